"""Writing a full version: a complete Hugging Face checkpoint with our manifest as its last file.

Where a part of the model is published, files in which nothing changed are those of the version before, linked under
another name.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.progress import counted, progress
from torchrl_ext.stores import Manifest, Placed
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.object import PART_BYTES
from torchrl_ext.types import ParamMeta, Part
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.tensor_writer import append_shards, plan_appended, write_shards
from torchrl_ext.weights.checkpoint import companion_files
from torchrl_ext.weights.source import WeightSource, checked
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, Layout, plan_shards

__all__ = ["FullWriter"]

_INDEX = "model.safetensors.index.json"
_IN_FLIGHT_BYTES = 64 << 20
_LANES = 8  # files that are uploaded beside each other


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

    def needed_bytes(self, source: WeightSource, base: Manifest | None = None) -> int:
        """Return about how many bytes a version takes: its tensors, and a little for the small files.

        Args:
            source: what is written.
            base: the version that `write_part` would write onto.
        """
        params = [*source.params(), *(() if base is None else _beside(source, base))]
        return sum(map(attrgetter("nbytes"), params)) + 256 * len(params) + sum(map(len, self._files.values()))

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last.

        Raises:
            OSError: no space, or another fault of the filesystem; `LocalStore.draft` explains it.
            ManifestError: the source does not yield what it declares.
        """
        params = source.params()
        if draft.appends and not self._adapter:
            shards = plan_appended(params, self._shard_bytes, _LANES, PART_BYTES)
        else:
            shards = plan_shards(params, self._shard_bytes, "adapter_model" if self._adapter else "model")
        head = Manifest(version=version, run_id=run_id, params=(), files={})
        total = sum(map(attrgetter("nbytes"), params))
        with progress(f"writing weights version {version}", total) as advance:
            pairs = counted(checked(source, params), lambda pair: pair[0].nbytes, advance)
            return self._write(draft, source, head, params, shards, pairs)

    def write_part(
        self, draft: Draft, source: WeightSource, version: int, run_id: str, base: PublishedVersion
    ) -> tuple[Manifest, int]:
        """Write a complete version that has all but the tensors of ``source`` in common with an earlier one.

        Files in which nothing changed are linked. What else lies in a file with a changed tensor is written once more,
        apart from the changed ones: an old tensor must not stay beside a new one, since readers load all that they
        find. So the next version of the same part writes nothing else.

        Args:
            draft: a folder of the file system of ``base``; of another one, files are copied.
            source: of the part.
            version, run_id: of the new version.
            base: the earlier one.

        Returns:
            The manifest, and the bytes of the tensors that were written.

        Raises:
            OSError, ManifestError: as `write`; or the base has a tensor not, or another one.
            IntegrityError: a tensor that has to be written once more is damaged.
        """
        changed, old = {meta.name: meta for meta in source.params()}, base.manifest
        order = base.params()
        for name in changed.keys() - {meta.name for meta in order if changed.get(meta.name) == meta}:
            raise ManifestError(f"version {old.version} has no parameter {changed[name]}", state="nothing was written")
        rest = _beside(source, old)
        fresh = changed.keys() | {meta.name for meta in rest}
        kept = list(dict.fromkeys(placed.file for placed in old.params if placed.meta.name not in fresh))
        plans = plan_shards(rest, self._shard_bytes) if rest else []
        plans += plan_shards(source.params(), self._shard_bytes)
        count = len(kept) + len(plans)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        renamed = dict(zip(kept, names, strict=False))
        for file, name in renamed.items():
            _link(Path(base.path) / file, draft.path / name)
        head = Manifest(
            version=version,
            run_id=run_id,
            params=tuple(
                Placed(meta=one.meta, file=renamed[one.file], checksum=one.checksum)
                for one in old.params
                if one.file in renamed
            ),
            files={name: old.files[file] for file, name in renamed.items()},
            part=(old.run_id, Part(base=old.version, names=frozenset(changed))),
        )
        shards = [replace(plan, name=name) for plan, name in zip(plans, names[len(kept) :], strict=True)]
        again = {meta.name: meta for meta in rest}
        pairs = ((again[name], tensor) for name, tensor in base.pairs({}, again))
        manifest = self._write(draft, source, head, order, shards, chain(pairs, checked(source)))
        return manifest, sum(map(attrgetter("nbytes"), (*rest, *changed.values())))

    def _write(
        self,
        draft: Draft,
        source: WeightSource,
        head: Manifest,
        params: Sequence[ParamMeta],
        shards: Sequence[Layout],
        pairs: Iterator[tuple[ParamMeta, Tensor]],
    ) -> Manifest:
        """Write tensors and the files beside them, the manifest last.

        Args:
            draft: where to.
            source: has the files beside the tensors.
            head: of the manifest, with the parameters and files that are there already.
            params: every parameter of the version, in order.
            shards: layouts of those that are written, one after the other as ``pairs`` come.
            pairs: these.
        """
        placed, sizes = {one.meta.name: one for one in head.params}, dict(head.files)
        where = {meta.name: shard.name for shard in shards for meta in shard.params}
        where |= {name: one.file for name, one in placed.items()}
        files = {**_checked_files(source.files()), **self._files}
        if not self._adapter:  # which file holds which tensor, as in any Hugging Face checkpoint; and the version
            total = {"total_size": sum(map(attrgetter("nbytes"), params)), "version": f"{head.version:06d}"}
            in_order = {meta.name: where[meta.name] for meta in params}
            files[_INDEX] = (
                msgspec.json.format(msgspec.json.encode({"metadata": total, "weight_map": in_order})) + b"\n"
            )
        if draft.appends:
            sums = append_shards(draft, shards, pairs, lanes=_LANES, in_flight_bytes=_LANES * PART_BYTES)
        else:
            in_flight = min(max(1, self._shard_bytes // 2), _IN_FLIGHT_BYTES)
            sums = write_shards(draft.path, shards, pairs, in_flight_bytes=in_flight)
        for shard in shards:
            sizes[shard.name] = shard.nbytes
            for meta in shard.params:
                placed[meta.name] = Placed(meta=meta, file=shard.name, checksum=sums[meta.name])
        for name, data in files.items():
            sizes[name] = len(data)
            draft.write(name, data)
        manifest = replace(head, params=tuple(placed[meta.name] for meta in params), files=sizes)
        draft.write(MANIFEST, manifest.to_bytes())
        return manifest


def _beside(source: WeightSource, base: Manifest) -> list[ParamMeta]:
    """Return the other parameters that lie in the files of a version in which those of ``source`` do, in order."""
    changed = {meta.name for meta in source.params()}
    touched = {placed.file for placed in base.params if placed.meta.name in changed}
    return [one.meta for one in base.params if one.file in touched and one.meta.name not in changed]


def _link(old: Path, new: Path) -> None:
    """Make a file known under another name; copy it where the file system has no such links, or no more of them."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        with open(old, "rb") as source, open(new, "xb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())


def _checked_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name in files:
        taken = name in (MANIFEST, _INDEX) or name.endswith(".safetensors")
        if taken or not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
            raise ConfigError(
                f"a checkpoint cannot hold a file called {name!r} beside its weights",
                expected="plain names such as config.json",
            )
    return dict(files)
