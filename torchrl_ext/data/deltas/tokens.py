"""Changes of one flat stream of units as bytes: a joint token for each gap and step, through stock zstd.

A stream is cut into blocks by whoever writes it; a block says where it begins, so that a reader can decode any block by
itself. A block, little-endian, varints as in LEB128:

    byte     1; + 2: the joint tokens are a zstd frame (RFC 8878), else stored; + 4: so are the others; + 16: all joint
             ones but a few are equal
    varint   k, how many units changed, at least 1
    varint   position of the first one
    varint   bytes of the joint tokens as they follow
    varint   how many other steps there are
    varint   bytes of their tokens as they follow
    bytes    joint tokens, one byte for each change
    bytes    tokens of other steps
    uint32s  raw bits, lowest first: of all gaps, then of all other steps

A *gap* is the number of unchanged units since the change before, 0 for the first of a block. A *step* counts units in
the last place on one ordered line, modulo 2^width, zigzagged: -1, 1, -2, 2 are 0, 1, 2, 3. A number below 16 is its own
token; a larger one has the token ``16 + 4 * (length - 5)`` plus the two bits after the leading one of its ``length``
bits, and its other bits are raw. The joint token is ``3 * gap token + min(step, 2)``; gaps of 2^21 or more have the
token 84 and 64 raw bits. Steps from 2 on follow, less 2, in the second stream.

Where all joint tokens but a few are equal, as where nearly every unit changes, they are written as

    byte     the token that they are
    varints  how many are not; how many bytes tell where these are; bytes of the first frame
    frames   where: of each the number of equal ones before it, as bytes of 255 and one below; then which tokens

Sorted by the exponent of the base, tokens are the tightest of our encodings. A unit changes when its step exceeds half
a unit in its last place, so the exponent of its old bits, its *context*, predicts whether and how far. Neighbouring
contexts that change alike form a group, and the units of a group, in their order, are a stream with a block of tokens
of its own. A reader repeats the writer's walk over its own copy of the base. Such a block:

    byte     the number of groups, less 1
    bytes    the last context of each group but the last, increasing
    varints  of each group, bytes of its tokens, 0 where nothing changed
    tokens
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.deltas.table import Unit

__all__ = ["Buffer", "damaged", "decode", "decode_sorted", "encode", "encode_sorted", "varints"]

Buffer = bytes | bytearray | memoryview

_TOKENS, _JOINT, _OTHERS, _EQUAL = 1, 2, 4, 16
_KINDS: Final = {_TOKENS | joint | others for joint in (0, _JOINT, _EQUAL) for others in (0, _OTHERS)}
_FEW: Final = 16  # of so many tokens one is not like the others: codes of whole bits would take more
_MOST_EQUAL: Final = 1 << 24  # tokens that a few bytes may stand for
_FAST: Final = zstandard.ZstdCompressionParameters(
    window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
)  # tokens of scattered changes have few matches: their entropy is what counts, and runs are found all the same


def encode(positions: np.ndarray, steps: np.ndarray, nbits: int) -> bytes:
    """Return a block of changes as bytes.

    Args:
        positions: int32 or int64, shape (k,), strictly increasing from 0 or more, in the stream of units.
        steps: unsigned of ``nbits``, shape (k,): steps on the ordered line modulo 2^nbits, not 0.
        nbits: 8, 16, 32 or 64.

    Returns:
        The block; empty without changes.
    """
    from torchrl_ext.data.deltas.codec_loops import tokenise

    count = positions.size
    if not count:
        return b""
    top, mask = np.uint64(1 << (nbits - 1)), np.uint64((1 << nbits) - 1)
    first, far = int(positions[0]), int(positions[-1] - positions[0]) >> 21
    joint, others = np.empty((2, count), np.uint8)
    most = (19 + nbits) * count + 64 * min(count, far)
    raw = np.empty(most // 32 + 4, np.uint32)  # only what is filled takes memory
    found, used = tokenise(positions, steps, top, mask, joint, others, raw)
    raw = raw[:used]
    packer = zstandard.ZstdCompressor(compression_params=_FAST)
    kind, streams = _TOKENS, list[bytes]()
    for tokens, flag in ((joint, _JOINT), (others[:found], _OTHERS)):
        packed = packer.compress(tokens.data) if tokens.size else b""
        small = len(packed) < tokens.size
        kind |= flag * small
        streams.append(packed if small else tokens.tobytes())
    if common := _common(joint):
        kind, streams[0] = kind & ~_JOINT | _EQUAL, _equal(joint, *common, packer)
    head = bytes((kind,)) + varints(count, first, len(streams[0]), found, len(streams[1]))
    return b"".join((head, *streams, raw.data))


def decode(data: Buffer, count: int, span: int, nbits: int, name: str = "a block") -> tuple[np.ndarray, np.ndarray]:
    """Return the changes that a block codes; the inverse of `encode`.

    Args:
        data: untrusted bytes.
        count: how many changes there are at most; bounds, with ``span``, the memory that is taken.
        span: the number of units in the stream.
        nbits: of a unit.
        name: of the block, for errors.

    Returns:
        Positions, int32 where ``span`` is below 2^31 and else int64, and steps, as given to `encode`.

    Raises:
        IntegrityError: the bytes are not a block of this stream.
    """
    from torchrl_ext.data.deltas.codec_loops import raw_bits, unpack

    index, unit, view = np.dtype(np.int32 if span < 2**31 else np.int64), np.dtype(f"<u{nbits // 8}"), memoryview(data)
    if not len(view):
        return np.empty(0, index), np.empty(0, unit)
    kind, at = view[0], 1
    if kind not in _KINDS:
        raise damaged(name, f"it is of kind {kind}")
    (changed, first, nbytes, found, more), at = _read_varints(view, at, 5, name)
    if not 0 < changed <= min(count, span - first):
        raise damaged(name, f"it has {changed} changes from {first} on", f"1 to {count} below {span}")
    if found > changed or at + nbytes + more > len(view):
        raise damaged(name, "its streams are longer than it is")
    if kind & _EQUAL:
        joint = _unequal(view[at : at + nbytes], changed, name)
    else:
        joint = _unpacked(view[at : at + nbytes], bool(kind & _JOINT), changed, name)
    others = _unpacked(view[at + nbytes : at + nbytes + more], bool(kind & _OTHERS), found, name)
    bits, announced = raw_bits(joint, others)
    rest = view[at + nbytes + more :]
    if announced != found or joint.max() > 254 or len(rest) != 4 * -(-bits // 32):
        raise damaged(name, f"{found} other steps and {len(rest)} bytes of raw bits", f"{announced} and {bits} bits")
    raw = np.zeros(len(rest) // 4 + 2, np.uint32)
    raw[:-2] = np.frombuffer(rest, "<u4")
    positions, steps = np.empty(changed, index), np.empty(changed, unit)
    top, mask = np.uint64(1 << (nbits - 1)), np.uint64((1 << nbits) - 1)
    if not unpack(joint, others, raw, first, span, top, mask, positions, steps):
        raise damaged(name, f"its changes leave the {span} units, or a unit's bits")
    return positions, steps


def _common(joint: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Return the token that nearly all are, and where the others are; None where they are not few."""
    token = int(joint[joint.size // 2])  # as likely as any, if nearly all are equal
    sample = joint[:: 1 + joint.size // 1024]
    if not 1024 <= joint.size <= _MOST_EQUAL or np.count_nonzero(sample != token) * _FEW > 2 * sample.size:
        return None
    where = np.flatnonzero(joint != token)
    return (token, where) if 0 < where.size * _FEW < joint.size else None


def _equal(joint: np.ndarray, token: int, where: np.ndarray, packer: zstandard.ZstdCompressor) -> bytes:
    """Return tokens that are equal but for those at ``where``."""
    gaps = np.diff(where, prepend=-1) - 1
    ends = (gaps // 255 + 1).cumsum()
    places = np.full(ends[-1], 255, np.uint8)
    places[ends - 1] = gaps % 255
    first = packer.compress(places.data)
    return b"".join(
        (bytes((token,)), varints(where.size, places.size, len(first)), first, packer.compress(joint[where]))
    )


def _unequal(data: memoryview, count: int, name: str) -> np.ndarray:
    """Return ``count`` tokens that `_equal` wrote."""
    if not len(data):
        raise damaged(name, "it ends too early")
    (few, size, nbytes), at = _read_varints(data, 1, 3, name)
    if not 0 < few <= size <= count <= _MOST_EQUAL:
        raise damaged(name, f"{few} of its {count} tokens are said to be other ones, by {size} bytes")
    places = _unpacked(data[at : at + nbytes], True, size, name)
    ends = np.flatnonzero(places != 255)
    where = (255 * np.diff(ends, prepend=-1) - 254 + places[ends]).cumsum() - 1
    if ends.size != few or places[-1] == 255 or where[-1] >= count:
        raise damaged(name, "its other tokens leave it")
    tokens = np.full(count, data[0], np.uint8)
    tokens[where] = _unpacked(data[at + nbytes :], True, few, name)
    tokens.flags.writeable = False  # as those of a frame: one compiled version for all
    return tokens


def varints(*numbers: int) -> bytes:
    """Return numbers from 0 on as varints."""
    head = bytearray()
    for number in numbers:
        while number >= 128:
            head.append(number & 127 | 128)
            number >>= 7
        head.append(number)
    return bytes(head)


def _read_varints(view: memoryview, at: int, count: int, name: str) -> tuple[list[int], int]:
    """Return the varints at ``at``, each below 2^63, and where they end."""
    numbers, number, shift = list[int](), 0, 0
    while len(numbers) < count:
        if at == len(view) or shift == 63:
            raise damaged(name, "its head ends too early")
        number, at, shift = number | (view[at] & 127) << shift, at + 1, shift + 7
        if view[at - 1] < 128:
            numbers.append(number)
            number = shift = 0
    return numbers, at


def _unpacked(data: memoryview, packed: bool, size: int, name: str) -> np.ndarray:
    """Return ``size`` tokens from their bytes, which are a zstd frame if ``packed``; takes no more memory than that."""
    if packed:
        try:
            if zstandard.frame_content_size(data) != size:
                raise damaged(name, f"its tokens do not unpack to {size}")
            unpacker = zstandard.ZstdDecompressor()
            data = memoryview(unpacker.decompress(data, max_output_size=size, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise damaged(name, f"its tokens are no zstd frame ({error})") from error
    if len(data) != size:
        raise damaged(name, f"it has {len(data)} tokens", f"{size}")
    tokens = np.frombuffer(data, np.uint8)
    tokens.flags.writeable = False  # whatever memory it came from: one compiled version for all
    return tokens


def damaged(name: str, why: str, expected: str | None = None) -> IntegrityError:
    """Return the error to raise where bytes are not the block that they should be."""
    return IntegrityError(
        f"{name} of a delta is damaged: {why}",
        expected=expected,
        state="nothing was written",
        hint="fetch the payload again, or catch up from a keyframe",
    )


_GROUP_BITS: Final = 8 * 90  # that a group takes: its head, and two tables of Huffman codes


def encode_sorted(unit: Unit, positions: np.ndarray, steps: np.ndarray, old: np.ndarray) -> bytes:
    """Return a block of changes as bytes.

    Args:
        unit: of the dtype.
        positions: int32, shape (k,), increasing, in the block.
        steps: unsigned, shape (k,), not 0.
        old: unsigned, shape (n,): the block before the change, of less than 2^31 units.
    """
    from torchrl_ext.data.deltas.codec_loops import count_contexts, sort_changes

    context, counts = (np.uint64(unit.shift), np.uint64(unit.select)), np.zeros((256, 17), np.int64)
    count_contexts(old, positions, steps, unit.top, unit.mask, *context, counts)
    lasts = _grouped(counts)
    groups = _groups(lasts)
    changed = np.bincount(groups, weights=counts[:, 1:].sum(1), minlength=256).astype(np.int64)
    ends = changed.cumsum()
    ranks, moved = np.empty(positions.size, np.int32), np.empty_like(steps)
    sort_changes(old, positions, steps, *context, groups, ends - changed, ranks, moved)
    bodies, start = [], 0
    for end in ends[: len(lasts) + 1].tolist():
        bodies.append(encode(ranks[start:end], moved[start:end], 8 * unit.width))
        start = end
    return b"".join((bytes((len(lasts), *lasts)), varints(*map(len, bodies)), *bodies))


def decode_sorted(data: Buffer, unit: Unit, old: np.ndarray, name: str = "a block") -> tuple[np.ndarray, np.ndarray]:
    """Return positions, int32, and steps; the inverse of `encode`.

    Args:
        data: untrusted bytes.
        unit: of the dtype.
        old: as the writer had it, of less than 2^31 units; bounds the memory that is taken.
        name: of the block, for errors.

    Raises:
        IntegrityError: the bytes are not a block of changes of this base.
    """
    from torchrl_ext.data.deltas.codec_loops import unsort_changes

    view, nothing = memoryview(data), np.empty(0, np.int32)
    if not len(view):
        return nothing, np.empty(0, unit.dtype)
    at = 1 + view[0]
    lasts = [*view[1:at]]
    if len(lasts) != view[0] or lasts != sorted({*lasts} - {255}):
        raise damaged(name, f"its contexts end at {lasts}", f"{view[0]} increasing numbers below 255")
    sizes, at = _read_varints(view, at, len(lasts) + 1, name)
    if at + sum(sizes) != len(view):
        raise damaged(name, f"its groups take {sum(sizes)} bytes", f"{len(view) - at}")
    context, groups = (np.uint64(unit.shift), np.uint64(unit.select)), _groups(lasts)
    ranks, moved, ends = [nothing], [np.empty(0, unit.dtype)], np.zeros(256, np.int64)
    for group, size in enumerate(sizes):
        left = old.size - int(ends[group - 1])
        rank, step = decode(view[at : at + size], left, old.size, 8 * unit.width, name)
        ranks.append(rank)
        moved.append(step)
        ends[group:] += rank.size
        at += size
    found = np.concatenate(ranks), np.concatenate(moved)
    positions, steps = np.empty(ends[-1], np.int32), np.empty(ends[-1], unit.dtype)
    if unsort_changes(old, *context, groups, np.append(0, ends[:-1]), ends, *found, positions, steps) != ends[-1]:
        raise damaged(name, "its changes leave the base", f"{ends[-1]} changes of a base of consecutive versions")
    return positions, steps


def _groups(lasts: list[int]) -> np.ndarray:
    """Return the group of each of 256 contexts, uint8, from the last context of each group but the last."""
    return np.searchsorted(np.array(lasts, np.int64), np.arange(256), "left").astype(np.uint8)


def _grouped(counts: np.ndarray) -> list[int]:
    """Merge neighbours among the contexts as long as that saves bits; return the last context of all groups but one."""
    lasts = np.flatnonzero(counts[:, 0]).tolist()
    rows = [counts[context] for context in lasts]
    bits = [_bits(row) for row in rows]
    gains = [a + b + _GROUP_BITS - _bits(r + s) for a, b, r, s in zip(bits, bits[1:], rows, rows[1:], strict=False)]
    while gains and max(gains) > 0:
        at = gains.index(max(gains))
        rows[at : at + 2] = [rows[at] + rows[at + 1]]
        bits[at : at + 2] = [_bits(rows[at])]
        del lasts[at], gains[at]
        for left in range(max(0, at - 1), min(at + 1, len(gains))):
            gains[left] = bits[left] + bits[left + 1] + _GROUP_BITS - _bits(rows[left] + rows[left + 1])
    return lasts[:-1]


def _bits(row: np.ndarray) -> float:
    """Return the entropy of what happens to the units that are counted in ``row``, in bits."""
    kinds = np.append(row[1:], row[0] - row[1:].sum())
    kinds = kinds[kinds > 0].astype(np.float64)
    return float(row[0] * np.log2(row[0]) - (kinds * np.log2(kinds)).sum())
