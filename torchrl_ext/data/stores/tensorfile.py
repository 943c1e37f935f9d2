"""Safetensors files: their headers, and reading them into tensor memory.

Format: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, data_offsets relative to the
header's end, and ``__metadata__``), then the tensors' bytes in C order without gaps
(https://github.com/huggingface/safetensors, README, "Format"). Readers view the bytes in place, so tensors are laid out
by falling element size, which keeps each of them aligned; the header is padded with spaces to 8 bytes.

The library's own reader maps files into memory: one that is truncated meanwhile would end the process (SIGBUS), and
nothing of a remote store can be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.errors import IntegrityError, ManifestError, WeightSyncError
from torchrl_ext.base.files import LocalFile, OpenFile
from torchrl_ext.base.types import Count, ParamMeta, Shape, Wire
from torchrl_ext.data.weights.digests import byte_view

__all__ = ["CHUNK_BYTES", "Layout", "TensorFile", "plan_shards"]

CHUNK_BYTES = 1 << 20
"""Bytes that are read (or written) and checksummed together: the second step finds them in the core's own cache.

At 4 MiB a publication took twice the processor time (two cores with 2 MiB each).
"""

_HEADER_LIMIT = 100_000_000  # of the reference implementation
_METADATA = "__metadata__"
_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {
    ours: getattr(torch, theirs) for ours, theirs in _TORCH_NAMES.items() if theirs in dir(torch)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Row(Wire, frozen=True, kw_only=True, gc=False):
    """A tensor in a header."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one safetensors file: where each parameter goes.

    Attributes:
        name: of the file.
        params: in the order in which the source yields them.
        header: the bytes before the first tensor.
        offsets: first byte of each parameter, counted from the start of the file, by name.
        nbytes: size of the file.
    """

    name: str
    params: tuple[ParamMeta, ...]
    header: bytes
    offsets: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, name: str, params: Sequence[ParamMeta]) -> Layout:
        """Lay ``params`` out in a file of this name.

        Raises:
            ManifestError: safetensors has no such dtype, or no such name.
        """
        rows: dict[str, Any] = {_METADATA: {"format": "pt"}}
        at = 0
        for meta in sorted(params, key=attrgetter("dtype.itemsize"), reverse=True):
            if meta.dtype not in _NAMES:
                raise ManifestError(
                    f"a safetensors file cannot hold {meta}", expected=f"a dtype of {', '.join(sorted(_DTYPES))}"
                )
            if meta.name == _METADATA or meta.name != meta.name.encode(errors="ignore").decode():
                raise ManifestError(
                    f"a safetensors file cannot hold a tensor called {meta.name!r}",
                    expected="a name in Unicode; __metadata__ is the format's own",
                    hint="rename the tensor, with mapper= for example",
                )
            end = at + meta.nbytes
            rows[meta.name] = _Row(dtype=_NAMES[meta.dtype], shape=meta.shape, data_offsets=(at, end))
            at = end
        text = msgspec.json.encode(rows)
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        offsets = {meta.name: begin + rows[meta.name].data_offsets[0] for meta in params}
        header = len(text).to_bytes(8, "little") + text
        return cls(name=name, params=tuple(params), header=header, offsets=offsets, nbytes=begin + at)


def plan_shards(params: Iterable[ParamMeta], shard_bytes: int) -> list[Layout]:
    """Split ``params``, in order, over files of at most ``shard_bytes`` of tensors (one larger tensor: a file alone).

    File names are those of Hugging Face checkpoints: ``model.safetensors``, or ``model-00001-of-00003.safetensors``.
    """
    groups: list[list[ParamMeta]] = [[]]
    filled = 0
    for meta in params:
        if groups[-1] and filled + meta.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(meta)
        filled += meta.nbytes
    if len(groups) == 1:
        return [Layout.of("model.safetensors", groups[0])]
    total = len(groups)
    return [Layout.of(f"model-{i:05d}-of-{total:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


class TensorFile:
    """One open safetensors file; its header is checked completely before anything in it is used.

    It stays readable while it is open, even when it was unlinked meanwhile.

    Args:
        path: the file, or what is open of one, which is closed with this object.

    Raises:
        FileNotFoundError: no such file.
        IntegrityError: truncated, a header that cannot be right, or no file but a pipe or a device.

    Attributes:
        nbytes: size of the file.
        chunk_bytes: how many bytes are best read at once.
        entries: what each tensor is, and its first byte behind the header, by name.
    """

    _file: OpenFile | None = None

    def __init__(self, path: str | os.PathLike[str] | OpenFile) -> None:
        self.path = path.path if isinstance(path, OpenFile) else os.fspath(path)
        try:
            self._file = path if isinstance(path, OpenFile) else LocalFile(path)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # a circle of links, no permission
            raise self._damaged(f"cannot be opened: {error}") from error
        self.nbytes, self.chunk_bytes = self._file.nbytes, self._file.chunk_bytes
        try:
            size = bytearray(8)
            if self.nbytes < 8:
                raise self._damaged(f"has only {self.nbytes} bytes")
            self._fill(memoryview(size), 0)
            if size == b"version ":
                raise self._damaged("is a pointer of Git LFS, not the file", "fetch the file: git lfs pull")
            length = int.from_bytes(size, "little")
            if length > min(_HEADER_LIMIT, self.nbytes - 8):
                raise self._damaged(f"claims a header of {length:,} bytes")
            text, self._begin = bytearray(length), 8 + length
            self._fill(memoryview(text), 8)
            self.entries = _parsed(text, self.nbytes - self._begin)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self.close()
            raise self._damaged(f"has a header that cannot be read: {error}") from None
        except BaseException:
            self.close()
            raise

    def params(self) -> tuple[ParamMeta, ...]:
        """Return what the file holds, in the order of its header."""
        return tuple(meta for meta, _ in self.entries.values())

    def read(self, name: str, into: Tensor | None = None) -> tuple[Tensor, str]:
        """Read one tensor; return it with the xxh3-128 of the bytes that were read (32 hex digits).

        Args:
            name: a name of `params`.
            into: contiguous CPU tensor of the same dtype and shape to fill; by default a new one.

        Raises:
            IntegrityError: the file ends too early, or holds no such tensor.
            FileNotFoundError: it was removed from a remote store.
        """
        if name not in self.entries:  # it was replaced since somebody looked
            raise self._damaged(f"holds no tensor {name!r}")
        meta, _ = self.entries[name]
        tensor = torch.empty(meta.shape, dtype=meta.dtype) if into is None else into
        return tensor, self._through(name, byte_view(tensor).numpy().data)

    def checksum(self, name: str, scratch: Tensor) -> str:
        """Return the xxh3-128 of a tensor's bytes, read through ``scratch`` (uint8) without keeping them."""
        return self._through(name, scratch.numpy().data)

    def _through(self, name: str, memory: memoryview) -> str:
        """Read a tensor into memory, over and over where that is smaller; return the checksum of what was read."""
        meta, first = self.entries[name]
        hasher, step, kept = xxhash.xxh3_128(), min(self.chunk_bytes, max(1, len(memory))), len(memory) >= meta.nbytes
        for begin in range(0, meta.nbytes, step):
            chunk = memory[begin if kept else 0 :][: min(step, meta.nbytes - begin)]
            self._fill(chunk, self._begin + first + begin)
            hasher.update(chunk)
        return hasher.hexdigest()

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            try:
                count = 0 if self._file is None else self._file.read_into(view, offset)
            except (FileNotFoundError, WeightSyncError):
                raise
            except OSError as error:
                raise self._damaged(f"cannot be read at byte {offset:,}: {error}") from error
            if count == 0:
                raise self._damaged(f"ends at byte {offset:,}")
            view, offset = view[count:], offset + count

    def _damaged(self, how: str, hint: str = "write it again") -> IntegrityError:
        return IntegrityError(f"{self.path} {how}", expected="a complete safetensors file", hint=hint)


def _parsed(text: bytearray, nbytes: int) -> dict[str, tuple[ParamMeta, int]]:
    """Return `TensorFile.entries` from a header with ``nbytes`` behind it, where every reader would read it alike."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
    entries, decode = dict[str, tuple[ParamMeta, int]](), msgspec.json.Decoder(_Row).decode
    for name, text_of in raw.items():
        try:
            row = decode(text_of)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{name!r} is described by {bytes(text_of)[:200]!r}: {error}") from None
        if row.dtype not in _DTYPES:
            raise ValueError(f"{name!r} has dtype {row.dtype!r}, unknown to torch {torch.__version__}")
        meta, (begin, end) = ParamMeta(name, _DTYPES[row.dtype], row.shape), row.data_offsets
        if end - begin != meta.nbytes:
            raise ValueError(f"{name!r} takes {end - begin} bytes instead of {meta.nbytes}")
        entries[name] = meta, begin
    at = 0
    for meta, begin in sorted(entries.values(), key=lambda entry: (entry[1], entry[0].nbytes)):
        if begin != at:
            raise ValueError(f"{meta.name!r} begins at byte {begin:,} instead of {at:,}")
        at += meta.nbytes
    if at != nbytes:
        raise ValueError(f"there are {nbytes:,} bytes instead of the {at:,} that it describes")
    return entries
