"""Writing a full version: a complete Hugging Face checkpoint with our manifest as its last file.

Shards are written while the source still gathers: checksums, writes and fsyncs run beside each other.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    """How full versions are written.

    Args:
        shard_bytes: bound on the tensors of one file, in bytes; a larger tensor gets a file of its own.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They win over those of a source.
        adapter: write PEFT's layout, one ``adapter_model.safetensors`` without an index, in place of a checkpoint's.

    Raises:
        ConfigError: no such ``files`` directory, a name in it that cannot be a file, or no room in a shard.
    """

    def __init__(self, shard_bytes: int, files: Any = None, *, adapter: bool = False) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes is {shard_bytes}", expected="a number of bytes, 1 or more")
        self._shard_bytes = sys.maxsize if adapter else shard_bytes
        self._stem, self._index = ("adapter_model", _no_index) if adapter else ("model", _index)
        self._files = _checked_files(companion_files(files) if isinstance(files, (str, os.PathLike)) else files or {})

    def needed_bytes(self, source: WeightSource) -> int:
        """About how many bytes a version of ``source`` takes: the tensors, and a little for headers and small files."""
        params = source.params()
        return sum(map(attrgetter("nbytes"), params)) + 256 * len(params) + sum(map(len, self._files.values()))

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        shards = plan_shards(params, self._shard_bytes, self._stem)
        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for shard in shards:
            sizes[shard.name] = shard.nbytes
            where |= dict.fromkeys(map(attrgetter("name"), shard.params), shard.name)
        index = self._index(where, sum(map(attrgetter("nbytes"), params)), version)
        files = {**_checked_files(source.files()), **self._files, **index}
        checksums = _write_shards(
            draft.path,
            shards,
            checked(source, params),
            in_flight_bytes=min(max(1, self._shard_bytes // 2), _IN_FLIGHT_BYTES),
        )
        for name, data in files.items():
            sizes[name] = len(data)
            draft.write(name, data)
        placed = tuple(Placed(meta=meta, file=where[meta.name], checksum=checksums[meta.name]) for meta in params)
        manifest = Manifest(version=version, run_id=run_id, params=placed, files=sizes)
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


def _no_index(where: Mapping[str, str], total: int, version: int) -> dict[str, bytes]:
    """An adapter is one file."""
    return {}


def _index(where: Mapping[str, str], total: int, version: int) -> dict[str, bytes]:
    """The index file of Hugging Face checkpoints, which file holds which tensor; and the version, for other readers."""
    index = {"metadata": {"total_size": total, "version": f"{version:06d}"}, "weight_map": where}
    return {_INDEX: (json.dumps(index, indent=2) + "\n").encode()}


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
    flow = _Flow(in_flight_bytes)
    files = [_ShardFile(folder / shard.name, shard, flow, checksums) for shard in shards]
    writer = ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-write")  # two would wait for one inode's lock
    syncer = ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-fsync")
    finished: list[Future[None]] = []
    try:
        for file in files:
            batch: list[tuple[ParamMeta, Tensor]] = []
            written: list[Future[None]] = []
            waiting = unsynced = 0
            for last in range(len(file.layout.params) - 1, -1, -1):
                meta, tensor = next(pairs)
                batch.append((meta, tensor.detach().cpu()))
                waiting += meta.nbytes
                if waiting >= _BATCH_BYTES or len(batch) >= _MAX_BUFFERS or last == 0:
                    flow.take(waiting)
                    written.append(writer.submit(file.write, batch, waiting))
                    unsynced += waiting
                    batch, waiting = [], 0
                if unsynced >= _SYNC_BYTES:  # the device starts while later tensors are still copied
                    finished.append(syncer.submit(file.sync, written))
                    written, unsynced = [], 0
            finished.append(syncer.submit(file.finish, written))
        next(pairs, None)  # lets the source say that it has more than it declared
        for future in finished:
            future.result()
    finally:
        writer.shutdown(cancel_futures=True)
        syncer.shutdown(cancel_futures=True)
        for file in files:
            file.close()
    return checksums


class _Flow:
    """Bytes on their way to the files; a writer's failure reaches the thread that feeds it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._taken == 0 or self._taken + count <= self._limit
            )
            if self._failure is not None:
                raise self._failure
            self._taken += count

    def give(self, count: int, failure: BaseException | None = None) -> None:
        with self._changed:
            self._taken -= count
            self._failure = self._failure or failure
            self._changed.notify_all()


class _ShardFile:
    """One file that one thread writes while another one syncs it."""

    def __init__(self, path: Path, layout: Layout, flow: _Flow, checksums: dict[str, str]) -> None:
        self.layout = layout
        self._path, self._flow, self._checksums = path, flow, checksums
        self._opening = threading.Lock()
        self._descriptor: int | None = None

    def write(self, batch: list[tuple[ParamMeta, Tensor]], nbytes: int) -> None:
        failure: BaseException | None = None
        try:
            run = _Run(self._open())
            while batch:
                meta, tensor = batch.pop(0)
                self._checksums[meta.name] = _checksum_into(run, self.layout.offsets[meta.name], tensor)
                del tensor
            run.flush()
        except BaseException as error:
            failure = error
            raise
        finally:
            self._flow.give(nbytes, failure)

    def sync(self, written: list[Future[None]]) -> None:
        for future in written:
            future.result()
        os.fdatasync(self._open())

    def finish(self, written: list[Future[None]]) -> None:
        for future in written:
            future.result()
        os.fsync(self._open())
        self.close()

    def close(self) -> None:
        with self._opening:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        with self._opening:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                _write(self._descriptor, [memoryview(self.layout.header)], 0)
            return self._descriptor


def _checksum_into(run: _Run, offset: int, tensor: Tensor) -> str:
    hasher = xxhash.xxh3_128()
    view = byte_view(tensor).numpy().data
    for begin in range(0, len(view), CHUNK_BYTES):
        chunk = view[begin : begin + CHUNK_BYTES]
        hasher.update(chunk)
        run.add(chunk, offset + begin)
    return hasher.hexdigest()


class _Run:
    """Neighbouring pieces, written with one system call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: list[memoryview] = []
        self._begin = self._end = 0

    def add(self, piece: memoryview, offset: int) -> None:
        if offset != self._end or len(self._pieces) >= _MAX_BUFFERS or self._end - self._begin >= CHUNK_BYTES:
            self.flush()
            self._begin = self._end = offset
        self._pieces.append(piece)
        self._end += len(piece)

    def flush(self) -> None:
        if self._pieces:
            _write(self._descriptor, self._pieces, self._begin)
        self._pieces = []


def _write(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        count = os.pwritev(descriptor, pieces, offset)
        offset += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][count:]
