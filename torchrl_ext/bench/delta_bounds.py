"""How few bits a bfloat16 delta can take under two models; importing this imports numba.

Plain: per tensor, positions as a Bernoulli process and ulp steps by their order-0 entropy. Conditional: the same for
each exponent of the base apart. Tables that tell the distributions are not counted.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.units import units
from torchrl_ext.kernels.jit import njit

__all__ = ["bounds"]


@njit
def _tally(old, new, seen, changed, row, steps):
    """Count elements and changes per exponent, and steps (modulo 2^16) per exponent; ``row`` maps exponents to rows."""
    rows = 0
    for i in range(old.size):
        a, b = np.int32(old[i]), np.int32(new[i])
        context = (a >> 7) & 255
        seen[context] += 1
        if a != b:
            if row[context] < 0:
                row[context] = rows
                steps[rows] = 0
                rows += 1
            changed[context] += 1
            a = 0xFFFF - a if a & 0x8000 else a | 0x8000
            b = 0xFFFF - b if b & 0x8000 else b | 0x8000
            steps[row[context], (b - a) & 0xFFFF] += 1
    return rows


def bounds(old: Tensor, new: Tensor) -> tuple[int, float, float]:
    """Changed elements, plain bound and conditional bound in bits, of one bfloat16 tensor."""
    seen, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    row, steps = np.full(256, -1), np.empty((256, 1 << 16), np.int64)
    rows = _tally(units(old), units(new), seen, changed, row, steps)
    steps = steps[:rows]
    plain = _places(seen.sum(keepdims=True), changed.sum(keepdims=True)) + _entropy(steps.sum(0))
    inside = _places(seen, changed) + sum(_entropy(one) for one in steps)
    return int(changed.sum()), plain, inside


def _places(seen: np.ndarray, changed: np.ndarray) -> float:
    return sum(_entropy(np.array([n - k, k])) for n, k in zip(seen, changed, strict=True))


def _entropy(counts: np.ndarray) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float(-(used * np.log2(used / used.sum())).sum()) if used.size else 0.0
