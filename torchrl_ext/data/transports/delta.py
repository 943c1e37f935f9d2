"""`DeltaTransport` publishes changes as a chain of versions, which a reader can join at any point."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, TransportError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info, ParamMeta, Wire
from torchrl_ext.data.group.ranks import Steps
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.stores.store import MemoryStore, Store
from torchrl_ext.data.transports.base import Abilities, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.broadcast import Broadcast, send
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.transports.disk import Invitation, SharedRoot, VersionReader
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.versions.compiled import compile_loops
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.owned import Owned, steps
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.checkpoint import local_checkpoint
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["DeltaOffer", "DeltaTransport"]


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
        full: FullWriter | KeptTensors
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
            self._chain,
            self._own,
            keyframe_every=keyframe_every,
            base=self._base,
            keep_files=keep_files,
            timeout_s=timeout_s,
        )

    @classmethod
    def encodings(cls) -> tuple[str, ...]:
        """Return the names that ``encoding=`` takes."""
        return tuple(encodings.names())

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        self._begin()
        compile_loops(
            self._codec.name, [ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items()]
        )
        if self._group is not None:
            self._group.init_all_workers_group({})  # versions are sent, whatever the model
        self._connected = True

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        self._chain.own()
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
        self._chain.own()
        delta = self._writer.publish(update.source, update.version, self.ranks.session)
        self._connected = True
        if delta is not None:
            elements = sum(map(math.prod, map(attrgetter("shape"), update.params)))
            stats.bytes = sum(delta.files.values())
            stats.density = int(delta.changed.sum()) / max(1, elements)
            stats.rank_bytes = self._writer.rank_bytes
            stats.encoding = ", ".join(delta.codecs)
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
            self._writer.restart()  # another trainer may publish here meanwhile
        self._store.disown()

    # worker end

    def attend(self, within: Deadline) -> VersionReader:
        chain, broadcast = Chain(self._store), None
        if self._group is not None:
            broadcast = Broadcast(self._group.attend(within), self._store, chain)
        # what is returned is whole, so the copies to which changes are applied are here
        return VersionReader(chain, self._base, broadcast=broadcast, copies=lambda name: True)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> VersionReader:
        offer = DeltaOffer.from_json(info, "the offer of a delta transport")
        if offer.encoding:
            compile_loops(offer.encoding, here.params)
        store: Store
        if offer.group is None:
            root, broadcast = offer.root or "", None
            chain = Chain(store := open_store(root))
            Invitation(root=root, probe=offer.probe, run_id=offer.run_id, trainer=offer.trainer).find(store, within)
        else:
            group = VLLMCollectiveTransport.join(offer.group, here, within)
            chain = Chain(store := MemoryStore())
            broadcast = Broadcast(group, store, chain)
        copies = lambda name: offer.needs_base or here.copies(name)  # noqa: E731
        return VersionReader(chain, offer.base, broadcast=broadcast, copies=copies, slices=here.slices)
