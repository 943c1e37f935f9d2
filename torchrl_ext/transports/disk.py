"""`DiskTransport` publishes each version as a complete Hugging Face checkpoint in a directory that both ends see."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores import Chain, LocalStore, Manifest, version_name
from torchrl_ext.stores.versions import Held
from torchrl_ext.transports.base import Incremental, deadline
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta, Part
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.hooks import hook_at
from torchrl_ext.versions.local_checkpoint import LocalCheckpoint
from torchrl_ext.weights.source import WeightSource

__all__ = ["DiskTransport"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at the pointer


class DiskTransport(StandaloneTransport, Incremental):
    """Publishes ``root/weight_v000001/``, ``root/weight_v000002/``, ...; each loads with ``from_pretrained``.

    A version appears as a whole (temporary sibling, fsync, rename), then the pointer ``root/latest`` moves to it.
    Versions older than the one that every engine serves are removed; where no control layer acknowledges, the newest
    two stay. Numbers go on where an earlier trainer on the same root stopped.

    Args:
        root: directory that the trainer and every worker reach, under the same path if ``seen_at`` names no other.
        keep_files: never remove old versions.
        shard_bytes: bound on the tensors of one file, in bytes; a larger tensor gets a file of its own.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They win over those of the source.
        seen_at: path under which workers reach ``root``, where theirs is another one.
        adapter: versions are PEFT adapters (``adapter_model.safetensors`` beside ``adapter_config.json``) in place of
            whole checkpoints.
        post_write_hook: as in `DeltaTransport`.
        local_dir: directory on each engine's host, into which a version is copied while the engine serves, to be loaded
            from there (`torchrl_ext.versions.local_checkpoint`); one for all engines of a host. None loads from
            ``root``, as engines without our plugin always do.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: no such ``files`` directory, a name in it that cannot be a file, or no room in a shard.

    Example:
        >>> trainer, worker = tx.DiskTransport(root), tx.DiskTransport(root)
        >>> trainer.send_weights(policy)  # root/weight_v000001/ is a Hugging Face checkpoint
        >>> worker.receive_weights(timeout=5.0)["bias"].shape
        torch.Size([2])
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_files: bool = False,
        shard_bytes: int = 4 << 30,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        adapter: bool = False,
        seen_at: str | os.PathLike[str] | None = None,
        post_write_hook: str | Callable[[str, str], Any] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._store = LocalStore(root)
        self._versions = Chain(self._store)
        self._keep_files, self._wrote = keep_files, hook_at(post_write_hook)
        self._seen_at = self._store.root if seen_at is None else Path(seen_at)
        self._local = None if local_dir is None else LocalCheckpoint(local_dir)
        self._full, self._adapter = FullWriter(shard_bytes, files, adapter=adapter), adapter
        self._run_id = uuid.uuid4().hex
        self._shared = SharedRoot(self._store, self._run_id)
        self._connected = False
        self._received: Held | None = None
        self._opened: PublishedVersion | None = None
        self._aborted = threading.Event()

    @classmethod
    def from_info(cls, info: Info) -> DiskTransport:
        return cls(info["root"], local_dir=info.get("local_dir"))

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return str(self._store.root)

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        self._store.own()
        self._connected = True
        return Handoff(info=self.invite())

    def invite(self) -> Info:
        """Write a probe, and return the info by which workers join; a process that only reads may call this too."""
        local = None if self._local is None else str(self._local.directory)
        return {"transport": self.name, **self._shared.invite(), "root": str(self._seen_at), "local_dir": local}

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        began = time.perf_counter()
        if not self._store.owned:
            self._store.own()
        if self._shared.probe is not None:  # workers that joined have found it
            self._shared.clear()
        if source.part is None:
            needed = self._full.needed_bytes(source)
            with self._store.draft(version_name(version), needed_bytes=needed) as draft:
                manifest = self._full.write(draft, source, version, self._run_id)
        else:
            base = self._own_version(source.part.base)
            needed = self._full.needed_bytes(source, base.manifest)
            try:
                with self._store.draft(version_name(version), needed_bytes=needed) as draft:
                    manifest, self.stats.bytes = self._full.write_part(draft, source, version, self._run_id, base)
            finally:
                base.close()
        self._versions.advance(version)
        if self._wrote is not None:
            self._wrote(self.root, version_name(version))
        self._connected = True
        self.stats.spans = {"publish": time.perf_counter() - began}
        return Handoff(info=self._info(manifest, source.part), acknowledge=self._prune)

    def builds_on(self, version: int) -> bool:
        """Return whether this trainer published ``version``, and it is there; adapters are published whole."""
        if self._adapter:
            return False
        try:
            self._own_version(version).close()
        except (FileNotFoundError, IntegrityError):
            return False
        return True

    def _own_version(self, version: int) -> PublishedVersion:
        opened = PublishedVersion(self._store, version)
        try:
            opened.check(opened.params(), self._run_id)
        except IntegrityError:
            opened.close()
            raise
        return opened

    def latest_version(self) -> int:
        return self._versions.newest()

    # worker end

    def join(self, info: Info) -> None:
        self._shared.find(info, self.timeout_s, self._aborted)
        self._connected = True

    @property
    def incremental(self) -> Incremental:
        return self

    def prefetch(self, version: int, held: Callable[[], Mapping[str, str]] | None = None) -> None:
        opened = self._open_version(version)
        self._pin(opened)
        part = opened.manifest.part  # what else it holds was verified with the version before
        known = part is not None and (part[0], part[1].base) == self._received
        opened.verify(part[1].names if part is not None and known else None)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        version = info["version"]
        opened = self._opened
        if opened is None or opened.number != version:
            opened = self._open_version(version)
            self._pin(opened)
        self._opened = None
        try:
            params = tuple(map(ParamMeta.from_json, info["params"]))
            opened.check(params, info.get("run_id"))
            yield from opened.pairs(into, {meta.name for meta in params})
        finally:
            opened.close()
        self._received = opened.manifest.run_id, version

    # both ends

    def abort(self) -> None:
        self._aborted.set()

    def check_connection(self) -> bool:
        return self._connected and self._store.root.is_dir()

    def shutdown(self) -> None:
        self._connected = False
        self.abort()
        self._pin(None)
        self._shared.clear()
        if self._store.owned:
            self._store.disown()

    # without a control layer

    def poll(self, timeout_s: float) -> Info | None:
        self._aborted.clear()
        until, pause = deadline(timeout_s), _SHORTEST_S
        while True:
            newest = self._versions.latest()
            with suppress(FileNotFoundError):  # pruned meanwhile: a newer one is coming
                if newest and self._other(newest):
                    self._versions.offered(newest)
                    opened = PublishedVersion(self._store, newest)
                    self._pin(opened if self._local is None else self._copied(opened, self._local))
                    self._connected = True
                    return self._info(opened.manifest)
            if self._aborted.wait(min(pause, max(0.0, until - time.monotonic()))) or time.monotonic() >= until:
                return None
            pause = min(2 * pause, _LONGEST_S)

    def pass_over(self, info: Info) -> None:
        """Take note that others received the version in ``info``, so that `poll` waits for another one (worker end)."""
        self._pin(None)
        self._received = info["run_id"], info["version"]

    # its helpers

    def _prune(self, oldest: int | None) -> None:
        """Remove versions before ``oldest``; with None, where nobody says what is read, all but the newest two."""
        if self._keep_files:
            return
        if oldest is None:
            oldest = (0, 0, *self._versions.numbers())[-2]
        self._versions.prune(before=oldest)

    def _other(self, newest: int) -> bool:
        """Return whether ``newest`` was not received last; in an emptied root it may be lower, or of another run."""
        if self._received is None or newest != self._received[1]:
            return True
        return self._versions.replaced(newest, self._received[0])

    def _info(self, manifest: Manifest, part: Part | None = None) -> Info:
        rows = []
        for placed in manifest.params:
            if part is None or placed.meta.name in part.names:
                rows.append(placed.meta.to_json())
        return {
            "transport": self.name,
            "version": manifest.version,
            "run_id": manifest.run_id,
            "path": str(self._seen_at / version_name(manifest.version)),
            "params": rows,
        }

    def _open_version(self, version: int) -> PublishedVersion:
        until = deadline(min(VISIBLE_S, self.timeout_s))
        self._aborted.clear()  # an earlier abort ended the waits of its time, and not this one
        while True:
            try:
                opened = PublishedVersion(self._store, version)
                return opened if self._local is None else self._copied(opened, self._local)
            except FileNotFoundError as error:
                newest = self._versions.latest()
                if newest > version or self._aborted.wait(_SHORTEST_S) or time.monotonic() > until:
                    raise StoreError(
                        f"{error.filename} is not there",
                        expected=f"weights version {version}; the newest in {self.root} is {newest}",
                        state="nothing was read",
                        hint="send the weights again",
                    ) from error

    def _copied(self, opened: PublishedVersion, local: LocalCheckpoint) -> PublishedVersion:
        """Return the version as it is on this host, where it is copied first."""
        try:
            local.pull(self.root, opened.number)
            return PublishedVersion(self._store, opened.number, opened.manifest, at=local.directory)
        finally:
            opened.close()

    def _pin(self, opened: PublishedVersion | None) -> None:
        """Hold one version open, so that pruning cannot remove it before it is read."""
        if self._opened is not None:
            self._opened.close()
        self._opened = opened
