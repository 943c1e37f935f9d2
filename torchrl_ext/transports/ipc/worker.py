"""The worker end of `IPCTransport`: a connection to the trainer, and buckets copied out of its staging buffer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import IntegrityError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.transports.base import Arrival, WorkerEnd
from torchrl_ext.transports.buckets import Lander, layout
from torchrl_ext.transports.ipc import messages
from torchrl_ext.transports.ipc.host_memory import Segment, attach
from torchrl_ext.transports.ipc.messages import read, send
from torchrl_ext.transports.links import Link, connect_locally

__all__ = ["ALIGN_BYTES", "SLOTS", "IPCWorker", "half"]

log = logging.getLogger("torchrl_ext")

ALIGN_BYTES = 64
SLOTS = 2
"""Halves of the staging buffer: while workers copy out of one, the trainer fills the other."""

_LARGEST_BYTES = 1 << 42  # more than any machine has memory for
_PAUSES: Any = {"shortest_s": 0.005, "longest_s": 0.05}  # between attempts to connect
_LAST_WORDS_S = 1.0


@final
class IPCWorker(WorkerEnd):
    """A worker's end of the connection to its trainer, through which it receives handoffs.

    Args:
        address: where the trainer listens.
        devices: where this worker can take weights from, best first.
        rank: among the workers of all engines; None where nobody gave it one.
    """

    def __init__(self, address: str, devices: Callable[[], list[str]], rank: int | None = None) -> None:
        self._address, self._devices, self._rank = address, devices, rank
        self._link: Link | None = None
        self._welcome: messages.Welcome | None = None

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

        def let_in() -> messages.Welcome | None:
            while self._welcome is None and self._connect(within) and self._hear(within) is not None:
                continue
            return self._welcome

        welcome = within.poll(
            let_in,
            f"the trainer at {self._address} did not let rank {self._rank} in",
            **_PAUSES,
            expected="a trainer on this machine, of this user and network namespace",
            hint="use transport 'collective' or 'disk' between machines or containers",
        )
        if welcome is not None and welcome.session != session:
            raise IntegrityError("another trainer answers at the address of this one", state="nothing was received")

    def announced(self, within: Deadline) -> Arrival | None:
        """Return the next version that is announced, or None at the deadline; a trainer that is gone may come back."""
        for _ in within.pauses(**_PAUSES):
            try:
                while self._connect(within) and (message := self._hear(within)) is not None:
                    if isinstance(message, messages.Announce):
                        info = message.load.to_json()
                        return Arrival(version=message.version, params=message.params, info=info)
            except NotConnectedError:
                self.close()  # another trainer may come after it
        return None

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        """As `WorkerEnd.receive`; the deadline begins anew with each bucket.

        Raises:
            NotConnectedError: the trainer is gone.
            TransportError, DeadlineError: it stopped, or does not go on.
            ConfigError, IntegrityError: a message of it is malformed.
        """
        load, link, welcome = _load(arrival), self._link, self._welcome
        if link is None or welcome is None:
            raise NotConnectedError("this worker is not connected to a trainer", hint="connect first")
        if load.session != welcome.session:
            raise NotConnectedError("the handoff is of another trainer than this worker's", hint="connect again")
        name, complete = None, False
        try:
            if sum(meta.nbytes for meta in arrival.params) > _LARGEST_BYTES:
                raise IntegrityError(f"a handoff of more than {_LARGEST_BYTES:,} bytes", state="nothing was read")
            segment = attach(welcome.segment)
            try:
                capacity, lander = _capacity(segment), Lander(arrival.params, into, segment.flat.device)
                buckets = layout(arrival.params, capacity)
                for number, bucket in enumerate(buckets):
                    _await_filled(link, load.handoff, number, within.again(link.peer))
                    pairs = lander.take(bucket, half(segment, number, capacity))
                    segment.settle()
                    complete = number + 1 == len(buckets)
                    send(link, messages.Taken(handoff=load.handoff, bucket=number), within.again())
                    for name, tensor in pairs:
                        yield name, tensor
            finally:
                segment.close()
        except GeneratorExit:
            if not complete:
                self._say(messages.Refused(handoff=load.handoff, why=f"it stopped loading after {name!r}"))
            raise
        except Exception as error:
            if not complete:
                self.refuse(arrival, error)
            raise

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        """Tell the trainer that a version cannot land here, because of ``error``."""
        self._say(messages.Refused(handoff=_load(arrival).handoff, why=why(error)))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._welcome = None, None

    def _connect(self, within: Deadline) -> bool:
        """Try to connect where this end is not connected, and return whether it is."""
        if self._link is None:
            self._link = connect_locally(self._address)
            if self._link is None:
                return False
            send(self._link, messages.Hello(rank=self._rank, devices=self._devices()), within)
        return True

    def _hear(self, within: Deadline) -> Any:
        """Return the trainer's next message, None where none came; map the staging buffer where it is a `Welcome`.

        Raises:
            NotConnectedError: the trainer is gone.
            TransportError: it refused this worker, or its buffer cannot be mapped; then it knows why.
        """
        link = self._link
        if link is None:
            raise NotConnectedError("this worker is not connected to a trainer", hint="connect first")
        message = read(link, messages.FromTrainer, within)
        if isinstance(message, messages.TurnedAway):
            self.close()
            raise TransportError(
                f"{link.peer} refused this worker: {message.why}",
                state="nothing was received",
                hint="mend that in the trainer, and connect again",
            )
        if isinstance(message, messages.Welcome):
            try:
                attach(message.segment).close()
            except WeightSyncError as error:
                self._say(messages.Leaving(why=why(error)))
                self.close()  # without the buffer, no other message of it can be used
                raise
            self._welcome = message
        return message

    def _say(self, message: messages.Leaving | messages.Refused) -> None:
        """Send a message that the trainer may not be there to read."""
        if self._link is not None:
            try:
                send(self._link, message, Deadline(_LAST_WORDS_S))
            except WeightSyncError as error:
                log.info("while a handoff was given up: %s", error)
                self.close()


def _load(arrival: Arrival) -> messages.Load:
    return messages.Load.from_json(arrival.info, "a handoff of an ipc transport")


def _await_filled(link: Link, handoff: int, number: int, within: Deadline) -> None:
    """Wait until the trainer has filled bucket ``number``.

    Raises:
        TransportError, DeadlineError: it stopped, or does not go on.
        IntegrityError: it filled another one.
    """
    while (message := read(link, messages.FromTrainer, within)) is not None:
        if not isinstance(message, messages.Filled | messages.Stopped) or message.handoff != handoff:
            continue  # of a handoff that this end did not take
        if isinstance(message, messages.Stopped):
            raise TransportError(f"{link.peer} stopped: {message.why}", state="a part of the version may have landed")
        if message.bucket != number:
            raise IntegrityError(f"{link.peer} filled bucket {message.bucket}", expected=f"bucket {number}")
        return
    raise within.error(f"{link.peer} did not fill bucket {number}", state="a part of the version may have landed")


def half(segment: Segment, number: int, capacity: int) -> Tensor:
    """Return the half of a staging buffer that bucket ``number`` lies in, of ``capacity`` bytes."""
    begin = number % SLOTS * capacity
    return segment.flat[begin : begin + capacity]


def _capacity(segment: Segment) -> int:
    capacity = segment.flat.numel() // SLOTS
    if capacity < ALIGN_BYTES or capacity % ALIGN_BYTES:
        raise IntegrityError(
            f"a staging buffer of {segment.flat.numel()} bytes", expected="two halves, each n x 64 bytes"
        )
    return capacity
