"""Changes of a block as tokens that are sorted by the exponent of the base: the tightest of our encodings.

A unit changes when its step exceeds half a unit in its last place, so the exponent of its old bits, its *context*,
predicts whether and how far. Neighbouring contexts that change alike form a group, and the units of a group, in their
order, are a stream with a block of tokens of its own (`torchrl_ext.data.deltas.tokens`). A reader repeats the writer's
walk over its own copy of the base. A block:

    byte     the number of groups, less 1
    bytes    the last context of each group but the last, increasing
    varints  of each group, bytes of its tokens, 0 where nothing changed
    tokens
"""

from __future__ import annotations

from typing import Final

import numpy as np

from torchrl_ext.data.deltas import tokens
from torchrl_ext.data.deltas.tokens import Buffer, damaged, read_varint, varints
from torchrl_ext.data.deltas.units import Unit

__all__ = ["decode", "encode"]

_GROUP_BITS: Final = 8 * 90  # that a group takes: its head, and two tables of Huffman codes


def encode(unit: Unit, positions: np.ndarray, steps: np.ndarray, old: np.ndarray) -> bytes:
    """Return a block of changes as bytes.

    Args:
        unit: of the dtype.
        positions: int32, shape (k,), increasing, in the block.
        steps: unsigned, shape (k,), not 0.
        old: unsigned, shape (n,): the block before the change, of less than 2^31 units.
    """
    from torchrl_ext.data.deltas.block_loops import count_contexts, sort_changes

    if not positions.size:
        return b""
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
        bodies.append(tokens.encode(ranks[start:end], moved[start:end], 8 * unit.width))
        start = end
    return b"".join((bytes((len(lasts), *lasts)), varints(*map(len, bodies)), *bodies))


def decode(data: Buffer, unit: Unit, old: np.ndarray, name: str = "a block") -> tuple[np.ndarray, np.ndarray]:
    """Return positions, int32, and steps; the inverse of `encode`.

    Args:
        data: untrusted bytes.
        unit: of the dtype.
        old: as the writer had it, of less than 2^31 units; bounds the memory that is taken.
        name: of the block, for errors.

    Raises:
        IntegrityError: the bytes are not a block of changes of this base.
    """
    from torchrl_ext.data.deltas.block_loops import unsort_changes

    view, nothing = memoryview(data), np.empty(0, np.int32)
    if not len(view):
        return nothing, np.empty(0, unit.dtype)
    at = 1 + view[0]
    lasts = [*view[1:at]]
    if len(lasts) != view[0] or lasts != sorted({*lasts} - {255}):
        raise damaged(name, f"its contexts end at {lasts}", f"{view[0]} increasing numbers below 255")
    sizes = []
    for _ in range(len(lasts) + 1):
        number, at = read_varint(view, at, name)
        sizes.append(number)
    if at + sum(sizes) != len(view):
        raise damaged(name, f"its groups take {sum(sizes)} bytes", f"{len(view) - at}")
    context, groups = (np.uint64(unit.shift), np.uint64(unit.select)), _groups(lasts)
    ranks, moved, ends = [nothing], [np.empty(0, unit.dtype)], np.zeros(256, np.int64)
    for group, size in enumerate(sizes):
        left = old.size - int(ends[group - 1])
        rank, step = tokens.decode(view[at : at + size], left, old.size, 8 * unit.width, name)
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
