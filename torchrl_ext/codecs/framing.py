"""The frame around the blocks of a payload (`torchrl_ext.codecs.ulp` has the format)."""

from __future__ import annotations

from typing import Final

import xxhash

from torchrl_ext.codecs.base import Buffer
from torchrl_ext.errors import IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["damaged", "frame", "unframe"]

_FORMAT: Final = 2


def frame(count: int, block_log2: int, bodies: list[bytes]) -> bytes:
    """The payload around the bodies of a tensor of ``count`` units."""
    head = bytearray((_FORMAT, block_log2))
    for value in (count, *map(len, bodies)):
        while value >= 128:
            head.append(value & 127 | 128)
            value >>= 7
        head.append(value)
    payload = b"".join((head, *bodies))
    return payload + xxhash.xxh3_64_digest(payload)[::-1]


def unframe(payload: Buffer, meta: ParamMeta, count: int) -> tuple[int, list[memoryview]]:
    """Units per block, and the body of each block.

    Raises:
        IntegrityError: the frame is damaged, or that of a tensor of another size; names the tensor.
    """
    data = memoryview(payload).cast("B")
    if len(data) < 11 or xxhash.xxh3_64_digest(data[:-8])[::-1] != bytes(data[-8:]):
        raise damaged(meta, "its checksum does not match its bytes")
    log2 = data[1]
    if data[0] != _FORMAT or not 12 <= log2 <= 28:
        raise damaged(meta, f"it starts with format {data[0]}, block size 2^{log2}", f"format {_FORMAT}, 2^12 to 2^28")
    end, at = len(data) - 8, 2

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < end and shift < 63:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
        raise damaged(meta, "its head ends too early")

    stated = varint()
    if stated != count:
        raise damaged(meta, f"it is for a tensor of {stated} units", f"{count}")
    blocks = -(-count // (1 << log2))
    if blocks > end - at:
        raise damaged(meta, "its head ends too early")
    sizes = [varint() for _ in range(blocks)]
    if at + sum(sizes) != end:
        raise damaged(meta, f"its blocks take {sum(sizes)} bytes", f"{end - at}")
    bodies = []
    for size in sizes:
        bodies.append(data[at : at + size])
        at += size
    return 1 << log2, bodies


def damaged(meta: ParamMeta, why: str, expected: str | None = None) -> IntegrityError:
    """What is raised where a payload is not one of its parameter."""
    return IntegrityError(
        f"the delta of {meta.name!r} is damaged: {why}",
        expected=expected,
        state="nothing was written",
        hint="fetch the payload again, or catch up from a keyframe",
    )
