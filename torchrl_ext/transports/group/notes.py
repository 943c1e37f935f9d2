"""The notes that the ranks of a group leave for each other: names and JSON values, hosted by the trainer (rank 0).

The trainer's own process reads and writes them directly. A worker does so over a TCP connection, in messages as in
`torchrl_ext.transports.links`:

=================================================  ===============================================================
``{"notes": 4, "nonce": hex}``                     trainer, at once; 16 random bytes
``{"nonce": hex, "proof": hex}``                   worker; 16 random bytes, and HMAC-SHA256 by the secret of
                                                   ``"worker"`` and both nonces, the trainer's first
``{"proof": hex}``                                 trainer; the same of ``"trainer"``. Whoever has no proof is
                                                   disconnected
``{"number", "do": "put", "key", "value"}``        worker: leave a note; with ``"keep": true`` an earlier one stays
``{"number", "do": "drop", "key"}``                worker: remove it
``{"number", "do": "wait", "key", "seconds"}``     worker: its value; if it is not there, wait, but at most
                                                   `LONGEST_WAIT_S`
``{"number", "do": "will", "key", "value"}``       worker: leave a note, unless one is there, when this connection
                                                   closes
``{"number"}``, ``{"number", "value"}``            trainer; without a value there is no such note
=================================================  ===============================================================
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
from typing import Annotated, Any, Literal, final

import msgspec

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.transports.group.sockets import dial, listen
from torchrl_ext.transports.links import Link, close_in_children, serve
from torchrl_ext.types import Info

__all__ = ["NOTE_BYTES", "HostedNotes", "NoteStore", "RemoteNotes"]

NOTE_BYTES = 64 << 20
"""Bound on one note: a list of half a million parameters."""

LONGEST_WAIT_S = 0.5

_STORE_BYTES = 4 * NOTE_BYTES
_FORMAT = 4
_NONCE_BYTES = 16
_GREETING_BYTES = 1024
_GREET_S, _PATIENCE_S = 10.0, 60.0
"""Seconds that a worker has to prove itself once it is connected, and to read an answer."""
_PAUSE_S, _SLICE_S = 0.001, 0.05
_MOST_CONNECTIONS = 4096


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's message; the fields are listed above."""

    number: int
    do: Literal["put", "drop", "wait", "will"]
    key: str
    value: Any = None
    keep: bool = False
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_WAIT_S)] = 0.0


class NoteStore(ABC):
    """JSON notes that every rank of a group can read: `HostedNotes` in the trainer, `RemoteNotes` in a worker.

    Args:
        host, port: where workers reach the trainer.
        secret: known to trainer and workers alone; "" lets in whoever finds the port.
        stop: set by another thread to end every wait.

    Attributes:
        patience_s: how long the trainer may take for each of its answers, in seconds.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event) -> None:
        self.host, self.port, self.secret, self.stop = host, port, secret, stop
        self.address = f"{host}:{port}"
        self.patience_s = 0.0

    @abstractmethod
    def put(self, key: str, value: Any, *, keep: bool = False) -> None:
        """Write a note; with ``keep`` only if there is none of this name.

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

    def put_at_end(self, key: str, value: Any) -> None:  # noqa: B027 - the trainer's notes end with it
        """Have a note written, if there is none of its name, when the trainer loses this process (worker end)."""

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

    def has(self, key: str) -> bool:
        """Return whether the note is there."""
        return bool(self.wait(key, 0.0))


@final
class HostedNotes(NoteStore):
    """Hosts the notes and listens for workers (trainer end); arguments as for `NoteStore`, ``port`` 0 for a free one.

    Raises:
        TransportError: the port is taken.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event) -> None:
        self._texts: dict[str, str] = {}
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

    def put(self, key: str, value: Any, *, keep: bool = False) -> None:
        text = json.dumps(value, separators=(",", ":"))
        with self._lock:
            if keep and key in self._texts:
                return
            room = _STORE_BYTES - sum(map(len, self._texts.values()))
            if len(text) > min(NOTE_BYTES, room):
                raise TransportError(
                    f"the note {key!r} has {len(text)} bytes",
                    expected=f"at most {NOTE_BYTES}, and room for it among the others: {room} bytes",
                )
            self._texts[key] = text
            for event in self._awaited.get(key, ()):
                event.set()

    def wait(self, key: str, until: float, *, look_s: float = _SLICE_S) -> list[Any]:
        """As `NoteStore.wait`; every ``look_s`` seconds it looks whether it should stop."""
        with self._lock:
            text = self._texts.get(key)
            if text is not None or time.monotonic() >= until:
                return [] if text is None else [json.loads(text)]
            event = threading.Event()
            self._awaited.setdefault(key, []).append(event)
        within = Deadline(until - time.monotonic(), stop=self.stop)
        while not event.wait(min(look_s, within.left_s)) and not within.over and not self._ended.is_set():
            pass
        with self._lock:
            self._awaited[key].remove(event)
            if not self._awaited[key]:
                del self._awaited[key]
            text = self._texts.get(key)
        return [] if text is None else [json.loads(text)]

    def drop(self, key: str) -> None:
        with self._lock:
            self._texts.pop(key, None)

    def sweep(self, *beginnings: str) -> None:
        with self._lock:
            for key in list(self._texts):
                if key.startswith(beginnings):
                    del self._texts[key]

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
        wills: dict[str, Any] = {}
        try:
            if self._proves_itself(link):
                link.longest_bytes = NOTE_BYTES + _GREETING_BYTES
                while (message := link.read(None)) is not None:  # the kernel gives up a machine that is silent
                    request = msgspec.convert(message, _Request)
                    link.send(self._answer(request, wills), Deadline(_PATIENCE_S).until)
        except (WeightSyncError, msgspec.ValidationError, UnicodeError):
            pass  # it is gone, or does not follow the protocol: it sees its connection closed
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()
            for key, value in wills.items():
                with suppress(TransportError):  # the notes are full
                    self.put(key, value, keep=True)

    def _answer(self, request: _Request, wills: dict[str, Any]) -> Info:
        answer: Info = {"number": request.number}
        if request.do == "put":
            self.put(request.key, request.value, keep=request.keep)
        elif request.do == "drop":
            self.drop(request.key)
        elif request.do == "will":
            wills.clear()  # one group at a time
            wills[request.key] = request.value
        else:
            for value in self.wait(request.key, Deadline(request.seconds).until, look_s=LONGEST_WAIT_S):
                answer["value"] = value
        return answer

    def _proves_itself(self, link: Link) -> bool:
        own, until = os.urandom(_NONCE_BYTES).hex(), Deadline(_GREET_S).until
        link.send({"notes": _FORMAT, "nonce": own}, until)
        answer = link.read(until) or {}
        nonces = own + str(answer.get("nonce"))
        if not hmac.compare_digest(str(answer.get("proof")).encode(), _proof(self.secret, "worker", nonces).encode()):
            return False
        link.send({"proof": _proof(self.secret, "trainer", nonces)}, until)
        return True


@final
class RemoteNotes(NoteStore):
    """A worker's connection to the notes of its trainer; arguments as for `NoteStore`.

    Args:
        timeout_s: how long this worker waits for the trainer to listen, and then for each of its answers, in seconds.

    Raises:
        DeadlineError: no trainer listens at the address, or the process that listens does not answer.
        TransportError: the trainer has another secret.
    """

    def __init__(self, host: str, port: int, secret: str, stop: threading.Event, *, timeout_s: float) -> None:
        super().__init__(host, port, secret, stop)
        self.patience_s = timeout_s
        self._lock, self._number = threading.Lock(), 0
        within = Deadline(timeout_s, stop=stop)
        for _ in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
            self._link = Link(dial(host, port, within), f"the process that listens at {self.address}")
            if self._greet(within):
                self._link.peer = f"the trainer (rank 0) at {self.address}"
                return
        raise self._silent(within)

    def put(self, key: str, value: Any, *, keep: bool = False) -> None:
        nbytes = len(json.dumps(value, separators=(",", ":")))
        if nbytes > NOTE_BYTES:
            raise TransportError(f"the note {key!r} has {nbytes} bytes", expected=f"at most {NOTE_BYTES}")
        self._ask({"do": "put", "key": key, "value": value, "keep": keep})

    def drop(self, key: str) -> None:
        self._ask({"do": "drop", "key": key})

    def put_at_end(self, key: str, value: Any) -> None:
        self._ask({"do": "will", "key": key, "value": value})

    def wait(self, key: str, until: float) -> list[Any]:
        within = Deadline(until - time.monotonic(), stop=self.stop)
        while True:
            left_s = min(LONGEST_WAIT_S, within.left_s)
            answer = self._ask({"do": "wait", "key": key, "seconds": left_s}, self.stop if left_s else None)
            if "value" in answer or within.over:
                return [answer["value"]] if "value" in answer else []

    def close(self) -> None:
        self._link.close()

    def _greet(self, within: Deadline) -> bool:
        """Prove to each other that both ends have the secret; return False if the trainer is just leaving."""
        own, greeting = os.urandom(_NONCE_BYTES).hex(), None
        try:
            greeting = self._link.read(within.until, within.stop)
            if greeting is None:
                raise self._silent(within)
            if greeting.get("notes") == _FORMAT:
                nonces = str(greeting.get("nonce")) + own
                self._link.send({"nonce": own, "proof": _proof(self.secret, "worker", nonces)}, within.until)
                answer = self._link.read(within.until, within.stop)
                if answer is None:
                    raise self._silent(within)
                if answer.get("proof") == _proof(self.secret, "trainer", nonces):
                    return True
        except NotConnectedError:
            if greeting is None:
                return False
        except DeadlineError:
            raise self._silent(within) from None
        except TransportError:
            if within.stop.is_set():
                raise
        self._link.close()
        raise TransportError(
            f"{self._link.peer} does not let this worker in",
            expected="a trainer of the same version of torchrl_ext, with the same secret",
            state="no group was joined",
            hint="check the address and the port, and give every rank the same secret; a trainer that sends through "
            "an engine client makes one for the engines",
        )

    def _silent(self, within: Deadline) -> WeightSyncError:
        self._link.close()
        return within.error(
            f"{self._link.peer} did not answer",
            expected="the trainer (rank 0), alive",
            state="no group was joined",
            hint="check master_address and master_port, and that the trainer is not frozen",
        )

    def _ask(self, question: Info, stop: threading.Event | None = None) -> Info:
        """Return the answer to one question; empty when stopped."""
        with self._lock:
            self._number += 1
            until = Deadline(self.patience_s).until
            try:
                self._link.send({"number": self._number, **question}, until)
                while (answer := self._link.read(until, stop)) is not None:
                    if answer.get("number") == self._number:  # else it is that of a question that was stopped
                        return answer
                if stop is not None and stop.is_set():
                    return {}
                raise DeadlineError("it said nothing in time")
            except WeightSyncError as error:
                self._link.close()
                raise NotConnectedError(
                    f"{self._link.peer} is dead, frozen or shut down: {error.what}",
                    state="every version that was received completely is intact",
                    hint="connect again when a trainer is back",
                ) from error


def _proof(secret: str, end: str, nonces: str) -> str:
    """Return the proof of one end, for which one has to know the secret."""
    return hmac.digest(secret.encode(), (end + nonces).encode(errors="backslashreplace"), "sha256").hex()
