"""What one trainer rank keeps and codes of a model: copies of the blocks that are its own to write, and no others."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from torchrl_ext.codecs.blocks import BlockEncoding
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.streams import find
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.stores.delta_manifest import DIGEST
from torchrl_ext.stores.table import ParamTable, Segment
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.versions.containers import BlockFiles, code
from torchrl_ext.versions.writer import FlatCopies
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import block_words
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["OwnBlocks", "layout_digest"]


_Place = tuple[int, int]
"""A block that this rank writes: the number of the stream, and of the segment there."""


class OwnBlocks:
    """One rank's part of the copies against which deltas are taken: streams of the blocks that it writes."""

    def __init__(self) -> None:
        self._table = ParamTable.of(())
        self._kept: dict[int, list[_Place]] = {}  # by the number of the shard that they are parts of
        self._copies: FlatCopies | None = None  # None before the first version

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return 0 if self._copies is None else self._copies.nbytes

    @staticmethod
    def layout(source: WeightSource) -> Info:
        """Return what this rank holds of which parameters, JSON-safe, for rank 0 to share out.

        Raises:
            ManifestError: a shard belongs to no parameter, or to another one.
        """
        params, shards = source.params(), []
        known = {meta.name: (index, meta) for index, meta in enumerate(params)}
        for shard in source.shards():
            index, meta = known.get(shard.meta.name, (0, None))
            if meta != shard.meta:
                raise ManifestError(
                    f"`shards()` of the source yields a block of {shard.meta}", expected=str(meta or "a parameter")
                )
            shards.append([index, shard.block.start, shard.block.stop, int(shard.gathers)])
        return {"params": [meta.to_json() for meta in params], "shards": shards}

    def keep(self, source: WeightSource, changed: Mapping[str, Any]) -> Info:
        """Note which blocks are this rank's to write, forget every copy, and return ``{"streams": their segments}``.

        Args:
            source: what is sent.
            changed: by the number of a shard, in decimal, its blocks that are; of a shard that is not there, all of it.
        """
        params, streams = source.params(), dict[torch.dtype, list[Segment]]()
        numbers, order = {meta.name: number for number, meta in enumerate(params)}, dict[torch.dtype, int]()
        self._kept, self._copies = {}, None
        for number, shard in enumerate(source.shards()):
            meta, rows = shard.meta, changed.get(str(number), [shard.block])
            for block in (Block(tuple(start), tuple(stop)) for start, stop in rows):
                if block.numel:
                    own, stream = streams.setdefault(meta.dtype, []), order.setdefault(meta.dtype, len(order))
                    self._kept.setdefault(number, []).append((stream, len(own)))
                    box = () if block == Block.whole(meta.shape) else (block.start, block.shape)
                    own.append(Segment(numbers[meta.name], *box))
        self._table = ParamTable.of(params, [*streams.values()])
        return {"streams": msgspec.to_builtins([*streams.values()])}

    def seed(self, source: WeightSource) -> Info:
        """Copy this rank's blocks; return what they add to the digest of each parameter, as ``{"words": base64}``."""
        with closing(self._taken(source)) as taken:
            return self._copy(taken)

    def start(self, base: str) -> Info:
        """Copy this rank's blocks of the tensors in a checkpoint directory; return as `seed`.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """
        wanted, source = dict[str, list[_Place]](), CheckpointSource(base)
        for place in chain(*self._kept.values()):
            wanted.setdefault(self._of(place)[0].name, []).append(place)

        def parts() -> Iterator[tuple[_Place, Tensor]]:
            for found, tensor in checked(source):
                for place in wanted.pop(found.name, ()):
                    meta, block = self._of(place)
                    if found != meta:
                        raise _other_base(meta, str(found))
                    yield place, tensor[block.within(Block.whole(meta.shape))]
            for place, *_ in wanted.values():
                meta, _ = self._of(place)
                raise _other_base(meta, f"no {meta.name}")

        return self._copy(parts())

    def encode(
        self, source: WeightSource, codec: BlockEncoding, stem: str, write: Callable[[str, bytes], None]
    ) -> Info:
        """Code what changed in this rank's blocks, and write it; the copies become what ``source`` has now.

        Args:
            source: what is sent.
            codec: the encoding.
            stem: of the names of files.
            write: writes a file durably.

        Returns:
            JSON-safe: ``rows``, the blocks in streams of this rank; ``kinds``; ``files``; and, for each
            parameter, ``changed`` and ``words``, as in `BlockFiles`. Columns are in base64.

        Raises:
            ConfigError: this rank has no copies.
        """
        if self._copies is None:
            raise ConfigError("this rank has no copies of its blocks", hint="send a full version")
        files, streams = BlockFiles(self._table, stem), self._copies.bits
        with closing(self._taken(source)) as taken:
            placed = ((*place, tensor) for place, tensor in taken)
            coded = partial(code, self._table, codec)
            found = find(self._table, streams, placed, coded, threads=_threads(), follow=True)
            for name, data in files.laid(found):
                write(name, data)
        return {
            "rows": _text(files.rows),
            "kinds": files.kinds,
            "files": files.sizes,
            "changed": _text(files.changed),
            "words": _text(files.words),
        }

    def _of(self, place: _Place) -> tuple[ParamMeta, Block]:
        stream, segment = self._table.streams[place[0]], place[1]
        return self._table.params[stream.params[segment]], stream.box(segment)

    def _taken(self, source: WeightSource) -> Generator[tuple[_Place, Tensor], None, None]:
        """Yield each block with its elements as they are now; every rank takes what gathers, whatever becomes of it."""
        shards, taking = enumerate(source.shards()), False
        try:
            for number, shard in shards:
                own = self._kept.get(number, [])
                if own or shard.gathers:
                    taking = shard.gathers
                    tensor = _elements(shard)
                    taking = False
                    for place in own:
                        yield place, tensor[self._of(place)[1].within(shard.block)].to(shard.meta.dtype)
        finally:
            if not taking:  # no gather failed, and other ranks wait in those that are left
                with suppress(Exception):
                    for _, shard in shards:
                        if shard.gathers:
                            shard.take()

    def _copy(self, parts: Iterable[tuple[_Place, Tensor]]) -> Info:
        words = np.zeros((len(self._table.params), 2), DIGEST)
        for place, tensor in parts:
            if self._copies is None:
                self._copies = FlatCopies(self._table, pinned=tensor.is_cuda)
            (stream, segment), (meta, block) = place, self._of(place)
            copy = self._copies.parts[stream][segment]
            copy.copy_(tensor)
            live = tensor if tensor.is_cuda else copy
            words[self._table.number[meta.name]] += np.array(block_words(meta, block, live), DIGEST)
        return {"words": _text(words)}


def _text(column: np.ndarray) -> str:
    return b64encode(column.tobytes()).decode()


def layout_digest(layout: Info) -> str:
    """Return 32 hex digits that stand for a layout."""
    return xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())


def _elements(shard: Shard) -> Tensor:
    tensor = shard.take().detach().resolve_conj().resolve_neg()
    if tuple(tensor.shape) != shard.block.shape:
        raise ManifestError(
            f"a shard of {shard.meta.name!r} gives a tensor of shape {tuple(tensor.shape)}",
            expected=f"{shard.block.shape}, as its block says",
        )
    return tensor


def _other_base(meta: ParamMeta, found: str) -> ConfigError:
    return ConfigError(
        f"the base checkpoint holds {found}",
        expected=str(meta),
        hint="pass as base= the checkpoint from which this policy was loaded, or nothing",
    )


def _threads() -> int:
    """Return how many threads code: this rank's share of the cores, where torchrun says how many ranks are here."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, worker_threads() // max(1, int(ranks) if ranks.isdigit() else 1))
