"""`DeltaTransport` publishes what changed, as a chain of versions that a reader can join and follow at any point."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from torchrl_ext.codecs.base import codec_from_json, encodings, make_codec, needs_base
from torchrl_ext.codecs.pipeline import worker_threads
from torchrl_ext.codecs.slime.current import CHECKSUMS
from torchrl_ext.errors import ConfigError, TransportError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.stores import open_store, version_name
from torchrl_ext.stores.chain import Chain
from torchrl_ext.transports.base import Incremental
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.delta.by_shard import ByShard, of_blocks, refuse
from torchrl_ext.transports.delta.carriers import Broadcast, SharedFiles
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.foreign import ForeignVersions
from torchrl_ext.versions.hooks import PRE_READ_HOOK, hook_at, read_hook
from torchrl_ext.versions.open_route import OpenRoute
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.versions.warm import Warming
from torchrl_ext.versions.writer import ChainWriter, Copies
from torchrl_ext.weights.checkpoint import local_checkpoint
from torchrl_ext.weights.devices import usable_device
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import WeightSource

__all__ = ["DeltaTransport"]


class DeltaTransport(StandaloneTransport, Incremental):
    """Publishes a full keyframe first, then what changed. Readers catch up from whatever version they hold.

    Args:
        root: directory that the trainer and every worker reach under the same path; or the URL of an object store.
            None with carrier ``"collective"``.
        carrier: ``"disk"``, where workers read what the trainer publishes under ``root``; or ``"collective"``, where
            the same versions are broadcast to them, and each end keeps in its memory what it needs.
        encoding: one of `encodings`.
        keyframe_every: every so many versions a full one is published beside the delta; 0 for the first one only.
        base: checkpoint directory that the readers hold already, or a name of the Hub in the local cache; the first
            version of a root is a delta on it then.
        keep_files: never remove old versions. Else those go that neither the newest keyframe nor a reader needs.
        shard_bytes: bound on the tensors of one file of a keyframe, in bytes.
        files: as in `DiskTransport`, for keyframes.
        settings: of the encoding.
        storage_options: of the fsspec filesystem behind a URL; they are not told to workers.
        checksum: of tensors, in files of encodings ``"xor"`` and ``"overwrite"``; one of slime's `CHECKSUMS`.
        post_write_hook: function, or ``"module:function"``, to call with the root and the name of a complete version.
        pre_read_hook: to call with the root, and a version if it takes two, before a reader looks for one. A worker in
            an engine takes it from its own environment variable ``TORCHRL_EXT_PRE_READ_HOOK``, never from the trainer.
        baseline_device: where the trainer keeps the tensors of the newest version, which deltas are taken against: None
            for host memory, pinned where the weights are on a GPU; or ``"cuda"``, which takes the model's size on the
            GPU once more, and spares a copy of the whole model to the GPU for every version.
        local_dir: directory on each engine's host, for the copies that it keeps of parameters which cannot be patched
            in place (quantised, packed), and readers without a control layer of all; None keeps them in memory.
        by_shard: every rank of the trainer makes this transport, keeps only what deltas of its own blocks are taken
            against (`WeightSource.shards`), and writes its own files of a version; workers read what they need. For
            carrier ``"disk"``, and all encodings but those of other libraries' files.
        master_address, master_port, rank, world_size, device: of the group of carrier ``"collective"``, as in
            `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        root: the directory, as an absolute path; or the URL.

    Raises:
        ConfigError: no such encoding (the message lists them), or one that does not take ``settings``; no such
            carrier; a root or hooks with carrier ``"collective"``, or no root with ``"disk"``; ``by_shard`` with a
            carrier or an encoding that has no parts.

    Example:
        >>> trainer, worker = tx.DeltaTransport(root), tx.DeltaTransport(root)
        >>> held = torch.nn.Linear(4, 2)
        >>> trainer.send_weights(policy)  # a keyframe; what follows is what changed
        >>> _ = worker.receive_weights(timeout=5.0, model=held)
        >>> bool((held.weight == policy.weight).all()), worker.received_version
        (True, 1)
    """

    name: ClassVar[str] = "delta"
    proves: ClassVar[bool] = True
    parts: ClassVar[bool] = False  # changes are of whole versions; what did not change costs nothing

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
        settings: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        checksum: str = CHECKSUMS[0],
        post_write_hook: str | Callable[[str, str], Any] | None = None,
        pre_read_hook: str | Callable[..., Any] | None = None,
        baseline_device: Any = None,
        local_dir: str | os.PathLike[str] | None = None,
        by_shard: bool = False,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int | None = 0,
        world_size: int | None = None,
        device: Any = None,
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
        if carrier == "collective" and (post_write_hook or pre_read_hook):
            raise ConfigError("hooks are for files that both sides see", hint="leave them out, or take carrier='disk'")
        if keyframe_every < 0:
            raise ConfigError(f"keyframe_every is {keyframe_every}", expected="a number of versions, 0 for no more")
        if encoding == "auto":  # engines keep no copy of the base unless the caller asks for the tightest encoding
            settings = {"whole_base": False, "threads": worker_threads(), **(settings or {})}
        self._codec = make_codec(encoding, **(settings or {}))
        if by_shard:
            refuse(carrier, encoding)
            self._codec = of_blocks(self._codec)
        self._rank = rank or 0
        self._aborted, run_id = threading.Event(), uuid.uuid4().hex
        self._carrier: SharedFiles | Broadcast
        self._broadcast: Broadcast | None = None
        if root is None:
            group = VLLMCollectiveTransport(master_address, master_port, rank, world_size, device, timeout_s=timeout_s)
            self._carrier = self._broadcast = Broadcast(group)
        else:
            full = FullWriter(shard_bytes, files)
            self._carrier = SharedFiles(open_store(root, storage_options), run_id, full, self._aborted, timeout_s)
        self._wrote, self._reading = hook_at(post_write_hook), read_hook(pre_read_hook)
        self._base = None if base is None else os.path.abspath(local_checkpoint(base))
        self._local_dir = None if local_dir is None else os.path.abspath(local_dir)
        store = self._carrier.store
        self.root = store.url
        self._foreign = ForeignVersions(store, self._base, settles=True)
        self._chain = Chain(store, foreign=self._foreign)
        where = None if baseline_device is None else usable_device(baseline_device)
        self._by_shard = ByShard(self.name, store, self._base, where, timeout_s) if by_shard else None
        self._writer = ChainWriter(
            store,
            self._chain,
            run_id,
            codec=self._codec,
            full=self._carrier.full,
            keyframe_every=keyframe_every,
            base=self._base,
            keep_files=keep_files,
            checksum=checksum,
            baseline=partial(Copies, where) if self._by_shard is None else self._by_shard.baseline,
        )
        self._reader = ChainReader(self._chain, self._carrier.open_full, self._base, local_dir)
        self._opened: OpenRoute | None = None
        self._connected = self._alone = self._needs_base = False
        self._warming: Warming | None = None  # until the first update has waited for it

    @classmethod
    def encodings(cls) -> tuple[str, ...]:
        """Return the names that ``encoding=`` takes."""
        return tuple(encodings.names())

    @classmethod
    def from_info(cls, info: Info) -> DeltaTransport:
        known = {"base": info["base"], "local_dir": info.get("local_dir")}
        if "wire" not in info:
            return cls(info["root"], pre_read_hook=os.environ.get(PRE_READ_HOOK) or None, **known)
        group = Broadcast.group(info)
        made = cls(carrier="collective", timeout_s=group.timeout_s, **known)
        if made._broadcast is not None:
            made._broadcast.link = group
        return made

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        self._begin(tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items()))
        if self._broadcast is not None:
            self._broadcast.link.init_all_workers_group({})  # versions are sent, whatever the model
        self._connected = True

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        self._carrier.store.own()
        self._connected = True
        warming = self._begin(params)
        opening = self._carrier.open(workers)
        info = {"transport": self.name, "base": self._base, "local_dir": self._local_dir}

        def transfer() -> None:
            opening.transfer()
            warming.wait(self.timeout_s)

        told = {"needs_base": needs_base(self._codec), "codec": self._codec.to_json()}
        return Handoff(info={**opening.info, **info, **told}, transfer=transfer)

    def _begin(self, params: tuple[ParamMeta, ...]) -> Warming:
        if self._broadcast is not None:
            self._writer.restart()  # workers may be new, and hold no version
        self._warming = Warming(self._codec, params, beside=False)
        return self._warming

    def _begun(self, warming: Warming) -> None:
        """Wait for compiled loops, before the first update alone, and remove what only connecting ends needed."""
        warming.wait(self.timeout_s)
        self._warming = None
        self._carrier.joined()

    @property
    def drives(self) -> bool:
        return self._by_shard is None or self._by_shard.ranks.rank == 0

    @property
    def baseline_bytes(self) -> int:
        """Bytes of what this trainer process keeps of the newest version, to take deltas against."""
        return self._writer.baseline_bytes if self._by_shard is None else self._by_shard.own.nbytes

    def follow(self, source: WeightSource) -> None:
        if self._by_shard is None:
            super().follow(source)
        else:
            self._by_shard.follow(source)

    def dismiss(self, source: WeightSource | None, error: BaseException | None = None) -> None:
        if self._by_shard is not None:
            self._by_shard.dismiss(error)
        elif error is not None:
            super().dismiss(source, error)

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        rank = self._rank if self._by_shard is None else self._by_shard.ranks.rank
        if rank != 0:
            raise TransportError(
                f"send_weights was called on rank {rank}",
                expected="rank 0, the trainer; other ranks receive",
                state="nothing was sent",
            )
        if self._warming is not None:
            self._begun(self._warming)
        began = time.perf_counter()
        if not self._carrier.store.owned:
            self._carrier.store.own()
        delta = self._writer.publish(source, version)
        if self._wrote is not None:
            self._wrote(self.root, version_name(version))
        self._connected = True
        params = source.params()
        elements = sum(map(math.prod, map(attrgetter("shape"), params)))
        changed = 0 if delta is None else sum(map(attrgetter("changed"), delta.params))
        self.stats.bytes = None if delta is None else sum(delta.files.values())
        self.stats.density = 1.0 if delta is None else changed / max(1, elements)
        self.stats.spans = {"publish": time.perf_counter() - began}
        if self._by_shard is not None and delta is not None:
            self.stats.rank_bytes = self._by_shard.rank_bytes
        info = {"transport": self.name, "version": version, "params": list(map(ParamMeta.to_json, params))}
        handoff = Handoff(info=info, acknowledge=self._writer.acknowledge)
        if self._broadcast is None:
            return handoff
        base = None if delta is None else delta.base_version
        return replace(handoff, ahead=partial(self._broadcast.send, version, base))

    def builds_on(self, version: int) -> bool:
        return self._writer.builds_on(version)

    def renew(self) -> None:
        if self._base is not None:  # else the chain begins with a keyframe, which they can read
            self._writer.renew()

    def latest_version(self) -> int:
        return self._chain.newest()

    # worker end

    def want(self, slices: Mapping[str, tuple[Block, ...]], whole: Mapping[str, str]) -> None:
        self._reader.want(slices)

    def join(self, info: Info) -> None:
        self._carrier.join(info)
        self._needs_base = info["needs_base"]
        self._reader.retain(lambda name: self._needs_base)
        if "codec" in info:
            params = [ParamMeta.from_json(row) for row in info.get("params", ())]
            self._warming = Warming(codec_from_json(info["codec"]), params, beside=True)
        self._connected = True

    def retain(self, names: Callable[[str], bool]) -> None:
        self._reader.retain(lambda name: self._needs_base or names(name))

    @property
    def incremental(self) -> Incremental:
        return self

    def expect(self, version: int, files: Sequence[str] | None, label: str | None) -> None:
        self._reader.expect(version, files, label, self._foreign)

    def prefetch(self, version: int, held: Callable[[], Mapping[str, str]] | None = None) -> Changes | None:
        self._await_version(version)
        if held is not None:
            if self._warming is not None:
                self._begun(self._warming)
            if self._reader.held is None:
                self._reader.adopt(version, held)
            changes = self._reader.changes(version)
            self.stats.worker_bytes = (self._reader.read_bytes,)
            if changes is not None:
                return changes
        self._pin(self._open(version))
        return None

    def landed(self, changes: Changes) -> None:
        self._reader.advance(changes)
        if self._broadcast is not None:
            self._broadcast.landed()

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        route, self._opened = self._opened, None
        if route is None or route.reached[1] != info["version"]:
            self._await_version(info["version"])
            route = self._open(info["version"])
        yield from self._reader.tensors(route, into)
        if self._broadcast is not None:
            self._broadcast.landed()

    # both ends

    def abort(self) -> None:
        self._aborted.set()
        self._carrier.abort()

    def check_connection(self) -> bool:
        return self._connected and self._carrier.check_connection()

    def shutdown(self) -> None:
        self._connected = False
        self.abort()
        self._pin(None)
        self._carrier.shutdown()
        self._carrier.store.disown()

    # without a control layer

    def poll(self, timeout_s: float) -> Info | None:
        self._aborted.clear()
        if not self._alone:  # what is returned is whole, so the copy to which changes are applied is kept here
            self._alone = True
            self._reader.retain(lambda name: True)
        for _ in self._carrier.looks(timeout_s):
            if self._reading is not None:
                self._reading(self.root, self.received_version + 1)
            version = self._reader.unseen(self.received_version)
            if version:
                with suppress(FileNotFoundError):  # pruned meanwhile: a newer one is coming
                    self._chain.offered(version)
                    self._pin(route := self._reader.open(version))
                    self._connected = True
                    rows = [meta.to_json() for meta in route.params]
                    return {"transport": self.name, "version": version, "params": rows}
        return None

    # its helpers

    def _open(self, version: int) -> OpenRoute:
        try:
            return self._reader.open(version)
        except FileNotFoundError as error:
            raise self._carrier.lost(version, self._chain) from error

    def _pin(self, route: OpenRoute | None) -> None:
        """Hold one route open, so that pruning cannot remove it before it is read."""
        if self._opened is not None:
            self._opened.close()
        self._opened = route
        self.stats.worker_bytes = (self._reader.read_bytes,)

    def _await_version(self, version: int) -> None:
        """Wait until a version is here: a shared filesystem may show it late, and a broadcast takes a while."""
        missing: FileNotFoundError | None = None
        self._aborted.clear()  # an earlier abort ended the waits of its time, and not this one
        self._chain.known.clear()
        self._reader.remember(version)
        for _ in self._carrier.looks(self._carrier.wait_s):
            if self._reading is not None:
                self._reading(self.root, version)
            try:
                self._chain.version(version)
                return
            except FileNotFoundError as error:
                missing = error
        raise self._carrier.lost(version, self._chain) from missing
