"""`IPCTransport` carries weights through memory that a trainer shares with engines on its machine."""

from __future__ import annotations

import logging
import time
import uuid
from typing import ClassVar

import torch

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import usable_device
from torchrl_ext.base.errors import ConfigError, DeadlineError, NotConnectedError, TransportError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.group.links import new_address, shared_address
from torchrl_ext.data.ipc.device_memory import create_on, sharable
from torchrl_ext.data.ipc.memory import HOST, SEGMENT_BYTES, SLOTS, SharedSegment, create
from torchrl_ext.data.ipc.messages import Announce, Done, IPCLoad, IPCOffer
from torchrl_ext.data.ipc.worker import IPCWorker, buckets_of
from torchrl_ext.data.ipc.workers import ConnectedWorkers
from torchrl_ext.data.transports.base import Handoff, TransferStats, Update, Worker
from torchrl_ext.data.transports.buckets import Packer
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.weights.source import checked

__all__ = ["IPCTransport"]

log = logging.getLogger("torchrl_ext")

_SMALLEST_BYTES = 2048
_HOST_BYTES, _DEVICE_BYTES = 16 << 20, 512 << 20
_LEAST_BYTES = 1 << 20
"""If memory is short, a default buffer is halved, down to about this size in bytes."""


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
        self._channel, self._count, self._bucket_bytes = channel or "default", workers, bucket_bytes
        self._on_host = device is not None and usable_device(device).type == "cpu"
        self._segments = dict[str, SharedSegment]()
        self._workers: ConnectedWorkers | None = None
        self._alone = True
        self._session, self._handoffs = uuid.uuid4().hex, 0
        self._worker = IPCWorker(shared_address(self._channel), self._devices)

    @property
    def staging_bytes(self) -> int:
        """The size of the staging buffer, in bytes; with several GPUs, of each one's buffer."""
        if self._segments:
            return next(iter(self._segments.values())).flat.numel()
        nbytes = self._bucket_bytes or (_HOST_BYTES if self._devices() == [HOST] else _DEVICE_BYTES)
        return nbytes // SEGMENT_BYTES * SEGMENT_BYTES  # one size on every device, so one layout

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """See `Transport.open`; 0 workers (no control layer) means those that call `receive_weights`."""
        self.close()
        self._alone = workers == 0
        if self._alone:
            return Handoff()
        address = new_address()
        connected = self._listen_at(address)
        return Handoff(
            info=IPCOffer(address=address, session=self._session).to_json(),
            transfer=lambda within: connected.wait_for(workers, within, range(1, 1 + workers)),
        )

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        """As `Transport.prepare`.

        Raises:
            ConfigError: the staging buffer is too small for the model.
        """
        if not self._alone:
            self._joined()
        params, stats = update.params, TransferStats()
        buckets_of(params, self.staging_bytes // SLOTS)
        self._handoffs += 1
        load = IPCLoad(session=self._session, handoff=self._handoffs)

        def transfer(within: Deadline) -> None:
            if self._alone:
                connected = self._workers or self._listen_at(shared_address(self._channel))
                connected.wait_for(self._count, within)
            else:
                connected = self._joined()
            began = time.perf_counter()
            try:
                connected.begin(load.handoff)
                if self._alone:
                    connected.tell(Announce(version=update.version, params=params, load=load), within)
                self._transfer(connected, update, load.handoff, within)
            except BaseException as error:
                self.close()  # by which workers see that nothing more comes
                if isinstance(error, (TransportError, DeadlineError)):
                    raise type(error)(
                        f"weights version {update.version} did not arrive: {error.what}",
                        state="no worker reports the version, and the connection is closed",
                        hint="send again when the workers are back",
                    ) from error
                raise
            stats.spans.since("transfer", began)

        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def _joined(self) -> ConnectedWorkers:
        if self._workers is None:
            raise NotConnectedError("this transport was shut down", hint="connect again")
        return self._workers

    def _transfer(self, connected: ConnectedWorkers, update: Update, handoff: int, within: Deadline) -> None:
        params, segments, number = update.params, connected.segments, -1
        packer = Packer(params, checked(update.source, params))
        for number, bucket in enumerate(buckets_of(params, self.staging_bytes // SLOTS)):
            connected.await_taken(number - SLOTS, within)
            packer.fill(bucket, [segment.half(number) for segment in segments])
            for segment in segments:
                segment.settle()
            connected.tell(Done(handoff=handoff, bucket=number), within)
        packer.finish()
        connected.await_taken(number, within)

    def _listen_at(self, address: str) -> ConnectedWorkers:
        self._workers = ConnectedWorkers(address, self._session, self._segment_on)
        return self._workers

    def _segment_on(self, devices: list[str]) -> SharedSegment:
        """Return the staging buffer on the first of a worker's devices that this process can use too."""
        mine = self._devices()
        device = next((device for device in devices if device in mine), HOST)
        if device not in self._segments:
            self._segments[device] = self._created(device, self.staging_bytes)
        return self._segments[device]

    def _created(self, device: str, nbytes: int) -> SharedSegment:
        """Create a staging buffer, smaller where memory is short, unless its size was asked for or is already used."""
        while True:
            try:
                return create(nbytes) if device == HOST else create_on(device, nbytes)
            except TransportError as error:
                if self._bucket_bytes or self._segments or nbytes <= _LEAST_BYTES:
                    raise
                nbytes //= 2
                log.warning("the staging buffer has %d bytes only: %s", nbytes, error.what)

    def _devices(self) -> list[str]:
        return [HOST] if self._on_host else _local_devices()

    # worker end

    def attend(self, within: Deadline) -> IPCWorker:
        return self._worker

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> IPCWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: the trainer did not accept this worker in time.
            TransportError: the trainer is on another machine, or has another user or pid namespace.
        """
        offer = IPCOffer.from_json(info, "the offer of an ipc transport")
        worker = IPCWorker(offer.address, _local_devices, here.rank)
        try:
            worker.enter(offer.session, within)
        except BaseException:
            worker.close()
            raise
        return worker

    # both ends

    def check_connection(self) -> bool:
        connected = self._workers
        return self._worker.check_connection() or (connected is not None and connected.alive)

    def shutdown(self) -> None:
        super().shutdown()
        self._alone = True
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def _local_devices() -> list[str]:
    """Return where this process can take weights from, best first: UUIDs of accelerators, then the host."""
    return [*sharable(), HOST]
