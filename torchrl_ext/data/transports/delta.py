"""`DeltaTransport` publishes changes as a chain of versions, which a reader can join at any point.

`DeltaReader`, the worker's end, follows the chain.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, final

import numpy as np
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, IntegrityError, StoreError, TransportError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info, ParamMeta, Wire
from torchrl_ext.data.group.group import GroupWorker
from torchrl_ext.data.group.ranks import Steps
from torchrl_ext.data.landing.changes import Changes
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.follower import VISIBLE_S, Follower
from torchrl_ext.data.stores.manifest import BLOCKS, DeltaManifest
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.stores.store import MemoryStore, Store
from torchrl_ext.data.transports.base import Abilities, Arrival, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.broadcast import Broadcast, send
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.transports.disk import Invitation, SharedRoot
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.versions.compiled import compile_loops
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.open_route import OpenRoute
from torchrl_ext.data.versions.owned import Owned, steps
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.checkpoint import local_checkpoint
from torchrl_ext.data.weights.source import WeightSource

_Taken = TypeVar("_Taken")

__all__ = ["DeltaOffer", "DeltaReader", "DeltaTransport"]


class DeltaOffer(Wire, frozen=True, kw_only=True):
    """Where versions come from: a root (`Invitation`), or a group in which they are broadcast.

    Attributes:
        needs_base: deltas are decoded with all old bytes, of which workers keep a copy then.
        encoding: its name; "" where it is not known, of a root that a caller names.
        base: the checkpoint on which the first version is a delta.
        group: the offer of the collective transport that broadcasts them.
    """

    needs_base: bool = False
    encoding: str = ""
    base: str | None = None
    group: Info | None = None
    root: str | None = None
    probe: str = ""
    run_id: str = ""
    trainer: str = ""


@final
class DeltaReader(StandaloneEnd):
    """Follows a chain; a version that was staged, or that `next` returned, stays open, so that none can prune it.

    Args:
        store: holds the versions; in memory where a group brings them.
        base: the checkpoint that the worker holds already.
        group: brings the versions.
        copies: names the tensors of which whole copies are kept.
        slices: the blocks that are read of changes, by name.
    """

    def __init__(
        self,
        store: Store,
        base: str | None,
        *,
        group: GroupWorker | None = None,
        copies: Callable[[str], bool] = lambda name: False,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
    ) -> None:
        self._store = store
        self._chain = Chain(store)
        self._broadcast = None if group is None else Broadcast(group, store, self._chain)
        self._reader = ChainReader(self._chain, base, None if self._broadcast is None else self._broadcast.kept.open)
        self._reader.want(slices or {})
        self._reader.retain(copies)
        self._opened: OpenRoute | None = None
        self._follower = Follower(self._chain, None if self._broadcast is None else self._arrivals)

    def _arrivals(self, within: Deadline) -> Iterator[None]:
        """Yield whenever a broadcast may have brought another version, until the deadline."""
        assert self._broadcast is not None
        yield
        while self._broadcast.fetch(within):
            yield

    def stage(self, version: int, held: Callable[[], Mapping[str, str]] | None, within: Deadline) -> Changes | None:
        def found(version: int) -> Changes | None:
            changes = None
            if held is not None:
                if self._reader.held is None:
                    self._reader.adopt(version, held)
                changes = self._reader.changes(version)
            if changes is None:  # it has to be read in full
                self._pin(self._reader.open(version))
            return changes

        return self._reach(version, found, within)

    def _reach(self, version: int, take: Callable[[int], _Taken], within: Deadline) -> _Taken:
        """Return what ``take`` finds: a filesystem may show a version late, and a broadcast takes a while."""
        within = within.within(VISIBLE_S) if self._broadcast is None else within.again()
        try:
            return self._follower.reach(version, take, within)
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
        return self._follower.newer(opened, within, None if received is None else (run, received.version))

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


class DeltaTransport(StandaloneTransport):
    """Publishes a full keyframe first, then only changes. Readers catch up from any version.

    Args:
        root: directory that the trainer and every worker can access under the same path; or the URL of a remote store,
            whose settings each side finds in its environment.
            None with carrier ``"collective"``.
        carrier: with ``"disk"``, workers read the versions that the trainer publishes under ``root``; with
            ``"collective"``, the trainer broadcasts the same versions, and each end keeps the data that it needs in
            memory.
        encoding: one of `encodings`.
        keyframe_every: number of versions after which a keyframe is published beside the delta; 0 for only the first
            version.
        base: checkpoint directory that the readers already hold, or a name of the Hub in the local cache; the first
            version of a root is then a delta on it.
        keep_files: never remove old versions. By default, versions that neither the newest keyframe nor a reader needs
            are removed.
        shard_bytes: largest total size of the tensors in one file of a keyframe, in bytes.
        files: as in `DiskTransport`, for keyframes.
        master_address, master_port, rank, world_size, device, secret: settings of the group of carrier
            ``"collective"``, as in `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        root: the directory, as an absolute path; or the URL.

    Raises:
        ConfigError: the encoding is unknown (the message lists all); the carrier is unknown; or there is a root with
            carrier ``"collective"``, or no root with ``"disk"``.

    Example:
        >>> trainer, worker = tx.DeltaTransport(root), tx.DeltaTransport(root)
        >>> held = torch.nn.Linear(4, 2)
        >>> trainer.send_weights(policy)  # a keyframe; what follows is what changed
        >>> _ = worker.receive_weights(timeout=5.0, model=held)
        >>> bool((held.weight == policy.weight).all()), worker.received_version
        (True, 1)
    """

    name: ClassVar[str] = "delta"
    abilities: ClassVar[Abilities] = Abilities(digests=True, compares=True, gathers=False)

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        carrier: str = "disk",
        encoding: str = "auto",
        keyframe_every: int = 25,
        base: str | os.PathLike[str] | None = None,
        keep_files: bool = False,
        shard_bytes: int = 4 << 30,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int | None = 0,
        world_size: int | None = None,
        device: Any = None,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if carrier not in ("disk", "collective"):
            raise ConfigError(f"there is no carrier {carrier!r}", expected="'disk' or 'collective'")
        if (root is None) != (carrier == "collective"):
            raise ConfigError(
                "carrier 'disk' needs a root" if root is None else "carrier 'collective' takes no root",
                expected="root= for files that both sides see, or carrier='collective' without one",
            )
        if keyframe_every < 0:
            raise ConfigError(
                f"keyframe_every is {keyframe_every}", expected="a number of versions, or 0 for no further keyframes"
            )
        self._codec = encodings.make(encoding)
        run_id = uuid.uuid4().hex
        self._store: Store
        full: FullWriter
        self._group: VLLMCollectiveTransport | None = None
        if root is None:
            self._store, self._kept = MemoryStore(), KeptTensors()
            full = self._kept
            self._group = VLLMCollectiveTransport(
                master_address, master_port, rank, world_size, device, secret=secret, timeout_s=timeout_s
            )
        else:
            self._store, full = open_store(root), FullWriter(shard_bytes, files)
        self.root = self._store.url
        self._shared = SharedRoot(self._store, run_id)
        self._base = None if base is None else os.path.abspath(local_checkpoint(base))
        self._chain = Chain(self._store, run_id)
        self._own = Owned(self._codec, full)
        self._writer = ChainWriter(
            self._store,
            self._chain,
            run_id,
            self._own,
            keyframe_every=keyframe_every,
            base=self._base,
            keep_files=keep_files,
            one_owner=not self._store.joined or self._codec.container != BLOCKS,
            timeout_s=timeout_s,
        )

    @classmethod
    def encodings(cls) -> tuple[str, ...]:
        """Return the names that ``encoding=`` takes."""
        return tuple(encodings.names())

    @property
    def baseline_bytes(self) -> int:
        """Bytes of the newest version that this trainer process keeps as the baseline of deltas."""
        return self._own.nbytes

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        self._begin()
        compile_loops(
            self._codec.name, [ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items()]
        )
        if self._group is not None:
            self._group.init_all_workers_group({})  # versions are sent, whatever the model
        self._connected = True

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        if self._chain.own():
            self._writer.forget()
        self._connected = True
        self._begin()
        opening = Handoff() if self._group is None else self._group.open(workers, (), within)
        offer = DeltaOffer(
            needs_base=self._codec.whole_base,
            encoding=self._codec.name,
            base=self._base,
            group=opening.info if self._group is not None else None,
            **(self._shared.invite() if self._group is None else {}),
        )

        def transfer(within: Deadline) -> None:
            compile_loops(self._codec.name, params)  # while workers do so, too
            opening.transfer(within)

        return Handoff(info=offer.to_json(), transfer=transfer)

    def _begin(self) -> None:
        if self._group is not None:
            self._writer.restart()  # workers may be new, and hold no version

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        if self._group is not None and self._group.rank:
            raise TransportError(
                f"send_weights was called on rank {self._group.rank}",
                expected="rank 0, the trainer; other ranks receive",
                state="nothing was sent",
            )
        self._shared.clear()  # workers that joined have found the probe
        if update.anew and self._base is not None:  # else the chain begins with a keyframe, which workers can read
            self._writer.renew()
        began, stats = time.perf_counter(), TransferStats()
        if self._chain.own():
            self._writer.forget()
            self._shared.moved()
        delta = self._writer.publish(update.source, update.version, self.ranks.session)
        self._connected = True
        if delta is not None:
            elements = sum(map(math.prod, map(attrgetter("shape"), update.params)))
            stats.bytes = sum(delta.files.values())
            stats.density = int(delta.changed.sum()) / max(1, elements)
            stats.rank_bytes = self._writer.rank_bytes
            stats.encoding = _kinds(delta)
        stats.spans.since("publish", began)
        if self._group is None:
            return Handoff(served=self._writer.acknowledge, digest=self._writer.digest, stats=stats)
        ahead = partial(send, self._group, self._store, self._kept, update.version)
        return Handoff(ahead=ahead, served=self._writer.acknowledge, digest=self._writer.digest, stats=stats)

    def rank_steps(self, source: WeightSource) -> Steps:
        return steps(self._own, source, self._store, self.ranks.rank, self._base, self.timeout_s)

    def latest_version(self) -> int:
        return self._chain.newest()

    def check_connection(self) -> bool:
        reached = self._store.available() if self._group is None else self._group.check_connection()
        return self._connected and reached

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def shutdown(self) -> None:
        super().shutdown()
        if self._group is not None:
            self._group.shutdown()
            self._kept.tensors = {}
            self._chain.prune(before=self._chain.newest() + 1)  # the pointer stays, so that numbers go on
        elif self._store.owned:
            self._shared.clear()
        self._store.disown()

    # worker end

    def attend(self, within: Deadline) -> DeltaReader:
        return DeltaReader(
            self._store,
            self._base,
            group=None if self._group is None else self._group.attend(within),
            copies=lambda name: True,  # what is returned is whole, so the copy to which changes are applied is here
        )

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> DeltaReader:
        offer = DeltaOffer.from_json(info, "the offer of a delta transport")
        if offer.encoding:
            compile_loops(offer.encoding, here.params)
        store: Store = MemoryStore()
        group = None if offer.group is None else VLLMCollectiveTransport.join(offer.group, here, within)
        if group is None:
            root = offer.root or ""
            store = open_store(root)
            Invitation(root=root, probe=offer.probe, run_id=offer.run_id, trainer=offer.trainer).find(store, within)
        copies, slices = lambda name: offer.needs_base or here.copies(name), here.slices
        return DeltaReader(store, offer.base, group=group, copies=copies, slices=slices)


def _kinds(delta: DeltaManifest) -> str:
    """Return how the changes of a delta were coded."""
    kinds, total = [codec["name"] for codec in delta.codecs], delta.blocks.size
    if len(kinds) == 1:
        return str(kinds[0])
    counts = np.bincount(delta.blocks["codec"], minlength=len(kinds)).tolist()
    return ", ".join(f"{count} of {total} blocks {kind}" for count, kind in zip(counts, kinds, strict=True))
