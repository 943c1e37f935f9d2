"""What one trainer rank keeps and codes of a model: copies of the blocks that are its own to write, and no others."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded
from torchrl_ext.codecs.pipeline import Where, encode_tensors, worker_threads
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.kernels.base import Words
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.versions.containers import Packed
from torchrl_ext.versions.shards.parts import flat_positions
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import block_words
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["OwnBlocks", "layout_digest"]


@dataclass(eq=False)
class _Kept:
    """A block that this rank writes.

    Attributes:
        index, meta: of the parameter.
        block: which of its elements.
        copy: they are, as the newest version has them; None before the first one.
        words: what they add to the parameter's digest.
        finite: whether the copy is known to be.
    """

    index: int
    meta: ParamMeta
    block: Block
    copy: Tensor | None = None
    words: Words = (0, 0)
    finite: bool = False

    def look(self, source: WeightSource, tensor: Tensor) -> None:
        """Look for NaN and infinity in all of its elements, where somebody wants to know of them."""
        found = None if source.look is None else source.look(self.meta.name, tensor, self.block)
        self.finite = found is not None and found.item() == 0.0


class OwnBlocks:
    """One rank's part of the copies against which deltas are taken.

    Args:
        device: where the copies are; by default on the host, pinned where the source's tensors are on a GPU.

    Attributes:
        nbytes: bytes of the copies.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._kept: dict[int, list[_Kept]] = {}  # by the number of the shard that they are parts of

    @property
    def nbytes(self) -> int:
        return sum(kept.copy.nbytes for kept in self._every() if kept.copy is not None)

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

    def keep(self, source: WeightSource, changed: Mapping[str, Any]) -> None:
        """Note which blocks are this rank's to write, and forget every copy.

        Args:
            source: what is sent.
            changed: by the number of a shard, in decimal, its blocks that are; of a shard that is not there, all of it.
        """
        self._kept = {}
        index = {meta.name: number for number, meta in enumerate(source.params())}
        for number, shard in enumerate(source.shards()):
            blocks = [shard.block]
            if (rows := changed.get(str(number))) is not None:
                blocks = [Block(tuple(start), tuple(stop)) for start, stop in rows]
            own = [_Kept(index[shard.meta.name], shard.meta, block) for block in blocks if block.numel]
            if own:
                self._kept[number] = own

    def seed(self, source: WeightSource) -> Info:
        """Copy this rank's blocks; return what they add to the digest of each parameter, as ``{"words": rows}``."""
        with closing(self._taken(source)) as taken:
            for kept, tensor in taken:
                self._copy(kept, tensor)
                kept.look(source, tensor)
        return self._words()

    def start(self, base: str) -> Info:
        """Copy this rank's blocks of the tensors in a checkpoint directory; return as `seed`.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """
        wanted: dict[str, list[_Kept]] = {}
        for kept in self._every():
            wanted.setdefault(kept.meta.name, []).append(kept)
        for meta, tensor in checked(CheckpointSource(base)):
            for kept in wanted.pop(meta.name, ()):
                if kept.meta != meta:
                    raise _other_base(kept.meta, str(meta))
                self._copy(kept, tensor[kept.block.within(Block.whole(meta.shape))])
        for kept, *_ in wanted.values():
            raise _other_base(kept.meta, f"no {kept.meta.name}")
        return self._words()

    def encode(self, source: WeightSource, codec: Codec, stem: str, write: Callable[[str, bytes], None]) -> Info:
        """Code what changed in this rank's blocks, and write it; the copies become what ``source`` has now.

        Args:
            source: what is sent.
            codec: the encoding.
            stem: of the names of files.
            write: writes a file durably.

        Returns:
            JSON-safe: ``parts``, rows of parameter, first element and sizes of a block, changed units, codec, file,
            offset, bytes, checksum, and the two words that the change adds to the digest; ``codecs``; ``files``.
        """
        waiting, order, taken_last = deque[tuple[_Kept, Tensor]](), deque[tuple[_Kept, Words]](), list[Where]()
        codecs, told, parts, sizes = list[Codec](), list[Info](), list[list[Any]](), dict[str, int]()

        def pairs(taken: Iterator[tuple[_Kept, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
            for kept, tensor in taken:
                if kept.copy is None:
                    raise ConfigError(f"this rank has no copy of {kept.meta.name!r}", hint="send a full version")
                waiting.append((kept, tensor))
                taken_last[:] = [_where(kept)]
                yield kept.meta.name, kept.copy, tensor

        def changes(taken: Iterator[tuple[_Kept, Tensor]]) -> Iterator[Encoded]:
            encoded = encode_tensors(
                pairs(taken),
                codec,
                threads=_threads(),
                follow=True,
                where=lambda: taken_last[0],
                look=source.look is not None,
            )
            for change in encoded:
                kept, tensor = waiting.popleft()
                if not change.finite or not kept.finite:
                    kept.look(source, tensor)
                if not change.changed:
                    continue
                words = change.digest
                if words is None:  # the encoding did not list what changed
                    every = self._words_of(kept, tensor)
                    words = every[0] - kept.words[0], every[1] - kept.words[1]
                kept.words = (kept.words[0] + words[0]) % 2**64, (kept.words[1] + words[1]) % 2**64
                order.append((kept, words))
                yield change

        with closing(self._taken(source)) as taken:
            for file, data, payloads in Packed(stem=stem).laid(changes(taken)):
                write(file, data)
                sizes[file] = len(data)
                for change, offset, nbytes, checksum in payloads:
                    if change.codec not in codecs:
                        codecs.append(change.codec)
                        told.append(change.codec.to_json())
                    kept, words = order.popleft()
                    place = kept.index, kept.block.start, kept.block.shape
                    payload = change.changed, codecs.index(change.codec), file, offset, nbytes, checksum
                    parts.append([*place, *payload, *(word % 2**64 for word in words)])
        return {"parts": parts, "codecs": told, "files": sizes}

    # its helpers

    def _every(self) -> Iterator[_Kept]:
        for own in self._kept.values():
            yield from own

    def _taken(self, source: WeightSource) -> Generator[tuple[_Kept, Tensor], None, None]:
        """Yield each block with its elements as they are now; every rank takes what gathers, whatever becomes of it."""
        shards, taking = enumerate(source.shards()), False
        try:
            for number, shard in shards:
                own = self._kept.get(number, [])
                if own or shard.gathers:
                    taking = shard.gathers
                    tensor = _elements(shard)
                    taking = False
                    for kept in own:
                        yield kept, tensor[kept.block.within(shard.block)].to(kept.meta.dtype)
        finally:
            if not taking:  # no gather failed, and other ranks wait in those that are left
                with suppress(Exception):
                    for _, shard in shards:
                        if shard.gathers:
                            shard.take()

    def _copy(self, kept: _Kept, tensor: Tensor) -> None:
        if kept.copy is None:
            pinned = self._device is None and tensor.is_cuda
            where, dtype = self._device or "cpu", kept.meta.dtype
            kept.copy = torch.empty(kept.block.shape, dtype=dtype, device=where, pin_memory=pinned)
        kept.copy.copy_(tensor)
        kept.words = self._words_of(kept, tensor)

    def _words_of(self, kept: _Kept, tensor: Tensor) -> Words:
        """Return what a block adds to the digest, from whichever of its two tensors is on an accelerator."""
        return block_words(kept.meta, kept.block, kept.copy if kept.copy is not None and not tensor.is_cuda else tensor)

    def _words(self) -> Info:
        found: dict[int, Words] = {}
        for kept in self._every():
            first, second = found.get(kept.index, (0, 0))
            found[kept.index] = first + kept.words[0], second + kept.words[1]
        return {"words": [[index, first % 2**64, second % 2**64] for index, (first, second) in found.items()]}


def _where(kept: _Kept) -> Where:
    """Return where the units of a block lie in its parameter: a position, if they follow one another there."""
    last = kept.block.numel * unit_of(kept.meta.dtype).parts - 1
    first, end = flat_positions(kept.meta, kept.block, np.array([0, last])).tolist()
    return first if end - first == last else partial(flat_positions, kept.meta, kept.block)


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
