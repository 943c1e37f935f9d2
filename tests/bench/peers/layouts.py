"""What an update weighs in each layout: ours, and the published ones of others, on the same pairs of checkpoints.

``pulse`` is the layout 3.1 of grail's ``sparse_codec.py`` (https://github.com/one-covenant/grail), which arXiv
2602.03839 describes: rows and columns of what changed as differences, in the narrowest of 8, 16 and 32 bits for each
tensor, then the new values, behind one JSON header; the whole in zstd-1.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from torchrl_ext.bench.delta import _published_bytes, _xor, coded, copies_of
from torchrl_ext.bench.runner import rounds
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.units import units
from torchrl_ext.versions.containers import BlockFiles

Weights = Mapping[str, Tensor]
Row = dict[str, Any]
OURS = ("ulp", "context")
THEIRS = ("int32 + bf16", "xor + zstd", "pulse")
_POOLED = 1 << 16  # elements of a tensor on average, from which threads pay off for layouts that code tensor by tensor


def flat(tensor: Tensor) -> np.ndarray:
    """Return the bits of a bfloat16 tensor in one dimension, without a copy where it is contiguous."""
    return units(tensor).reshape(-1)


def changed(old: Weights, new: Weights) -> int:
    """Count the elements that differ in their bits."""
    return sum(int(np.count_nonzero(flat(old[name]) != flat(new[name]))) for name in new)


def pairs(old: Tensor, new: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat places of what changed, int32, and the new bits there."""
    before, after = flat(old), flat(new)
    where = np.flatnonzero(before != after)
    return where.astype(np.int32), after[where]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = numbers.max(initial=0)
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.int32)


def pulse_tensor(name: str, old: Tensor, new: Tensor) -> tuple[Row, list[np.ndarray]] | None:
    """Return a tensor's entry of the header, without offsets, and its arrays; None where nothing changed."""
    where, values = pairs(old, new)
    if not where.size:
        return None
    rows, columns = np.divmod(where, max(1, math.prod(new.shape[1:])))
    steps = np.diff(rows, prepend=0)
    across = np.diff(columns, prepend=0)
    first = steps != 0
    first[0] = True
    across[first] = columns[first]
    arrays = [_narrow(steps), _narrow(across), values]
    entry = {"name": name, "shape": list(new.shape), "num_nonzero": len(values), "value_dtype": "bfloat16"}
    return entry | {"row_dtype": arrays[0].dtype.name, "col_dtype": arrays[1].dtype.name}, arrays


def pulse_join(found: Iterable[tuple[Row, list[np.ndarray]] | None]) -> bytes:
    """Put entries and arrays of tensors into one compressed payload."""
    entries, data, at = [], [], 0
    for entry, arrays in filter(None, found):
        rows, columns, values = (array.nbytes for array in arrays)
        sizes = {"indices_offset": at, "indices_size": rows + columns, "rows_size": rows, "cols_size": columns}
        entries.append(entry | sizes | {"values_offset": at + rows + columns, "values_size": values})
        data += [array.tobytes() for array in arrays]
        at += rows + columns + values
    header = json.dumps({"version": 31, "tensors": entries}, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(level=1).compress(b"".join([struct.pack("<I", len(header)), header, *data]))


def pulse_applied(old: Weights, payload: bytes) -> dict[str, np.ndarray]:
    """Return the new bits of every tensor of which ``payload`` says something."""
    data = zstandard.ZstdDecompressor().decompress(payload)
    begins = 4 + struct.unpack_from("<I", data)[0]
    found = {}
    for entry in json.loads(data[4:begins])["tensors"]:
        count, at = entry["num_nonzero"], begins + entry["indices_offset"]
        rows = np.frombuffer(data, entry["row_dtype"], count, at).astype(np.int64)
        across = np.frombuffer(data, entry["col_dtype"], count, at + entry["rows_size"]).astype(np.int64)
        values = np.frombuffer(data, np.uint16, count, begins + entry["values_offset"])
        first = rows != 0
        first[0] = True
        sums = np.cumsum(across)
        starts = np.flatnonzero(first)
        columns = sums - np.repeat(sums[starts] - across[starts], np.diff(starts, append=count))
        bits = flat(old[entry["name"]]).view(np.uint16).copy()
        bits[np.cumsum(rows) * max(1, math.prod(entry["shape"][1:])) + columns] = values
        found[entry["name"]] = bits
    return found


def assert_lossless(old: Weights, new: Weights, payload: bytes) -> None:
    """Show that PULSE's layout, as written here, gives the new weights back."""
    found = pulse_applied(old, payload)
    for name, tensor in new.items():
        bits = found.get(name, flat(old[name]).view(np.uint16))
        if not np.array_equal(bits, flat(tensor).view(np.uint16)):
            raise AssertionError(f"{name} does not come back")


def weigh(old: Weights, new: Weights, repeats: int) -> Iterator[Row]:
    """Yield a row of each layout: bytes, bits per changed element, and seconds to find and code, beside a copy.

    Each way has the same threads. Ours also sums a digest of every tensor; ``xor + zstd`` a checksum of every tensor.
    """
    threads, count = worker_threads(), changed(old, new)
    rows = [(name, old[name], new[name]) for name in new]
    targets = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    olds = copies_of(old)

    def over(work: Callable[..., Any]) -> list[Any]:
        if sum(tensor.numel() for tensor in new.values()) < _POOLED * len(new):  # a pool would take longer
            return [work(*row) for row in rows]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda row: work(*row), rows))

    def blocks(kind: str) -> int:
        return sum(len(data) for _, data in BlockFiles(olds.table).laid(coded(olds, new, kind, threads)))

    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: over(lambda name, before, after: np.copyto(flat(targets[name]), flat(after))),
        "int32 + bf16": lambda: sum(
            where.nbytes + values.nbytes for where, values in over(lambda _, a, b: pairs(a, b))
        ),
        "xor + zstd": lambda: sum(over(lambda *row: len(_xor(row)))),
        "pulse": lambda: pulse_join(over(pulse_tensor)),
        **{kind: partial(blocks, kind) for kind in OURS},
    }
    payload = ways["pulse"]()
    assert_lossless(old, new, payload)
    sizes = {"int32 + bf16": 6 * count, "xor + zstd": ways["xor + zstd"](), "pulse": len(payload)}
    sizes |= {kind: _published_bytes(rows, kind) for kind in OURS}  # with the manifest
    del payload
    spent = rounds({name: partial(_timed, way) for name, way in ways.items()}, repeats)
    copy_s, total = statistics.median(spent["copy"]), sum(tensor.numel() for tensor in new.values())
    for name, size in sizes.items():
        taken = statistics.median(spent[name])
        yield {
            "name": name,
            "ours": name in OURS,
            "parameters": total,
            "tensors": len(new),
            "density": count / total,
            "bytes": size,
            "bits_per_changed": 8 * size / max(1, count),
            "encode_s": taken,
            "copy_s": copy_s,
            "encode_of_copy": taken / copy_s,
        }


def _timed(way: Callable[[], Any]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began
