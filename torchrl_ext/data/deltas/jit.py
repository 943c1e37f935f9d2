"""What the compiled loops share: decorators, and a few operations on bits that Python lacks.

Importing this module imports numba (about half a second); whoever needs a compiled loop imports it when the loop is
first called. Compiled code is kept beside the source where that is writable (``__pycache__``), else in the user's
cache directory, or in ``NUMBA_CACHE_DIR`` where that is set; where nothing is writable it is compiled once per process.
`torchrl_ext.data.versions.compiled` compiles everything when ends connect.

numba asks only the file of the *outermost* function whether kept code is stale, and keeps what one version of itself
compiled: another version that shares the directory throws that away. So the name that it keeps a loop under carries a
checksum of this file, whose helpers it may call beside those of its own, and of the versions that compile it. A trainer
and an engine often have different ones.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_ext.base.errors import ConfigError

try:
    import llvmlite
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
except ImportError as error:
    raise ConfigError(
        f"deltas are coded and checked by compiled loops, and numba cannot be imported: {error}",
        hint="pip install numba, in the engine's environment too",
    ) from error

__all__ = [
    "GOLDEN",
    "bit_length",
    "changed64",
    "count_ones",
    "count_trailing_zeros",
    "helper",
    "line",
    "njit",
    "pointer",
    "unline",
]


def njit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` without the interpreter lock; kept on disk wherever some directory is writable."""
    function.__qualname__ += f"_{_compilers():08x}"
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no writable directory
        return numba.njit(nogil=True)(function)


@functools.cache
def _compilers() -> int:
    return zlib.crc32(f"{numba.__version__} {llvmlite.__version__}".encode(), zlib.crc32(Path(__file__).read_bytes()))


def helper(function: Callable[..., Any]) -> Any:
    """Compile ``function`` for use inside other compiled loops only."""
    return numba.njit(nogil=True, inline="never")(function)


@intrinsic
def changed64(typingctx: Any, old: Any, new: Any, start: Any) -> Any:
    """Return a uint64 whose bit ``t`` says whether ``old[start + t] != new[start + t]``, for t < 64.

    Both are contiguous 1-D arrays of one unsigned dtype. Plain vector IR, which every processor has a few compares for.
    """
    signature = types.uint64(old, new, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = []
        for kind, value in zip(signature.args[:2], args[:2], strict=True):
            data = context.make_array(kind)(context, builder, value).data
            vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), 64)
            pointer = builder.bitcast(builder.gep(data, [args[2]]), vector.as_pointer())
            vectors.append(builder.load(pointer, align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *vectors), ir.IntType(64))

    return signature, codegen


@intrinsic
def count_trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Return the index of the lowest set bit of a uint64; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def count_ones(typingctx: Any, value: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def bit_length(typingctx: Any, value: Any) -> Any:
    """Return how many bits it takes to write a uint64 that is not zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.int64(types.uint64), codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Return an address (int64) as `numba.carray` takes it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiples of it keep the largest distance from each other


@helper
def line(bits, top, mask, ordered):
    """Return a bit pattern's place on the ordered line; ``ordered`` is 1 for sign-magnitude formats, 0 for integers."""
    return bits ^ (top | ((np.uint64(0) - np.uint64((bits & top) != np.uint64(0))) & mask)) if ordered else bits


@helper
def unline(place, top, mask, ordered):
    """Return the bit pattern at a place on the ordered line; the inverse of `line`."""
    if ordered:
        return place ^ top if place & top else place ^ mask
    return place
