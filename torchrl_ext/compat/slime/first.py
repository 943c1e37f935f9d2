"""slime's first delta files: many parameters' changes in one safetensors file, byte for byte as it wrote them.

Source: THUDM/slime at 987b3149e. A file holds `__positions__` (U8) and `__values__` (the parameters' dtype), and as
metadata the strings `encoding`, `params` (a JSON list, one row per parameter with its byte range of positions and
element range of values), `current_version` and `checksum`. Positions are flat element indices:

    indices       int32
    deltas        index - previous index - 1, uint16 where the parameter's largest fits, else uint32
    deltas_zstd   deltas, the whole file as one zstd frame of level 1

The checksum is ``h(positions) ^ (h(values) << 1)`` with h = `torch.hash_tensor`, 0 when empty; a Python integer.
A file never mixes dtypes here, and a mixed one is refused: the format would widen all values to a common dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import zstandard
from safetensors.torch import save

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, index_dtype, unit_of
from torchrl_ext.data.stores.tensorfile import FORMAT_NAMES, HEADER_DAMAGE, parse_header

__all__ = ["FLUSH_BYTES", "FlushFile", "build_flush", "check_dtype", "flush_buckets", "flush_name", "parse_flush"]

FLUSH_BYTES: Final = 512 * 1024**2
ENCODINGS: Final = ("indices", "deltas", "deltas_zstd")
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_HASHED: Final = frozenset(  # what torch.hash_tensor takes
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)
_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlushFile(NamedTuple):
    """What a flush file holds when it is read back, its patches in the file's order."""

    encoding: str
    current_version: str
    patches: tuple[StreamPatch, ...]


def flush_name(rank: int, flush: int) -> str:
    """Return the name of the ``flush``-th file of trainer rank ``rank``, both from 0."""
    return f"rank{rank:04d}_flush{flush:06d}.safetensors"


def check_dtype(meta: ParamMeta) -> None:
    """Check that the format can name the dtype of a parameter.

    Raises:
        ConfigError: it cannot.
    """
    if meta.dtype not in FORMAT_NAMES:
        raise ConfigError(f"{meta} has a dtype that safetensors cannot name", hint="use 'ulp' or 'context'")


def flush_buckets(
    patches: Iterable[StreamPatch], encoding: str, *, buffer_bytes: int = FLUSH_BYTES
) -> Iterator[list[StreamPatch]]:
    """Group a stream of patches, of a parameter each, into files of one dtype each.

    A group is yielded before a patch that would bring it above ``buffer_bytes`` of positions and values; a single
    patch larger than that goes alone.
    """
    begun: dict[torch.dtype, tuple[list[StreamPatch], int]] = {}
    for patch in patches:
        bucket, held = begun.get(patch.meta.dtype, ([], 0))
        size = patch.positions.size * _width(patch, encoding) + patch.values.nbytes
        if bucket and held + size > buffer_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(patch)
        begun[patch.meta.dtype] = bucket, held + size
    for bucket, _ in begun.values():
        yield bucket


def _gaps(patch: StreamPatch) -> np.ndarray:
    return np.diff(patch.positions, prepend=-1) - 1


def _width(patch: StreamPatch, encoding: str) -> int:
    """Return the bytes per position of a parameter."""
    if encoding == "indices":
        if patch.meta.numel > 2**31:
            raise ConfigError(
                f"{patch.meta} has more elements than encoding 'indices' can number", hint="use 'deltas' or 'ulp'"
            )
        return 4
    largest = int(_gaps(patch).max(initial=0))
    if largest >= 2**32:
        raise ConfigError(f"{patch.meta} has a gap of {largest}, too long for encoding {encoding!r}", hint="use 'ulp'")
    return 2 if largest <= 65535 else 4


def build_flush(patches: Iterable[StreamPatch], encoding: str, *, current_version: str) -> bytes:
    """Return the bytes of one flush file.

    Raises:
        ConfigError: mixed dtypes, or a tensor that the format cannot carry.
    """
    patches = list(patches)
    if len({patch.meta.dtype for patch in patches}) != 1:
        raise ConfigError("a flush file holds parameters of exactly one dtype", hint="group them by `flush_buckets`")
    rows, positions, values, at, element = [], [], [], 0, 0
    for patch in patches:
        check_dtype(patch.meta)
        width = _width(patch, encoding)
        packed = patch.positions.astype("<i4") if encoding == "indices" else _gaps(patch).astype(f"<u{width}")
        rows.append(
            {
                "name": patch.meta.name,
                "dtype": dtype_name(patch.meta.dtype),
                "shape": list(patch.meta.shape),
                "pos_start": at,
                "pos_end": at + packed.nbytes,
                "pos_width": width,
                "val_start": element,
                "val_end": element + patch.positions.size,
            }
        )
        positions.append(packed.view(np.uint8))
        values.append(patch.values)
        at, element = at + packed.nbytes, element + patch.positions.size
    where, what = np.concatenate(positions), np.concatenate(values)
    dtype = patches[0].meta.dtype
    metadata = {
        "encoding": encoding,
        "params": json.dumps(rows),
        "current_version": current_version,
        "checksum": str(checksum(where, what, dtype)),
    }
    tensors = {"__positions__": torch.from_numpy(where), "__values__": torch.from_numpy(what).view(dtype)}
    data = save(tensors, metadata)
    return zstandard.ZstdCompressor(level=1, threads=-1).compress(data) if encoding == "deltas_zstd" else data


def checksum(positions: np.ndarray, values: np.ndarray, dtype: torch.dtype) -> int:
    """Return the format's checksum; dtypes unknown to `torch.hash_tensor` are hashed as integers of their width."""
    view = dtype if dtype_name(dtype) in _HASHED else _SIGNED[dtype.itemsize]
    return _hash(torch.from_numpy(positions)) ^ (_hash(torch.from_numpy(values).view(view)) << 1)


def _hash(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    try:
        return int(torch.hash_tensor(tensor).view(torch.int64)) % 2**64
    except AttributeError:
        raise ConfigError(
            f"torch {torch.__version__} has no hash_tensor, which these files are checked with", hint="update torch"
        ) from None


def parse_flush(data: bytes | bytearray | memoryview, where: str, table: ParamTable) -> FlushFile:
    """Return what a flush file holds, trusting nothing in it.

    Args:
        data: untrusted bytes; zstd is recognised by its magic number.
        where: name of the file, for messages.
        table: the parameters that may occur; they bound what a file can make this allocate.

    Raises:
        IntegrityError: the file is damaged, or writes what ``table`` does not have; names file and tensor.
    """
    head = 2**20 + sum(1024 + 16 * len(meta.name) for meta in table.params)
    view = memoryview(data).cast("B")
    if bytes(view[:4]) == _MAGIC:
        view = _unpacked(view, head + sum((4 + meta.dtype.itemsize) * meta.numel for meta in table.params), where)
    metadata, entries = _tensors(view, where, head)
    if set(entries) != {"__positions__", "__values__"} or entries["__positions__"][0].dtype != torch.uint8:
        raise _bad(where, f"it holds {sorted(entries)}", "__positions__ (U8) and __values__")
    encoding = metadata.get("encoding")
    if encoding not in ENCODINGS:
        raise _bad(where, f"its encoding is {encoding!r}", f"one of {', '.join(ENCODINGS)}")
    try:
        rows = json.loads(metadata.get("params", ""))
        stated = int(metadata.get("checksum", ""))
        if not isinstance(rows, list):
            raise ValueError("params is not a list")
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"its metadata cannot be read: {error}") from None
    dtype = entries["__values__"][0].dtype
    positions = np.frombuffer(entries["__positions__"][1], np.uint8)
    values = np.frombuffer(entries["__values__"][1], unit_of(dtype).dtype)
    found = checksum(positions.copy(), values.copy(), dtype)
    if found != stated:
        raise _bad(where, f"its checksum is {found}", f"{stated}")
    patches, at, element = dict[str, StreamPatch](), 0, 0
    for row in rows:
        patch = _patch(row, where, encoding, dtype, positions, values, table)
        if patches.setdefault(patch.meta.name, patch) is not patch:
            raise _bad(where, f"tensor {patch.meta.name!r} occurs twice")
        if row["pos_start"] != at or row["val_start"] != element:
            raise _bad(where, f"tensor {patch.meta.name!r} does not start where the one before it ends")
        at, element = row["pos_end"], row["val_end"]
    if at != positions.size or element != values.size:
        raise _bad(where, f"its parameters end at {at} and {element}", f"{positions.size} and {values.size}")
    return FlushFile(encoding, metadata.get("current_version", ""), tuple(patches.values()))


def _unpacked(frame: memoryview, most: int, where: str) -> memoryview:
    """Return the content of a zstd frame, which has to declare its size: at most ``most`` bytes."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise _bad(where, f"its zstd frame declares {size} bytes", f"at most {most}")
        return memoryview(zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise _bad(where, f"its zstd frame cannot be read: {error}") from None


def _tensors(
    view: memoryview, where: str, header_bytes: int
) -> tuple[dict[str, str], dict[str, tuple[ParamMeta, memoryview]]]:
    """Return the metadata of a safetensors file, and what each tensor is with its bytes, which share the file's memory.

    ``header_bytes`` bounds the header, which takes some twenty times its size while it is parsed.
    """
    length = int.from_bytes(view[:8], "little") if len(view) >= 8 else -1
    try:
        if not 2 <= length <= min(len(view) - 8, header_bytes):
            raise ValueError(f"its header would take {length} bytes of {len(view)}")
        body = view[8 + length :]
        found, metadata = parse_header(bytes(view[8 : 8 + length]), len(body))
    except HEADER_DAMAGE as error:
        raise _bad(where, str(error)) from None
    return metadata, {name: (meta, body[begin : begin + meta.nbytes]) for name, (meta, begin) in found.items()}


def _patch(
    row: Any,
    where: str,
    encoding: str,
    dtype: torch.dtype,
    positions: np.ndarray,
    values: np.ndarray,
    table: ParamTable,
) -> StreamPatch:
    try:
        meta = ParamMeta.from_json([row["name"], row["dtype"], row["shape"]])
        check_dtype(meta)
        begin, end, width = row["pos_start"], row["pos_end"], row["pos_width"]
        first, last = row["val_start"], row["val_end"]
        numbers = (begin, end, width, first, last)
        if any(type(number) is not int for number in numbers):
            raise ValueError
    except (TypeError, KeyError, ValueError, ManifestError) as error:  # a ConfigError is a ValueError
        raise _bad(where, f"a parameter is described by {row!r}: {error}") from None
    known = table.params[table.number[meta.name]] if meta.name in table.number else None
    if known != meta or meta.dtype != dtype:
        raise _bad(where, f"it writes {meta}", str(known or "a tensor of this model"))
    if not 0 <= begin <= end <= positions.size or not 0 <= first <= last <= values.size:
        raise _bad(where, f"the ranges of tensor {meta.name!r} leave the file")
    if width not in ((4,) if encoding == "indices" else (2, 4)) or end - begin != width * (last - first):
        raise _bad(where, f"tensor {meta.name!r} has {end - begin} bytes of positions for {last - first} values")
    if last - first > meta.numel:
        raise _bad(where, f"tensor {meta.name!r} has {last - first} values", f"at most {meta.numel}")
    kind = "<i4" if encoding == "indices" else f"<u{width}"
    packed = np.frombuffer(positions[begin:end].tobytes(), kind).astype(np.int64)
    indices = packed if encoding == "indices" else np.cumsum(packed + 1) - 1
    if indices.size and not (indices[0] >= 0 and indices[-1] < meta.numel and (np.diff(indices) > 0).all()):
        raise _bad(where, f"the indices of tensor {meta.name!r} do not increase from 0 to {meta.numel - 1}")
    indices = indices.astype(index_dtype(meta.numel))
    return StreamPatch.of(table, meta.name, indices, values[first:last].copy())  # of its own: the file may go


def _bad(where: str, why: str, expected: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: {why}", expected=expected, state="nothing of it was used", hint="publish it again"
    )
