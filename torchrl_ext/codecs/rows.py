"""The payloads of formats 1 to 3, each of one tensor: earlier releases wrote them, and they are only read.

A payload, little-endian, varints as in LEB128:

    byte     2, the version of this layout
    byte     b: a block is 2^b units, 12 to 28; the last one is shorter
    varint   units in the tensor
    varint per block   bytes of its body, 0 where nothing changed
    bodies
    8 bytes  xxh3-64 of everything before

A body begins with its kind. Kind 2 is a step for each unit; kind 3 the byte planes of all units, as in the kind `dense`
of `torchrl_ext.codecs.blocks`. Kind 1 are tokens of gaps and of steps, coded by rANS (J. Duda, arXiv 1311.2540;
interleaving as in F. Giesen, arXiv 1402.3392), of which `context` has them apart for each exponent of the base:

    varint C                  number of contexts that have changes
    C - 1 bits                whether a context's id is one more than the one before (only of `context`)
    C x [byte id], varint n, table     context id (where no bit says it), changes, table of its gap tokens
    C - 1 bits                whether a context has another step table than the one before
    tables                    step tables
    varint r, varint w        32-bit words of raw bits, 16-bit words of the coder
    4 x uint32                states, or one where there are fewer than 4096 changes
    r x uint32, w x uint16

A table gives each of 256 tokens a frequency; frequencies sum to 4096. It is written in one of three ways:

    constant    0x20, token
    geometric   0x80 | last token, q                 gaps of a Bernoulli process with p = 2^(-q/8)
    explicit    b, last token, gamma codes           frequencies + 1 as Elias-gamma codes, summing to 2^b, b 4..12
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
import xxhash
from torch import Tensor

from torchrl_ext.codecs.blocks import DENSE
from torchrl_ext.codecs.patch import Patch, SparsePatch, StepPatch, index_dtype, same
from torchrl_ext.codecs.tokens import Buffer, damaged, read_varint
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import Info, ParamMeta

__all__ = ["RowCodec", "row_codec"]

_FORMAT: Final = 2
_TOKENS, _STEPS, _PLANES = 1, 2, 3
_BITS: Final = 12  # a table sums to 2^12
_POWERS: Final = [round(2 ** (32 - r / 8)) for r in range(8)]  # 2^(-r/8) in units of 2^-32
_Found = tuple[np.ndarray, np.ndarray]
"""Positions in a tensor, and new bits or steps."""


@final
@dataclass(frozen=True)
class RowCodec:
    """Reads the payloads of one encoding of formats 1 to 3.

    Attributes:
        name: ``"ulp"``, ``"context"`` or ``"dense"``.
    """

    name: str

    @property
    def whole_base(self) -> bool:
        """Whether `decode` needs the old tensor."""
        return self.name == "context"

    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        """Return the change that a payload codes; takes and raises as `torchrl_ext.codecs.base.Codec.decode`."""
        unit, name = unit_of(meta.dtype), f"tensor {meta.name!r}"
        old = None
        if self.whole_base:
            if base is None:
                raise ConfigError(f"encoding 'context' of {meta.name!r} is read with the base", hint="pass base=")
            (old,) = same(meta, base)
        index, found = index_dtype(unit.count(meta)), list[_Found]()
        for start, size, body in _bodies(memoryview(payload).cast("B"), unit.count(meta), name):
            if not len(body):
                continue
            kind, rest = body[0], body[1:]
            if (kind == _PLANES) != (self.name == "dense") or not _TOKENS <= kind <= _PLANES:
                raise damaged(name, f"a block is of kind {kind}")
            if kind == _PLANES:
                positions, values = DENSE.read(rest, unit, size, name, None)
            elif kind == _STEPS:
                if len(rest) != size * unit.width:
                    raise damaged(name, f"{len(rest)} bytes of plain steps", f"{size * unit.width}")
                every = np.frombuffer(rest, unit.dtype)
                positions = np.flatnonzero(every)
                values = every[positions]
            else:
                positions, values = _changes(rest, unit, size, None if old is None else old[start:][:size], name)
            found.append((positions.astype(index) + index.type(start), values))
        nothing = np.empty(0, index), np.empty(0, unit.dtype)
        indices, values = map(np.concatenate, zip(nothing, *found, strict=True))
        return (SparsePatch if self.name == "dense" else StepPatch)(meta, indices, values)


def row_codec(info: Info) -> RowCodec:
    """Return what reads the payloads of the encoding that a manifest of formats 1 to 3 names.

    Raises:
        ManifestError: there is no such encoding.
    """
    if not isinstance(info, dict) or info.get("name") not in ("ulp", "context", "dense"):
        raise ManifestError(f"{info!r} does not describe an encoding of formats 1 to 3")
    return RowCodec(info["name"])


def _bodies(data: memoryview, count: int, name: str) -> list[tuple[int, int, memoryview]]:
    """Return of each block of a tensor of ``count`` units its first unit, its size in units, and its body."""
    if not len(data):
        return []
    if len(data) < 11 or xxhash.xxh3_64_digest(data[:-8])[::-1] != bytes(data[-8:]):
        raise damaged(name, "its checksum does not match its bytes")
    log2, numbers, at, data = data[1], list[int](), 2, data[:-8]
    if data[0] != _FORMAT or not 12 <= log2 <= 28:
        raise damaged(name, f"it is of layout {data[0]} with blocks of 2^{log2}", f"{_FORMAT}, and 2^12 to 2^28")
    size = 1 << log2
    units, at = read_varint(data, at, name)
    if units != count:
        raise damaged(name, f"its payload is for {units} units", f"{count}")
    for _ in range(-(-count // size)):
        number, at = read_varint(data, at, name)
        numbers.append(number)
    if at + sum(numbers) != len(data):
        raise damaged(name, f"its blocks take {sum(numbers)} bytes", f"{len(data) - at}")
    bodies = []
    for number, nbytes in enumerate(numbers):
        bodies.append((number * size, min(size, count - number * size), data[at : at + nbytes]))
        at += nbytes
    return bodies


def _changes(data: memoryview, unit: Unit, size: int, old: np.ndarray | None, name: str) -> _Found:
    """Decode the tokens of a block of ``size`` units; ``old`` are its units before, of `context`."""
    from torchrl_ext.codecs.row_loops import decode_run, untokenise, unwalk

    number, at = read_varint(data, 0, name)
    if not 1 <= number <= (1 if old is None else 256):
        raise damaged(name, f"it has changes of {number} contexts")
    follows, at = _flags(data, at, number if old is not None else 1, name)
    ids, counts, gaps, last = [], [], [], -1
    for context in range(number):
        if old is not None:
            if context and follows[context - 1]:
                last += 1
            else:
                byte, at = _byte(data, at, name)
                last = byte if byte > last else 256
            if last > 255:
                raise damaged(name, "its contexts are repeated or out of order")
        ids.append(max(0, last))
        count, at = read_varint(data, at, name)
        counts.append(count)
        if not count or sum(counts) > size:
            raise damaged(name, f"it counts {sum(counts)} changes", f"1 to {size}")
        table, at = _table(data, at, name)
        gaps.append(table)
    fresh, at = _flags(data, at, number, name)
    steps = list[np.ndarray]()
    for context in range(number):
        if not context or fresh[context - 1]:
            table, at = _table(data, at, name)
            steps.append(table)
        else:
            steps.append(steps[-1])
    raw_words, at = read_varint(data, at, name)
    words, at = read_varint(data, at, name)
    found = sum(counts)
    lanes = 4 if found >= 4096 else 1
    if at + 4 * (lanes + raw_words) + 2 * words != len(data):
        raise damaged(name, "its streams are not as long as it says")
    states = np.frombuffer(data[at : at + 4 * lanes], "<u4").astype(np.uint64)
    if (states < 1 << 15).any() or (states >> np.uint64(31)).any():
        raise damaged(name, "the states of its coder are out of range")
    raw = np.frombuffer(data[at + 4 * lanes :][: 4 * raw_words], "<u4")
    coded = np.append(np.frombuffer(data[len(data) - 2 * words :], "<u2"), np.uint16(0))
    tokens, word, low, starts = np.empty((2, found), np.uint8), 0, 0, np.append(0, np.cumsum(counts))
    for context, count in enumerate(counts):
        for own, table in zip(tokens, (gaps[context], steps[context]), strict=True):
            word = decode_run(own[low : low + count], low, table, states, coded, word)
        low += count
    if word != words or (states != 1 << 15).any():
        raise damaged(name, "its coded tokens do not end where they must")
    positions, values = np.empty(found, np.int64), np.empty(found, unit.dtype)
    raw = np.append(raw, np.uint32(0))
    if old is None:
        sound = untokenise(*tokens, raw, size, unit.mask, positions, values)
    else:
        context_of = np.uint64(unit.shift), np.uint64(unit.select)
        sound = unwalk(old, *context_of, np.array(ids), starts, *tokens, raw, unit.mask, positions, values)
    if not sound:
        raise damaged(name, "its changes leave the block", "a payload and a base of consecutive versions")
    return positions, values


def _byte(data: memoryview, at: int, name: str) -> tuple[int, int]:
    if at >= len(data):
        raise damaged(name, "it ends too early")
    return data[at], at + 1


def _flags(data: memoryview, at: int, number: int, name: str) -> tuple[list[bool], int]:
    """Return one bit less than ``number``, lowest first."""
    end = at + (number + 6) // 8
    if end > len(data):
        raise damaged(name, "it ends too early")
    flags = int.from_bytes(data[at:end], "little")
    return [bool(flags >> bit & 1) for bit in range(number - 1)], end


def _table(data: memoryview, at: int, name: str) -> tuple[np.ndarray, int]:
    """Return the frequencies of tokens: int64, shape (256,)."""
    kind, at = _byte(data, at, name)
    last, at = _byte(data, at, name)
    if kind == 0x20:
        freq = [0] * last + [1 << _BITS]
    elif kind & 0x80:
        freq = _geometric(last, kind & 0x7F)
    elif 4 <= kind <= _BITS:
        bits = int.from_bytes(data[at : at + 2048], "little")
        bit, most, freq = 0, 8 * len(data[at : at + 2048]), []
        for _ in range(last + 1):  # length - 1 zeros, a one, the bits below the leading one
            zeros = (bits & -bits).bit_length() - 1
            if not 0 <= zeros <= _BITS or (bit := bit + 2 * zeros + 1) > most:
                raise damaged(name, "a table of frequencies is malformed")
            freq.append((bits >> zeros + 1) % (1 << zeros) + (1 << zeros) - 1 << _BITS - kind)
            bits >>= 2 * zeros + 1
        at += -(-bit // 8)
    else:
        freq = []
    if sum(freq) != 1 << _BITS:
        raise damaged(name, "a table of frequencies is malformed")
    return np.array(freq + [0] * (256 - len(freq))), at


def _geometric(q: int, last: int) -> list[int]:
    """Return the table of a geometric distribution with p = 2^(-q/8), of which the last token has the tail."""
    keep = (1 << 32) - (_POWERS[q & 7] >> (q >> 3))  # 1 - p
    here, power, freq = 1 << 32, keep, list[int]()  # P(value >= first value of token), keep^(width of token)
    for token in range(last + 1):
        if token >= 16 and token % 4 == 0:  # tokens 16 to 19 are 4 wide, each four after them twice as wide
            power = power * power >> 32
            if token == 16:
                power = power * power >> 32
        after = here * power >> 32 if token < last else 0
        freq.append(max(1, here - after << _BITS >> 32))
        here = after
    while (have := sum(freq)) != 1 << _BITS:  # the largest ones change
        best = freq.index(max(freq))
        if have < 1 << _BITS:
            freq[best] += (1 << _BITS) - have
        else:
            give = min(have - (1 << _BITS), max(1, freq[best] // 8), freq[best] - 1)
            if give < 1:
                return []
            freq[best] -= give
    return freq
