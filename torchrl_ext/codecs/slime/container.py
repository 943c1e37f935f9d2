"""Safetensors files as bytes, built and parsed here so that nothing in a file from elsewhere is trusted.

Format: https://github.com/huggingface/safetensors#format. Eight bytes little-endian length, a JSON header padded with
spaces to a multiple of eight, then the data without holes. Tensors lie in the order of the reference writer: wider
dtypes first, then by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zstandard

from torchrl_ext.errors import IntegrityError

__all__ = ["DTYPES", "Entry", "build_safetensors", "decompress", "parse_safetensors"]

Buffer = bytes | bytearray | memoryview

DTYPES = {  # in the order of the reference writer, last first
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_ORDER = {code: rank for rank, code in enumerate(DTYPES.values())}
_SIZES = {code: getattr(torch, name).itemsize for name, code in DTYPES.items() if name in dir(torch)}
_LARGEST_HEADER = 100_000_000  # the reference reader's limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: the format's dtype code (``"BF16"``), shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def build_safetensors(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file."""
    names = sorted(entries, key=lambda name: (-_ORDER[entries[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        entry = entries[name]
        end = at + memoryview(entry.data).nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(entries[name].data for name in names)))


def parse_safetensors(
    data: Buffer, where: str, header_bytes: int = _LARGEST_HEADER
) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and entries of a file; the entries share its memory.

    Args:
        data: untrusted bytes.
        where: name of the file, for messages.
        header_bytes: bound on the header, which takes some twenty times its size while it is parsed.

    Raises:
        IntegrityError: the bytes are not a file that every reader would understand alike; names file and tensor.
    """
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little") if len(view) >= 8 else -1
    if not 2 <= length <= min(len(view) - 8, header_bytes):
        raise _bad(where, f"its header would take {length} bytes of {len(view)}")
    try:
        header = json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _bad(where, "its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(where, "its metadata is no mapping of strings")
    body = view[8 + length :]
    entries, spans = {}, []
    for name, row in header.items():
        entry, span = _entry(where, name, row, body)
        entries[name] = entry
        spans.append((*span, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise _bad(where, f"tensor {name!r} starts at {start}", f"{end}, without overlap or hole")
        end = stop
    if end != len(body):
        raise _bad(where, f"its tensors end at {end}", f"{len(body)}, the end of the file")
    return metadata, entries


def _entry(where: str, name: str, row: Any, body: memoryview) -> tuple[Entry, tuple[int, int]]:
    try:
        code, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]
        numbers = [start, stop, *shape]
    except (TypeError, KeyError, ValueError):
        raise _bad(where, f"tensor {name!r} is described by {row!r}", "dtype, shape and data_offsets") from None
    if not isinstance(code, str) or code not in _SIZES:
        raise _bad(where, f"tensor {name!r} has dtype {code!r}", f"one of {', '.join(_SIZES)}")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _bad(where, f"tensor {name!r} has shape {shape!r} and offsets {[start, stop]!r}", "whole numbers")
    count = 1
    for size in shape:
        count *= size
    if not start <= stop <= len(body) or stop - start != count * _SIZES[code]:
        raise _bad(
            where, f"tensor {name!r} takes bytes {start} to {stop} of {len(body)}", f"{count * _SIZES[code]} bytes"
        )
    return Entry(code, tuple(shape), body[start:stop]), (start, stop)


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _bad(where: str, why: str, expected: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: {why}",
        expected=expected,
        state="nothing of it was used",
        hint="fetch the file again, or catch up from a keyframe",
    )


def decompress(data: Buffer, most: int, what: str) -> bytes:
    """One zstd frame, whatever it claims never more than ``most`` bytes.

    Raises:
        IntegrityError: no frame, a damaged one, or a longer one; names ``what``.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size > most:
            raise _bad(what, f"its zstd frame declares {size} bytes", f"at most {most}")
        reader = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False)
        if size >= 0:
            result = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        else:  # a streamed frame: feed it piecemeal, so that a bomb is caught after its first excess
            result, view = b"", memoryview(data)
            pieces, total = [], 0
            for at in range(0, len(view), 1024):
                pieces.append(reader.decompress(view[at : at + 1024]))
                total += len(pieces[-1])
                if total > most:
                    raise _bad(what, f"its zstd frame gives more than {most} bytes")
            if not reader.eof or reader.unused_data:
                raise _bad(what, "its zstd frame has no end, or more after it")
            result = b"".join(pieces)
    except zstandard.ZstdError as error:
        raise _bad(what, f"its zstd frame cannot be read: {error}") from None
    return result
