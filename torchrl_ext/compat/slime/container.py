"""Safetensors files as bytes, built and parsed here so that nothing in a file from elsewhere is trusted.

Format: https://github.com/huggingface/safetensors#format. Eight bytes little-endian length, a JSON header padded with
spaces to a multiple of eight, then the data without holes. Tensors lie in the order of the reference writer: wider
dtypes first, then by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchrl_ext.errors import IntegrityError
from torchrl_ext.weights.tensorfile import FORMAT_NAMES, HEADER_DAMAGE, parse_header

__all__ = ["Entry", "build_safetensors", "parse_safetensors"]

Buffer = bytes | bytearray | memoryview

_ORDER = {dtype: rank for rank, dtype in enumerate(FORMAT_NAMES)}
_LARGEST_HEADER = 100_000_000  # the reference reader's limit


class Entry(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Buffer


def build_safetensors(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file."""
    names = sorted(entries, key=lambda name: (-_ORDER[entries[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        entry = entries[name]
        end = at + memoryview(entry.data).nbytes
        header[name] = {"dtype": FORMAT_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(entries[name].data for name in names)))


def parse_safetensors(
    data: Buffer, where: str, header_bytes: int = _LARGEST_HEADER
) -> tuple[dict[str, str], dict[str, Entry]]:
    """Return metadata and entries of a safetensors file; the entries share its memory.

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
    body = view[8 + length :]
    try:
        found, metadata = parse_header(bytes(view[8 : 8 + length]), len(body))
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is no mapping of strings")
    except HEADER_DAMAGE as error:
        raise _bad(where, f"its header cannot be right: {error}") from None
    entries = {
        name: Entry(meta.dtype, meta.shape, body[begin : begin + meta.nbytes]) for name, (meta, begin) in found.items()
    }
    return metadata, entries


def _bad(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: {why}",
        state="nothing of it was used",
        hint="fetch the file again, or catch up from a keyframe",
    )
