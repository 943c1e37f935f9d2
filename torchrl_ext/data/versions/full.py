"""Full versions: complete Hugging Face checkpoints, written while tensors come, and read with every tensor verified."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.streams import in_threads
from torchrl_ext.data.stores.manifest import MANIFEST, FilePlace, Manifest, version_name
from torchrl_ext.data.stores.store import Draft, Store
from torchrl_ext.data.stores.tensorfile import CHUNK_BYTES, Layout, TensorFile, plan_shards
from torchrl_ext.data.weights.checkpoint import companion_files
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.data.weights.source import WeightSource, checked

__all__ = ["FullWriter", "PublishedVersion", "write_shards"]

_BUFFER_BYTES = 128 << 10  # of a file
_INDEX = "model.safetensors.index.json"

_Pairs = Iterator[tuple[ParamMeta, Tensor]]


def write_shards(folder: Path, shards: Sequence[Layout], pairs: _Pairs) -> dict[str, str]:
    """Write ``pairs`` into ``shards`` under ``folder``, durably.

    Tensors on the CPU are written from their own memory, where `safetensors.torch.save_file` copies them first. What a
    source gathers or copies is freed as soon as it is written: a few tensors are held.

    Args:
        folder: where the files go.
        shards: layouts whose parameters, one shard after the other, are those of ``pairs``.
        pairs: `(meta, tensor)` in order.

    Returns:
        xxh3-128 of each tensor's bytes, as 32 hex digits, by name.

    Raises:
        OSError: a write failed; the files are incomplete.
    """
    checksums, synced = dict[str, str](), list[Future[None]]()
    with ExitStack() as files, ThreadPoolExecutor(1, "torchrl-ext-fsync") as syncer:

        def writes() -> Iterator[tuple[int, Callable[[], None]]]:
            for shard in shards:
                file = files.enter_context(open(folder / shard.name, "xb", buffering=_BUFFER_BYTES))
                file.write(shard.header)
                for meta, tensor in islice(pairs, len(shard.params)):
                    at = shard.offsets[meta.name]
                    yield tensor.nbytes, partial(_write, file, at, meta.name, tensor.cpu(), checksums)
                yield 0, partial(end, file)
            next(pairs, None)  # lets the source say that it has more than it declared

        def end(file: BinaryIO) -> None:  # while the next shard is written
            synced.append(syncer.submit(_sync, file))

        deque(in_threads(writes(), threads=1), maxlen=0)  # two would wait for one inode's lock
        for future in synced:
            future.result()
    return checksums


def _write(file: BinaryIO, at: int, name: str, tensor: Tensor, checksums: dict[str, str]) -> None:
    """Write a tensor, and take its checksum while it is in the core's cache."""
    if file.tell() != at:
        file.seek(at)
    hasher, view = xxhash.xxh3_128(), byte_view(tensor).numpy().data
    for begin in range(0, len(view), CHUNK_BYTES):
        hasher.update(chunk := view[begin : begin + CHUNK_BYTES])
        file.write(chunk)
    checksums[name] = hasher.hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


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

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a full version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        placed, sizes = self.write_tensors(draft, [params], 0, checked(source, params))
        files = self.finish(draft, source.files(), version, params, placed, sizes)
        full = tuple(placed[meta.name] for meta in params)
        manifest = Manifest(version=version, run_id=run_id, params=params, files=files, full=full)
        draft.write(MANIFEST, manifest.to_bytes())
        return manifest

    def write_tensors(
        self, draft: Draft, owned: Sequence[Sequence[ParamMeta]], rank: int, pairs: _Pairs
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
        sums = write_shards(draft.path, shards, pairs)
        placed = {meta.name: (shard.name, sums[meta.name]) for shard in shards for meta in shard.params}
        return placed, {shard.name: shard.nbytes for shard in shards}

    def finish(
        self,
        draft: Draft,
        files: Mapping[str, bytes],
        version: int,
        params: Sequence[ParamMeta],
        placed: Mapping[str, FilePlace],
        sizes: Mapping[str, int],
    ) -> dict[str, int]:
        """Write what stands beside the tensors but the manifest, when every rank has written; return all sizes.

        Args:
            draft: of the version.
            files: of the source.
            version: its number.
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
        return {**sizes, **{name: len(data) for name, data in files.items()}}


def _checked_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name in files:
        taken = name in (MANIFEST, _INDEX) or name.endswith(".safetensors") or name.startswith("delta-")
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
        manifest: of the version.

    Raises:
        FileNotFoundError: the version is not there (any more).
        IntegrityError: its files are not what its manifest says.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        folder, places = version_name(manifest.version), manifest.full or ()
        self._manifest, self._path = manifest, f"{store.url}/{folder}"
        self._placed = [(meta, *place) for meta, place in zip(manifest.params, places, strict=True)]
        self._files: dict[str, TensorFile] = {}
        self._verified = False
        try:
            for name in sorted({file for file, _ in places}):
                try:
                    found_at = store.open(f"{folder}/{name}")
                except FileNotFoundError as error:
                    if MANIFEST not in store.list(folder):  # pruned in between
                        raise
                    raise IntegrityError(
                        f"{self._path}/{name} is missing",
                        expected="every file that the manifest names",
                        hint="send again",
                    ) from error
                file = self._files[name] = TensorFile(found_at)
                if file.nbytes != manifest.files[name]:
                    raise IntegrityError(
                        f"{file.path} has {file.nbytes:,} bytes",
                        expected=f"{manifest.files[name]:,}, as in the manifest",
                    )
            for meta, name, _ in self._placed:
                entry = self._files[name].entries.get(meta.name)
                if entry is None or entry[0] != meta:
                    raise IntegrityError(f"{self._path}/{name} does not hold {meta}, as the manifest says")
        except BaseException:
            self.close()
            raise

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters of the version, in order."""
        return self._manifest.params

    def verify(self) -> None:
        """Verify the checksum of every tensor, unless an earlier call did.

        Raises:
            IntegrityError: names the first tensor whose bytes differ, and its file.
        """
        scratch = torch.empty(max((file.chunk_bytes for file in self._files.values()), default=0), dtype=torch.uint8)
        for meta, file, checksum in () if self._verified else self._placed:
            self._compare(meta, file, checksum, self._files[file].checksum(meta.name, scratch))
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
        reads = ((0, partial(self._read, *placed, into)) for placed in self._placed)
        yield from in_threads(reads, threads=1)

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in self._files.values():
            file.close()

    def _read(self, meta: ParamMeta, file: str, checksum: str, into: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        target = into.get(meta.name)
        direct = (
            target is not None
            and target.device.type == "cpu"
            and target.is_contiguous()
            and ParamMeta.of(meta.name, target) == meta
        )
        tensor, found = self._files[file].read(meta.name, target if direct else None)
        self._compare(meta, file, checksum, found)
        return meta.name, tensor

    def _compare(self, meta: ParamMeta, file: str, checksum: str, found: str) -> None:
        if found != checksum:
            raise IntegrityError(
                f"tensor {meta.name!r} in {self._path}/{file} is damaged",
                expected=f"xxh3-128 {checksum}, found {found}",
                state=f"nothing of version {self._manifest.version} was used beyond the tensors before it",
                hint="send the weights again, and check the disk",
            )
