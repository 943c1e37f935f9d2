"""Writing a full version: a complete Hugging Face checkpoint with our manifest as its last file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec
from torch import Tensor

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.manifest import MANIFEST, Manifest, Placed
from torchrl_ext.data.stores.store import Draft
from torchrl_ext.data.stores.tensorfile import plan_shards
from torchrl_ext.data.versions.tensor_writer import write_shards
from torchrl_ext.data.weights.checkpoint import companion_files
from torchrl_ext.data.weights.source import WeightSource, checked

__all__ = ["FilePlace", "FullWriter"]

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
