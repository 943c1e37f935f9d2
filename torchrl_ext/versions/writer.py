"""The writing side of a chain: keyframes, deltas, and what is kept of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
import xxhash

from torchrl_ext.codecs.base import Codec
from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores import Root, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.chain import BESIDE, Chain
from torchrl_ext.stores.delta_manifest import DeltaManifest, DeltaParam
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.baseline import Baseline
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.delta_files import Heading, containers
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.source import WeightSource

__all__ = ["ChainWriter"]

log = logging.getLogger("torchrl_ext")

_CONTAINERS = {**dict.fromkeys(("indices", "deltas", "deltas_zstd"), "flushes"), "xor": "whole", "overwrite": "whole"}
_UNACKNOWLEDGED = 3  # keyframes that stay while no update succeeds


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
        store: Root,
        chain: Chain,
        run_id: str,
        *,
        codec: Codec,
        full: FullWriter,
        keyframe_every: int,
        base: str | None,
        keep_files: bool,
        baseline_device: torch.device | None = None,
    ) -> None:
        self._store, self._chain, self._run_id = store, chain, run_id
        self._codec, self._full = codec, full
        self._container = containers.make(_CONTAINERS.get(codec.name, "packed"))
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
        params = source.params()
        baseline = self._current_baseline(params)
        first = not baseline.fits(params)
        due = 0 < self._keyframe_every <= self._since_keyframe + 1
        keyframe = first or due or not self._acknowledged
        if not self._acknowledged:
            self._collect(_UNACKNOWLEDGED)
        self._acknowledged = False
        manifest = None
        needed = self._full.needed_bytes(source) if keyframe else 0
        with self._store.draft(version_name(version), needed_bytes=needed) as draft:
            if not first:
                manifest = self._write_delta(draft, BESIDE if keyframe else "", baseline, source, version)
            if keyframe:
                self._full.write(draft, baseline.seeding(source) if first else baseline, version, self._run_id)
        self._chain.versions.advance(version)
        baseline.version = (self._run_id, version)
        self._since_keyframe = 0 if keyframe else self._since_keyframe + 1
        return manifest

    def restart(self) -> None:
        """Forget what was published: the next version is a full one, or a delta on the base checkpoint."""
        self._baseline = None

    def acknowledge(self) -> None:
        """Whoever takes part has the version that was published last: collect."""
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

    def _current_baseline(self, params: tuple[ParamMeta, ...]) -> Baseline:
        if self._baseline is None:
            baseline = Baseline(self._baseline_device)
            if self._base is not None and self._chain.versions.newest() == 0:  # later ones follow on other versions
                baseline.start(CheckpointSource(self._base), params)
                baseline.version = (_fingerprint(baseline.digests()), 0)
            self._baseline = baseline
        return self._baseline

    def _write_delta(
        self, draft: Draft, folder: str, baseline: Baseline, source: WeightSource, version: int
    ) -> DeltaManifest:
        base = baseline.version
        if base is None:
            raise IntegrityError("a delta needs a base")
        base_digests = baseline.digests() if base[1] == 0 else {}
        prefix = f"{folder}/" if folder else ""
        heading = Heading(version=version, base_version=base[1], codec=self._codec, tensor=baseline.tensor)
        changes = baseline.encode(source, self._container.scanner(self._codec))
        written = self._container.write(heading, changes, lambda name, data: draft.write(prefix + name, data))
        digests = baseline.digests()
        params = tuple(
            replace(written.params.get(meta.name, DeltaParam(meta=meta, digest="")), digest=digests[meta.name])
            for meta in baseline.params()
        )
        manifest = DeltaManifest(
            version=version,
            base_version=base[1],
            run_id=self._run_id,
            base_run_id=base[0],
            container=self._container.name,
            codecs=tuple(written.codecs),
            params=params,
            files=written.files,
            base_digests=base_digests,
        )
        draft.write(prefix + MANIFEST, manifest.to_bytes())
        return manifest


def _fingerprint(digests: Mapping[str, str]) -> str:
    """One name for the content of a whole checkpoint."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return f"base-{hasher.hexdigest()}"
