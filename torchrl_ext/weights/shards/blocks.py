"""`Block` is a box of elements of a full tensor, and `Shard` one that a trainer rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from torchrl_ext.errors import ManifestError
from torchrl_ext.types import ParamMeta

__all__ = ["Block", "Shard", "checked_shards"]


class Block(NamedTuple):
    """A box of elements of a full tensor, in checkpoint coordinates: ``start <= index < stop`` in every dimension.

    Attributes:
        start, stop: one number per dimension; none of a tensor without dimensions, which has one element.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """Return the block of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the block."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements; 0 where the block is empty."""
        return math.prod(max(0, size) for size in self.shape)

    def within(self, other: Block) -> tuple[slice, ...]:
        """Return the slices that cut this block out of a tensor that holds ``other``, which contains it."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.start, self.stop, other.start, strict=True)
        )

    def meet(self, other: Block) -> Block | None:
        """Return the block of elements that are in both; None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Block(start, stop) if all(map(int.__lt__, start, stop)) else None

    def contains(self, other: Block) -> bool:
        """Return whether every element of ``other`` is in this block."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))


@dataclass(frozen=True, eq=False)
class Shard:
    """A block of a parameter that this trainer rank holds.

    Attributes:
        meta: the parameter: its full shape, and the dtype in which it is sent.
        block: which of its elements these are.
        take: returns them as they are now, of the block's shape, on any device and with any strides; of a dtype that
            is cast where they are copied to one of ``meta.dtype``.
        gathers: `take` is a collective: every trainer rank has to call it, at the same point.
        why: where it gathers, the reason, in words for the report.
    """

    meta: ParamMeta
    block: Block
    take: Callable[[], Tensor]
    gathers: bool = False
    why: str = ""

    def under(self, meta: ParamMeta) -> Shard:
        """Return this shard as one of another name or dtype."""
        return Shard(meta, self.block, self.take, self.gathers, self.why)


def checked_shards(
    shards: Iterable[Shard], params: Iterable[ParamMeta]
) -> Iterator[tuple[ParamMeta, tuple[Shard, ...]]]:
    """Yield each parameter with the shards of it that one rank holds, once these are found to be sound.

    Args:
        shards: of one rank, in the order of ``params``.
        params: what the source declares.

    Yields:
        Each of ``params``, in order, with its shards; none where this rank holds nothing of it.

    Raises:
        ManifestError: a shard is of no declared parameter, or out of order; or its block reaches out of the tensor, has
            no elements, or shares some with another one of this rank.
    """
    declared = iter(params)
    for found, several in groupby(shards, attrgetter("meta")):
        for meta in declared:
            if meta == found:
                break
            yield meta, ()
        else:
            raise ManifestError(
                f"a shard of {found} follows those of all parameters, or is out of order",
                hint="`shards()` of a WeightSource yields in the order of `params()`, with the same names and dtypes",
            )
        held = tuple(several)
        _require_apart(meta, held)
        yield meta, held
    for meta in declared:
        yield meta, ()


def _require_apart(meta: ParamMeta, shards: Sequence[Shard]) -> None:
    whole = Block.whole(meta.shape)
    before: list[Block] = []  # those that reach as far along the first dimension as the next one begins
    for shard in sorted(shards, key=attrgetter("block")):
        block = shard.block
        if len(block.start) != len(whole.start) or len(block.stop) != len(whole.stop) or not whole.contains(block):
            raise ManifestError(f"a shard of {meta} is {_words(block)}", expected=f"a block within {_words(whole)}")
        if not shard.gathers and not all(map(int.__lt__, block.start, block.stop)):
            raise ManifestError(f"a shard of {meta} is {_words(block)}, which is empty", hint="yield none in its place")
        before = [other for other in before if not block.start or other.stop[0] > block.start[0]]
        for other in before:
            if other.meet(block) is not None:
                raise ManifestError(
                    f"two shards of {meta} on this rank share elements: {_words(other)} and {_words(block)}",
                    expected="blocks that are apart",
                    state="nothing was sent",
                    hint="yield each element once; replicas are those of other ranks",
                )
        before.append(block)


def _words(block: Block) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(*block, strict=True)) + "]"
