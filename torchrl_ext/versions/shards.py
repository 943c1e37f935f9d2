"""Safetensors shards written while the source still gathers: checksums, writes and fsyncs run beside each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash
from torch import Tensor

from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, Layout

__all__ = ["write_shards"]

_BATCH_BYTES = 8 << 20
_SYNC_BYTES = 64 << 20
_MAX_BUFFERS = 512  # below IOV_MAX


def write_shards(
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
    view = memoryview(byte_view(tensor).numpy())
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
