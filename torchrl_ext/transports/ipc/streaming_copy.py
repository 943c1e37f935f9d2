"""A copy that bypasses the processor's caches: what is written goes straight to memory.

An ordinary store first fetches the line that it is about to overwrite. For weights, which nobody reads soon, that is a
third of the traffic, and it evicts the staging buffer. glibc's ``memcpy`` has such stores too, but only for copies
far larger than a bucket (`glibc.cpu.x86_non_temporal_threshold`, three quarters of the last-level cache).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchrl_ext.kernels.jit import njit

__all__ = ["copy_streaming"]

_LINE_BYTES = 64
_STEP_BYTES = 4 * _LINE_BYTES


@intrinsic
def _store_lines(typingctx: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Compile to a copy of ``nbytes``, a multiple of 256, between two addresses; ``target`` is a multiple of 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        begin, origin, size = args
        word, line = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
        entry = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        at = builder.phi(word)
        at.add_incoming(word(0), entry)
        builder.cbranch(builder.icmp_unsigned("<", at, size), body, end)
        builder.position_at_end(body)

        def address(base: Any, number: int) -> Any:
            return builder.inttoptr(builder.add(builder.add(base, at), word(number * _LINE_BYTES)), line.as_pointer())

        loaded = [builder.load(address(origin, number), align=1) for number in range(4)]
        for number, value in enumerate(loaded):
            store = builder.store(value, address(begin, number), align=_LINE_BYTES)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        at.add_incoming(builder.add(at, word(_STEP_BYTES)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        builder.fence("seq_cst")  # such stores are ordered by nothing else
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), codegen


@njit
def _copy_lines(target, source, nbytes):  # type: ignore[no-untyped-def]
    _store_lines(target, source, nbytes)  # type: ignore[call-arg]  # the compiler gives the context


def copy_streaming(source: np.ndarray, target: np.ndarray) -> None:
    """Copy a contiguous uint8 array into another one of the same size that does not overlap it."""
    begin = -target.ctypes.data % _LINE_BYTES
    end = begin + (target.nbytes - begin) // _STEP_BYTES * _STEP_BYTES
    if end <= begin:
        target[:] = source
        return
    target[:begin], target[end:] = source[:begin], source[end:]
    _copy_lines(np.uint64(target.ctypes.data + begin), np.uint64(source.ctypes.data + begin), np.uint64(end - begin))
