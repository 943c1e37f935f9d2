"""The notes that the ranks of a group leave for each other: names and JSON values, kept by the trainer (rank 0).

The trainer's own process reads and writes them directly. A worker does so over a TCP connection, in messages as in
`torchrl_ext.transports.links`:

===============================================  =================================================================
``{"notes": 2, "nonce": hex}``                   trainer, at once; 16 random bytes
``{"nonce": hex, "proof": hex}``                 worker; 16 random bytes, and HMAC-SHA256 by the secret of
                                                 ``"worker"`` and both nonces, the trainer's first
``{"proof": hex}``                               trainer; the same of ``"trainer"``. One who has no proof is
                                                 disconnected
``{"number", "set": name, "value"}``             worker: leave a note
``{"number", "drop": name}``                     worker: remove it
``{"number", "wait": name, "seconds"}``          worker: its value; if it is not there, wait, but at most
                                                 `LONGEST_WAIT_S`
``{"number"}``, ``{"number", "value"}``          trainer; without a value there is no such note
===============================================  =================================================================
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, final

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.group.sockets import dial, listen
from torchrl_ext.transports.links import Link, close_in_children, serve
from torchrl_ext.types import Info

__all__ = ["NOTE_BYTES", "KeptNotes", "NoteStore", "RemoteNotes"]

NOTE_BYTES = 64 << 20
"""Bound on one note: a list of half a million parameters."""

LONGEST_WAIT_S = 0.5

_STORE_BYTES = 4 * NOTE_BYTES
_FORMAT = 2
_NONCE_BYTES = 16
_GREETING_BYTES = 1024
_GREET_S, _PATIENCE_S = 10.0, 60.0
"""Seconds that a worker has to prove itself once it is connected, and to read an answer."""
_PAUSE_S, _SLICE_S = 0.001, 0.05
_MOST_CONNECTIONS = 4096


class NoteStore(ABC):
    """JSON notes that every rank of a group can read: `KeptNotes` in the trainer, `RemoteNotes` in a worker.

    Args:
        host, port: where workers reach the trainer.
        secret: what only trainer and workers know; "" lets in whoever finds the port.
        stop: set by another thread to end every wait.

    Attributes:
        patience_s: how long the trainer may take for each of its answers, in seconds.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event) -> None:
        self.host, self.port, self.secret, self.stop = host, port, secret, stop
        self.address = f"{host}:{port}"
        self.patience_s = 0.0

    @abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Write a note.

        Raises:
            TransportError: it is too large, or there are too many.
        """

    @abstractmethod
    def wait(self, key: str, until: float) -> list[Any]:
        """Return a note as a list of one; empty if it did not come by the monotonic time ``until``, or when stopped."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Remove a note, if it is there."""

    def sweep(self, *beginnings: str) -> None:  # noqa: B027 - only the trainer knows when nobody needs notes any more
        """Remove every note whose name begins with one of these (trainer end)."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; the trainer's end ends the notes for all. May be called twice."""

    def collect(self, beginning: str, ranks: Iterable[int], until: float) -> dict[int, Any]:
        """Wait for the note ``beginning + rank`` of each rank; return those that came by ``until`` or before a stop."""
        found = {}
        for rank in ranks:
            for value in self.wait(f"{beginning}{rank}", 0.0 if self.stop.is_set() else until):
                found[rank] = value
        return found

    def get(self, key: str) -> Any:
        """Read a note that is known to be there.

        Raises:
            TransportError: it is not.
        """
        for value in self.wait(key, 0.0):
            return value
        raise TransportError(f"there is no note {key!r} at {self.address}", state="nothing was moved")

    def has(self, key: str) -> bool:
        """Return whether the note is there."""
        return bool(self.wait(key, 0.0))


@final
class KeptNotes(NoteStore):
    """Keeps the notes and listens for workers (trainer end); arguments as for `NoteStore`, ``port`` 0 for a free one.

    Raises:
        TransportError: the port is taken.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event) -> None:
        self._held: dict[str, str] = {}
        self._awaited: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._ended = threading.Event()
        try:
            self._listener = listen(host, port)
        except OSError as error:
            raise TransportError(
                f"the trainer cannot listen at {host}:{port}: {error}",
                state="no group was formed",
                hint="pick another master_port, or 0 for a free one",
            ) from error
        super().__init__(host, self._listener.getsockname()[1], secret, stop)
        close_in_children(self._listener)
        serve(self._listener, self._serve, "torchrl-ext-notes")

    def put(self, key: str, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        with self._lock:
            room = _STORE_BYTES - sum(map(len, self._held.values()))
            if len(text) > min(NOTE_BYTES, room):
                raise TransportError(
                    f"the note {key!r} has {len(text)} bytes",
                    expected=f"at most {NOTE_BYTES}, and room for it among the others: {room} bytes",
                )
            self._held[key] = text
            for event in self._awaited.get(key, ()):
                event.set()

    def wait(self, key: str, until: float, *, look_s: float = _SLICE_S) -> list[Any]:
        """As `NoteStore.wait`; every ``look_s`` seconds it looks whether it should stop."""
        with self._lock:
            text = self._held.get(key)
            if text is None and time.monotonic() < until:
                event = threading.Event()
                self._awaited.setdefault(key, []).append(event)
            else:
                event = None
        if event is not None:
            while not event.wait(min(look_s, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until or self._ended.is_set() or self.stop.is_set():
                    break
            with self._lock:
                self._awaited[key].remove(event)
                if not self._awaited[key]:
                    del self._awaited[key]
                text = self._held.get(key)
        return [] if text is None else [json.loads(text)]

    def drop(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)

    def sweep(self, *beginnings: str) -> None:
        with self._lock:
            for key in list(self._held):
                if key.startswith(beginnings):
                    del self._held[key]

    def close(self) -> None:
        with self._lock:
            self._ended.set()
            links = [*self._links]
        with suppress(OSError):  # it was closed
            self._listener.shutdown(socket.SHUT_RDWR)  # lets go of the thread that accepts
        self._listener.close()
        for link in links:
            link.close()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        link = Link(connection, f"a worker at {address[0]}", longest_bytes=_GREETING_BYTES)
        with self._lock:
            if self._ended.is_set() or len(self._links) >= _MOST_CONNECTIONS:
                link.close()
                return
            self._links.add(link)
        try:
            if self._proves_itself(link):
                link.longest_bytes = NOTE_BYTES + _GREETING_BYTES
                while (asked := link.read(None)) is not None:
                    answer: Info = {"number": asked["number"]}
                    if "set" in asked:
                        self.put(str(asked["set"]), asked["value"])
                    elif "drop" in asked:
                        self.drop(str(asked["drop"]))
                    else:
                        left_s = float(asked["seconds"])
                        until = deadline(left_s if 0 <= left_s <= LONGEST_WAIT_S else LONGEST_WAIT_S)
                        for value in self.wait(str(asked["wait"]), until, look_s=LONGEST_WAIT_S):
                            answer["value"] = value
                    link.send(answer, deadline(_PATIENCE_S))
        except (WeightSyncError, KeyError, TypeError, ValueError, OverflowError):
            pass  # it is gone, or does not follow the protocol: it sees its connection closed
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _proves_itself(self, link: Link) -> bool:
        own, until = os.urandom(_NONCE_BYTES).hex(), deadline(_GREET_S)
        link.send({"notes": _FORMAT, "nonce": own}, until)
        said = link.read(until) or {}
        nonces = own + str(said.get("nonce"))
        if not hmac.compare_digest(str(said.get("proof")).encode(), _proof(self.secret, "worker", nonces).encode()):
            return False
        link.send({"proof": _proof(self.secret, "trainer", nonces)}, until)
        return True


@final
class RemoteNotes(NoteStore):
    """A worker's connection to the notes of its trainer; arguments as for `NoteStore`.

    Args:
        timeout_s: how long this worker waits for the trainer to listen, and then for each of its answers, in seconds.

    Raises:
        DeadlineError: no trainer listens at the address, or what listens does not answer.
        TransportError: the trainer has another secret.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event, *, timeout_s: float) -> None:
        super().__init__(host, port, secret, stop)
        self.patience_s = timeout_s
        self._lock, self._asked = threading.Lock(), 0
        until = deadline(timeout_s)
        for _ in pauses(timeout_s, stop, shortest_s=_PAUSE_S, longest_s=_SLICE_S):
            self._link = Link(dial(host, port, until, stop), f"what listens at {self.address}")
            if self._greet(until):
                self._link.peer = f"the trainer (rank 0) at {self.address}"
                return
        raise _aborted() if stop.is_set() else self._silent()

    def put(self, key: str, value: Any) -> None:
        nbytes = len(json.dumps(value, separators=(",", ":")))
        if nbytes > NOTE_BYTES:
            raise TransportError(f"the note {key!r} has {nbytes} bytes", expected=f"at most {NOTE_BYTES}")
        self._ask({"set": key, "value": value})

    def drop(self, key: str) -> None:
        self._ask({"drop": key})

    def wait(self, key: str, until: float) -> list[Any]:
        while True:
            left_s = min(LONGEST_WAIT_S, max(0.0, until - time.monotonic()))
            answer = self._ask({"wait": key, "seconds": left_s}, self.stop if left_s else None)
            if "value" in answer:
                return [answer["value"]]
            if time.monotonic() >= until or self.stop.is_set():
                return []

    def close(self) -> None:
        self._link.close()

    def _greet(self, until: float) -> bool:
        """Prove to each other that both ends have the secret; return False if the trainer is just leaving."""
        own, greeting = os.urandom(_NONCE_BYTES).hex(), None
        try:
            greeting = self._link.read(until, self.stop)
            if greeting is None and not self.stop.is_set():
                raise self._silent()
            if greeting is not None and greeting.get("notes") == _FORMAT:
                nonces = str(greeting.get("nonce")) + own
                self._link.send({"nonce": own, "proof": _proof(self.secret, "worker", nonces)}, until)
                if (self._link.read(until, self.stop) or {}).get("proof") == _proof(self.secret, "trainer", nonces):
                    return True
        except NotConnectedError:
            if greeting is None:
                return False
        except DeadlineError:
            raise self._silent() from None
        except TransportError:
            pass  # it does not follow the protocol
        self._link.close()
        if self.stop.is_set():
            raise _aborted()
        raise TransportError(
            f"{self._link.peer} does not let this worker in",
            expected="a trainer of the same version of torchrl_ext, with the same secret",
            state="no group was joined",
            hint="check the address and the port, and give every rank the same secret; a trainer that sends through "
            "an engine client makes one for the engines",
        )

    def _silent(self) -> DeadlineError:
        self._link.close()
        return DeadlineError(
            f"{self._link.peer} did not answer within {self.patience_s:g} s",
            expected="the trainer (rank 0), alive",
            state="no group was joined",
            hint="check master_address and master_port, and that the trainer is not frozen",
        )

    def _ask(self, question: Info, stop: threading.Event | None = None) -> Info:
        """Return the answer to one question; empty when stopped."""
        with self._lock:
            self._asked += 1
            until = deadline(self.patience_s)
            try:
                self._link.send({"number": self._asked, **question}, until)
                while (answer := self._link.read(until, stop)) is not None:
                    if answer.get("number") == self._asked:  # else it is that of a question that was stopped
                        return answer
                if stop is not None and stop.is_set():
                    return {}
                raise DeadlineError("it said nothing in time")
            except WeightSyncError as error:
                self._link.close()
                raise NotConnectedError(
                    f"{self._link.peer} is dead, frozen or shut down: {error.what}",
                    state="what was received completely is intact",
                    hint="connect again when a trainer is back",
                ) from error


def _proof(secret: str, who: str, nonces: str) -> str:
    """Return the proof of one end, which only those can make who know the secret."""
    return hmac.digest(secret.encode(), (who + nonces).encode(errors="backslashreplace"), "sha256").hex()


def _aborted() -> TransportError:
    return TransportError("joining the trainer was aborted", state="no group was joined")
