"""The frame of our own encodings, and `ulp` and `context`, two that code gaps and ulp steps by rANS.

`context` codes them apart for each exponent of the base; `torchrl_ext.codecs.dense` is the third encoding.

A payload, little-endian, varints as in LEB128:

    byte     2, the version of this format
    byte     b: a block is 2^b units, 12 to 28; the last one is shorter
    varint   units in the tensor
    varint per block   bytes of its body, 0 where nothing changed
    bodies   byte 1 + body as in `torchrl_ext.codecs.coder.encode`, or byte 2 + one plain step per unit
    8 bytes  xxh3-64 of everything before

Blocks are independent, so they are coded and decoded in parallel; a tensor without changes is an empty
payload. Plain steps take over where coding would not save anything, so that a payload is never larger than the tensor
by more than its framing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs, Reads
from torchrl_ext.codecs.patch import DensePatch, Patch, StepPatch
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.types import ParamMeta

__all__ = ["ContextCodec", "FramedCodec", "UlpCodec", "damaged"]

_FORMAT: Final = 2
_CODED, _STEPS = b"\x01", b"\x02"
_Tokens = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What is coded of a block: tokens of gaps and of steps, grouped by context; ids of the contexts; where the tokens of
each begin, and those of the last end; raw bits, as 32-bit words or as bytes."""


@dataclass(frozen=True, kw_only=True)
class FramedCodec(Codec):
    """What our own encodings share: a frame that holds independently coded blocks and a checksum.

    Attributes:
        block_log2: a block is 2^block_log2 units.

    Raises:
        ConfigError: a block size outside 2^12 to 2^28.
    """

    framed: ClassVar[bool] = True
    block_log2: int = 22

    def __post_init__(self) -> None:
        if not isinstance(self.block_log2, int) or not 12 <= self.block_log2 <= 28:
            raise ConfigError(f"block_log2={self.block_log2!r}", expected="an integer from 12 to 28")

    def block_units(self, unit: Unit, count: int) -> int:
        return 1 << self.block_log2

    def join(self, count: int, blocks: list[bytes]) -> bytes:
        head = bytearray((_FORMAT, self.block_log2))
        for value in (count, *map(len, blocks)):
            while value >= 128:
                head.append(value & 127 | 128)
                value >>= 7
            head.append(value)
        payload = b"".join((head, *blocks))
        return payload + xxhash.xxh3_64_digest(payload)[::-1]

    def _bodies(self, payload: Buffer, meta: ParamMeta, count: int) -> list[tuple[int, int, memoryview]]:
        """Return of each block of a tensor of ``count`` units its first unit, its size in units, and its body.

        Raises:
            IntegrityError: the frame is damaged, or that of a tensor of another size; names the tensor.
        """
        data = memoryview(payload).cast("B")
        if len(data) < 11 or xxhash.xxh3_64_digest(data[:-8])[::-1] != bytes(data[-8:]):
            raise damaged(meta, "its checksum does not match its bytes")
        log2 = data[1]
        if data[0] != _FORMAT or not 12 <= log2 <= 28:
            what = f"it starts with format {data[0]}, block size 2^{log2}"
            raise damaged(meta, what, f"format {_FORMAT}, 2^12 to 2^28")
        numbers, at, end, size = list[int](), 2, len(data) - 8, 1 << log2
        blocks, value, shift = -(-count // size), 0, 0
        while len(numbers) <= blocks:  # the first is the tensor's own
            if at == end or shift >= 63:
                raise damaged(meta, "its head ends too early")
            value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
            if data[at - 1] < 128:
                numbers.append(value)
                value = shift = 0
                if numbers[0] != count:
                    raise damaged(meta, f"it is for a tensor of {numbers[0]} units", f"{count}")
        if at + sum(numbers) - count != end:
            raise damaged(meta, f"its blocks take {sum(numbers) - count} bytes", f"{end - at}")
        bodies = []
        for number in range(blocks):
            start, nbytes = number * size, numbers[number + 1]
            bodies.append((start, min(size, count - start), data[at : at + nbytes]))
            at += nbytes
        return bodies


def damaged(meta: ParamMeta, why: str, expected: str | None = None) -> IntegrityError:
    """Return the error to raise where a payload is not one of its parameter."""
    return IntegrityError(
        f"the delta of {meta.name!r} is damaged: {why}",
        expected=expected,
        state="nothing was written",
        hint="fetch the payload again, or catch up from a keyframe",
    )


@dataclass(frozen=True, kw_only=True)
class _StepCodec(FramedCodec):
    """What `UlpCodec` and `ContextCodec` share: blocks are coded as tokens, and decoded to steps."""

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        from torchrl_ext.codecs.coder.encode import encode_body
        from torchrl_ext.codecs.coder.tokens import lay_steps

        gaps, steps, ids, starts, raw = self._tokens(unit, block)
        if not gaps.size:
            return b""
        most, named = block.size * unit.width, self.needs == "all"
        head = np.empty(2048 * (1 + ids.size), np.uint8)  # a table takes less than 400 bytes
        words = np.empty(2 * gaps.size + 8, np.uint16)
        end, first = encode_body(gaps, steps, starts, ids, named, raw.size, most, head, words)
        if end >= 0 and end + raw.nbytes + words[first:].nbytes <= most:
            return b"".join((_CODED, head[:end].data, raw.data, words[first:].data))
        plain = np.zeros(block.size, unit.dtype)
        for part in block.parts:
            lay_steps(*part, unit.top, unit.mask, unit.ordered, plain)
        return _STEPS + plain.tobytes()

    @abstractmethod
    def _tokens(self, unit: Unit, block: Block) -> _Tokens:
        """Return the tokens and raw bits of a block, which are coded next."""

    @abstractmethod
    def _untoken(
        self, unit: Unit, base: np.ndarray | None, start: int, size: int, decoded: _Tokens, *into: np.ndarray
    ) -> bool:
        """Fill ``into``, indices and steps, from what was decoded of a block; False where that does not fit."""

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        from torchrl_ext.codecs.coder.decode import ERRORS, decode_body

        unit = unit_of(meta.dtype)
        count = meta.numel * unit.parts
        dtype = np.dtype(np.int32 if count < 2**31 else np.int64)
        old = self._base(meta, base) if self.needs == "all" or base is not None else None
        found = [(np.empty(0, dtype), np.empty(0, unit.dtype))]
        for start, size, body in self._bodies(payload, meta, count) if len(payload) else ():
            if not len(body):
                continue
            if body[:1] == _STEPS:
                if len(body) != 1 + size * unit.width:
                    raise damaged(meta, f"{len(body) - 1} bytes of plain steps", f"{size * unit.width}")
                every = np.frombuffer(body[1:], unit.dtype)
                where = np.flatnonzero(every)
                found.append(((where + start).astype(dtype), every[where]))
                continue
            if body[:1] != _CODED:
                raise damaged(meta, f"a block is of kind {body[0]}", "1 or 2")
            data = np.frombuffer(body[1:], np.uint8)
            data.flags.writeable = False  # whatever memory it came from: one compiled version for all
            error, *decoded, low, high = decode_body(data, size, self.needs == "all")
            if error:
                raise damaged(meta, ERRORS[error])
            into = np.empty(decoded[0].size, dtype), np.empty(decoded[0].size, unit.dtype)
            own = None if old is None else old[start : start + size]
            if not self._untoken(unit, own, start, size, (*decoded, data[low:high]), *into):
                expected = "a payload and a base of consecutive versions"
                raise damaged(meta, f"changes leave the block at {start}", expected)
            found.append(into)
        indices, steps = found[-1] if len(found) < 3 else map(np.concatenate, zip(*found, strict=True))
        patch = StepPatch(meta, indices, steps)
        if old is None:
            return patch
        resolved = patch.resolve(old[indices])
        if indices.nbytes + steps.nbytes <= old.nbytes:
            return resolved
        values = old.copy()
        values[indices] = resolved.values
        return DensePatch(meta, values)


@final
@dataclass(frozen=True, kw_only=True)
class UlpCodec(_StepCodec):
    """Codes gaps between changes and steps in units in the last place, each with one table per block: the fast one."""

    name: ClassVar[str] = "ulp"
    needs: ClassVar[Needs] = "changed"

    def _tokens(self, unit: Unit, block: Block) -> _Tokens:
        from torchrl_ext.codecs.coder.tokens import tokenise

        line, state, found, last = (unit.top, unit.mask, unit.ordered), np.zeros(3, np.uint64), 0, -1
        gaps, steps = np.empty(block.size, np.uint8), np.empty(block.size, np.uint8)  # what is filled takes memory
        raw = np.empty(block.size * (4 + unit.width) // 4 + 64, np.uint32)
        for part in block.parts:
            begin, found = found, found + part.places.size
            tokenise(*part, *line, gaps[begin:found], steps[begin:found], raw, last, state)
            last = int(part.places[-1])
        used = int(state[0]) + bool(state[2])
        return gaps[:found], steps[:found], np.zeros(1, np.uint8), np.array((0, found)), raw[:used]

    def _untoken(
        self, unit: Unit, base: np.ndarray | None, start: int, size: int, decoded: _Tokens, *into: np.ndarray
    ) -> bool:
        from torchrl_ext.codecs.coder.decode import untokenise

        gaps, values, _, _, raw = decoded
        return untokenise(gaps, values, raw, size, start, unit.mask, *into)


@final
@dataclass(frozen=True, kw_only=True)
class ContextCodec(_StepCodec):
    """Codes gaps and steps as `UlpCodec` does, but apart for each exponent of the base: the tight one.

    An element changes when its step exceeds half a unit in its last place, so the exponent predicts where and how far.
    A reader repeats the writer's walk over its own copy of the base.
    """

    name: ClassVar[str] = "context"
    needs: ClassVar[Needs] = "all"
    reads: ClassVar[Reads] = "all"

    def _tokens(self, unit: Unit, block: Block) -> _Tokens:
        from torchrl_ext.codecs.coder.tokens import sort_by_context, walk

        line, context = (unit.top, unit.mask, unit.ordered), (np.uint64(unit.shift), np.uint64(unit.select))
        contexts, far = np.empty(block.size, np.uint8), np.empty(block.size, np.uint32)  # what is filled takes memory
        wide, starts = np.empty(block.size, unit.dtype), np.empty(257, np.int64)
        counts, last, found, after = np.zeros((4, 256), np.uint32), np.zeros(256, np.uint32), 0, 0
        for part in block.parts:
            begin, found = found, found + part.places.size
            filled = contexts[begin:found], far[begin:found], wide[begin:found]
            walk(block.old, *part, *line, *context, *filled, after, counts, last)
            after = int(part.places[-1]) + 1
        gaps, steps = np.empty(found, np.uint8), np.empty(found, np.uint8)
        raw = np.empty(found * (4 + unit.width) // 4 + 64, np.uint32)
        used = sort_by_context(contexts[:found], far[:found], wide[:found], starts, gaps, steps, raw)
        ids = np.flatnonzero(starts[1:] > starts[:-1])
        return gaps, steps, ids.astype(np.uint8), np.append(starts[ids], found), raw[:used]

    def _untoken(
        self, unit: Unit, base: np.ndarray | None, start: int, size: int, decoded: _Tokens, *into: np.ndarray
    ) -> bool:
        from torchrl_ext.codecs.coder.decode import unwalk

        gaps, values, ids, starts, raw = decoded
        context = np.uint64(unit.shift), np.uint64(unit.select)
        return unwalk(base, *context, ids, starts, gaps, values, raw, start, unit.mask, *into)
