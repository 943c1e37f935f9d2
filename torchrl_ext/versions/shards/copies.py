"""Copies of a model over the ranks of a trainer: rank 0 gives orders, and each rank keeps and codes its own part."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import codec_from_json
from torchrl_ext.codecs.blocks import BlockEncoding
from torchrl_ext.errors import ManifestError
from torchrl_ext.stores import Store
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.delta_manifest import BLOCK, DIGEST, DeltaManifest
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.table import ParamTable, Segment
from torchrl_ext.types import Info, ParamMeta, decoded
from torchrl_ext.versions.shards.own import OwnBlocks, layout_digest
from torchrl_ext.versions.writer import Baseline
from torchrl_ext.weights.digests import PositionDigest, position_digest
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.shards.sharing import shared_out
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["RankCopies", "Ranks", "steps"]


class Ranks(Protocol):
    """The ranks of a trainer, as rank 0 speaks to them (`torchrl_ext.transports.ranks.Session`)."""

    def order(self, step: str, /, **args: Any) -> None:
        """Let every other rank run ``step``."""

    def answers(self) -> list[Info]:
        """Return what ranks 1, 2, ... answer to the last order."""

    def ask(self, step: str, /, **args: Any) -> list[Info]:
        """Give an order, and return the answers to it."""


def steps(
    own: OwnBlocks, source: WeightSource, store: Store, rank: int, base: str | None
) -> Mapping[str, Callable[[Info], Info | None]]:
    """Return what a rank other than 0 does for each order of `RankCopies`.

    Args:
        own: what this rank keeps.
        source: what is sent.
        store: where versions are written.
        rank: this one.
        base: the checkpoint directory on which the first version is a delta.
    """

    def encode(order: Info) -> Info:
        place, prefix = order["place"], order["prefix"]
        codec, stem = codec_from_json(order["codec"]), f"rank{rank:05d}"
        return own.encode(source, codec, stem, lambda name, data: store.add(place, prefix + name, data))

    return {
        "agree": lambda order: {"layout": layout_digest(own.layout(source))},
        "blocks": lambda order: own.layout(source),
        "keep": lambda order: own.keep(source, order["blocks"][rank]),
        "start": lambda order: own.start(base or order["base"]),
        "seed": lambda order: own.seed(source),
        "encode": encode,
        "keyframe": lambda order: source.replay(),
    }


@final
class RankCopies(Baseline):
    """Copies of which every trainer rank keeps those of its own blocks; this is their end on rank 0.

    A keyframe is streamed from the source, and compared on the way with what the ranks hold of it.

    Args:
        ranks: returns the others.
        own: what rank 0 keeps.
        codec: the encoding.
    """

    def __init__(self, ranks: Callable[[], Ranks], own: OwnBlocks, codec: BlockEncoding) -> None:
        super().__init__()
        self._ranks, self._own, self._codec = ranks, own, codec
        self._agreed: list[str] = []
        self._source: WeightSource | None = None
        self._stream: Iterator[tuple[str, Tensor]] | None = None

    def fits(self, source: WeightSource) -> bool:
        """Return whether the copies are of the blocks that ranks hold now; else share the blocks out anew.

        Raises:
            ManifestError: ranks do not send the same parameters, or some elements are nowhere; names the first.
        """
        self._source, self._files = source, source.files()
        mine = self._own.layout(source)
        found = [layout_digest(mine), *(answer["layout"] for answer in self._ranks().ask("agree"))]
        if found == self._agreed:
            return True
        self.version, self._agreed = None, []
        layouts = [mine, *self._ranks().ask("blocks")]
        params = source.params()
        _compare(layouts)
        held = [
            [(index, Block(tuple(start), tuple(stop))) for index, start, stop, _ in layout["shards"]]
            for layout in layouts
        ]
        shared = [
            {
                str(number): kept.get(number, [])
                for number, (_, block) in enumerate(own)
                if block.numel and kept.get(number) != [block]
            }
            for own, kept in zip(held, shared_out(params, held), strict=True)
        ]
        self._ranks().order("keep", blocks=shared)
        kept = [self._own.keep(source, shared[0]), *self._ranks().answers()]
        self._streams = [len(answer["streams"]) for answer in kept]
        segments = [own for answer in kept for own in answer["streams"]]
        self.table = ParamTable.of(params, decoded(segments, list[list[Segment]], "the streams of the ranks"))
        self._agreed = found
        return False

    def start(self, base: str, source: WeightSource) -> None:
        self.fits(source)
        self._ranks().order("start", base=base)
        self._gathered([self._own.start(base), *self._ranks().answers()])

    def take(self, source: WeightSource) -> None:
        self.version = None
        self._ranks().order("seed")
        self._gathered([self._own.seed(source), *self._ranks().answers()])

    def write(self, delta: DeltaManifest, source: WeightSource, draft: Draft, prefix: str) -> DeltaManifest:
        self.version = None
        self._ranks().order("encode", codec=self._codec.to_json(), place=draft.place, prefix=prefix)
        mine = self._own.encode(source, self._codec, "rank00000", lambda name, data: draft.write(prefix + name, data))
        found = [mine, *self._ranks().answers()]
        kinds, files, rows = list[str](), dict[str, int](), list[np.ndarray]()
        changed, digests, stream = np.zeros(len(self.metas), DIGEST), delta.digests.copy(), 0
        for answer, streams in zip(found, self._streams, strict=True):
            own = _column(answer["rows"], BLOCK)
            kinds += [kind for kind in answer["kinds"] if kind not in kinds]
            own["codec"] = np.array([kinds.index(kind) for kind in answer["kinds"]], np.uint32)[own["codec"]]
            own["stream"] += stream
            own["file"] += len(files)
            files |= answer["files"]
            rows.append(own)
            changed += _column(answer["changed"], DIGEST)
            digests += _column(answer["words"], DIGEST).reshape(-1, 2)
            stream += streams
        self.rank_bytes = tuple(sum(answer["files"].values()) for answer in found)
        made = replace(
            delta,
            codecs=tuple({"name": kind} for kind in kinds),
            files=files,
            changed=changed,
            digests=digests,
            blocks=np.concatenate(rows),
        )
        draft.write(prefix + MANIFEST, made.to_bytes())
        return made

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors, gathered one by one; other ranks take part.

        Raises:
            ManifestError: a tensor is not what the ranks hold of it; names it.
        """
        assert self._source is not None
        self._ranks().order("keyframe")
        self._stream = iter(self._source)
        for meta, tensor in checked(self._stream, self.metas):
            expected = PositionDigest(*self.digests[self.table.number[meta.name]].tolist())
            if (found := position_digest(tensor)) != expected:
                raise ManifestError(
                    f"tensor {meta.name!r} of the source is not what `shards()` gave of it on all ranks",
                    expected=f"digest {expected.hex()}, found {found.hex()}",
                    state="nothing was published",
                    hint="do not change weights during an update, and send the same weights on every rank",
                )
            yield meta.name, tensor
        self._stream = None
        self._ranks().answers()

    def drain(self) -> None:
        stream, self._stream = self._stream, None
        with suppress(Exception):  # the caller has an error of its own to raise
            for _ in stream or ():
                pass

    def _gathered(self, found: Sequence[Info]) -> None:
        """Add up what the ranks' blocks add to the digests."""
        self.digests = np.zeros((len(self.metas), 2), DIGEST)
        for answer in found:
            self.digests += _column(answer["words"], DIGEST).reshape(-1, 2)


def _column(text: str, dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(b64decode(text), dtype).copy()


def _compare(layouts: Sequence[Info]) -> None:
    """Compare what ranks say of the parameters, and of what gathers, with what rank 0 says.

    Raises:
        ManifestError: names the first that differs, and the rank.
    """
    params, gathered = layouts[0]["params"], _gathering(layouts[0])
    for rank, other in enumerate(layouts[1:], 1):
        what, ours, theirs = "parameter", [_meta(row) for row in params], [_meta(row) for row in other["params"]]
        if ours == theirs:
            what, ours, theirs = "shard that is gathered", gathered, _gathering(other)
        if ours == theirs:
            continue
        pairs = enumerate(zip(ours, theirs, strict=False))
        number = next((at for at, (one, two) in pairs if one != two), min(len(ours), len(theirs)))
        here, there = ((one[number] if number < len(one) else "none") for one in (ours, theirs))
        raise ManifestError(
            f"{what} {number} is {there} on trainer rank {rank}, and {here} on rank 0",
            expected="the same on every rank",
            state="nothing was sent",
            hint="send the same model on every rank",
        )


def _meta(row: Sequence[Any]) -> str:
    return str(ParamMeta.from_json((row[0], row[1], row[2])))


def _gathering(layout: Info) -> list[str]:
    return [layout["params"][index][0] for index, *_, gathers in layout["shards"] if gathers]
