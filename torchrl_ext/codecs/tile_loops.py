"""The compiled loop of `torchrl_ext.versions.tiles`; importing this imports numba."""

from __future__ import annotations

import numpy as np

from torchrl_ext.kernels.jit import njit

__all__ = ["route"]


@njit
def route(  # type: ignore[no-untyped-def]  # numba's
    positions, before, after, firsts, rows, columns, cuts, wholes, corners, tiles, streams, units, ends, to, olds, news
):
    """Sort changes in a range of a stream of whole parameters by the stream in which they are sent.

    Stream 0 has the parameters that are whole there, and stream 1 + ``tiles`` * i + j the tiles of row i and column j.

    Args:
        positions: shape (n,), increasing; before, after: unsigned, shape (n,).
        firsts: int64 shape (k + 1,): where each parameter begins, in the coordinates of ``positions``.
        rows, columns: int64 shape (k,): sizes of the last two dimensions, of those that are cut.
        cuts: int64 shape (k,): the row of ``corners``; -1 of those that are whole.
        wholes: int64 shape (k,): the unit of stream 0 at which each one begins that is whole.
        corners: int64 shape (c, tiles * tiles): the unit of its stream at which each tile begins.
        streams: uint16, units: int64, shape (n,): memory to work in.
        ends: int64 shape (1 + tiles * tiles,), zeros before; filled: where each stream's changes end in the next three.
        to: int32 or int64, olds, news: as ``before``, shape (n,): filled: units of the streams, and their bits.
    """
    count, low, segment = positions.size, 0, 0
    while low < count:
        while firsts[segment + 1] <= positions[low]:
            segment += 1
        first, end, cut = firsts[segment], firsts[segment + 1], cuts[segment]
        height, width, row_start, row_end = rows[segment], columns[segment], 0, -1
        band, line, column, left, right = 0, 0, 0, 0, 0
        while low < count and positions[low] < end:
            at = np.int64(positions[low]) - first
            if cut < 0:
                streams[low], units[low] = 0, at + wholes[segment]
            else:
                if at >= row_end:
                    row = at // width
                    row_start, row_end, matrix = row * width, row * width + width, row // height
                    row -= matrix * height
                    band = ((row + 1) * tiles - 1) // height
                    top, bottom = height * band // tiles, height * (band + 1) // tiles
                    line = matrix * (bottom - top) + row - top
                    column, left, right = 0, 0, width // tiles
                while at - row_start >= right:
                    column += 1
                    left, right = right, width * (column + 1) // tiles
                tile = band * tiles + column
                streams[low] = 1 + tile
                units[low] = corners[cut, tile] + line * (right - left) + at - row_start - left
            ends[streams[low]] += 1
            low += 1
    total = 0
    for stream in range(ends.size):  # where each one begins
        total, ends[stream] = total + ends[stream], total
    for k in range(count):
        place = ends[streams[k]]
        to[place], olds[place], news[place] = units[k], before[k], after[k]
        ends[streams[k]] = place + 1
