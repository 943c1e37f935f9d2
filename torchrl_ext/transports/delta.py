"""`DeltaTransport`: only what changed, as a chain of versions that a reader can join and follow at any point."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import encodings, make_codec
from torchrl_ext.errors import ConfigError, IntegrityError, StoreError
from torchrl_ext.stores import open_store, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.chain import BESIDE, Chain
from torchrl_ext.stores.deltas import DeltaManifest, DeltaParam
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.transports.base import Changes, Transport, deadline
from torchrl_ext.transports.baseline import Baseline
from torchrl_ext.transports.containers import Heading, containers
from torchrl_ext.transports.follower import Follower
from torchrl_ext.transports.foreign import ForeignVersions
from torchrl_ext.transports.full import FullWriter
from torchrl_ext.transports.hooks import load_hook
from torchrl_ext.transports.published import PublishedVersion
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.transports.ways import Way
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.source import WeightSource

__all__ = ["DeltaTransport"]

_CONTAINERS = {**dict.fromkeys(("indices", "deltas", "deltas_zstd"), "flushes"), "xor": "whole", "overwrite": "whole"}
_HOOK = "TORCHRL_EXT_PRE_READ_HOOK"
_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at the pointer


class DeltaTransport(Transport):
    """Publishes a full keyframe first, then what changed. Readers catch up from wherever they are.

    Args:
        root: directory that the trainer and every worker reach under the same path; or the URL of an object store.
        encoding: one of `encodings`.
        keyframe_every: every so many versions a full one is published beside the delta; 0 for the first one only.
        base: checkpoint directory that the readers hold already; the first version of a root is a delta on it then.
        keep_files: never remove old versions. Else those go that neither the newest keyframe nor a reader needs.
        shard_bytes: bound on the tensors of one file of a keyframe, in bytes.
        files: as in `DiskTransport`, for keyframes.
        settings: of the encoding.
        storage_options: of the fsspec filesystem behind a URL; they are not told to workers.
        post_write_hook: ``"module:function"`` to call with the root and a version's directory name when a version is
            complete, for mounts whose writes must be published. What it raises fails the update.
        pre_read_hook: ``"module:function"`` to call with the root before a reader looks for a version. A worker in an
            engine takes it from its own environment variable ``TORCHRL_EXT_PRE_READ_HOOK``, never from the trainer.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: no such encoding (the message lists them), or one that does not take ``settings``.
    """

    name: ClassVar[str] = "delta"
    proves: ClassVar[bool] = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        encoding: str = "auto",
        keyframe_every: int = 25,
        base: str | os.PathLike[str] | None = None,
        keep_files: bool = False,
        shard_bytes: int = 4 << 30,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        settings: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        post_write_hook: str | None = None,
        pre_read_hook: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if keyframe_every < 0:
            raise ConfigError(f"keyframe_every is {keyframe_every}", expected="a number of versions, 0 for no more")
        if encoding == "auto":  # engines keep no copy of the base unless the caller asks for the tightest encoding
            settings = {"whole_base": False, **(settings or {})}
        self._codec = make_codec(encoding, **(settings or {}))
        self._container = containers.make(_CONTAINERS.get(encoding, "packed"))
        self._store, self._run_id = open_store(root, storage_options), uuid.uuid4().hex
        self._shared = SharedRoot(self._store, self._run_id)
        self._base = None if base is None else os.path.abspath(base)
        self._chain = Chain(self._store, foreign=ForeignVersions(self._store, self._base))
        self._keyframe_every, self._keep_files = keyframe_every, keep_files
        self._full = FullWriter(shard_bytes, files)
        self._baseline: Baseline | None = None
        self._since_keyframe = 0
        self._acknowledged = True
        self._follower = Follower(
            self._chain, lambda number, manifest: PublishedVersion(self._store, number, manifest), self._base
        )
        self._opened: Way | None = None
        self._wrote, self._reading = load_hook(post_write_hook), load_hook(pre_read_hook)
        self._connected = self._alone = self._needs_base = False
        self._aborted = threading.Event()

    @classmethod
    def encodings(cls) -> tuple[str, ...]:
        """Names for ``encoding=``."""
        return tuple(encodings.names())

    @classmethod
    def from_info(cls, info: Info) -> DeltaTransport:
        return cls(info["root"], base=info["base"], pre_read_hook=os.environ.get(_HOOK) or None)

    @property
    def root(self) -> str:
        """The directory, as an absolute path; or the URL."""
        return self._store.url

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        self._store.own()
        self._connected = True
        whole = self._codec.needs == "all"
        return Handoff(info={"transport": self.name, "base": self._base, "needs_base": whole, **self._shared.invite()})

    def prepare(self, source: WeightSource, version: int) -> Iterable[Handoff]:
        began = time.perf_counter()
        self._store.own()
        self._shared.clear()
        params = source.params()
        baseline = self._current_baseline(params)
        first = not baseline.fits(params)
        due = 0 < self._keyframe_every <= self._since_keyframe + 1
        keyframe = first or due or not self._acknowledged  # nobody may be able to build upon the version before
        self._acknowledged = False
        manifest = None
        needed = sum(meta.nbytes for meta in params) if keyframe else 0
        with self._store.draft(version_name(version), needed_bytes=needed) as draft:
            if not first:
                manifest = self._write_delta(draft, BESIDE if keyframe else "", baseline, source, version)
            if keyframe:
                self._full.write(draft, baseline.seeding(source) if first else baseline, version, self._run_id)
        self._chain.versions.advance(version)
        self._wrote(self._store.url, version_name(version))
        baseline.version = (self._run_id, version)
        self._since_keyframe = 0 if keyframe else self._since_keyframe + 1
        self._connected = True
        total = sum(meta.numel for meta in params)
        self.stats.bytes = None if manifest is None else manifest.nbytes
        self.stats.density = 1.0 if manifest is None else manifest.changed / max(1, total)
        self.stats.spans = {"publish": time.perf_counter() - began}
        return [Handoff(info=self._info(version, params))]

    def acknowledge(self, version: int) -> None:
        self._acknowledged = True
        self._collect()

    def latest_version(self) -> int:
        return self._chain.versions.newest()

    # worker end

    def join(self, info: Info) -> None:
        self._shared.find(info, self.timeout_s, self._aborted)
        self._needs_base = info["needs_base"]
        self._follower.retain(lambda name: self._needs_base)
        self._connected = True

    def retain(self, names: Callable[[str], bool]) -> None:
        self._follower.retain(lambda name: self._needs_base or names(name))

    def changes(self, version: int, held: Callable[[], Mapping[str, str]]) -> Changes | None:
        self._await_version(version)
        if self._follower.held is None:
            self._follower.adopt(version, held)
        return self._follower.changes(version)

    def landed(self, changes: Changes) -> None:
        self._follower.advance(changes)

    def prefetch(self, version: int) -> None:
        self._await_version(version)
        way = self._open(version)
        self._follower.check(way)
        self._pin(way)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        way, self._opened = self._opened, None
        if way is None or way.reached[1] != info["version"]:
            self._await_version(info["version"])
            way = self._open(info["version"])
        yield from self._follower.tensors(way, into)

    # both ends

    def abort(self) -> None:
        self._aborted.set()

    def check_connection(self) -> bool:
        return self._connected and self._store.available()

    def shutdown(self) -> None:
        self._connected = False
        self.abort()
        self._pin(None)
        if self._store.owned:
            self._shared.clear()
            self._store.disown()

    # alone, without a control layer

    def announce(self, info: Info) -> None:
        self.acknowledge(info["version"])

    def poll(self, timeout_s: float) -> Info | None:
        self._aborted.clear()
        if not self._alone:  # what is returned is whole, so the copy to which changes are applied is kept here
            self._alone = True
            self._follower.retain(lambda name: True)
        until, pause = deadline(timeout_s), _SHORTEST_S
        while True:
            self._reading(self._store.url)
            newest = self._chain.latest()
            if newest not in (0, self.received_version):
                with suppress(FileNotFoundError):  # collected since: a newer one is on its way
                    self._chain.forget()
                    way = self._follower.open(newest)
                    self._pin(way)
                    self._connected = True
                    return self._info(newest, way.params)
            if self._aborted.wait(min(pause, max(0.0, until - time.monotonic()))) or time.monotonic() >= until:
                return None
            pause = min(2 * pause, _LONGEST_S)

    # its helpers

    def _current_baseline(self, params: tuple[ParamMeta, ...]) -> Baseline:
        if self._baseline is None:
            baseline = Baseline()
            if self._base is not None and self.latest_version() == 0:  # later ones follow on other versions
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

    def _info(self, version: int, params: tuple[ParamMeta, ...]) -> Info:
        return {"transport": self.name, "version": version, "params": [meta.to_json() for meta in params]}

    def _open(self, version: int) -> Way:
        try:
            return self._follower.open(version)
        except FileNotFoundError as error:
            raise self._lost(version) from error

    def _pin(self, way: Way | None) -> None:
        """Hold one way open, so that collection cannot take it away before it is read."""
        if self._opened is not None:
            self._opened.close()
        self._opened = way

    def _await_version(self, version: int) -> None:
        """A shared filesystem may show a new version a moment late."""
        until = deadline(min(VISIBLE_S, self.timeout_s))
        self._chain.forget()
        while True:
            self._reading(self._store.url)
            try:
                self._chain.version(version)
                return
            except FileNotFoundError as error:
                if time.monotonic() > until:
                    raise self._lost(version) from error
            self._aborted.wait(_SHORTEST_S)

    def _lost(self, version: int) -> StoreError:
        return StoreError(
            f"{self.root} holds no version {version}",
            expected=f"{version_name(version)}; the newest here is {self._chain.versions.latest()}",
            state="nothing was read",
            hint="send the weights again",
        )

    def _collect(self) -> None:
        if not self._keep_files:
            self._chain.collect()


def _fingerprint(digests: Mapping[str, str]) -> str:
    """One name for the content of a whole checkpoint."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return f"base-{hasher.hexdigest()}"
