"""Writing tensors into safetensors files while they come."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.tensorfile import CHUNK_BYTES, Layout
from torchrl_ext.data.weights.digests import byte_view

__all__ = ["write_shards"]

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
