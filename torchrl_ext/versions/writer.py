"""The writing side of a chain: keyframes, deltas, what is kept of them, and copies that deltas are taken against."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.errors import ConfigError, IntegrityError, StoreError
from torchrl_ext.stores import Store, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.chain import BESIDE, Chain, Held
from torchrl_ext.stores.delta_manifest import DeltaManifest, DeltaParam
from torchrl_ext.stores.manifest import MANIFEST, Manifest
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import container_for
from torchrl_ext.versions.delta_files import DeltaFiles
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import PositionDigest, position_digest
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["Baseline", "ChainWriter", "WritesFull"]

log = logging.getLogger("torchrl_ext")

_UNACKNOWLEDGED = 3  # keyframes that stay while no update succeeds


class WritesFull(Protocol):
    """Writes full versions (`torchrl_ext.versions.checkpoint_writer.FullWriter`)."""

    def needed_bytes(self, source: WeightSource) -> int:
        """Return about how many bytes a version of ``source`` takes."""

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last."""


class ChainWriter:
    """Publishes one trainer's versions.

    Args:
        store: where to.
        chain: its versions.
        run_id: of this trainer.
        codec: the encoding of deltas.
        full: writes keyframes.
        keyframe_every: as in `DeltaTransport`.
        base: checkpoint directory on which the first version of an empty store is a delta.
        keep_files: never remove old versions.
        baseline_device: as in `DeltaTransport`.
    """

    def __init__(
        self,
        store: Store,
        chain: Chain,
        run_id: str,
        *,
        codec: Codec,
        full: WritesFull,
        keyframe_every: int,
        base: str | None,
        keep_files: bool,
        baseline_device: torch.device | None = None,
    ) -> None:
        self._store, self._chain, self._run_id = store, chain, run_id
        self._codec, self._full = codec, full
        self._container = container_for(codec)
        self._keyframe_every, self._base, self._keep_files = keyframe_every, base, keep_files
        self._baseline: Baseline | None = None
        self._baseline_device = baseline_device
        self._since_keyframe = 0
        self._acknowledged = True

    def publish(self, source: WeightSource, version: int) -> DeltaManifest | None:
        """Make ``source`` version ``version``; returns its delta, None for a keyframe without one.

        An attempt that fails leaves no trace but that the next version is a keyframe, and so does a version that not
        every engine acknowledged: it may be the one on which nobody can build.

        Raises:
            StoreError: no space, no permission, no connection.
            ConfigError: the base checkpoint is not one of this model.
            ManifestError: the source does not yield what it declares.
        """
        baseline = self._baseline or self._first_baseline(source.params())
        first = baseline.version is None or source.params() != baseline.params()
        due = 0 < self._keyframe_every <= self._since_keyframe + 1
        keyframe = first or due or not self._acknowledged
        if not self._acknowledged:
            self._collect(_UNACKNOWLEDGED)
        self._acknowledged = False
        manifest = None
        needed = self._full.needed_bytes(source) if keyframe else 0
        with self._store.draft(version_name(version), needed_bytes=needed) as draft:
            if not first:
                manifest = self._write_delta(draft, f"{BESIDE}/" if keyframe else "", baseline, source, version)
            if keyframe:
                self._full.write(draft, baseline.seeding(source) if first else baseline, version, self._run_id)
        self._chain.versions.advance(version)
        baseline.version = (self._run_id, version)
        self._since_keyframe = 0 if keyframe else self._since_keyframe + 1
        return manifest

    def restart(self) -> None:
        """Forget what was published, so that the next version is a full one, or a delta on the base checkpoint."""
        self._baseline = None

    def acknowledge(self, oldest: int | None = None) -> None:
        """Note that whoever takes part has the version that was published last, and collect.

        Args:
            oldest: what engines may still read. Collection does not look at it: readers under way have leases.
        """
        self._acknowledged = True
        self._collect(1)

    def _collect(self, keyframes: int) -> None:
        """What cannot be removed stays: that is no reason to call an update failed which engines serve."""
        if self._keep_files:
            return
        try:
            self._chain.collect(keep_keyframes=keyframes)
        except StoreError as error:
            log.warning("old weights versions stay: %s", error)

    def _first_baseline(self, params: tuple[ParamMeta, ...]) -> Baseline:
        baseline = Baseline(self._baseline_device)
        if self._base is not None and self._chain.versions.newest() == 0:  # later ones follow on other versions
            baseline.start(CheckpointSource(self._base), params)
            baseline.version = (_fingerprint(baseline.digests), 0)
        self._baseline = baseline
        return baseline

    def _write_delta(
        self, draft: Draft, prefix: str, baseline: Baseline, source: WeightSource, version: int
    ) -> DeltaManifest:
        base = baseline.version
        if base is None:
            raise IntegrityError("a delta needs a base")
        base_digests = {name: digest.hex() for name, digest in baseline.digests.items()} if base[1] == 0 else {}
        files = DeltaFiles(version, base[1], self._codec, baseline.tensors, draft, prefix)
        self._container.write(files, baseline.encode(source, self._codec))
        rows = []
        for meta in baseline.params():
            row = files.params.get(meta.name) or DeltaParam(meta=meta, digest="")
            rows.append(replace(row, digest=baseline.digests[meta.name].hex()))
        manifest = DeltaManifest(
            version=version,
            base_version=base[1],
            run_id=self._run_id,
            base_run_id=base[0],
            container=self._container.name,
            codecs=tuple(files.codecs),
            params=tuple(rows),
            files=files.sizes,
            base_digests=base_digests,
        )
        draft.write(prefix + MANIFEST, manifest.to_bytes())
        return manifest


def _fingerprint(digests: Mapping[str, PositionDigest]) -> str:
    """One name for the content of a whole checkpoint."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name].hex()}\n".encode())
    return f"base-{hasher.hexdigest()}"


class Baseline(WeightSource):
    """Copies of every tensor, their digests, and the version that they are.

    While a version is being made the copies are neither the old one nor the new one: `version` is None then, and stays
    so when the attempt fails. The next version is a full one in that case, which seeds the copies again.

    Args:
        device: where the copies are; by default on the host, pinned where the source's tensors are on a GPU.

    Attributes:
        tensors: the copies, by name.
        digests: their position digests.
        version: run id and number of the version that they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._params: tuple[ParamMeta, ...] = ()
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, PositionDigest] = {}
        self._files: Mapping[str, bytes] = {}
        self.version: Held | None = None

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def files(self) -> Mapping[str, bytes]:
        return self._files

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((meta.name, self.tensors[meta.name]) for meta in self._params)

    def start(self, base: WeightSource, params: tuple[ParamMeta, ...]) -> None:
        """Seed with the tensors of ``base`` that ``params`` name, in their order.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """
        held = {meta.name: meta for meta in base.params()}
        for meta in params:
            if held.get(meta.name) != meta:
                raise ConfigError(
                    f"the base checkpoint holds {held.get(meta.name, f'no {meta.name}')}",
                    expected=str(meta),
                    hint="pass as base= the checkpoint from which this policy was loaded, or nothing",
                )
        for _ in self.seed(_Part(base, frozenset(meta.name for meta in params))):
            pass
        self._params = params

    def seeding(self, source: WeightSource) -> WeightSource:
        """Return ``source``, of which each tensor that is iterated is kept; then set `version`."""
        return _Seeding(self, source)

    def seed(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Keep and yield every tensor of ``source``; then set `version`."""
        self.version, self._params, self._files = None, source.params(), source.files()
        known, self.tensors, self.digests = self.tensors, {}, {}
        for meta, tensor in checked(source, self._params):
            copy = known.pop(meta.name, None)
            if copy is None or ParamMeta.of(meta.name, copy) != meta:
                pinned = self._device is None and tensor.is_cuda
                copy = torch.empty(meta.shape, dtype=meta.dtype, device=self._device or "cpu", pin_memory=pinned)
            copy.copy_(tensor)
            self.tensors[meta.name] = copy
            self.digests[meta.name] = position_digest(tensor if tensor.is_cuda else copy)
            yield meta.name, copy

    def encode(self, source: WeightSource, codec: Codec) -> Iterator[Encoded]:
        """Yield what changed in each tensor since `version`; the copies follow. At the end, set `version`."""
        self.version = None
        triples = ((meta.name, self.tensors[meta.name], tensor) for meta, tensor in checked(source, self._params))
        for change in encode_tensors(triples, codec, follow=True):
            name = change.meta.name
            if change.changed:
                digest = change.digest  # None: nobody looked at what changed, and the whole tensor is summed
                self.digests[name] = (
                    position_digest(self.tensors[name]) if digest is None else self.digests[name].plus(digest)
                )
            yield change


class _Part(WeightSource):
    """Some tensors of a source."""

    def __init__(self, source: WeightSource, names: frozenset[str]) -> None:
        self._source, self._names = source, names

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta in self._source.params() if meta.name in self._names)

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._source if name in self._names)


class _Seeding(WeightSource):
    def __init__(self, baseline: Baseline, source: WeightSource) -> None:
        self._baseline, self._source = baseline, source

    def params(self) -> tuple[ParamMeta, ...]:
        return self._source.params()

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._baseline.seed(self._source)
