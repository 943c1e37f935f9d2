"""Writing tensors into safetensors files while they come: on a disk, or straight into a bucket."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchrl_ext.stores.base import Draft
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, Layout, plan_shards

__all__ = ["append_shards", "plan_appended", "write_shards"]

_BATCH_BYTES = 8 << 20
_SYNC_BYTES = 64 << 20
_MAX_BUFFERS = 512  # below IOV_MAX
_SMALL_BYTES = 16 << 10  # of a tensor: smaller ones are copied together, as a buffer each would cost more


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
                    tensor = tensor.detach().cpu() if tensor.requires_grad else tensor.cpu()
                    batch.append((meta, tensor))
                    waiting += tensor.nbytes
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


def plan_appended(params: Sequence[ParamMeta], shard_bytes: int, lanes: int, part_bytes: int) -> list[Layout]:
    """Split ``params`` over files that `append_shards` can write from their beginning to their end, beside each other.

    Each holds tensors of one element size, so that their order in the file is that in which they come.

    Args:
        params: in the order in which they come.
        shard_bytes: bound on the tensors of one file, as in `plan_shards`.
        lanes: how many files are written beside each other.
        part_bytes: fewer tensors are not split over several files.
    """
    groups: list[tuple[ParamMeta, ...]] = []
    for width in sorted({meta.dtype.itemsize for meta in params}, reverse=True):
        for run in plan_shards([meta for meta in params if meta.dtype.itemsize == width], lanes * shard_bytes):
            size = sum(meta.nbytes for meta in run.params)
            beside: list[list[ParamMeta]] = [[] for _ in range(max(1, min(lanes, size // part_bytes)))]
            filled = [0] * len(beside)
            for meta in run.params:
                at = filled.index(min(filled))
                beside[at].append(meta)
                filled[at] += meta.nbytes
            groups += [plan.params for lane in beside if lane for plan in plan_shards(lane, shard_bytes)]
    if len(groups) <= 1:
        return plan_shards(params, sys.maxsize)
    total = len(groups)
    return [Layout.of(f"model-{i:05d}-of-{total:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def append_shards(
    draft: Draft,
    shards: Sequence[Layout],
    pairs: Iterator[tuple[ParamMeta, Tensor]],
    *,
    lanes: int,
    in_flight_bytes: int,
) -> dict[str, str]:
    """Write ``pairs`` into ``shards``, as `plan_appended` laid them out, without a disk of this machine.

    Args:
        draft: where the files go.
        shards: each file is open from its first tensor to its last.
        pairs: `(meta, tensor)` in order.
        lanes: how many threads write.
        in_flight_bytes: bound on the bytes handed over and not yet written, but for one tensor.

    Returns:
        xxh3-128 of each tensor's bytes, as 32 hex digits, by name.

    Raises:
        StoreError: a write failed; the files are incomplete.
    """
    where = {meta.name: shard for shard in shards for meta in shard.params}
    left = {shard.name: len(shard.params) for shard in shards}
    checksums: dict[str, str] = {}
    handed, in_flight = deque[tuple[Future[None], int]](), 0
    with ExitStack() as files, ThreadPoolExecutor(lanes, thread_name_prefix="torchrl-ext-append") as pool:
        opened: dict[str, _Appended] = {}
        try:
            for meta, tensor in pairs:
                shard = where[meta.name]
                if shard.name not in opened:
                    opened[shard.name] = files.enter_context(_Appended(draft, shard))
                left[shard.name] -= 1
                while handed and (handed[0][0].done() or in_flight + meta.nbytes > in_flight_bytes):
                    future, nbytes = handed.popleft()
                    future.result()
                    in_flight -= nbytes
                task = partial(opened[shard.name].add, meta, tensor.detach().cpu(), checksums, left[shard.name] == 0)
                handed.append((opened[shard.name].submit(pool, task), meta.nbytes))
                in_flight += meta.nbytes
                del tensor, task
            for future, _ in handed:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        for shard in shards:
            if not shard.params:
                files.enter_context(_Appended(draft, shard)).finish()
    return checksums


class _Appended:
    """One file that is appended to; it is given up where the block fails before its last tensor."""

    def __init__(self, draft: Draft, shard: Layout) -> None:
        self._file, self._shard = ExitStack(), shard
        self._append = self._file.enter_context(draft.append(shard.name))
        self._append(shard.header)
        self._before: Future[None] | None = None

    def submit(self, pool: ThreadPoolExecutor, task: Callable[[Future[None] | None], None]) -> Future[None]:
        """Run a task in the pool, after the one before."""
        self._before = pool.submit(task, self._before)
        return self._before

    def add(
        self, meta: ParamMeta, tensor: Tensor, checksums: dict[str, str], last: bool, before: Future[None] | None
    ) -> None:
        if before is not None:  # it was begun earlier, so that this waits for no thread
            before.result()
        hasher, view = xxhash.xxh3_128(), byte_view(tensor).numpy().data
        for at in range(0, len(view), CHUNK_BYTES):
            hasher.update(view[at : at + CHUNK_BYTES])
            self._append(view[at : at + CHUNK_BYTES])
        checksums[meta.name] = hasher.hexdigest()
        if last:
            self.finish()

    def finish(self) -> None:
        self._file.close()

    def __enter__(self) -> _Appended:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._file.__exit__(*raised)


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
        run = _run(batch, offsets)
        flat = run[0][1] if len(run) == 1 else torch._utils._flatten_dense_tensors([tensor for _, tensor in run])
        hasher, view, offset = xxhash.xxh3_128(), byte_view(flat).numpy().data, offsets[run[0][0].name]
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            if len(run) == 1:
                hasher.update(chunk)
            if offset + at != end or len(pieces) >= _MAX_BUFFERS or end - begin >= CHUNK_BYTES:
                _write(descriptor, pieces, begin)
                pieces, begin, end = [], offset + at, offset + at
            pieces.append(chunk)
            end += len(chunk)
        if len(run) == 1:
            checksums[run[0][0].name] = hasher.hexdigest()
        else:
            for meta, tensor in run:
                at = offsets[meta.name] - offset
                checksums[meta.name] = xxhash.xxh3_128_hexdigest(view[at : at + tensor.nbytes])
        del run, flat
    _write(descriptor, pieces, begin)


def _run(batch: list[tuple[ParamMeta, Tensor]], offsets: Mapping[str, int]) -> list[tuple[ParamMeta, Tensor]]:
    """Take the next tensor from a batch, or small ones of one dtype that follow one another in the file."""
    run = [batch.pop(0)]
    after, dtype = offsets[run[0][0].name], run[0][1].dtype
    while batch and batch[0][1].nbytes < _SMALL_BYTES and run[-1][1].nbytes < _SMALL_BYTES:
        after += run[-1][1].nbytes
        if offsets[batch[0][0].name] != after or batch[0][1].dtype != dtype:
            break
        run.append(batch.pop(0))
    return run


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
