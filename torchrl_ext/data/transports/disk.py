"""`DiskTransport` publishes each version as a complete Hugging Face checkpoint in a directory that both ends see."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import StoreError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.folders import version_name
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.transports.base import Arrival, Handoff, LandingEnd, TransferStats, Update, Worker
from torchrl_ext.data.transports.shared_root import VISIBLE_S, Invitation, SharedRoot
from torchrl_ext.data.transports.standalone import Mailbox, StandaloneTransport
from torchrl_ext.data.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.data.versions.checkpoint_writer import FullWriter

__all__ = ["DiskTransport"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at the pointer


class DiskTransport(StandaloneTransport):
    """Publishes ``root/weight_v000001/``, ``root/weight_v000002/``, ...; each loads with ``from_pretrained``.

    A version appears as a whole (temporary sibling, fsync, rename), then the pointer ``root/latest`` moves to it.
    Versions older than the one that every engine serves are removed; without a control layer that acknowledges
    versions, the newest two stay. Numbers continue from an earlier trainer on the same root.

    Args:
        root: directory that the trainer and every worker can access, under the same path unless ``seen_at`` is set.
        keep_files: never remove old versions.
        shard_bytes: largest total size of the tensors in one file, in bytes; a larger tensor gets its own file.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They replace the source's files of the same names.
        seen_at: path under which workers access ``root``, if it differs.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the ``files`` directory does not exist, has an invalid name, or ``shard_bytes`` is not positive.

    Example:
        >>> trainer, worker = tx.DiskTransport(root), tx.DiskTransport(root)
        >>> trainer.send_weights(policy)  # root/weight_v000001/ is a Hugging Face checkpoint
        >>> worker.receive_weights(timeout=5.0)["bias"].shape
        torch.Size([2])
    """

    name: ClassVar[str] = "disk"
    parts: ClassVar[bool] = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_files: bool = False,
        shard_bytes: int = 4 << 30,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        seen_at: str | os.PathLike[str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._store = LocalStore(root)
        self._run_id = uuid.uuid4().hex
        self._versions = Chain(self._store, self._run_id)
        self._keep_files = keep_files
        self._seen_at = self._store.root if seen_at is None else Path(seen_at)
        self._full = FullWriter(shard_bytes, files)
        self._shared = SharedRoot(self._store, self._run_id)

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return str(self._store.root)

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        self._versions.own()
        self._connected = True
        return Handoff(info={**self._shared.invite(), "root": str(self._seen_at)})

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        source, version, stats, began = update.source, update.version, TransferStats(), time.perf_counter()
        if self._versions.own():
            self._shared.moved()
        self._shared.clear()  # workers that joined have found the probe
        with self._store.draft(version_name(version), needed_bytes=self._full.needed_bytes(source)) as draft:
            self._full.write(draft, source, version, self._run_id)
        self._versions.advance(version)
        self._connected = True
        stats.spans.since("publish", began)
        return Handoff(info=self._info(version), served=self._prune, stats=stats)

    def _info(self, version: int) -> Info:
        return {"run_id": self._run_id, "path": str(self._seen_at / version_name(version))}

    def latest_version(self) -> int:
        return self._versions.newest()

    def _prune(self, oldest: int | None) -> None:
        """Remove versions before ``oldest``; None, where no control layer knows which are read, keeps two."""
        if self._keep_files:
            return
        if oldest is None:
            oldest = (0, 0, *self._versions.numbers())[-2]
        self._versions.prune(before=oldest)

    def check_connection(self) -> bool:
        return self._connected and self._store.root.is_dir()

    def shutdown(self) -> None:
        super().shutdown()
        self.mailbox.close()
        self._shared.clear()
        self._store.disown()

    # worker end

    @cached_property
    def mailbox(self) -> DiskReader:
        return DiskReader(self._store)

    def attend(self, within: Deadline) -> DiskReader:
        return self.mailbox

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> LandingEnd:
        offer = Invitation.from_json(info, "the offer of a disk transport")
        store = LocalStore(offer.root)
        offer.find(store, within)
        return DiskReader(store)


@final
class DiskReader(LandingEnd, Mailbox):
    """Reads versions of a root; a version that was staged, or that `get` returned, stays open and readable.

    Args:
        store: the root.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._versions = Chain(store)
        self._opened: PublishedVersion | None = None

    def stage(self, version: int, held: object, within: Deadline) -> None:
        opened = self._open(version, within)
        self._pin(opened)
        opened.verify()

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        if self._opened is None or self._opened.number != arrival.version:
            self._pin(self._open(arrival.version, within))
        assert self._opened is not None
        opened, self._opened = self._opened, None
        with closing(opened):
            opened.check(arrival.params, arrival.info.get("run_id"))
            yield from opened.pairs(into)

    def get(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        for _ in within.pauses(shortest_s=_SHORTEST_S, longest_s=_LONGEST_S):
            run, newest = self._versions.head()
            with suppress(FileNotFoundError):  # pruned meanwhile: a newer one is coming
                if newest and (
                    received is None  # in an emptied root the newest may be lower, or of another run
                    or newest != received.version
                    or run not in ("", received.info["run_id"])
                ):
                    self._pin(opened := PublishedVersion(self._store, newest))
                    return Arrival(version=newest, params=opened.params(), info={"run_id": opened.manifest.run_id})
        return None

    def _open(self, version: int, within: Deadline) -> PublishedVersion:
        missing: FileNotFoundError | None = None
        for _ in within.within(VISIBLE_S).pauses(shortest_s=_SHORTEST_S, longest_s=_SHORTEST_S):
            try:
                return PublishedVersion(self._store, version)
            except FileNotFoundError as error:
                missing = error
                if self._versions.latest() > version:
                    break
        raise StoreError(
            f"{missing and missing.filename} is not there",
            expected=f"weights version {version}; the newest in {self._store.root} is {self._versions.latest()}",
            state="nothing was read",
            hint="send the weights again",
        ) from missing

    def _pin(self, opened: PublishedVersion | None) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = opened

    def close(self) -> None:
        self._pin(None)
