"""`Share`: which blocks of every parameter one trainer rank holds, or one worker needs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np

from torchrl_ext.errors import ManifestError
from torchrl_ext.transports.sharded.plans.boxes import as_array, first_overlap
from torchrl_ext.types import Info, ParamMeta, dtype_name
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Share", "check_block", "checksums", "shape_ids"]

_MOST_BLOCKS, _MOST_IN_ALL = 1 << 12, 1 << 20  # of one parameter, and of all patterns, as others tell them
_LARGEST = 1 << 48  # as in `ParamMeta.from_json`


@final
class Share:
    """What one member of a group holds, or needs, of every parameter: equal patterns are said once.

    Two shares of the same blocks are equal, in whatever order these were given.

    Args:
        patterns: tuples of disjoint blocks; those of one tuple have equal numbers of dimensions.
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
        """Return the blocks of the parameter at this place, in ascending order; none of them is empty."""
        return self.patterns[self.of[index]]

    def some(self, places: Iterable[int]) -> Share:
        """Return the share of the parameters at these places alone, in this order."""
        return Share.of_blocks(self.blocks(place) for place in places)

    def __len__(self) -> int:
        return len(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and self.patterns == other.patterns and np.array_equal(self.of, other.of)

    def __hash__(self) -> int:
        return hash((self.patterns, self.of.tobytes()))

    def to_json(self) -> Info:
        """Return ``patterns``, ``[[start, stop], ...]`` of each, and ``of``: int32, little-endian, zlib, base64."""
        packed = zlib.compress(self.of.astype("<i4").tobytes(), 6)
        return {"patterns": self.patterns, "of": base64.b64encode(packed).decode()}

    @classmethod
    def from_json(cls, told: Any, params: Sequence[ParamMeta]) -> Share:
        """Make a share from what another process told; the inverse of `to_json`.

        Args:
            told: not trusted.
            params: the parameters that it is about.

        Raises:
            ManifestError: it is malformed, speaks of another number of parameters, or of blocks that are no part of
                theirs.
        """
        try:
            share = cls(_read_patterns(told["patterns"]), _read_of(told["of"], len(params), len(told["patterns"])))
        except (TypeError, ValueError, KeyError, OverflowError, zlib.error, binascii.Error) as error:
            raise ManifestError(
                f"what a member of the group says that it holds or needs is malformed: {error!s:.200}",
                expected="patterns: lists of [start, stop]; of: one index per parameter, zlib and base64",
            ) from None
        shape_of, _ = shape_ids(params)
        pairs = shape_of.astype(np.int64) * (len(share.patterns) + 1) + share.of
        for index in np.unique(pairs, return_index=True)[1].tolist():
            for block in share.blocks(index):
                check_block(block, params[index])
        return share


def shape_ids(params: Sequence[ParamMeta]) -> tuple[np.ndarray, int]:
    """Return a number for every parameter, equal for equal shapes and element sizes, and how many there are."""
    seen: dict[Any, int] = {}
    found = [seen.setdefault((meta.shape, meta.dtype.itemsize), len(seen)) for meta in params]
    return np.array(found, dtype=np.int64), len(seen)


def check_block(block: Block, meta: ParamMeta, who: str = "a member of the group") -> None:
    """Raise ManifestError unless a block is part of a parameter."""
    if len(block.start) != len(meta.shape) or not Block.whole(meta.shape).contains(block):
        raise ManifestError(
            f"{who} names the block from {list(block.start)} to {list(block.stop)} of {meta}",
            expected="a block of its elements",
        )


def checksums(params: Sequence[ParamMeta], shares: Sequence[Share]) -> np.ndarray:
    """Return a checksum per parameter over its name, dtype and shape, and the blocks of every member; uint64."""
    words = [f"{meta.name}\0{dtype_name(meta.dtype)}{list(meta.shape)}" for meta in params]
    found = np.array([_checksum(word) for word in words], dtype=np.uint64)
    for share in shares:
        of_pattern = np.array([_checksum(repr([tuple(b) for b in one])) for one in share.patterns], dtype=np.uint64)
        found ^= found >> np.uint64(29)
        found *= np.uint64(0x9E3779B97F4A7C15)  # odd, so that nothing is lost; wraps around
        found += of_pattern[share.of] if len(params) else found
    return found


def _checksum(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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


def _read_patterns(told: Any) -> list[list[Block]]:
    if not isinstance(told, (list, tuple)) or sum(map(len, told)) > _MOST_IN_ALL:
        raise ValueError("patterns are no list, or too many")
    if max(map(len, told), default=0) > _MOST_BLOCKS:
        raise ValueError(f"more than {_MOST_BLOCKS} blocks of one parameter")
    return [[_read_block(*row) for row in pattern] for pattern in told]


def _read_block(start: Any, stop: Any) -> Block:
    for number in (*start, *stop):
        if type(number) is not int or not 0 <= number < _LARGEST:
            raise ValueError(f"{number!r} is no index")
    if len(start) != len(stop) or any(map(int.__gt__, start, stop)):
        raise ValueError(f"{[start, stop]} is no block")
    return Block(tuple(start), tuple(stop))


def _read_of(told: Any, params: int, patterns: int) -> np.ndarray:
    packed = base64.b64decode(told, validate=True)
    raw = zlib.decompressobj().decompress(packed, 4 * params + 1)  # no further: what it unpacks to is not trusted
    if len(raw) != 4 * params:
        raise ValueError(f"not one index for each of {params} parameters")
    of = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    if len(of) and (of.min() < 0 or of.max() >= patterns):
        raise ValueError(f"an index is outside of the {patterns} patterns")
    return of
