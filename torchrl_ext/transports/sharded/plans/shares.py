"""`Share`: the blocks of every parameter that one trainer rank holds, or one worker needs."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, final

import msgspec
import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.transports.sharded.plans.boxes import as_array, first_overlap
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Share", "check_block", "packed", "shape_ids", "unpacked"]

_MOST_BLOCKS, _MOST_IN_ALL = 1 << 12, 1 << 20  # of one parameter, and of all patterns, in a share from elsewhere
_MOST_BYTES = 256 << 20


class _ShareRows(msgspec.Struct, frozen=True):
    """A share as JSON: ``patterns`` as lists of ``[start, stop]``, and ``of`` as `packed` writes it, in base64."""

    patterns: list[Annotated[list[Block], msgspec.Meta(max_length=_MOST_BLOCKS)]]
    of: bytes


@final
class Share:
    """The blocks that one member of a group holds, or needs, of every parameter; equal patterns are kept once.

    Two shares of the same blocks are equal, in whatever order the blocks were given.

    Args:
        patterns: tuples of disjoint blocks; the blocks of one tuple have equal numbers of dimensions.
        of: for every parameter the index into ``patterns``, of shape (parameters,).

    Attributes:
        patterns: distinct tuples of blocks, each in ascending order, by the first parameter that has them.
        of: int32 of shape (parameters,), read-only.

    Raises:
        ManifestError: blocks of one pattern overlap, or differ in their numbers of dimensions.
    """

    def __init__(self, patterns: Sequence[Iterable[Block]], of: np.ndarray) -> None:
        tidy = [tuple(sorted(block for block in pattern if block.numel)) for pattern in patterns]
        used, first, inverse = np.unique(np.asarray(of, dtype=np.int32), return_index=True, return_inverse=True)
        found: dict[tuple[Block, ...], int] = {}
        number = np.zeros(len(used), dtype=np.int32)
        for at in np.argsort(first):
            number[at] = found.setdefault(tidy[used[at]], len(found))
        for pattern in found:
            _check_disjoint(pattern)
        self.patterns: tuple[tuple[Block, ...], ...] = tuple(found)
        self.of: np.ndarray = number[inverse]
        self.of.setflags(write=False)

    @classmethod
    def of_blocks(cls, blocks: Iterable[Iterable[Block]]) -> Share:
        """Make a share from the blocks of every parameter, in order of parameters; empty blocks are left out.

        Raises:
            ManifestError: blocks of one parameter overlap.
        """
        index: dict[tuple[Block, ...], int] = {}
        of = [index.setdefault(tuple(of_one), len(index)) for of_one in blocks]
        return cls(tuple(index), np.array(of, dtype=np.int32))

    def blocks(self, index: int) -> tuple[Block, ...]:
        """Return the blocks of the parameter at this index, in ascending order; none of them is empty."""
        return self.patterns[self.of[index]]

    def some(self, indices: Iterable[int]) -> Share:
        """Return the share of the parameters at these indices, in this order."""
        return Share.of_blocks(self.blocks(index) for index in indices)

    def __len__(self) -> int:
        return len(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and self.patterns == other.patterns and np.array_equal(self.of, other.of)

    def __hash__(self) -> int:
        return hash((self.patterns, self.of.tobytes()))

    def to_json(self) -> Info:
        """Return ``patterns``, ``[[start, stop], ...]`` of each, and ``of``: int32, little-endian, zlib, base64."""
        return {"patterns": self.patterns, "of": base64.b64encode(packed(self.of)).decode()}

    @classmethod
    def from_json(cls, rows: Any, params: Sequence[ParamMeta]) -> Share:
        """Make a share from the JSON of another process; the inverse of `to_json`.

        Args:
            rows: not trusted.
            params: the parameters of the share.

        Raises:
            ManifestError: it is malformed, is of another number of parameters, or has a block that does not lie in its
                parameter.
        """
        try:
            read = msgspec.convert(rows, _ShareRows)
            of = unpacked(read.of, len(params))
            if sum(map(len, read.patterns)) > _MOST_IN_ALL or (len(of) and of.max() >= len(read.patterns)):
                raise ValueError("there are too many blocks, or an index is outside of the patterns")
            pairs = shape_ids(params)[0] * (len(read.patterns) + 1) + of
            for index in np.unique(pairs, return_index=True)[1].tolist():
                for block in read.patterns[of[index]]:
                    check_block(block, params[index])
            return cls(read.patterns, of)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise ManifestError(
                f"a member of the group sent a malformed share: {error!s:.200}",
                expected="patterns: lists of [start, stop]; of: one index per parameter, zlib and base64",
            ) from None


def packed(numbers: np.ndarray, dtype: str = "<i4") -> bytes:
    """Return whole numbers, 0 or more, as an array of ``dtype``, in zlib's format."""
    return zlib.compress(numbers.astype(dtype).tobytes(), 6)


def unpacked(data: bytes, count: int | None = None, dtype: str = "<i4") -> np.ndarray:
    """Return the array, of shape (numbers,), that `packed` wrote.

    Args:
        data: not trusted: no more is unpacked than ``count`` numbers, or 256 MiB.
        count: how many numbers there have to be, if that is known.
        dtype: of the array.

    Raises:
        ValueError: it is malformed, has another or a larger number of values, or one below 0.
    """
    size = np.dtype(dtype).itemsize
    most = _MOST_BYTES if count is None else count * size
    try:
        raw = zlib.decompressobj().decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(raw) > most or len(raw) % size or (count is not None and len(raw) < most):
        raise ValueError(f"{len(raw)} bytes are not the {most} that are expected")
    found = np.frombuffer(raw, dtype=dtype)
    if len(found) and found.min() < 0:
        raise ValueError("a number is below 0")
    return found


def shape_ids(params: Sequence[ParamMeta]) -> tuple[np.ndarray, int]:
    """Return a number for every parameter, equal for equal shapes and element sizes, and how many there are."""
    seen: dict[Any, int] = {}
    found = [seen.setdefault((meta.shape, meta.dtype.itemsize), len(seen)) for meta in params]
    return np.array(found, dtype=np.int64), len(seen)


def check_block(block: Block, meta: ParamMeta, who: str = "a member of the group") -> None:
    """Raise ManifestError unless a block is part of a parameter."""
    sizes, whole = {len(block.start), len(block.stop)}, Block.whole(meta.shape)
    if sizes != {len(meta.shape)} or not whole.contains(block) or any(map(int.__gt__, block.start, block.stop)):
        raise ManifestError(
            f"{who} names the block from {list(block.start)} to {list(block.stop)} of {meta}",
            expected="a block of its elements",
        )


def _check_disjoint(pattern: tuple[Block, ...]) -> None:
    ndims = {len(block.start) for block in pattern}
    if len(ndims) > 1:
        raise ManifestError(f"blocks of one parameter have {sorted(ndims)} dimensions", expected="the parameter's own")
    pair = first_overlap(as_array(pattern, ndims.pop())) if len(pattern) > 1 else None
    if pair is not None:
        first, second = (pattern[at] for at in pair)
        raise ManifestError(
            f"two blocks of one parameter overlap: from {list(first.start)} to {list(first.stop)}, and from "
            f"{list(second.start)} to {list(second.stop)}",
            expected="each element named once",
        )
