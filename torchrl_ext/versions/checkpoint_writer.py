"""Writing a full version: a complete Hugging Face checkpoint with our manifest as its last file.

Shards are written while the source still gathers: checksums, writes and fsyncs run beside each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from torchrl_ext.errors import ConfigError
from torchrl_ext.stores import Manifest, Placed
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import companion_files
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.source import WeightSource, checked
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, Layout, plan_shards

__all__ = ["FullWriter"]

_INDEX = "model.safetensors.index.json"
_IN_FLIGHT_BYTES = 64 << 20
_BATCH_BYTES = 8 << 20
_SYNC_BYTES = 64 << 20
_MAX_BUFFERS = 512  # below IOV_MAX


class FullWriter:
    """Writes full versions: complete Hugging Face checkpoints, or PEFT adapters.

    Args:
        shard_bytes: bound on the tensors of one file, in bytes; a larger tensor gets a file of its own.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They replace those of a source with the same names.
        adapter: write PEFT's layout, one ``adapter_model.safetensors`` without an index, in place of a checkpoint's.

    Raises:
        ConfigError: no such ``files`` directory, a name in it that cannot be a file, or no room in a shard.
    """

    def __init__(self, shard_bytes: int, files: Any = None, *, adapter: bool = False) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes is {shard_bytes}", expected="a number of bytes, 1 or more")
        self._shard_bytes = sys.maxsize if adapter else shard_bytes
        self._adapter = adapter
        self._files = _checked_files(companion_files(files) if isinstance(files, (str, os.PathLike)) else files or {})

    def needed_bytes(self, source: WeightSource) -> int:
        """Return about how many bytes a version of ``source`` takes: its tensors, and a little for the small files."""
        params = source.params()
        return sum(map(attrgetter("nbytes"), params)) + 256 * len(params) + sum(map(len, self._files.values()))

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        shards = plan_shards(params, self._shard_bytes, "adapter_model" if self._adapter else "model")
        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for shard in shards:
            sizes[shard.name] = shard.nbytes
            for meta in shard.params:
                where[meta.name] = shard.name
        files = {**_checked_files(source.files()), **self._files}
        if not self._adapter:  # which file holds which tensor, as in any Hugging Face checkpoint; and the version
            total = {"total_size": sum(map(attrgetter("nbytes"), params)), "version": f"{version:06d}"}
            files[_INDEX] = (json.dumps({"metadata": total, "weight_map": where}, indent=2) + "\n").encode()
        checksums = _write_shards(
            draft.path,
            shards,
            checked(source, params),
            in_flight_bytes=min(max(1, self._shard_bytes // 2), _IN_FLIGHT_BYTES),
        )
        for name, data in files.items():
            sizes[name] = len(data)
            draft.write(name, data)
        placed = []
        for meta in params:
            placed.append(Placed(meta=meta, file=where[meta.name], checksum=checksums[meta.name]))
        manifest = Manifest(version=version, run_id=run_id, params=tuple(placed), files=sizes)
        draft.write(MANIFEST, manifest.to_bytes())
        return manifest


def _checked_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name in files:
        taken = name in (MANIFEST, _INDEX) or name.endswith(".safetensors")
        if taken or not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
            raise ConfigError(
                f"a checkpoint cannot hold a file called {name!r} beside its weights",
                expected="plain names such as config.json",
            )
    return dict(files)


def _write_shards(
    folder: Path, shards: Sequence[Layout], pairs: Iterator[tuple[ParamMeta, Tensor]], *, in_flight_bytes: int
) -> dict[str, str]:
    """Write ``pairs`` into ``shards`` under ``folder``, durably.

    Tensors on the CPU are written from their own memory; what a source gathers or copies is freed as soon as it is
    written, and no more than ``in_flight_bytes`` (or one tensor) waits.

    Args:
        folder: where the files go.
        shards: layouts whose parameters, one shard after the other, are those of ``pairs``.
        pairs: `(meta, tensor)` in order.
        in_flight_bytes: bound on the bytes handed over and not yet written.

    Returns:
        xxh3-128 of each tensor's bytes, as 32 hex digits, by name.

    Raises:
        OSError: a write failed; the files are incomplete.
    """
    checksums: dict[str, str] = {}
    writer = ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-write")  # two would wait for one inode's lock
    syncer = ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-fsync")
    handed, in_flight = deque[tuple[Future[None], int]](), 0  # batches in the order in which they are written
    synced: list[Future[None]] = []
    with ExitStack() as files:
        try:
            for shard in shards:
                file = files.enter_context(open(folder / shard.name, "xb", buffering=0))
                batch: list[tuple[ParamMeta, Tensor]] = []
                written: list[Future[None]] = []
                waiting = unsynced = 0
                head = shard.header
                for last in range(len(shard.params) - 1, -1, -1):
                    meta, tensor = next(pairs)
                    batch.append((meta, tensor.detach().cpu()))
                    waiting += meta.nbytes
                    if waiting >= _BATCH_BYTES or len(batch) >= _MAX_BUFFERS or last == 0:
                        while handed and (handed[0][0].done() or in_flight + waiting > in_flight_bytes):
                            future, nbytes = handed.popleft()
                            future.result()
                            in_flight -= nbytes
                        written.append(
                            writer.submit(_write_batch, file.fileno(), head, shard.offsets, batch, checksums)
                        )
                        handed.append((written[-1], waiting))
                        in_flight += waiting
                        unsynced += waiting
                        batch, waiting, head = [], 0, b""
                    if unsynced >= _SYNC_BYTES:  # the device starts while later tensors are still copied
                        synced.append(syncer.submit(_sync, file, written, False))
                        written, unsynced = [], 0
                if head:  # a file without tensors
                    written.append(writer.submit(_write_batch, file.fileno(), head, shard.offsets, batch, checksums))
                synced.append(syncer.submit(_sync, file, written, True))
            next(pairs, None)  # lets the source say that it has more than it declared
            for future in synced:
                future.result()
        finally:
            writer.shutdown(cancel_futures=True)
            syncer.shutdown(cancel_futures=True)
    return checksums


def _write_batch(
    descriptor: int,
    head: bytes,
    offsets: Mapping[str, int],
    batch: list[tuple[ParamMeta, Tensor]],
    checksums: dict[str, str],
) -> None:
    """Write tensors, neighbours with one system call, and take their checksums while they are in the core's cache.

    Args:
        descriptor: of the file.
        head: what stands at its beginning, with its first tensors.
        offsets: where each tensor goes.
        batch: the tensors; emptied on the way, so that what is written is freed.
        checksums: takes the xxh3-128 of each.
    """
    pieces, begin, end = [memoryview(head)] if head else [], 0, len(head)
    while batch:
        meta, tensor = batch.pop(0)
        hasher, offset = xxhash.xxh3_128(), offsets[meta.name]
        view = byte_view(tensor).numpy().data
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            hasher.update(chunk)
            if offset + at != end or len(pieces) >= _MAX_BUFFERS or end - begin >= CHUNK_BYTES:
                _write(descriptor, pieces, begin)
                pieces, begin, end = [], offset + at, offset + at
            pieces.append(chunk)
            end += len(chunk)
        checksums[meta.name] = hasher.hexdigest()
        del tensor
    _write(descriptor, pieces, begin)


def _write(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        count = os.pwritev(descriptor, pieces, offset)
        offset += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][count:]


def _sync(file: FileIO, written: list[Future[None]], last: bool) -> None:
    """Wait for batches to be written, and flush them to the device; close the file after the last ones."""
    for future in written:
        future.result()
    if last:
        os.fsync(file.fileno())
        file.close()
    else:
        os.fdatasync(file.fileno())
