"""Our own two encodings: gaps and ulp steps by rANS, alone (`ulp`) or per exponent of the base (`context`).

A payload, little-endian, varints as in LEB128:

    byte     2, the version of this format
    byte     b: a block is 2^b units, 12 to 28; the last one is shorter
    varint   units in the tensor
    varint per block   bytes of its body, 0 where nothing changed
    bodies   byte 1 + body as in `torchrl_ext.codecs.coder.encode`, or byte 2 + one plain step per unit
    8 bytes  xxh3-64 of everything before

Blocks know nothing of each other, so they are coded and decoded in parallel; a tensor without changes is an empty
payload. Plain steps take over where coding would not save anything, so that a payload is never larger than the tensor
by more than its framing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Block, Buffer, Codec, Needs, Reads
from torchrl_ext.codecs.framing import damaged, frame, unframe
from torchrl_ext.codecs.patch import DensePatch, Patch, StepPatch, index_dtype
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["ContextCodec", "UlpCodec"]

_CODED, _STEPS = b"\x01", b"\x02"


@dataclass(frozen=True, kw_only=True)
class _BlockCodec(Codec):
    """Shared half: blocks, frames, and steps on the way back.

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

    def join(self, unit: Unit, count: int, blocks: list[bytes]) -> bytes:
        return frame(count, self.block_log2, blocks)

    def encode_block(self, unit: Unit, block: Block) -> bytes:
        from torchrl_ext.codecs.coder.encode import encode_body
        from torchrl_ext.codecs.coder.tokens import lay_steps

        most = block.size * unit.width
        gaps, steps = np.empty(block.most, np.uint8), np.empty(block.most, np.uint8)  # only what is filled takes memory
        room = np.empty(block.most * (4 + unit.width) // 4 + 64, np.uint32)
        ids, starts, used = self._tokens(unit, block, gaps, steps, room)
        raw, head, words = room[:used], np.empty(1 << 19, np.uint8), np.empty(2 * starts[-1] + 8, np.uint16)
        end, first = encode_body(gaps, steps, starts, ids, self.needs == "all", used, most, head, words)
        if end >= 0 and end + raw.nbytes + words[first:].nbytes <= most:
            return b"".join((_CODED, head[:end].data, raw.data, words[first:].data))
        plain = np.zeros(block.size, unit.dtype)
        for part in block.parts:
            lay_steps(*part, unit.top, unit.mask, unit.ordered, plain)
        return _STEPS + plain.tobytes()

    @abstractmethod
    def _tokens(
        self, unit: Unit, block: Block, gaps: np.ndarray, steps: np.ndarray, raw: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Fill ``gaps`` and ``steps`` with tokens, and ``raw`` with raw bits.

        Returns:
            Context ids, where the tokens of each begin (and the last end), and how many words of ``raw`` are used.
        """

    @abstractmethod
    def _untoken(
        self,
        unit: Unit,
        base: np.ndarray | None,
        start: int,
        size: int,
        decoded: tuple[np.ndarray, ...],
        indices: np.ndarray,
        steps: np.ndarray,
    ) -> bool:
        """Fill ``indices`` and ``steps`` from tokens, ids, starts and raw bits; False where these do not fit."""

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        unit = unit_of(meta.dtype)
        count = unit.count(meta)
        old = self._base(meta, base) if self.needs == "all" or base is not None else None
        parts = [(np.empty(0, index_dtype(count)), np.empty(0, unit.dtype))]
        if len(payload):
            size, bodies = unframe(payload, meta, count)
            for number, body in enumerate(bodies):
                if len(body):
                    parts.append(self._decode_block(body, meta, unit, old, number * size, min(size, count)))
        indices, steps = (np.concatenate(each) if len(parts) > 2 else each[-1] for each in zip(*parts, strict=True))
        patch = StepPatch(meta, indices, steps)
        if old is None:
            return patch
        resolved = patch.resolve(old[indices])
        if indices.nbytes + steps.nbytes <= old.nbytes:
            return resolved
        values = old.copy()
        values[indices] = resolved.values
        return DensePatch(meta, values)

    def _decode_block(
        self, body: memoryview, meta: ParamMeta, unit: Unit, old: np.ndarray | None, start: int, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        count = unit.count(meta)
        size, dtype = min(size, count - start), index_dtype(count)
        if body[:1] == _STEPS:
            if len(body) != 1 + size * unit.width:
                raise damaged(meta, f"{len(body) - 1} bytes of plain steps", f"{size * unit.width}")
            every = np.frombuffer(body[1:], unit.dtype)
            where = np.flatnonzero(every)
            return (where + start).astype(dtype), every[where]
        if body[:1] != _CODED:
            raise damaged(meta, f"a block is of kind {body[0]}", "1 or 2")
        from torchrl_ext.codecs.coder.decode import ERRORS, decode_body

        data = np.frombuffer(body[1:], np.uint8)
        data.flags.writeable = False  # whatever memory it came from: one compiled version for all
        error, *decoded, low, high = decode_body(data, size, self.needs == "all")
        if error:
            raise damaged(meta, ERRORS[error])
        decoded.append(data[low:high])
        indices, steps = np.empty(decoded[0].size, dtype), np.empty(decoded[0].size, unit.dtype)
        base = None if old is None else old[start : start + size]
        if not self._untoken(unit, base, start, size, tuple(decoded), indices, steps):
            raise damaged(meta, f"changes leave the block at {start}", "a payload and a base of consecutive versions")
        return indices, steps


@final
@dataclass(frozen=True, kw_only=True)
class UlpCodec(_BlockCodec):
    """Gaps between changes and steps in units in the last place, each with one table per block. The fast one."""

    name: ClassVar[str] = "ulp"
    needs: ClassVar[Needs] = "changed"

    def _tokens(
        self, unit: Unit, block: Block, gaps: np.ndarray, steps: np.ndarray, raw: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        from torchrl_ext.codecs.coder.tokens import tokenise

        line, state, at, last = (unit.top, unit.mask, unit.ordered), np.zeros(3, np.uint64), 0, -1
        for part in block.parts:
            end = at + part.places.size
            if end > at:
                tokenise(*part, *line, gaps[at:end], steps[at:end], raw, last, state)
                at, last = end, int(part.places[-1])
        return np.zeros(1, np.uint8), np.array([0, at]), int(state[0]) + bool(state[2])

    def _untoken(
        self,
        unit: Unit,
        base: np.ndarray | None,
        start: int,
        size: int,
        decoded: tuple[np.ndarray, ...],
        indices: np.ndarray,
        steps: np.ndarray,
    ) -> bool:
        from torchrl_ext.codecs.coder.tokens import untokenise

        gaps, values, _, _, raw = decoded
        return untokenise(gaps, values, raw, size, start, unit.mask, indices, steps)


@final
@dataclass(frozen=True, kw_only=True)
class ContextCodec(_BlockCodec):
    """As `UlpCodec`, with gaps and steps coded apart for each exponent of the base. The tight one.

    An element changes when its step exceeds half a unit in its last place, so the exponent predicts where and how far.
    A reader repeats the writer's walk over its own copy of the base.
    """

    name: ClassVar[str] = "context"
    needs: ClassVar[Needs] = "all"
    reads: ClassVar[Reads] = "all"

    def _tokens(
        self, unit: Unit, block: Block, gaps: np.ndarray, steps: np.ndarray, raw: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        from torchrl_ext.codecs.coder.contexts import sort_by_context, walk

        line, context = (unit.top, unit.mask, unit.ordered), (np.uint64(unit.shift), np.uint64(unit.select))
        contexts, starts = np.empty(gaps.size, np.uint8), np.empty(257, np.int64)
        far, wide = np.empty(gaps.size, np.uint32), np.empty(gaps.size, unit.dtype)
        counts, last, at, after = np.zeros((4, 256), np.uint32), np.zeros(256, np.uint32), 0, 0
        for part in block.parts:
            end = at + part.places.size
            if end > at:
                filled = contexts[at:end], far[at:end], wide[at:end]
                walk(block.old, *part, *line, *context, *filled, after, counts, last)
                at, after = end, int(part.places[-1]) + 1
        used = sort_by_context(contexts[:at], far[:at], wide[:at], starts, gaps, steps, raw)
        ids = np.flatnonzero(starts[1:] > starts[:-1])
        return ids.astype(np.uint8), np.append(starts[ids], at), used

    def _untoken(
        self,
        unit: Unit,
        base: np.ndarray | None,
        start: int,
        size: int,
        decoded: tuple[np.ndarray, ...],
        indices: np.ndarray,
        steps: np.ndarray,
    ) -> bool:
        from torchrl_ext.codecs.coder.contexts import unwalk

        gaps, values, ids, starts, raw = decoded
        context = np.uint64(unit.shift), np.uint64(unit.select)
        return unwalk(base, *context, ids, starts, gaps, values, raw, start, unit.mask, indices, steps)
