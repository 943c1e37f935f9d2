"""Compiled loops of `torchrl_ext.weights.scatter`; importing this imports numba."""

from __future__ import annotations

from torchrl_ext.jit import njit

__all__ = ["gather", "scatter"]


@njit
def scatter(target, offsets, values):
    """``target[offsets] = values``; offsets lie within the target, which whoever translated them made sure of."""
    for k in range(offsets.size):
        target[offsets[k]] = values[k]


@njit
def gather(target, offsets, found):
    """``found[:] = target[offsets]``."""
    for k in range(offsets.size):
        found[k] = target[offsets[k]]
