"""Compiled helpers of `torchrl_ext.kernels.host_loops` that list what differs, at the speed of memory.

Where the processor has AVX-512 VBMI2, a vector compare gives a mask by which positions, old and new bits are compressed
into lists, whatever the density. Elsewhere masks of 64 elements are walked bit by bit. Both list the same.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchrl_ext.kernels.jit import changed64, count_ones, count_trailing_zeros, helper

__all__ = ["CHUNK", "list_by_vectors", "list_by_words", "list_changes"]

CHUNK = 16384  # elements whose changes are listed before they are summed; their places fit into uint16
_AHEAD_BITS = 8 * 2048
_0, _1 = np.uint64(0), np.uint64(1)


def _prefetch(builder: Any, address: Any) -> None:
    """Prefetch memory, which need not exist; the processor's own prefetching ends with every page of 4 KiB."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    name = "llvm.prefetch.p0"
    found = builder.module.globals.get(name)
    if found is None:
        found = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), name)
    builder.call(found, [builder.bitcast(address, byte), *(ir.Constant(number, flag) for flag in (0, 3, 1))])


@intrinsic
def _compress(
    typingctx: Any, old: Any, new: Any, start: Any, offset: Any, places: Any, before: Any, after: Any, at: Any
):
    """Append to three lists the changes among the elements from ``start`` on, one vector of them; return how many.

    ``places`` (uint16), ``before`` and ``after`` are written from index ``at``, a whole vector whatever is found.
    """
    signature = types.int64(old, new, types.int64, types.int64, places, before, after, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth
        lanes = min(32, 512 // width)
        unit, short = ir.VectorType(ir.IntType(width), lanes), ir.VectorType(ir.IntType(16), lanes)
        chosen = ir.VectorType(ir.IntType(1), lanes)

        def pointer(number: int, index: Any, vector: Any) -> Any:
            data = context.make_array(signature.args[number])(context, builder, args[number]).data
            return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())

        ahead = builder.add(args[2], ir.Constant(ir.IntType(64), _AHEAD_BITS // width))
        for number in (0, 1):
            _prefetch(builder, pointer(number, ahead, unit))
        a, b = (builder.load(pointer(number, args[2], unit), align=1) for number in (0, 1))
        differ = builder.icmp_unsigned("!=", a, b)
        first = builder.insert_element(
            ir.Constant(short, ir.Undefined), builder.trunc(args[3], ir.IntType(16)), ir.Constant(ir.IntType(32), 0)
        )
        none = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        every = builder.shuffle_vector(first, ir.Constant(short, ir.Undefined), none)
        where = builder.add(every, ir.Constant(short, list(range(lanes))))
        for number, value, vector in ((4, where, short), (5, a, unit), (6, b, unit)):
            name = f"llvm.x86.avx512.mask.compress.v{lanes}i{vector.element.width}"
            found = builder.module.globals.get(name)
            if found is None:
                found = ir.Function(builder.module, ir.FunctionType(vector, [vector, vector, chosen]), name)
            packed = builder.call(found, [value, ir.Constant(vector, None), differ])
            builder.store(packed, pointer(number, args[7], vector), align=1)
        count = builder.ctpop(builder.bitcast(differ, ir.IntType(lanes)))
        return builder.zext(count, ir.IntType(64))

    return signature, codegen


@intrinsic
def _lanes_of(typingctx: Any, array: Any) -> Any:
    """Return how many elements of an array `_compress` looks at together: a constant, where `itemsize` is a load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), min(32, 512 // signature.args[0].dtype.bitwidth))

    return types.int64(array), codegen


@helper
def list_by_vectors(old, new, begin, places, before, after):
    """List changes as `list_changes`, by vectors."""
    end, lanes, found = min(old.size, begin + CHUNK), _lanes_of(old), 0
    whole = begin + (end - begin) // lanes * lanes
    for i in range(begin, whole, lanes):
        found += _compress(old, new, i, i - begin, places, before, after, found)
    for i in range(whole, end):
        places[found], before[found], after[found] = i - begin, old[i], new[i]
        found += old[i] != new[i]
    return found


@helper
def list_by_words(old, new, begin, places, before, after):
    """List changes as `list_changes`, by words of 64 elements; each writes at least four, which saves a branch."""
    end, found = min(old.size, begin + CHUNK), 0
    for i in range(begin, end, 64):
        if i + 64 <= end:
            word = changed64(old, new, i)
        else:
            word = _0
            for t in range(end - i):
                if old[i + t] != new[i + t]:
                    word |= _1 << np.uint64(t)
        more = count_ones(word)
        for k in range(4):
            places[found + k] = i - begin + count_trailing_zeros(word)
            word &= word - _1
        if more > 4:
            k = 4
            while word:
                places[found + k] = i - begin + count_trailing_zeros(word)
                word &= word - _1
                k += 1
        found += more
    for k in range(found):
        before[k], after[k] = old[begin + places[k]], new[begin + places[k]]
    return found


def _has_vectors() -> bool:
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512vl", "avx512bw", "avx512vbmi2"))


list_changes = list_by_vectors if _has_vectors() else list_by_words
"""List what differs among the elements from ``begin`` to ``begin + CHUNK``.

Args:
    old, new: one unsigned dtype, shape (n,).
    begin: first element.
    places: uint16 shape (CHUNK + 64,), filled with indices less ``begin``.
    before, after: unsigned, shape (CHUNK + 64,), filled with the bits there.

Returns:
    How many.
"""
