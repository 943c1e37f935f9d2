"""`IPCTransport` carries weights through memory that a trainer shares with engines of its own machine."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, NotConnectedError, TransportError, why
from torchrl_ext.transports.base import TransferStats
from torchrl_ext.transports.buckets import Packer, Plan
from torchrl_ext.transports.ipc.host_memory import HOST, Segment, create, local_devices
from torchrl_ext.transports.ipc.worker import ALIGN_BYTES, SLOTS, IPCWorker, half
from torchrl_ext.transports.ipc.workers import ConnectedWorkers
from torchrl_ext.transports.links import new_address, shared_address
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.devices import usable_device
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["IPCTransport"]

log = logging.getLogger("torchrl_ext")

_SMALLEST_BYTES = 2048
_HOST_BYTES, _CUDA_BYTES = 16 << 20, 512 << 20
_LEAST_BYTES = 1 << 20
"""Where memory is short a default buffer is halved, down to this or the next larger half."""


class IPCTransport(StandaloneTransport):
    """Packs weights into one staging buffer, whose two halves are filled in turn, and hands it over by handle.

    While workers copy one half into their parameters, the trainer fills the other. On a CPU the buffer is anonymous
    shared memory, on a GPU an allocation shared by CUDA IPC; every worker, of however many engines, maps the same one.
    Neither has a name that could outlive its processes. The trainer owns the buffer until `shutdown`; workers map it
    while they receive, and never longer.

    Args:
        channel: without a control layer, one user's ends with the same name meet; engines learn the address by `open`.
        workers: without a control layer, how many workers a send waits for; more may come.
        bucket_bytes: size of the staging buffer, both halves, in bytes; by default 16 MiB on the host, where it
            stays in the processor's caches, and 512 MiB on a GPU; less where there is not as much memory.
        device: ``"cpu"`` stages on the host even where there are GPUs; by default the trainer stages on the first GPU
            of a worker that both see, else on the host.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: settings that cannot work.

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
        self._plan = Plan()
        # trainer end
        self._workers: ConnectedWorkers | None = None
        self._alone = True
        self._segments: dict[str, Segment] = {}
        self._session, self._handoffs = uuid.uuid4().hex, 0
        self._announced: queue.Queue[Info] = queue.Queue()
        # worker end
        self._worker = IPCWorker(self._devices)

    @classmethod
    def from_info(cls, info: Info) -> IPCTransport:
        return cls(timeout_s=float(info.get("timeout_s", 60.0)))

    @property
    def staging_bytes(self) -> int:
        """The size of the staging buffer, in bytes; with several GPUs, of each one's buffer."""
        if self._segments:
            return next(iter(self._segments.values())).flat.numel()
        nbytes = self._bucket_bytes or (_HOST_BYTES if self._devices() == [HOST] else _CUDA_BYTES)
        return nbytes // SLOTS // ALIGN_BYTES * ALIGN_BYTES * SLOTS  # one size on every device, so one layout

    # trainer end

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """As `Transport.open`; 0 workers (no control layer) stands for those that call `receive_weights`."""
        self._leave()
        self._alone = workers == 0
        if self._alone:
            return Handoff(info={"transport": self.name})
        connected = self._listen_at(new_address())
        info = {"transport": self.name, "address": self._address, "session": self._session, "timeout_s": self.timeout_s}
        return Handoff(info=info, transfer=lambda: connected.wait_for(workers, range(1, 1 + workers)))

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        if not self._alone and self._workers is None:
            raise NotConnectedError("this transport was shut down", hint="connect again")
        params = source.params()
        self._handoffs += 1
        info: Info = {
            "transport": self.name,
            "version": version,
            "session": self._session,
            "handoff": self._handoffs,
            "params": self._plan.rows(params),
        }
        if self._workers is not None:
            self._workers.aborted.clear()
        return Handoff(info=info, transfer=partial(self._send, source, info, params))

    def _send(self, source: WeightSource, info: Info, params: tuple[ParamMeta, ...]) -> None:
        connected = self._announced_to(info) if self._alone else self._workers
        if connected is None:
            raise NotConnectedError("this transport was shut down", hint="connect again")
        began = time.perf_counter()
        connected.begin(info["handoff"])
        self._last_version = max(self._last_version, info["version"])  # some may get it even if others do not
        try:
            self._send_staged(connected, Packer(params, checked(source, params)), params)
        except BaseException as error:
            connected.stop(why(error))
            if isinstance(error, TransportError):
                raise TransportError(
                    f"weights version {info['version']} did not arrive: {error.what}",
                    state="a worker that got a part of it does not report the version",
                    hint="send again when the workers are back",
                ) from error
            raise
        self.stats = TransferStats(spans={"transfer": time.perf_counter() - began})
        troubles = connected.troubles()
        if troubles and self._alone:  # with a control layer, the engines tell it themselves
            raise TransportError(
                f"weights version {info['version']} was not taken by {troubles}", state="the other workers have it"
            )

    def _send_staged(self, connected: ConnectedWorkers, packer: Packer, params: tuple[ParamMeta, ...]) -> None:
        segments, number = connected.segments, -1
        capacity = self.staging_bytes // SLOTS
        for number, bucket in enumerate(self._plan.buckets(params, capacity)):
            connected.await_taken(number - SLOTS)
            packer.fill(bucket, [half(segment, number, capacity) for segment in segments])
            for segment in segments:
                segment.settle()
            connected.filled(number)
        packer.finish()
        connected.await_taken(number)

    def _announced_to(self, info: Info) -> ConnectedWorkers:
        """Return the workers of this channel, once the handoff was announced to them."""
        connected, within = self._workers or self._listen_at(shared_address(self._channel)), Deadline(self.timeout_s)
        try:
            while (announced := self._announced.get(timeout=within.left_s)).get("handoff") != info["handoff"]:
                continue  # of a send that failed before it came to this
        except queue.Empty:
            raise TransportError("the handoff was not announced", hint="call announce(handoff.info)") from None
        connected.wait_for(self._count)
        connected.announce(announced)
        return connected

    def _listen_at(self, address: str) -> ConnectedWorkers:
        self._address = address
        self._workers = ConnectedWorkers(address, self._session, self._segment_on, self.timeout_s)
        return self._workers

    def _segment_on(self, devices: list[str]) -> Segment:
        """Return the staging buffer on the first of a worker's devices that this process can use too."""
        mine = self._devices()
        device = next((device for device in devices if device in mine), HOST)
        if device not in self._segments:
            self._segments[device] = self._created(device, self.staging_bytes)
        return self._segments[device]

    def _created(self, device: str, nbytes: int) -> Segment:
        """Create a staging buffer, smaller where memory is short, unless its size was asked for or is already used."""
        while True:
            try:
                return create(device, nbytes)
            except TransportError as error:
                if self._bucket_bytes or self._segments or nbytes <= _LEAST_BYTES:
                    raise
                nbytes //= 2
                log.warning("the staging buffer has %d bytes only: %s", nbytes, error.what)

    def _devices(self) -> list[str]:
        return [HOST] if self._on_host else local_devices()

    def announce(self, info: Info) -> None:
        self._announced.put(info)

    # worker end

    def join(self, info: Info) -> None:
        self._worker.join(info, self.timeout_s)

    def poll(self, timeout_s: float) -> Info | None:
        return self._worker.poll(shared_address(self._channel), timeout_s)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from self._worker.receive(info, into, self.timeout_s)

    def decline(self, info: Info, error: BaseException) -> None:
        self._worker.decline(info, error)

    # both ends

    def abort(self) -> None:
        """End every wait: a worker end's at once, a trainer end's as soon as no worker makes progress."""
        connected = self._workers
        if connected is not None:
            connected.aborted.set()
        self._worker.abort()

    def check_connection(self) -> bool:
        connected = self._workers
        return self._worker.connected or (connected is not None and connected.alive)

    def shutdown(self) -> None:
        self.abort()
        self._leave()
        self._worker.hang_up()
        self._alone = True
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _leave(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
