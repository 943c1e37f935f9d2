"""How a worker comes to the notes of its trainer (`torchrl_ext.transports.collective.notes`), and asks for them.

Every wait here has a deadline and ends when another thread says so. Addresses are looked up forwards and never
backwards: who connects from where is nobody's business, and a name server that lost the question costs seconds.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.collective.notes import (
    GREETING,
    LONGEST_WAIT_S,
    NONCE_BYTES,
    NOTE_BYTES,
    PROOF_BYTES,
    proof,
)
from torchrl_ext.transports.links import close_in_children
from torchrl_ext.transports.waits import in_time, pauses

__all__ = ["NotesLink"]

_SLICE_S = 0.05
_NAME_BYTES = 0xFFFF


class NotesLink:
    """A worker's connection to the `Notes` of its trainer.

    Args:
        address, port: where the trainer listens.
        secret: what it has.
        timeout_s: how long to wait for it to listen, and then for each of its answers, in seconds.
        stop: set by another thread to end every wait.

    Raises:
        DeadlineError: nobody listens there, or what listens does not answer.
        TransportError: it is no trainer, or one with another secret; or another thread aborted.
    """

    def __init__(self, address: str, port: int, secret: str, timeout_s: float, stop: threading.Event) -> None:
        self.port, self.patience_s = port, timeout_s
        self._where, self._gone = f"{address}:{port}", ""
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._owed = 0
        until = time.monotonic() + timeout_s
        for _ in pauses(until, stop):
            self._buffer.clear()
            self._socket = _reach(address, port, until, stop)
            close_in_children(self._socket)
            if self._greet(secret, timeout_s, until, stop):
                return
        raise _aborted() if stop.is_set() else self._silent(timeout_s)

    def set(self, key: str, value: bytes) -> None:
        """As `Notes.set`."""
        if len(value) > NOTE_BYTES:
            raise TransportError(f"the note {key!r} has {len(value)} bytes", expected=f"at most {NOTE_BYTES}")
        self._ask(b"S", key, value)

    def drop(self, key: str) -> None:
        """As `Notes.drop`."""
        self._ask(b"D", key)

    def sweep(self, *beginnings: str) -> None:
        """Only the trainer knows when nobody needs notes any more."""

    def wait(self, key: str, until: float, stop: threading.Event | None = None) -> bytes | None:
        """As `Notes.wait`."""
        while True:
            left_s = min(LONGEST_WAIT_S, max(0.0, until - time.monotonic()))
            found = self._ask(b"W", key, struct.pack(">d", left_s), stop if left_s else None)
            if found is not None or time.monotonic() >= until or (stop is not None and stop.is_set()):
                return found

    def close(self) -> None:
        """Leave. May be called twice."""
        self._gone = self._gone or "this rank left"
        with suppress(OSError):  # it was not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a wait of another thread
        with self._lock:
            self._socket.close()

    def _greet(self, secret: str, timeout_s: float, until: float, stop: threading.Event) -> bool:
        """Show that both ends have the secret; False when the other one is just leaving."""
        nonce, greeting, told = os.urandom(NONCE_BYTES), None, None
        try:
            greeting = self._read(len(GREETING) + NONCE_BYTES, until, stop)
            if greeting is not None and greeting.startswith(GREETING):
                nonces = greeting[len(GREETING) :] + nonce
                self._write(nonce + proof(secret, b"worker", nonces), until)
                told = self._read(PROOF_BYTES, until, stop)
                if told == proof(secret, b"trainer", nonces):
                    return True
        except TimeoutError:
            self.close()
            raise self._silent(timeout_s) from None
        except OSError:
            if greeting is None:
                self._socket.close()
                return False
        self.close()
        if stop.is_set():
            raise _aborted()
        raise TransportError(
            f"what listens at {self._where} does not let this worker in",
            expected="a trainer of the same version of torchrl_ext, with the same secret",
            state="no group was joined",
            hint="check the address and the port, and give every rank the same secret; a trainer that sends through "
            "an engine client makes one for the engines",
        )

    def _silent(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"what listens at {self._where} did not answer within {timeout_s:g} s",
            expected="the trainer (rank 0), alive",
            state="no group was joined",
            hint="check master_address and master_port, and that the trainer is not frozen",
        )

    def _ask(self, op: bytes, key: str, value: bytes = b"", stop: threading.Event | None = None) -> bytes | None:
        name = key.encode(errors="backslashreplace")[:_NAME_BYTES]
        asked = op + struct.pack(">H", len(name)) + name + value
        with self._lock:
            until = time.monotonic() + self.patience_s
            try:
                if self._gone:
                    raise ConnectionError(self._gone)
                self._write(struct.pack(">I", len(asked)) + asked, until)
                self._owed += 1
                found = None
                while self._owed:  # one that was not waited for comes first
                    answer = self._answer(until, stop)
                    if answer is None:
                        return None  # stopped; what comes is passed over by the next question
                    self._owed -= 1
                    found = answer[1:] if answer[:1] == b"\1" else None
                return found
            except OSError as error:
                self._gone = self._gone or str(error) or "it said nothing in time"
                self._socket.close()  # a late answer would be taken for that to another question
                raise NotConnectedError(
                    f"the trainer (rank 0) at {self._where} is dead, frozen or shut down: {self._gone}",
                    state="what was received completely is intact",
                    hint="connect again when a trainer is back",
                ) from error

    def _answer(self, until: float, stop: threading.Event | None) -> bytes | None:
        head = self._read(4, until, stop, keep=True)
        if head is None:
            return None
        (length,) = struct.unpack(">I", head)
        if not 1 <= length <= NOTE_BYTES + 1:
            raise ConnectionError("it does not speak our language")
        whole = self._read(4 + length, until, stop)
        return None if whole is None else whole[4:]

    def _read(self, count: int, until: float, stop: threading.Event | None, keep: bool = False) -> bytes | None:
        """So many bytes, which stay where they are with ``keep``; None when stopped."""
        while len(self._buffer) < count:
            if not _ready(self._socket, select.POLLIN, until, stop):
                return None
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionError("it closed the connection")
            self._buffer += part
        found = bytes(self._buffer[:count])
        if not keep:
            del self._buffer[:count]
        return found

    def _write(self, data: bytes, until: float) -> None:
        rest = memoryview(data)
        while rest:
            _ready(self._socket, select.POLLOUT, until, None)
            rest = rest[self._socket.send(rest) :]


def _ready(one: socket.socket, events: int, until: float, stop: threading.Event | None) -> bool:
    """Wait until a socket can be read or written; False when stopped.

    Raises:
        TimeoutError: it could not until then.
    """
    poll = select.poll()
    poll.register(one, events)
    while True:
        left_s = until - time.monotonic()
        if poll.poll(max(0.0, left_s if stop is None else min(left_s, _SLICE_S)) * 1e3):
            return True
        if stop is not None and stop.is_set():
            return False
        if time.monotonic() >= until:
            raise TimeoutError("it said nothing in time")


def _reach(address: str, port: int, until: float, stop: threading.Event) -> socket.socket:
    """A connection to whoever listens there, as soon as somebody does; not blocking."""
    began, failure = time.monotonic(), "no attempt was made"
    for _ in pauses(until, stop):
        try:
            for family, kind, protocol, _, place in _places(address, port, until, stop):
                one = socket.socket(family, kind, protocol)
                try:
                    one.settimeout(0.0)
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if _connected(one, place, until, stop):
                        return one
                except OSError as error:
                    failure = str(error)
                one.close()
        except OSError as error:  # the name is not known; that of a service may be, a moment later
            failure = str(error)
    if stop.is_set():
        raise _aborted()
    raise DeadlineError(
        f"no trainer (rank 0) listens at {address}:{port} after {time.monotonic() - began:.1f} s: {failure}",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        state="no group was joined",
        hint="check master_address and master_port",
    )


def _places(address: str, port: int, until: float, stop: threading.Event) -> list[tuple[Any, ...]]:
    """What `socket.getaddrinfo` says: at once of a number; of a name as soon as a name server answers."""
    look_up = partial(socket.getaddrinfo, address, port, type=socket.SOCK_STREAM)
    try:
        return look_up(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return [place for places in in_time(look_up, until, stop) for place in places]


def _connected(one: socket.socket, place: tuple[Any, ...], until: float, stop: threading.Event) -> bool:
    number = one.connect_ex(place)
    if number in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        if not _ready(one, select.POLLOUT, until, stop):
            return False
        number = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
    return True


def _aborted() -> TransportError:
    return TransportError("joining the trainer was aborted", state="no group was joined")
