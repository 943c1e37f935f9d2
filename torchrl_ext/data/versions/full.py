"""Full versions: complete Hugging Face checkpoints, written while tensors come, with our manifest as the last file.

A reader verifies each tensor before it hands it on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.folders import read_version, version_name
from torchrl_ext.data.stores.manifest import MANIFEST, Manifest, Placed
from torchrl_ext.data.stores.store import Draft, Store
from torchrl_ext.data.stores.tensorfile import CHUNK_BYTES, Layout, TensorFile, plan_shards
from torchrl_ext.data.weights.checkpoint import companion_files
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.data.weights.source import WeightSource, checked

__all__ = ["FilePlace", "FullWriter", "PublishedVersion", "write_shards"]

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


_INDEX = "model.safetensors.index.json"
_IN_FLIGHT_BYTES = 64 << 20

FilePlace = tuple[str, str]
"""The file that holds a tensor, and the xxh3-128 of the tensor's bytes (32 hex digits)."""


class FullWriter:
    """Writes full versions: complete Hugging Face checkpoints.

    Args:
        shard_bytes: bound on the tensors of one file, in bytes; a larger tensor gets a file of its own.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They replace those of a source with the same names.

    Raises:
        ConfigError: no such ``files`` directory, a name in it that cannot be a file, or no room in a shard.
    """

    def __init__(self, shard_bytes: int, files: Any = None) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes is {shard_bytes}", expected="a number of bytes, 1 or more")
        self._shard_bytes = shard_bytes
        self._files = _checked_files(companion_files(files) if isinstance(files, (str, os.PathLike)) else files or {})

    def needed_bytes(self, source: WeightSource) -> int:
        """Return about how many bytes a version takes: its tensors, and a little for the small files."""
        params = source.params()
        return sum(map(attrgetter("nbytes"), params)) + 256 * len(params) + sum(map(len, self._files.values()))

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        placed, sizes = self.write_tensors(draft, [params], 0, checked(source, params))
        return self.finish(draft, source.files(), version, run_id, params, placed, sizes)

    def write_tensors(
        self, draft: Draft, owned: Sequence[Sequence[ParamMeta]], rank: int, pairs: Iterator[tuple[ParamMeta, Tensor]]
    ) -> tuple[dict[str, FilePlace], dict[str, int]]:
        """Write the tensors that a rank owns into ``draft``.

        Args:
            draft: of the version.
            owned: the parameters that each rank owns.
            rank: this one.
            pairs: its tensors, in order.

        Returns:
            Where each of them lies, by name, and the size of each file.

        Raises:
            OSError, ManifestError: as `write`.
        """
        plans = [plan_shards(params, self._shard_bytes) if params or not any(owned) else [] for params in owned]
        total, first, shards = sum(map(len, plans)), sum(map(len, plans[:rank])), plans[rank]
        if total > len(shards):
            names = (f"model-{first + at:05d}-of-{total:05d}.safetensors" for at in range(1, len(shards) + 1))
            shards = [replace(shard, name=name) for shard, name in zip(shards, names, strict=True)]
        in_flight = min(max(1, self._shard_bytes // 2), _IN_FLIGHT_BYTES)
        sums = write_shards(draft.path, shards, pairs, in_flight_bytes=in_flight)
        placed = {meta.name: (shard.name, sums[meta.name]) for shard in shards for meta in shard.params}
        return placed, {shard.name: shard.nbytes for shard in shards}

    def finish(
        self,
        draft: Draft,
        files: Mapping[str, bytes],
        version: int,
        run_id: str,
        params: Sequence[ParamMeta],
        placed: Mapping[str, FilePlace],
        sizes: Mapping[str, int],
    ) -> Manifest:
        """Write what stands beside the tensors, the manifest last, when every rank has written.

        Args:
            draft: of the version.
            files: of the source.
            version, run_id: of the manifest.
            params: all of them, in order.
            placed, sizes: as `write_tensors` returned them, of all ranks.
        """
        files = {**_checked_files(files), **self._files}
        # which file holds which tensor, as in any Hugging Face checkpoint; and the version
        index = {
            "metadata": {"total_size": sum(map(attrgetter("nbytes"), params)), "version": f"{version:06d}"},
            "weight_map": {meta.name: placed[meta.name][0] for meta in params},
        }
        files[_INDEX] = msgspec.json.format(msgspec.json.encode(index)) + b"\n"
        for name, data in files.items():
            draft.write(name, data)
        rows = ((meta, placed[meta.name]) for meta in params)
        manifest = Manifest(
            version=version,
            run_id=run_id,
            params=tuple(Placed(meta=meta, file=file, checksum=checksum) for meta, (file, checksum) in rows),
            files={**sizes, **{name: len(data) for name, data in files.items()}},
        )
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


class PublishedVersion:
    """The manifest and the open files of one full version, which is read in ranges.

    In a directory it stays readable while it is pruned; in a remote store it is lost.

    Args:
        store: where the version is.
        number: the version.
        manifest: what it holds, where that is known; a ``checksum`` of "" is not compared.

    Raises:
        FileNotFoundError: the version is not there (any more).
        IntegrityError: its files are not what its manifest says.

    Attributes:
        number, manifest: as given, or read.
        path: where its files are: a directory, or a URL.
    """

    def __init__(self, store: Store, number: int, manifest: Manifest | None = None) -> None:
        if manifest is None:
            found = read_version(store, number)
            if found.full is None:
                raise IntegrityError(
                    f"{store.url}/{version_name(number)} is a delta",
                    expected="a full version",
                    hint="follow this root with the delta transport",
                )
            manifest = found.full
        self.number, self.manifest = number, manifest
        self._files: dict[str, TensorFile] = {}
        self._verified = False
        folder = version_name(number)
        self.path = f"{store.url}/{folder}"
        try:
            for name in sorted(set(map(attrgetter("file"), manifest.params))):
                try:
                    found_at = store.open(f"{folder}/{name}")
                except FileNotFoundError as error:
                    if MANIFEST not in store.list(folder):  # pruned in between
                        raise
                    raise IntegrityError(
                        f"{self.path}/{name} is missing",
                        expected="every file that the manifest names",
                        hint="send again",
                    ) from error
                file = self._files[name] = TensorFile(found_at)
                if file.nbytes != manifest.files[name]:
                    raise IntegrityError(
                        f"{file.path} has {file.nbytes:,} bytes",
                        expected=f"{manifest.files[name]:,}, as in the manifest",
                    )
            for placed in manifest.params:
                entry = self._files[placed.file].entries.get(placed.meta.name)
                if entry is None or entry[0] != placed.meta:
                    raise IntegrityError(f"{self.path}/{placed.file} does not hold {placed.meta}, as the manifest says")
        except BaseException:
            self.close()
            raise

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters of the version, in order."""
        return tuple(placed.meta for placed in self.manifest.params)

    def check(self, params: tuple[ParamMeta, ...], run_id: str | None) -> None:
        """Compare the manifest with what the trainer says that it published.

        Args:
            params: of the version.
            run_id: of the trainer, where it said so.

        Raises:
            ManifestError: names the first parameter that differs.
            IntegrityError: another trainer's run published it.
        """
        if run_id is not None and run_id != self.manifest.run_id:
            raise IntegrityError(
                f"{self.path} was published by run {self.manifest.run_id}",
                expected=f"run {run_id}, the trainer that announced it",
                hint="give each trainer its own root",
            )
        held = self.params()
        for meta, wanted in zip(held, params, strict=False):
            if meta != wanted:
                raise ManifestError(f"{self.path} holds {meta}", expected=str(wanted), state="nothing was read")
        if len(held) != len(params):
            raise ManifestError(
                f"{self.path} holds {len(held)} parameters",
                expected=str(len(params)),
                state="nothing was read",
            )

    def verify(self) -> None:
        """Verify the checksum of every tensor, unless an earlier call did.

        Raises:
            IntegrityError: names the first tensor whose bytes differ, and its file.
        """
        scratch = torch.empty(max((file.chunk_bytes for file in self._files.values()), default=0), dtype=torch.uint8)
        for placed in () if self._verified else self.manifest.params:
            self._compare(placed, self._files[placed.file].checksum(placed.meta.name, scratch))
        self._verified = True

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order, each verified first; the next ones are read meanwhile.

        Args:
            into: tensors to fill directly where they are contiguous and on the CPU. Then all that is yielded is
                verified first, so that damaged files change none of them.

        Raises:
            IntegrityError: names the tensor whose bytes differ, and its file.
        """
        if into:
            self.verify()
        batches = self._batches()
        with ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-read") as ahead:
            pending = ahead.submit(self._read, batches[0], into)
            for following in (*batches[1:], []):
                read = pending.result()
                pending = ahead.submit(self._read, following, into)
                while read:  # the consumer alone holds on to what it was given
                    yield read.popleft()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in self._files.values():
            file.close()

    def _batches(self) -> list[list[Placed]]:
        """Return tensors in order, as many together as are read together."""
        batches, held = list[list[Placed]]([[]]), 0
        for placed in self.manifest.params:
            if batches[-1] and held + placed.meta.nbytes > _BATCH_BYTES:
                batches.append([])
                held = 0
            batches[-1].append(placed)
            held += placed.meta.nbytes
        return batches

    def _read(self, batch: list[Placed], into: Mapping[str, Tensor]) -> deque[tuple[str, Tensor]]:
        read = deque[tuple[str, Tensor]]()
        for placed in batch:
            target = into.get(placed.meta.name)
            direct = (
                target is not None
                and target.device.type == "cpu"
                and target.is_contiguous()
                and ParamMeta.of(placed.meta.name, target) == placed.meta
            )
            tensor, checksum = self._files[placed.file].read(placed.meta.name, target if direct else None)
            self._compare(placed, checksum)
            read.append((placed.meta.name, tensor))
        return read

    def _compare(self, placed: Placed, checksum: str) -> None:
        if placed.checksum not in ("", checksum):
            raise IntegrityError(
                f"tensor {placed.meta.name!r} in {self.path}/{placed.file} is damaged",
                expected=f"xxh3-128 {placed.checksum}, found {checksum}",
                state=f"nothing of version {self.number} was used beyond the tensors before it",
                hint="send the weights again, and check the disk",
            )
