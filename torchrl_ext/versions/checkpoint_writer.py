"""Writing a full version: a complete Hugging Face checkpoint with our manifest as its last file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.stores import Manifest, Placed
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.versions.shards import write_shards
from torchrl_ext.weights.checkpoint import companion_files
from torchrl_ext.weights.source import WeightSource, checked
from torchrl_ext.weights.tensorfile import plan_shards

__all__ = ["FullWriter"]

_INDEX = "model.safetensors.index.json"
_IN_FLIGHT_BYTES = 64 << 20


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
        return sum(meta.nbytes for meta in params) + 256 * len(params) + sum(map(len, self._files.values()))

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        shards = plan_shards(params, self._shard_bytes, self._stem)
        files = {**_checked_files(source.files()), **self._files, **self._index(shards, version)}
        sizes = {shard.name: shard.nbytes for shard in shards} | {name: len(data) for name, data in files.items()}
        where = {meta.name: shard.name for shard in shards for meta in shard.params}
        checksums = write_shards(
            draft.path,
            shards,
            checked(source, params),
            in_flight_bytes=min(max(1, self._shard_bytes // 2), _IN_FLIGHT_BYTES),
        )
        for name, data in files.items():
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


def _no_index(shards: Iterable[Any], version: int) -> dict[str, bytes]:
    """An adapter is one file."""
    return {}


def _index(shards: Iterable[Any], version: int) -> dict[str, bytes]:
    """The index file of Hugging Face checkpoints, which file holds which tensor; and the version, for other readers."""
    where = {meta.name: shard.name for shard in shards for meta in shard.params}
    total = sum(meta.nbytes for shard in shards for meta in shard.params)
    index = {"metadata": {"total_size": total, "version": f"{version:06d}"}, "weight_map": where}
    return {_INDEX: (json.dumps(index, indent=2) + "\n").encode()}
