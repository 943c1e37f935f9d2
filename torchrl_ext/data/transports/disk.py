"""`DiskTransport` publishes each version as a complete Hugging Face checkpoint in a directory that both ends see.

`SharedRoot` probes the directory, to tell whether they do.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, TypeVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.base.types import Info, ParamMeta, Wire
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.follower import VISIBLE_S, looks, newer, reach
from torchrl_ext.data.stores.local import PROBE, LocalStore
from torchrl_ext.data.stores.manifest import version_name
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.transports.base import Abilities, Arrival, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.versions.full import FullWriter, PublishedVersion
from torchrl_ext.data.versions.open_route import OpenRoute
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.weights.blocks import Block

if TYPE_CHECKING:
    from torchrl_ext.data.transports.broadcast import Broadcast

_Taken = TypeVar("_Taken")

__all__ = ["DiskTransport", "Invitation", "SharedRoot", "VersionReader"]

_PROBE = re.compile(re.escape(PROBE) + "[0-9a-f]{32}")
_NOT_SENT = "no weights were sent; this engine still serves its previous weights"


class Invitation(Wire, frozen=True, kw_only=True):
    """Where the trainer left a probe.

    Attributes:
        root: of the versions, as workers see it.
        probe: the key of the probe.
        run_id: names the trainer's run; the content of the probe.
        trainer: where the trainer wrote the probe: the path there, and the host.
    """

    root: str
    probe: str
    run_id: str
    trainer: str

    def find(self, store: Store, within: Deadline) -> None:
        """Look for the trainer's probe (worker end).

        Args:
            store: the root, as this process sees it.
            within: ends the wait, which lasts `VISIBLE_S` at most.

        Raises:
            StoreError: it is not here, so the root is only visible to the trainer, or another directory.
            TransportError: another thread ended the wait.
            IntegrityError: the invitation names no probe.
        """
        if not _PROBE.fullmatch(self.probe):
            raise IntegrityError(
                f"the probe of a shared root is {self.probe!r}",
                expected="a name as the trainer gives one",
                state="nothing was read",
            )
        found = None
        for _ in within.within(VISIBLE_S).pauses(shortest_s=0.1, longest_s=0.1):
            with suppress(FileNotFoundError):
                found = store.get(self.probe, at_most=4096)
            if found is not None or not store.available():
                break
        if found is None and within.stop.is_set():
            raise within.error("the trainer's root was not found", state=_NOT_SENT)
        if found != self.run_id.encode(errors="replace"):
            here = f"{store.url} on {socket.gethostname()}"
            raise StoreError(
                f"{here} does not contain the file that the trainer wrote into {self.trainer}: only the trainer sees "
                "this root"
                if found is None
                else f"{here} and {self.trainer} are different directories",
                expected=f"the file {self.probe} in one directory that both ends see",
                state=_NOT_SENT,
                hint="choose a root on a filesystem that is mounted on both hosts under the same path",
            )


class SharedRoot:
    """Writes a probe, and invites workers to look for it (trainer end).

    Args:
        store: the directory (or bucket), as this process sees it.
        token: the content of the probe; names the trainer's run.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self._probe: str | None = None  # the key of the one that lies there

    def invite(self) -> Info:
        """Write a probe, and return the fields of an `Invitation`."""
        self.clear()
        self._probe = f"{PROBE}{uuid.uuid4().hex}"
        self._store.put(self._probe, self._token.encode())
        trainer = f"{self._store.url} on {socket.gethostname()}"
        return {"root": self._store.url, "probe": self._probe, "run_id": self._token, "trainer": trainer}

    def clear(self) -> None:
        """Remove the probe, if there is one."""
        if self._probe is not None:
            with suppress(StoreError):
                self._store.delete(self._probe)
            self._probe = None


@final
class VersionReader(StandaloneEnd):
    """Follows versions; one that was staged, or that `next` returned, stays open, so that it can be read when pruned.

    Args:
        chain: the versions; in memory where a group brings them.
        base: the checkpoint that the worker holds already.
        full: every version is a full one, and is verified as it is staged, while the engine serves. As it lands it is
            read again, by then from memory: to keep what was read first would take a copy of the model on every host.
        broadcast: brings the versions.
        copies: names the tensors of which whole copies are kept.
        slices: the blocks that are read of changes, by name.
    """

    def __init__(
        self,
        chain: Chain,
        base: str | None = None,
        *,
        full: bool = False,
        broadcast: Broadcast | None = None,
        copies: Callable[[str], bool] = lambda name: False,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
    ) -> None:
        self._chain, self._full, self._broadcast = chain, full, broadcast
        open_full = None if broadcast is None else broadcast.kept.open
        self._reader = ChainReader(chain, base, open_full, copies=copies, slices=slices or {})
        self._opened: OpenRoute | None = None

    def _looks(self, within: Deadline) -> Iterator[object]:
        """Yield whenever there may be another version, or a broadcast brought one, until the deadline."""
        if self._broadcast is None:
            yield from looks(within)
            return
        more = True
        while more:
            yield within
            more = self._broadcast.fetch(within)

    def stage(self, version: int, held: Callable[[], Mapping[str, str]] | None, within: Deadline) -> Changes | None:
        def found(version: int) -> Changes | None:
            changes = None
            if held is not None and not self._full:
                if self._reader.held is None:
                    self._reader.adopt(version, held)
                changes = self._reader.changes(version)
            if changes is None:  # it has to be read in full
                self._pin(route := self._reader.open(version))
                if self._full and isinstance(route.published, PublishedVersion):
                    route.published.verify()
            return changes

        return self._reach(version, found, within)

    def _reach(self, version: int, take: Callable[[int], _Taken], within: Deadline) -> _Taken:
        """Return what ``take`` finds: a filesystem may show a version late, and a broadcast takes a while."""
        within = within.within(VISIBLE_S) if self._broadcast is None else within.again()
        try:
            return reach(self._chain, version, take, self._looks(within), within)
        except StoreError as error:
            if self._broadcast is None:
                raise
            what, hint = f"weights version {version} did not come", "check that the trainer runs, and send again"
            raise within.error(f"{what} from the trainer", state="nothing was changed", hint=hint) from error

    def landed(self, staged: Changes) -> None:
        self._reader.advance(staged)
        self._forget()

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        route, self._opened = self._opened, None
        if route is None or route.reached[1] != arrival.version:
            route = self._reach(arrival.version, self._reader.open, within)
        try:
            yield from self._reader.tensors(route, into)
        except (FileNotFoundError, IntegrityError) as error:
            if self._chain.latest() == arrival.version:
                raise
            raise FileNotFoundError(f"version {arrival.version} was removed while it was read") from error
        self._forget()

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        def opened(version: int) -> Arrival:
            self._pin(route := self._reader.open(version))
            return Arrival(version=version, params=route.params)

        run = "" if self._reader.held is None else self._reader.held[0]
        return newer(self._chain, opened, self._looks(within), None if received is None else (run, received.version))

    def _pin(self, route: OpenRoute | None) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = route

    def _forget(self) -> None:
        if self._broadcast is not None:
            self._broadcast.landed()

    def close(self) -> None:
        self._pin(None)
        if self._broadcast is not None:
            self._broadcast.close()


class DiskTransport(StandaloneTransport):
    """Publishes ``root/weight_v000001/``, ``root/weight_v000002/``, ...; each loads with ``from_pretrained``.

    A version appears as a whole (temporary sibling, fsync, rename), then the pointer ``root/latest`` moves to it.
    Versions older than the one that every engine serves are removed; without a control layer that acknowledges
    versions, the newest two stay. Numbers continue from an earlier trainer on the same root.

    Args:
        root: directory that the trainer and every worker can access under the same path.
        keep_files: never remove old versions.
        shard_bytes: largest total size of the tensors in one file, in bytes; a larger tensor gets its own file.
        files: files that complete the checkpoint: a model directory whose config and tokenizer files are copied, or
            name -> content. They replace the source's files of the same names.
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
    abilities: ClassVar[Abilities] = Abilities(parts=False)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_files: bool = False,
        shard_bytes: int = 4 << 30,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._store = LocalStore(root)
        self._run_id = uuid.uuid4().hex
        self._versions = Chain(self._store, self._run_id)
        self._keep_files = keep_files
        self._full = FullWriter(shard_bytes, files)
        self._shared = SharedRoot(self._store, self._run_id)

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return str(self._store.root)

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        self._versions.own()
        self._connected = True
        return Handoff(info=self._shared.invite())

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        source, version, stats, began = update.source, update.version, TransferStats(), time.perf_counter()
        self._versions.own()
        self._shared.clear()  # workers that joined have found the probe
        with self._store.draft(version_name(version)) as draft:
            self._full.write(draft, source, version, self._run_id)
        self._versions.advance(version)
        self._connected = True
        stats.spans.since("publish", began)
        info = {"path": f"{self.root}/{version_name(version)}"}
        return Handoff(info=info, served=self._prune, stats=stats)

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
        self._shared.clear()
        self._store.disown()

    # worker end

    def attend(self, within: Deadline) -> VersionReader:
        return VersionReader(Chain(self._store), full=True)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> VersionReader:
        offer = Invitation.from_json(info, "the offer of a disk transport")
        store = LocalStore(offer.root)
        offer.find(store, within)
        return VersionReader(Chain(store), full=True)
