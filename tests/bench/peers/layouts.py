"""What an update weighs in each layout: ours, and the published ones of others, on the same pairs of checkpoints.

``pulse`` is the layout 3.1 of grail's ``sparse_codec.py`` (https://github.com/one-covenant/grail), which arXiv
2602.03839 describes: rows and columns of what changed as differences, in the narrowest of 8, 16 and 32 bits for each
tensor, then the new values, behind one JSON header; the whole in zstd-1.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import zstandard
from torch import Tensor

from tests.bench.data import say
from torchrl_ext.cli.bench import OTHERS, OURS, Pair, Shapes, changes, compare, model_shapes, synthetic_pair
from torchrl_ext.data.deltas.table import units

Row = dict[str, Any]
Pulse = tuple[Row, list[np.ndarray]] | None
"""A tensor's entry of the header, without offsets, and its arrays; None where nothing changed."""


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = numbers.max(initial=0)
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.int32)


def _pulse_tensor(name: str, old: Tensor, new: Tensor) -> Pulse:
    where, values = changes(name, old, new)
    if not where.size:
        return None
    rows, columns = np.divmod(where, max(1, math.prod(new.shape[1:])))
    steps, across = np.diff(rows, prepend=0), np.diff(columns, prepend=0)
    first = steps != 0
    first[0] = True
    across[first] = columns[first]
    arrays = [_narrow(steps), _narrow(across), values]
    entry = {"name": name, "shape": list(new.shape), "num_nonzero": len(values), "value_dtype": "bfloat16"}
    return entry | {"row_dtype": arrays[0].dtype.name, "col_dtype": arrays[1].dtype.name}, arrays


def _pulse_joined(found: Iterable[Pulse]) -> bytes:
    entries, data, at = [], [], 0
    for entry, arrays in filter(None, found):
        rows, columns, values = (array.nbytes for array in arrays)
        sizes = {"indices_offset": at, "indices_size": rows + columns, "rows_size": rows, "cols_size": columns}
        entries.append(entry | sizes | {"values_offset": at + rows + columns, "values_size": values})
        data += [array.tobytes() for array in arrays]
        at += rows + columns + values
    header = json.dumps({"version": 31, "tensors": entries}, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(level=1).compress(b"".join([struct.pack("<I", len(header)), header, *data]))


def pulse(pair: Pair) -> bytes:
    """Return a pair's changes in PULSE's layout."""
    return _pulse_joined(itertools.starmap(_pulse_tensor, pair))


def assert_lossless(pair: Pair, payload: bytes) -> None:
    """Show that PULSE's layout, as written here, gives the new weights back.

    Raises:
        AssertionError: the bits of a tensor differ.
    """
    data = zstandard.ZstdDecompressor().decompress(payload)
    begins = 4 + struct.unpack_from("<I", data)[0]
    entries = {entry["name"]: entry for entry in json.loads(data[4:begins])["tensors"]}
    for name, old, new in pair:
        bits = units(old).reshape(-1).copy()
        if entry := entries.get(name):
            count, at = entry["num_nonzero"], begins + entry["indices_offset"]
            rows = np.frombuffer(data, entry["row_dtype"], count, at).astype(np.int64)
            across = np.frombuffer(data, entry["col_dtype"], count, at + entry["rows_size"]).astype(np.int64)
            starts = np.flatnonzero(np.append(True, rows[1:] != 0))
            sums = np.cumsum(across)
            columns = sums - np.repeat(sums[starts] - across[starts], np.diff(starts, append=count))
            where = np.cumsum(rows) * max(1, math.prod(entry["shape"][1:])) + columns
            bits[where] = np.frombuffer(data, bits.dtype, count, begins + entry["values_offset"])
        if not np.array_equal(bits, units(new).reshape(-1)):
            raise AssertionError(f"{name} does not come back")


def weigh(pair: Pair, repeats: int) -> Iterator[Row]:
    """Yield a row of each layout: bytes, bits per changed element, and seconds to find and code, beside a copy."""
    assert_lossless(pair, pulse(pair))
    layouts = {**OTHERS, "pulse": (_pulse_tensor, lambda found: len(_pulse_joined(found)))}
    found = compare(pair, repeats, layouts)
    spent = {way: statistics.median(taken) for way, taken in found["seconds"].items()}
    for name in (*layouts, *OURS):
        yield {
            "name": name,
            "ours": name in OURS,
            **{key: found[key] for key in ("parameters", "tensors", "density")},
            **{key: found[key][name] for key in ("bytes", "bits_per_changed")},
            "encode_s": spent[name],
            "copy_s": spent["copy"],
            "encode_of_copy": spent[name] / spent["copy"],
        }


GROWTH: dict[str, dict[str, Any]] = {
    "full": {
        "models": [(2, 256, 4000), (4, 512, 8000), (6, 768, 16_000)],
        "density": [0.001, 0.01, 0.1, 0.5],
        "elements": 1 << 23,
        "tensors": [10, 100, 1000, 10_000],
    },
    "small": {"models": [(1, 128, 500), (1, 256, 500)], "density": [0.01], "elements": 1 << 18, "tensors": [10]},
}


def grow(size: str, repeats: int) -> Iterator[Row]:
    """Yield rows of layouts along three axes; where nothing else is said, 1 % of the elements change."""
    found = GROWTH[size]
    models = [model_shapes(*model) for model in found["models"]]
    cases: list[tuple[str, float, Shapes, float]] = [
        ("parameters", sum(map(math.prod, shapes.values())), shapes, 0.01) for shapes in models
    ]
    cases += [("density", density, models[1], density) for density in found["density"]]
    for count in found["tensors"]:
        shape = (8, found["elements"] // count // 8)
        cases.append(("tensors", count, {f"w.{number:05d}": shape for number in range(count)}, 0.01))
    for axis, at, shapes, density in cases:
        say(f"growth, {axis} {at}")
        for row in weigh(synthetic_pair(shapes, density), repeats):
            yield {"axis": axis, "at": at, **row}
