"""The worker end of `IPCTransport`: a connection to the trainer, and buckets copied out of its staging buffer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_ext.errors import DeadlineError, IntegrityError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.buckets import Lander, Plan
from torchrl_ext.transports.ipc.host_memory import Segment, attach, integer
from torchrl_ext.transports.links import Link, connect_locally
from torchrl_ext.types import Info

__all__ = ["ALIGN_BYTES", "SLOTS", "IPCWorker", "half"]

log = logging.getLogger("torchrl_ext")

ALIGN_BYTES = 64
SLOTS = 2
"""Halves of the staging buffer: while workers copy out of one, the trainer fills the other."""

_LARGEST_BYTES = 1 << 42  # more than any machine has memory for
_PAUSE_S = 0.005
_LAST_WORDS_S = 1.0


class IPCWorker:
    """A worker's end of the connection to its trainer, through which it receives handoffs.

    Args:
        devices: where it can take weights from, best first.
    """

    def __init__(self, devices: Callable[[], list[str]]) -> None:
        self._devices, self._plan = devices, Plan()
        self._link: Link | None = None
        self._welcome: Info = {}
        self._rank: int | None = None
        self._stop = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether the trainer let this worker in and lives."""
        link = self._link
        return link is not None and bool(self._welcome) and link.alive

    def join(self, info: Info, timeout_s: float) -> None:
        """Connect at the address in ``info``, and map the buffer once, so that what prevents it is known by then.

        Raises:
            DeadlineError: the trainer does not let this worker in.
            TransportError: another machine, user or pid namespace.
        """
        self._stop.clear()
        self._rank = integer(info, "rank")
        until = deadline(timeout_s)
        while not self._welcome:
            if self._stop.is_set():
                raise TransportError("joining the trainer was aborted")
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"the trainer at {info.get('address')} did not let rank {self._rank} in within {timeout_s:g} s",
                    expected="a trainer on this machine, of this user and network namespace",
                    hint="use transport 'collective' or 'disk' between machines or containers",
                )
            self._enter(info.get("address"), until)
        if self._welcome.get("session") != info.get("session"):
            raise IntegrityError("another trainer answers at the address of this one", state="nothing was received")

    def poll(self, address: str, timeout_s: float) -> Info | None:
        """Return the next announced info, or None after ``timeout_s`` seconds; a trainer that is gone may come back."""
        self._stop.clear()
        until = deadline(timeout_s)
        while True:
            try:
                message = self._enter(address, until)
            except NotConnectedError:
                self.hang_up()  # another trainer may come after it
                message = None
            if message is not None and "announce" in message:
                return _announced(message["announce"])
            if time.monotonic() >= until or self._stop.is_set():
                return None

    def _enter(self, address: Any, until: float) -> Info | None:
        """Connect where this end is not connected, and return the next message, if one came."""
        if self._link is None:
            self._link = connect_locally(address)
            if self._link is None:
                self._stop.wait(min(_PAUSE_S, max(0.0, until - time.monotonic())))
                return None
            self._link.send({"hello": {"rank": self._rank, "devices": self._devices()}}, until)
        message = self._link.read(until)
        if message is not None and "turned away" in message:
            name = self._link.peer
            self.hang_up()
            raise TransportError(
                f"{name} let this worker not in: {message['turned away']}",
                state="nothing was received",
                hint="mend that in the trainer, and connect again",
            )
        if message is not None and isinstance(message.get("welcome"), dict):
            try:
                attach(message["welcome"].get("segment")).close()
            except WeightSyncError as error:
                self._say({"leaving": why(error)})
                self.hang_up()  # without the buffer, no other message of it can be used
                raise
            self._welcome = message["welcome"]
        return message

    def receive(self, info: Info, into: Mapping[str, Tensor], timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """As `Transport.receive`.

        Raises:
            NotConnectedError: the trainer is gone.
            TransportError, DeadlineError: it stopped, or does not go on.
            IntegrityError, ManifestError: what it says is malformed.
        """
        link, handoff = self._require_link(info), integer(info, "handoff")
        name, complete = None, False
        try:
            params = self._plan.metas(_rows(info))
            total_bytes = sum(meta.nbytes for meta in params)
            if total_bytes > _LARGEST_BYTES:
                raise IntegrityError(f"a handoff of more than {_LARGEST_BYTES:,} bytes", state="nothing was read")
            segment = attach(self._welcome.get("segment"))
            try:
                capacity, lander = _capacity(segment), Lander(params, into, segment.flat.device)
                buckets = self._plan.buckets(params, capacity)
                for number, bucket in enumerate(buckets):
                    self._await_filled(link, handoff, number, timeout_s)
                    pairs = lander.take(bucket, half(segment, number, capacity))
                    segment.settle()
                    complete = number + 1 == len(buckets)
                    link.send({"taken": [handoff, number]}, deadline(timeout_s))
                    for name, tensor in pairs:
                        yield name, tensor
            finally:
                segment.close()
        except GeneratorExit:
            if not complete:
                self.refuse(info, f"it stopped loading after {name!r}")
            raise
        except Exception as error:
            if not complete:
                self.refuse(info, why(error))
            raise

    def _await_filled(self, link: Link, handoff: int, number: int, timeout_s: float) -> None:
        until = deadline(timeout_s)
        while True:
            message = link.read(until)
            if message is None:
                raise DeadlineError(
                    f"{link.peer} did not fill bucket {number} within {timeout_s:g} s",
                    state="a part of the version may have landed",
                )
            said = message.get("filled", message.get("stopped"))
            if not isinstance(said, list) or len(said) != 2 or said[0] != handoff:
                continue  # what is left of a handoff that this end did not take
            if "filled" not in message:
                raise TransportError(f"{link.peer} stopped: {said[1]}", state="a part of the version may have landed")
            if said[1] != number:
                raise IntegrityError(f"{link.peer} says bucket {said[1]!r}", expected=f"bucket {number}")
            return

    def refuse(self, info: Info, words: str) -> None:
        """Tell the trainer not to wait for this end."""
        self._say({"refused": [info.get("handoff"), words]})

    def _say(self, message: Info) -> None:
        """Send a message that the trainer may not be there to read."""
        if self._link is not None:
            try:
                self._link.send(message, deadline(_LAST_WORDS_S))
            except WeightSyncError as error:
                log.info("while a handoff was given up: %s", error)
                self.hang_up()

    def _require_link(self, info: Info) -> Link:
        if self._link is None or not self._welcome:
            raise NotConnectedError("this worker is not connected to a trainer", hint="connect first")
        if info.get("session") != self._welcome.get("session"):
            raise NotConnectedError("the handoff is of another trainer than this worker's", hint="connect again")
        return self._link

    def abort(self) -> None:
        """End a wait in another thread."""
        self._stop.set()
        link = self._link
        if link is not None:
            link.end()

    def hang_up(self) -> None:
        """Close the connection. May be called twice."""
        if self._link is not None:
            self._link.close()
        self._link, self._welcome = None, {}


def _announced(info: Any) -> Info:
    """Return an announced info, checked.

    Raises:
        IntegrityError: it is no handoff.
    """
    integer(info, "version")
    _rows(info)
    return info


def _rows(info: Info) -> list[Any]:
    rows = info.get("params")
    if not isinstance(rows, list):
        raise IntegrityError(f"the parameters of a handoff are {str(rows)[:80]}", expected="a list")
    return rows


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
