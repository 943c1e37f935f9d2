"""The worker end of `IPCTransport`: a connection to the trainer, and buckets copied out of its staging buffer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, IntegrityError, NotConnectedError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.links import Link, connect_locally
from torchrl_ext.data.ipc.messages import Announce, Done, Hello, IPCLoad, Welcome, read, send
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.transports.buckets import Bucket, Lander, layout
from torchrl_ext.data.transports.standalone import StandaloneEnd

__all__ = ["IPCWorker", "buckets_of"]

log = logging.getLogger("torchrl_ext")

_MOST_BUCKETS = 1 << 20
_PAUSES: Any = {"shortest_s": 0.005, "longest_s": 0.05}  # between attempts to connect
_LAST_WORDS_S = 1.0


def buckets_of(params: tuple[ParamMeta, ...], capacity: int) -> tuple[Bucket, ...]:
    """Return the buckets of ``capacity`` bytes in which ``params`` travel.

    Raises:
        ConfigError: there would be so many that it takes too long, and too much memory, to lay them out.
    """
    count = -(-sum(meta.nbytes for meta in params) // capacity)
    if count > _MOST_BUCKETS:
        raise ConfigError(
            f"a handoff takes {count:,} buckets of {capacity:,} bytes",
            expected=f"{_MOST_BUCKETS:,} or fewer",
            state="nothing was sent",
            hint="give IPCTransport a larger bucket_bytes",
        )
    return layout(params, capacity)


@final
class IPCWorker(StandaloneEnd):
    """A worker's end of the connection to its trainer, through which it receives handoffs.

    Args:
        address: where the trainer listens.
        devices: where this worker can take weights from, best first.
        rank: among the workers of all engines; None where nobody gave it one.
    """

    def __init__(self, address: str, devices: Callable[[], list[str]], rank: int | None = None) -> None:
        self._address, self._devices, self._rank = address, devices, rank
        self._link: Link | None = None
        self._welcome: Welcome | None = None

    def check_connection(self) -> bool:
        """Return whether the trainer let this worker in and lives."""
        link = self._link
        return link is not None and self._welcome is not None and link.alive

    def enter(self, session: str, within: Deadline) -> None:
        """Connect to the trainer, and map its buffer once, so that what prevents it is known by then.

        Raises:
            DeadlineError: the trainer does not let this worker in.
            TransportError: another machine, user or pid namespace.
            IntegrityError: another trainer than that of ``session`` answers.
        """

        def let_in() -> Welcome | None:
            while self._welcome is None and self._hear(within) is not None:
                continue
            return self._welcome

        welcome = within.poll(
            let_in,
            f"the trainer at {self._address} refused rank {self._rank}",
            **_PAUSES,
            expected="a trainer on this machine, of this user and network namespace",
            hint="use transport 'collective' or 'disk' between machines or containers",
        )
        if welcome is not None and welcome.session != session:
            raise IntegrityError("another trainer answers at this trainer's address", state="nothing was received")

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """As `StandaloneEnd.next`; each version is announced once, and a trainer that is gone may come back."""
        for _ in within.pauses(**_PAUSES):
            try:
                while (message := self._hear(within)) is not None:
                    if isinstance(message, Announce):
                        info = message.load.to_json()
                        return Arrival(version=message.version, params=message.params, info=info)
            except NotConnectedError:
                self.close()  # another trainer may come after it
        return None

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        """As `LandingEnd.receive`; the deadline begins anew with each bucket.

        Raises:
            NotConnectedError: the trainer is gone, or gave up.
            DeadlineError, TransportError: it does not go on.
            ConfigError, IntegrityError: a message of it is malformed.
        """
        load, link, welcome = _load(arrival), self._link, self._welcome
        if link is None or welcome is None:
            raise NotConnectedError("this worker is not connected to a trainer", hint="connect first")
        if load.session != welcome.session:
            raise NotConnectedError(
                "the handoff comes from a trainer that this worker has not joined", hint="connect again"
            )
        complete = False
        try:
            segment = welcome.segment.attach()
            try:
                lander = Lander(arrival.params, into, segment.flat.device)
                buckets = buckets_of(arrival.params, segment.capacity)
                for number, bucket in enumerate(buckets):
                    _await_filled(link, load.handoff, number, within.again(link.peer))
                    pairs = lander.take(bucket, segment.half(number))
                    segment.settle()
                    complete = number + 1 == len(buckets)
                    send(link, Done(handoff=load.handoff, bucket=number), within.again())
                    yield from pairs
            finally:
                segment.close()
        except BaseException:
            if not complete:
                self.close()  # by which the trainer sees that this worker takes no more
            raise

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._welcome = None, None

    def _hear(self, within: Deadline) -> Any:
        """Return the trainer's next message, None where none came; connect where this end is not connected.

        Raises:
            NotConnectedError: the trainer is gone.
            TransportError: its buffer cannot be mapped.
        """
        link = self._link
        if link is None:
            link = self._link = connect_locally(self._address)
            if link is None:
                return None
            send(link, Hello(rank=self._rank, devices=self._devices()), within)
        message = read(link, within)
        if isinstance(message, Welcome):
            try:
                message.segment.attach().close()
            except WeightSyncError:
                self.close()  # without the buffer, no other message of it can be used
                raise
            self._welcome = message
        return message


def _load(arrival: Arrival) -> IPCLoad:
    return IPCLoad.from_json(arrival.info, "a handoff of an ipc transport")


def _await_filled(link: Link, handoff: int, number: int, within: Deadline) -> None:
    """Wait until the trainer has filled bucket ``number``.

    Raises:
        NotConnectedError: it is gone, or gave up.
        DeadlineError, TransportError: it does not go on.
        IntegrityError: it filled another one.
    """
    while (message := read(link, within)) is not None:
        if not isinstance(message, Done) or message.handoff != handoff:
            continue  # of a handoff that this end did not take
        if message.bucket != number:
            raise IntegrityError(f"{link.peer} filled bucket {message.bucket}", expected=f"bucket {number}")
        return
    raise within.error(f"{link.peer} did not fill bucket {number}", state="a part of the version may have landed")
