"""`Blocks` of every parameter that one trainer rank holds, or one worker needs; and how structs are sent."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, final

import msgspec
import numpy as np

from torchrl_ext.base.errors import TransportError
from torchrl_ext.base.types import described
from torchrl_ext.data.weights.blocks import Block

__all__ = ["Blocks", "numbers", "packed", "unpacked", "unreadable"]

_MOST_BLOCKS, _MOST_PATTERNS = 1 << 12, 1 << 16
_MOST_BYTES = 64 << 20

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@final
class Blocks(msgspec.Struct, frozen=True):
    """The blocks that one member of a group holds, or needs, of every parameter; equal patterns are kept once.

    Shares that `of_blocks` makes of the same blocks are equal, in whatever order the blocks were given.

    Attributes:
        patterns: distinct tuples of blocks that are not empty, each in ascending order.
        of: for every parameter the index into ``patterns``, int32, little-endian.

    Raises:
        ValueError: there is an index outside of ``patterns``.
    """

    patterns: Annotated[
        tuple[Annotated[tuple[Block, ...], msgspec.Meta(max_length=_MOST_BLOCKS)], ...],
        msgspec.Meta(max_length=_MOST_PATTERNS),
    ]
    of: bytes

    def __post_init__(self) -> None:
        if numbers(self.of).max(initial=-1) >= len(self.patterns):
            raise ValueError("an index is outside of the patterns")

    @classmethod
    def of_blocks(cls, blocks: Iterable[Iterable[Block]]) -> Blocks:
        """Make a share from the blocks of every parameter, in order of parameters; empty blocks are left out."""
        found: dict[tuple[Block, ...], int] = {}
        seen: dict[tuple[Block, ...], int] = {}
        of = []
        for own in map(tuple, blocks):
            if own not in seen:
                seen[own] = found.setdefault(tuple(sorted(block for block in own if block.numel)), len(found))
            of.append(seen[own])
        return cls(tuple(found), np.array(of, dtype="<i4").tobytes())

    @property
    def indices(self) -> np.ndarray:
        """``of`` as an array of shape (parameters,), read-only."""
        return np.frombuffer(self.of, dtype="<i4")

    def blocks(self, index: int) -> tuple[Block, ...]:
        """Return the blocks of the parameter at this index, in ascending order; none of them is empty."""
        return self.patterns[self.indices[index]]


def numbers(data: bytes, dtype: str = "<i4") -> np.ndarray:
    """Return whole numbers, 0 or more, as a read-only array of shape (numbers,).

    Raises:
        ValueError: one is below 0, or the last one is cut off.
    """
    found = np.frombuffer(data, dtype=dtype)
    if found.min(initial=0) < 0:
        raise ValueError("a number is below 0")
    return found


def packed(struct: msgspec.Struct) -> str:
    """Return a struct as text for JSON: msgpack, zlib, base64."""
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(struct), 6)).decode()


def unpacked(text: Any, kind: type[_Struct], what: str) -> _Struct:
    """Return the struct that `packed` wrote.

    Args:
        text: not trusted: no more than 64 MiB are unpacked.
        kind: the struct's class.
        what: who sent it, and what it is, for the message.

    Raises:
        TransportError: as `unreadable`.
    """
    try:
        data = zlib.decompressobj().decompress(msgspec.convert(text, bytes), _MOST_BYTES)
        return msgspec.msgpack.decode(data, type=described(kind))
    except (zlib.error, msgspec.MsgspecError) as error:
        raise unreadable(what, error) from error


def unreadable(what: str, error: Exception) -> TransportError:
    """Return the error for something of another member that cannot be read because of ``error``."""
    return TransportError(
        f"{what} that cannot be read: {error!s:.200}",
        state="nothing was moved",
        hint="use one release of torchrl_ext on every rank and engine",
    )
