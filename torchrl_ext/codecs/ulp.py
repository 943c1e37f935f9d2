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

import threading
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.base import Buffer, Codec, Found, Needs, Piece
from torchrl_ext.codecs.coder.framing import damaged, frame, unframe
from torchrl_ext.codecs.patch import DensePatch, Patch, StepPatch, index_dtype
from torchrl_ext.codecs.units import Layout, layout_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta

__all__ = ["ContextCodec", "UlpCodec"]

_CODED, _STEPS = b"\x01", b"\x02"


class _Scratch(threading.local):
    """Work arrays of a thread, kept from block to block: fresh memory costs more than the work done in it."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def take(self, name: str, size: int, dtype: type[np.generic]) -> np.ndarray:
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, dtype)
        return array[:size]


_scratch = _Scratch()


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

    def piece_units(self, layout: Layout, count: int) -> int:
        return 1 << self.block_log2

    def join(self, layout: Layout, count: int, pieces: list[Piece]) -> bytes:
        return frame(count, self.block_log2, [piece.data for piece in pieces])

    def encode_piece(self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int) -> Piece:
        digest = np.zeros(2, np.uint64)
        changed, data = self._code(layout, old, new, start, digest)
        if changed and not data:
            from torchrl_ext.codecs.scan import plain_steps

            steps, digest = np.empty(old.size, layout.dtype), np.zeros(2, np.uint64)
            plain_steps(old, new, start, layout.top, layout.mask, layout.ordered, steps, digest)
            data = _STEPS + steps.tobytes()
        return Piece(data=data, changed=changed, digest=(int(digest[0]), int(digest[1])))

    def _code(
        self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int, digest: np.ndarray
    ) -> tuple[int, bytes]:
        """Number of changes, and the coded body, empty where plain steps are no longer."""
        ids, starts, raw = self._scan(layout, old, new, start, digest)
        changed = int(starts[-1])
        if not changed:
            return 0, b""
        return changed, self._body(old.nbytes, old.size, ids, starts, raw)

    def _body(self, most: int, size: int, ids: np.ndarray, starts: np.ndarray, raw: np.ndarray) -> bytes:
        """The coded body from the scratch arrays of a block of ``size`` units and ``most`` bytes; see `_code`."""
        from torchrl_ext.codecs.coder.encode import encode_body

        changed = int(starts[-1])
        head = _scratch.take("head", 1 << 19, np.uint8)
        words = _scratch.take("words", 2 * changed + 8, np.uint16)
        gaps, steps = _scratch.take("gaps", size, np.uint8), _scratch.take("steps", size, np.uint8)
        used, first = encode_body(gaps, steps, starts, ids, self.needs == "all", raw.size, most, head, words)
        if used < 0 or used + raw.nbytes + words[first:].nbytes > most:
            return b""
        return b"".join((_CODED, head[:used].data, raw.data, words[first:].data))

    @abstractmethod
    def _scan(
        self, layout: Layout, old: np.ndarray, new: np.ndarray, start: int, digest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fill the scratch arrays ``gaps`` and ``steps`` with tokens; context ids, their starts, and the raw bits."""

    @abstractmethod
    def _place(
        self,
        layout: Layout,
        base: np.ndarray | None,
        start: int,
        decoded: tuple[np.ndarray, ...],
        indices: np.ndarray,
        steps: np.ndarray,
        size: int,
    ) -> bool:
        """Fill ``indices`` and ``steps`` from tokens, ids, starts and raw bits; False where these do not fit."""

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        layout = layout_of(meta.dtype)
        count = layout.count(meta)
        old = self._base(meta, base) if self.needs == "all" or base is not None else None
        parts = [(np.empty(0, index_dtype(count)), np.empty(0, layout.dtype))]
        if len(payload):
            size, bodies = unframe(payload, meta, count)
            for number, body in enumerate(bodies):
                if len(body):
                    parts.append(self._decode_block(body, meta, layout, old, number * size, min(size, count)))
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
        self, body: memoryview, meta: ParamMeta, layout: Layout, old: np.ndarray | None, start: int, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        count = layout.count(meta)
        size, dtype = min(size, count - start), index_dtype(count)
        if body[:1] == _STEPS:
            if len(body) != 1 + size * layout.width:
                raise damaged(meta, f"{len(body) - 1} bytes of plain steps", f"{size * layout.width}")
            every = np.frombuffer(body[1:], layout.dtype)
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
        indices, steps = np.empty(decoded[0].size, dtype), np.empty(decoded[0].size, layout.dtype)
        base = None if old is None else old[start : start + size]
        if not self._place(layout, base, start, tuple(decoded), indices, steps, size):
            raise damaged(meta, f"changes leave the block at {start}", "a payload and a base of consecutive versions")
        return indices, steps


@final
@dataclass(frozen=True, kw_only=True)
class UlpCodec(_BlockCodec):
    """Gaps between changes and steps in units in the last place, each with one table per block. The fast one."""

    name: ClassVar[str] = "ulp"
    needs: ClassVar[Needs] = "changed"
    by_list: ClassVar[bool] = True

    def encode_listed(self, layout: Layout, found: Found) -> Piece:
        from torchrl_ext.codecs.scan import listed_steps, scan_listed

        changed, nbytes = found.places.size, found.size * layout.width
        if not changed:
            return Piece(data=b"", changed=0)
        listed, line = (found.places, found.before, found.after), (layout.top, layout.mask, layout.ordered)
        gaps, tokens = _scratch.take("gaps", found.size, np.uint8), _scratch.take("steps", found.size, np.uint8)
        raw = _scratch.take("raw", nbytes // 4 + 64, np.uint32)
        used = scan_listed(*listed, *line, gaps, tokens, raw)
        data = self._body(nbytes, found.size, np.zeros(1, np.uint8), np.array([0, changed]), raw[:used])
        if not data:
            steps = np.zeros(found.size, layout.dtype)
            listed_steps(*listed, *line, steps)
            data = _STEPS + steps.tobytes()
        return Piece(data=data, changed=changed)

    def _scan(self, layout, old, new, start, digest):
        from torchrl_ext.codecs.scan import scan_plain

        gaps, steps = _scratch.take("gaps", old.size, np.uint8), _scratch.take("steps", old.size, np.uint8)
        raw = _scratch.take("raw", old.nbytes // 4 + 64, np.uint32)
        found, used = scan_plain(old, new, start, layout.top, layout.mask, layout.ordered, gaps, steps, raw, digest)
        return np.zeros(1, np.uint8), np.array([0, found]), raw[:used]

    def _place(self, layout, base, start, decoded, indices, steps, size):
        from torchrl_ext.codecs.coder.untoken import place_plain

        gaps, values, _, _, raw = decoded
        return place_plain(gaps, values, raw, size, start, layout.mask, indices, steps)


@final
@dataclass(frozen=True, kw_only=True)
class ContextCodec(_BlockCodec):
    """As `UlpCodec`, with gaps and steps coded apart for each exponent of the base. The tight one.

    An element changes when its step exceeds half a unit in its last place, so the exponent predicts where and how far.
    A reader repeats the writer's walk over its own copy of the base.
    """

    name: ClassVar[str] = "context"
    needs: ClassVar[Needs] = "all"

    def _scan(self, layout, old, new, start, digest):
        from torchrl_ext.codecs.scan import scan_contexts, sort_contexts

        size = old.size
        contexts, far = _scratch.take("contexts", size, np.uint8), _scratch.take("far", size, np.uint32)
        wide = _scratch.take("wide", size, np.uint64)
        shift, select = np.uint64(layout.shift), np.uint64(layout.select)
        found = scan_contexts(
            old, new, start, layout.top, layout.mask, layout.ordered, shift, select, contexts, far, wide, digest
        )
        gaps, steps = _scratch.take("gaps", size, np.uint8), _scratch.take("steps", size, np.uint8)
        raw, starts = _scratch.take("raw", old.nbytes // 4 + size // 16 + 64, np.uint32), np.empty(257, np.int64)
        used = sort_contexts(contexts, far, wide, found, starts, gaps, steps, raw)
        ids = np.flatnonzero(starts[1:] > starts[:-1])
        return ids.astype(np.uint8), np.append(starts[ids], found), raw[:used]

    def _place(self, layout, base, start, decoded, indices, steps, size):
        from torchrl_ext.codecs.coder.untoken import place_contexts

        gaps, values, ids, starts, raw = decoded
        shift, select = np.uint64(layout.shift), np.uint64(layout.select)
        far = _scratch.take("far64", gaps.size, np.uint64)
        wide = _scratch.take("wide", gaps.size, np.uint64)
        return place_contexts(
            base, shift, select, ids, starts, gaps, values, raw, start, layout.mask, far, wide, indices, steps
        )
