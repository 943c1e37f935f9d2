"""`IPCTransport` carries weights through memory that a trainer shares with engines on its machine.

The ends leave each other notes in a key store (`torchrl_ext.data.group.store`) on a Unix socket of the trainer, which
lets in processes of this user and of root only. Both ends have to be of one release.

=====================================  =====================================================================
``join/<number>``                      worker: its token, its name in messages, and the devices from which it
                                       can take weights, best first; the number is its rank, or without a
                                       control layer the first one that is free
``<token>/welcome``                    trainer: its name in messages, the number of the next handoff, and the
                                       handle of the staging buffer on the best device of both
``<token>/left``                       worker, or its will, without a control layer; with one it ends the
                                       connection
``<handoff>/version``                  trainer, without a control layer: version and parameters
``<handoff>/filled/<bucket>``          trainer: workers may copy the bucket
``<handoff>/taken/<bucket>/<number>``  worker: it has, so the bucket's half may be filled again
=====================================  =====================================================================
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Annotated, ClassVar, NamedTuple, final

import msgspec
import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import usable_device
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    IntegrityError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.base.types import Count, Info, Params, Wire, decoded
from torchrl_ext.data.group.store import LOST, HostedStore, KeyStore, RemoteStore, dial
from torchrl_ext.data.ipc.memory import HOST, SEGMENT_BYTES, SLOTS, Handle, SharedSegment, create, local_devices
from torchrl_ext.data.transports.base import Arrival, Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.buckets import Bucket, Lander, Packer, layout
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.weights.source import checked

__all__ = ["IPCEnd", "IPCTransport"]

log = logging.getLogger("torchrl_ext")

_PROTOCOL = "torchrl_ext-ipc5"
_SMALLEST_BYTES = 2048
_HOST_BYTES, _DEVICE_BYTES = 16 << 20, 512 << 20
_LEAST_BYTES = 1 << 20
"""If memory is short, a default buffer is halved, down to about this size in bytes."""
_MOST_BUCKETS = 1 << 20
_LOOK_S, _GREET_S = 0.1, 1.0
"""How often a wait asks whether a worker has left; how long a trainer that listens may take to answer, in seconds."""


class IPCOffer(Wire, frozen=True, kw_only=True):
    """The trainer's address; goes to workers by the control layer."""

    address: Annotated[str, msgspec.Meta(pattern=f"^{_PROTOCOL}-[0-9]+-[0-9a-f]{{32}}$")]


class _Member(NamedTuple):
    """A worker, as the trainer knows it."""

    token: str
    name: str
    segment: SharedSegment


class IPCTransport(StandaloneTransport):
    """Packs weights into one staging buffer, whose two halves are filled in turn, and hands it over by handle.

    While workers copy one half into their parameters, the trainer fills the other. On a CPU the buffer is anonymous
    shared memory, on a GPU an allocation that both open; every worker, of however many engines, maps the same one.
    Neither has a name that could outlive its processes. The trainer owns the buffer until `shutdown`; workers map it
    only while they receive.

    Args:
        channel: without a control layer, ends of one user with the same channel name connect; engines get the address
            from `open`.
        workers: without a control layer, the number of workers that a send waits for; more may join.
        bucket_bytes: size of the staging buffer, both halves, in bytes; by default 16 MiB on the host, where it fits in
            the processor's caches, and 512 MiB on a GPU; less if memory is short.
        device: ``"cpu"`` stages on the host even if there are GPUs; by default the trainer stages on the first GPU of a
            worker that both see, or else on the host.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.

    Example:
        >>> sender = tx.WeightSender(tx.IPCTransport(), tx.connect(address))  # an engine of this machine
        >>> sender.register_model(lm)
        >>> sender.update_weights().verified
        True
        >>> sender.shutdown()
    """

    name: ClassVar[str] = "ipc"

    def __init__(
        self,
        channel: str | None = None,
        *,
        workers: int = 1,
        bucket_bytes: int | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if bucket_bytes is not None and bucket_bytes < _SMALLEST_BYTES:
            raise ConfigError(f"bucket_bytes={bucket_bytes}", expected=f"{_SMALLEST_BYTES} or more")
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"workers={workers}, timeout_s={timeout_s}", expected="1 or more; more than 0")
        self._address = _address(hashlib.sha256((channel or "default").encode()).hexdigest())
        self._count, self._bucket_bytes = workers, bucket_bytes
        self._on_host = device is not None and usable_device(device).type == "cpu"
        self._segments = dict[str, SharedSegment]()
        self._store: KeyStore | None = None
        self._members = dict[int, _Member]()
        self._joined, self._handoff = 0, 1  # how many workers did, in this connection; the number of the next handoff

    @property
    def staging_bytes(self) -> int:
        """The size of the staging buffer, in bytes; with several GPUs, of each one's buffer."""
        if self._segments:
            return next(iter(self._segments.values())).flat.numel()
        nbytes = self._bucket_bytes or (_HOST_BYTES if self._devices() == [HOST] else _DEVICE_BYTES)
        return nbytes // SEGMENT_BYTES * SEGMENT_BYTES  # one size on every device, so one layout

    # trainer end

    def open(self, workers: int, params: Params, within: Deadline) -> Handoff:
        self.close()
        address = _address(uuid.uuid4().hex)
        store = self._store = HostedStore(address, None, "")
        return Handoff(
            info=IPCOffer(address=address).to_json(),
            transfer=lambda within: self._meet(store, workers, within, range(1, 1 + workers)),
        )

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        if self._store is None or self._store.lost():
            self.close()
            self._store = self._hosted(within)
        store = self._store
        self._meet(store, self._count, within)
        store.set(f"{self._handoff}/version", [arrival.version, [meta.to_json() for meta in arrival.params]])

    def _hosted(self, within: Deadline) -> HostedStore:
        """Listen at the channel's address, which an earlier trainer, this one too, may take a moment to leave."""
        refusal: TransportError | None = None
        for _ in within.within(_GREET_S).pauses(shortest_s=0.001, longest_s=0.05):
            try:
                return HostedStore(self._address, None, "")
            except TransportError as error:
                refusal = error
        raise refusal or within.error()

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """As `Transport.prepare`.

        Raises:
            ConfigError: the staging buffer is too small for the model.
        """
        stats = TransferStats()
        _buckets(update.params, self.staging_bytes // SLOTS)

        def transfer(within: Deadline) -> None:
            store, began = self._store, time.perf_counter()
            if store is None:
                raise NotConnectedError("this transport is not open", hint="connect again")
            try:
                self._transfer(store, update, within)
            except BaseException as error:
                store.close(f"weights version {update.version} did not arrive: {error}")
                if isinstance(error, (TransportError, DeadlineError)):
                    raise type(error)(
                        f"weights version {update.version} did not arrive: {error.what}",
                        state="no worker reports the version, and the connection is closed",
                        hint="send again when the workers are back",
                    ) from error
                raise
            stats.spans.since("transfer", began)

        return Handoff(transfer=transfer, stats=stats)

    def _transfer(self, store: KeyStore, update: Update, within: Deadline) -> None:
        members, number = self._members, 0
        segments = {id(member.segment): member.segment for member in members.values()}.values()
        packer = Packer(update.params, checked(update.source, update.params))
        for number, bucket in enumerate(_buckets(update.params, self.staging_bytes // SLOTS)):
            self._await_taken(store, members, number - SLOTS, within.again())
            packer.fill(bucket, [segment.half(number) for segment in segments])
            for segment in segments:
                segment.settle()
            store.set(f"{self._handoff}/filled/{number}", True)
        packer.finish()
        self._await_taken(store, members, number, within.again())
        store.drop(f"{self._handoff}/")
        self._handoff += 1

    def _await_taken(self, store: KeyStore, members: dict[int, _Member], bucket: int, within: Deadline) -> None:
        """Wait until every worker has copied ``bucket``.

        Raises:
            NotConnectedError: a worker is gone, or gave up.
            DeadlineError, TransportError: one does not go on.
        """
        if bucket < 0:
            return
        for number, member in members.items():
            taken = f"{self._handoff}/taken/{bucket}/{number}"
            while True:
                left = store.find(f"{member.token}/left")  # asked first: it may leave once it has the last bucket
                if store.find(taken, within.within(_LOOK_S)) is not None:
                    break
                if left:
                    raise NotConnectedError(f"{member.name} is gone")
                within.check(f"{member.name} did not take bucket {bucket}")
            store.drop(taken)
        store.drop(f"{self._handoff}/filled/{bucket}")

    def _meet(self, store: KeyStore, least: int, within: Deadline, ranks: range = range(0)) -> None:
        """Wait until ``least`` workers are connected, and let in those that joined beyond.

        Raises:
            DeadlineError: they did not come.
            NotConnectedError, TransportError: one could not stay, or another thread gave up; or there is no memory.
        """
        while True:
            for number in [number for number, own in self._members.items() if store.find(f"{own.token}/left")]:
                store.drop(f"{self._members.pop(number).token}/")
            waits = len(self._members) < least
            note = store.find(f"join/{self._joined + 1}", within.within(_LOOK_S) if waits else None)
            if note is not None:
                token, name, devices = decoded(note, tuple[str, str, list[str]], "a worker's note", IntegrityError)
                segment = self._segment_on(devices)
                self._joined += 1
                self._members[self._joined] = _Member(token, name, segment)
                own = f"the trainer (pid {os.getpid()})"
                store.set(f"{token}/welcome", [own, self._handoff, segment.handle])
            elif not waits:
                return
            elif within.over:
                absent = [f"rank {rank}" for rank in ranks if store.find(f"join/{rank}") is None]
                raise within.error(
                    ", ".join(absent or [f"{least - len(self._members)} of {least} workers"]) + " did not connect",
                    expected="workers on this machine, of this user and this release of torchrl_ext",
                    state="nothing was sent",
                    hint="call receive_weights there, or let the engine connect",
                )

    def _segment_on(self, devices: list[str]) -> SharedSegment:
        """Return the staging buffer on the first of a worker's devices that this process can use too.

        Raises:
            TransportError: there is no memory, and no smaller one may do: its size was asked for, or is already used.
        """
        own, nbytes = self._devices(), self.staging_bytes
        device = next((device for device in devices if device in own), HOST)
        while device not in self._segments:
            try:
                self._segments[device] = create(device, nbytes)
            except TransportError as error:
                if self._bucket_bytes or self._segments or nbytes <= _LEAST_BYTES:
                    raise
                nbytes //= 2
                log.warning("the staging buffer has %d bytes only: %s", nbytes, error.what)
        return self._segments[device]

    def _devices(self) -> list[str]:
        return [HOST] if self._on_host else local_devices()

    # worker end

    def attend(self, within: Deadline) -> IPCEnd:
        return IPCEnd(self._address, self._devices(), self.timeout_s)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> IPCEnd:
        """As `Transport.join`.

        Raises:
            DeadlineError: the trainer did not accept this worker in time.
            TransportError: the trainer is on another machine, or has another user or pid namespace.
        """
        offer = IPCOffer.from_json(info, "the offer of an ipc transport")
        end = IPCEnd(offer.address, local_devices(), within.timeout_s, here.rank)
        try:
            if not end.enter(within):
                raise within.error(
                    f"the trainer at {offer.address} did not let in {end.name}",
                    expected="every worker of every engine to join",
                    hint="see which worker the trainer's error names",
                )
        except BaseException:
            end.close()
            raise
        return end

    # both ends

    def check_connection(self) -> bool:
        store = self._end.store if isinstance(self._end, IPCEnd) else self._store
        return store is not None and not store.lost()

    def close(self) -> None:
        store, self._store = self._store, None
        self._members, self._joined = {}, 0
        if store is not None:
            store.close()

    def shutdown(self) -> None:
        super().shutdown()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


@final
class IPCEnd(StandaloneEnd):
    """A worker's end: notes in the trainer's store, and buckets copied out of its staging buffer.

    Args:
        address: where the trainer listens.
        devices: where this worker can take weights from, best first.
        patience_s: how long the trainer may take to answer, in seconds.
        rank: among the workers of all engines; None without a control layer.

    Attributes:
        name: what messages call this worker.
        store: the connection; None without one.
    """

    def __init__(self, address: str, devices: list[str], patience_s: float, rank: int | None = None) -> None:
        self._address, self._devices, self._patience_s, self._rank = address, devices, patience_s, rank
        self.name = f"{'a worker' if rank is None else f'rank {rank}'} (pid {os.getpid()})"
        self._token, self._number = "", 0
        self.store: RemoteStore | None = None
        self._welcome: tuple[str, int, Handle] | None = None

    def enter(self, within: Deadline) -> bool:
        """Connect to the trainer, and map its buffer once, so that what prevents it is known by then.

        Returns:
            Whether the trainer has let this worker in; without a control layer it does so when it sends.

        Raises:
            DeadlineError: no trainer listens, or it does not answer.
            NotConnectedError: it is gone, or gave up.
            TransportError: another machine, user or pid namespace.
        """
        if self.store is None:
            self._token, self._welcome = uuid.uuid4().hex, None
            store = self.store = RemoteStore(self._address, None, "", within)
            store.patience_s = self._patience_s
            store.will(f"{self._token}/left" if self._rank is None else LOST, f"{self.name} is gone")
            note = [self._token, self.name, self._devices]
            for number in count(1) if self._rank is None else (self._rank,):
                self._number = number
                store.set(f"join/{number}", note, keep=True)
                if store.find(f"join/{number}") == note:
                    break
        if self._welcome is None:
            found = self.store.find(f"{self._token}/welcome", within)
            if found is not None:
                welcome = decoded(found, tuple[str, Count, Handle], "the trainer's note", IntegrityError)
                try:
                    welcome[2].attach().close()
                except BaseException as error:
                    self._give_up(error)
                    raise
                self._welcome = welcome
        return self._welcome is not None

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """As `StandaloneEnd.next`; each version is announced once, and a trainer that is gone may come back."""
        for _ in within.pauses(shortest_s=0.005, longest_s=0.05):
            try:
                if self.store is None:
                    dial(self._address, None, within).close()  # see whether a trainer listens; it may take its time
                patient = Deadline(max(within.left_s, _GREET_S), within.who, within.stop)
                if not self.enter(within if self.store else patient) or self._welcome is None or self.store is None:
                    continue
                found = self.store.find(f"{self._welcome[1]}/version", within)
                if found is not None:
                    version, params = decoded(found, tuple[Count, Params], "the trainer's note", IntegrityError)
                    return Arrival(version=version, params=params)
            except (NotConnectedError, DeadlineError):
                self.close()  # another trainer may come after it
            except TransportError:
                if not within.stop.is_set():
                    raise
        return None

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        """As `LandingEnd.receive`; the deadline begins anew with each bucket.

        Raises:
            NotConnectedError: the trainer is gone, or gave up.
            DeadlineError, TransportError: it does not go on.
            ConfigError: it would take too many buckets.
        """
        store, complete = self.store, False
        if store is None or self._welcome is None:
            raise NotConnectedError("this worker is not connected to a trainer", hint="connect first")
        trainer, handoff, handle = self._welcome
        try:
            segment = handle.attach()
            try:
                lander = Lander(arrival.params, into, segment.flat.device)
                buckets = _buckets(arrival.params, segment.capacity)
                for number, bucket in enumerate(buckets):
                    if store.find(f"{handoff}/filled/{number}", within.again()) is None:
                        raise within.error(
                            f"{trainer} did not fill bucket {number}", state="a part of the version may have landed"
                        )
                    pairs = lander.take(bucket, segment.half(number))
                    segment.settle()
                    if number + 1 == len(buckets):
                        self._welcome, complete = (trainer, handoff + 1, handle), True
                    store.set(f"{handoff}/taken/{number}/{self._number}", True)
                    yield from pairs
            finally:
                segment.close()
        except BaseException as error:
            if not complete:
                self._give_up(error)
            raise

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        self._give_up(error)

    def close(self) -> None:
        store, self.store, self._welcome = self.store, None, None
        if store is None:
            return
        if self._rank is None:
            store.patience_s = _GREET_S
            with suppress(WeightSyncError):  # it is over already
                store.set(f"{self._token}/left", True)
                store.find(f"{self._token}/left")  # now the trainer knows, and does not count on this worker
        store.close()

    def _give_up(self, error: BaseException) -> None:
        """End the connection, and tell trainer and other workers why."""
        if self.store is not None:
            self.store.close(f"{self.name} gave up: {str(error) or type(error).__name__}")
        self.close()


def _address(token: str) -> str:
    """Return an address of this user's in the kernel's abstract namespace."""
    return f"{_PROTOCOL}-{os.geteuid()}-{token[:32]}"


def _buckets(params: Params, capacity: int) -> tuple[Bucket, ...]:
    """Return the buckets of ``capacity`` bytes in which ``params`` travel: one at least.

    Raises:
        ConfigError: there would be so many that it takes too long, and too much memory, to lay them out.
    """
    needed = -(-sum(meta.nbytes for meta in params) // capacity)
    if needed > _MOST_BUCKETS:
        raise ConfigError(
            f"a handoff takes {needed:,} buckets of {capacity:,} bytes",
            expected=f"{_MOST_BUCKETS:,} or fewer",
            state="nothing was sent",
            hint="give IPCTransport a larger bucket_bytes",
        )
    return layout(params, capacity) or (Bucket((), 0),)
