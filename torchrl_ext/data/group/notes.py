"""The notes that the ranks of a group leave for each other: names and JSON values, hosted by the trainer (rank 0).

The trainer's own process reads and writes them directly. A worker does so over a TCP connection, in messages as in
`torchrl_ext.data.group.links`. A value travels as text, in which the trainer keeps it, too:

=================================================  ===============================================================
``{"notes": 5, "nonce": hex}``                     trainer, at once; 16 random bytes
``{"nonce": hex, "proof": hex}``                   worker; 16 random bytes, and HMAC-SHA256 by the secret of
                                                   ``"worker"`` and both nonces, the trainer's first
``{"proof": hex}``                                 trainer; the same of ``"trainer"``. Whoever has no proof is
                                                   disconnected
``{"number", "do": "put", "key", "text"}``         worker: leave a note; with ``"keep": true`` an earlier one stays
``{"number", "do": "drop", "key"}``                worker: remove it; a key that ends in ``/`` stands for all notes
                                                   whose names begin so
``{"number", "do": "wait", "key", "seconds"}``     worker: its value; if it is not there, wait, but at most
                                                   `LONGEST_WAIT_S`
``{"number", "do": "will", "key", "text"}``        worker: leave a note, unless one is there, when this connection
                                                   closes
``{"number"}``, ``{"number", "text"}``             trainer; without a text there is no such note
=================================================  ===============================================================
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal, final

import msgspec

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.base.types import Info, described
from torchrl_ext.data.group.links import Link, close_in_children, dial, listen, serve

__all__ = ["NOTE_BYTES", "HostedNotes", "NoteStore", "RemoteNotes"]

NOTE_BYTES = 64 << 20
"""Bound on one note: a list of half a million parameters."""

LONGEST_WAIT_S = 0.5

_STORE_BYTES = 4 * NOTE_BYTES
_MESSAGE_BYTES = 2 * NOTE_BYTES + 1024
"""Of a note whose every character is escaped, with its name."""
_FORMAT = 5
_NONCE_BYTES = 16
_GREETING_BYTES = 1024
_GREET_S, _PATIENCE_S = 10.0, 60.0
"""Seconds that a worker has to prove itself once it is connected, and to read an answer."""
_PAUSE_S, _SLICE_S = 0.001, 0.05
_MOST_CONNECTIONS = 4096


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request of one rank, as listed above."""

    number: int = 0
    do: Literal["put", "drop", "wait", "will"]
    key: str
    text: str = ""
    keep: bool = False
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_WAIT_S)] = 0.0


class NoteStore(ABC):
    """JSON notes that every rank of a group can read: `HostedNotes` in the trainer, `RemoteNotes` in a worker.

    Attributes:
        host, port, address: where workers reach the trainer.
        secret: known only to trainer and workers; "" lets in whoever finds the port.
        patience_s: how long the trainer may take for each of its answers, in seconds.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.host, self.port, self.secret, self.address = host, port, secret, f"{host}:{port}"
        self.patience_s = 0.0

    @abstractmethod
    def _ask(self, request: _Request, within: Deadline | None = None) -> list[str]:
        """Return the text of a note as a list of one, or an empty list; ``within`` is the deadline of a ``wait``."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; the trainer's end ends the notes for all. May be called twice."""

    def put(self, key: str, value: Any, *, keep: bool = False) -> None:
        """Write a note; with ``keep`` only if there is none of this name.

        Raises:
            TransportError: it is too large, or there are too many.
        """
        self._ask(_Request(do="put", key=key, text=_text(key, value), keep=keep))

    def put_at_end(self, key: str, value: Any) -> None:
        """Have a note written, if there is none of its name, when the trainer loses this process (worker end)."""
        self._ask(_Request(do="will", key=key, text=_text(key, value)))

    def drop(self, key: str) -> None:
        """Remove a note, if it is there; every note whose name begins with ``key`` where that ends in ``/``."""
        self._ask(_Request(do="drop", key=key))

    def wait(self, key: str, within: Deadline) -> list[Any]:
        """Return a note as a list of one; an empty list if it did not come within the deadline."""
        return [_value(text) for text in self._ask(_Request(do="wait", key=key), within)]

    def has(self, key: str) -> bool:
        """Return whether the note is there."""
        return bool(self.wait(key, Deadline(0.0)))

    def collect(self, beginning: str, ranks: Iterable[int], within: Deadline) -> dict[int, Any]:
        """Wait for the note ``beginning + rank`` of each rank, and return the notes that came within the deadline."""
        return {rank: value for rank in ranks for value in self.wait(f"{beginning}{rank}", within)}


@final
class HostedNotes(NoteStore):
    """Hosts the notes and listens for workers (trainer end).

    Args:
        host, port, secret: as in `NoteStore`; port 0 picks a free one.

    Raises:
        TransportError: the port is taken.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._texts: dict[str, str] = {}
        self._awaited: weakref.WeakValueDictionary[str, threading.Event] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._ended = False
        try:
            self._listener = listen(host, port)
        except OSError as error:
            raise TransportError(
                f"the trainer cannot listen at {host}:{port}: {error}",
                state="no group was formed",
                hint="pick another master_port, or 0 for a free one",
            ) from error
        super().__init__(host, self._listener.getsockname()[1], secret)
        close_in_children(self._listener)
        serve(self._listener, self._serve, "torchrl-ext-notes")

    def _ask(self, request: _Request, within: Deadline | None = None) -> list[str]:
        key = request.key
        with self._lock:
            if request.do == "put":
                self._write(request)
            elif request.do == "drop":
                for name in [name for name in self._texts if name.startswith(key)] if key.endswith("/") else [key]:
                    self._texts.pop(name, None)
            if request.do != "wait" or within is None:
                return []
            if key in self._texts or within.over:
                return self._read(key)
            event = self._awaited.setdefault(key, threading.Event())
        while not event.wait(min(LONGEST_WAIT_S, within.left_s)) and not within.over:
            pass
        with self._lock:
            return self._read(key)

    def _read(self, key: str) -> list[str]:
        return [self._texts[key]] if key in self._texts else []

    def _write(self, request: _Request) -> None:
        key, nbytes = request.key, len(request.text)
        if request.keep and key in self._texts:
            return
        room = _STORE_BYTES - sum(map(len, self._texts.values()))
        if nbytes > min(NOTE_BYTES, room):
            raise TransportError(
                f"the note {key!r} has {nbytes} bytes",
                expected=f"at most {NOTE_BYTES} bytes, and at most the {room} bytes that are left for notes",
            )
        self._texts[key] = request.text
        event = self._awaited.pop(key, None)
        if event is not None:
            event.set()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            links = [*self._links]
        with suppress(OSError):  # it was closed
            self._listener.shutdown(socket.SHUT_RDWR)  # lets go of the thread that accepts
        self._listener.close()
        for link in links:
            link.close()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        link = Link(connection, f"a worker at {address[0]}", longest_bytes=_GREETING_BYTES)
        with self._lock:
            if self._ended or len(self._links) >= _MOST_CONNECTIONS:
                link.close()
                return
            self._links.add(link)
        will = None
        try:
            if self._proves_itself(link):
                link.longest_bytes = _MESSAGE_BYTES
                while (message := link.read(None)) is not None:  # the kernel gives up a machine that is silent
                    request = msgspec.convert(message, described(_Request))
                    if request.do == "will":  # one group at a time
                        will = msgspec.structs.replace(request, do="put", keep=True)
                    found = self._ask(request, Deadline(request.seconds))
                    answer: Info = {"number": request.number}
                    if found:
                        answer["text"] = found[0]
                    link.send(answer, Deadline(_PATIENCE_S))
        except (WeightSyncError, msgspec.ValidationError, UnicodeError):
            pass  # it is gone, or does not follow the protocol: it sees its connection closed
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()
            if will is not None:
                with suppress(TransportError):  # the notes are full
                    self._ask(will)

    def _proves_itself(self, link: Link) -> bool:
        own, within = os.urandom(_NONCE_BYTES).hex(), Deadline(_GREET_S)
        link.send({"notes": _FORMAT, "nonce": own}, within)
        answer = link.read(within) or {}
        nonces = own + str(answer.get("nonce"))
        if not hmac.compare_digest(str(answer.get("proof")).encode(), _proof(self.secret, "worker", nonces).encode()):
            return False
        link.send({"proof": _proof(self.secret, "trainer", nonces)}, within)
        return True


@final
class RemoteNotes(NoteStore):
    """A worker's connection to the notes of its trainer.

    Args:
        host, port, secret: as in `NoteStore`.
        within: deadline for the trainer to listen and to answer; each later answer may take as many seconds.

    Raises:
        DeadlineError: no trainer listens at the address, or the process that listens does not answer.
        TransportError: the trainer has another secret, or another thread ended the wait.
    """

    def __init__(self, host: str, port: int, secret: str, within: Deadline) -> None:
        super().__init__(host, port, secret)
        self.patience_s = within.timeout_s
        self._lock, self._number = threading.Lock(), 0
        failure = "no attempt was made"
        for _ in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
            self._link = Link(dial(host, port, within, failure), f"the process that listens at {self.address}")
            try:
                greeting = self._heard(within)
            except NotConnectedError as error:  # a trainer that is just leaving; the next one may listen soon
                failure = error.what
                continue
            self._prove(greeting, within)
            self._link.peer = f"the trainer (rank 0) at {self.address}"
            return
        raise self._silent(within)

    def _prove(self, greeting: Info, within: Deadline) -> None:
        """Prove to each other that both ends have the secret."""
        own = os.urandom(_NONCE_BYTES).hex()
        nonces = str(greeting.get("nonce")) + own
        with suppress(NotConnectedError):  # it disconnects whoever has another secret
            if greeting.get("notes") == _FORMAT:
                self._link.send({"nonce": own, "proof": _proof(self.secret, "worker", nonces)}, within)
                if self._heard(within).get("proof") == _proof(self.secret, "trainer", nonces):
                    return
        raise self._refused()

    def _heard(self, within: Deadline) -> Info:
        try:
            message = self._link.read(within)
        except NotConnectedError:
            raise
        except TransportError:  # no message of ours
            raise self._refused() from None
        if message is None:
            raise self._silent(within)
        return message

    def _refused(self) -> TransportError:
        self._link.close()
        return TransportError(
            f"{self._link.peer} refused this worker",
            expected="a trainer of the same version of torchrl_ext, with the same secret",
            state="no group was joined",
            hint="check the address and the port, and give every rank the same secret; a trainer that sends through "
            "an engine client makes one for the engines",
        )

    def _silent(self, within: Deadline) -> WeightSyncError:
        self._link.close()
        return within.error(
            f"{self._link.peer} did not answer",
            expected="a trainer (rank 0) that runs",
            state="no group was joined",
            hint="check master_address and master_port, and that the trainer does not hang",
        )

    def close(self) -> None:
        self._link.close()

    def _ask(self, request: _Request, within: Deadline | None = None) -> list[str]:
        within = within or Deadline(0.0)
        while True:
            seconds = min(LONGEST_WAIT_S, within.left_s)
            found = self._answer(request, seconds, within.stop if seconds else None)
            if found or request.do != "wait" or within.over:
                return found

    def _answer(self, request: _Request, seconds: float, stop: threading.Event | None) -> list[str]:
        """Return the text in the answer to one request; empty without one, and when stopped."""
        with self._lock:
            self._number += 1
            request = msgspec.structs.replace(request, number=self._number, seconds=seconds)
            within = Deadline(self.patience_s, stop=stop)
            try:
                self._link.send(msgspec.to_builtins(request), Deadline(self.patience_s))
                while (answer := self._link.read(within)) is not None:
                    if answer.get("number") == self._number:  # else it is that of a request that was stopped
                        return [str(answer["text"])] if "text" in answer else []
                if within.stop.is_set():
                    return []
                raise DeadlineError("it said nothing in time")
            except WeightSyncError as error:
                self._link.close()
                raise NotConnectedError(
                    f"{self._link.peer} has ended, hangs or was shut down: {error.what}",
                    state="every version that was received completely is intact",
                    hint="connect again when the trainer is back",
                ) from error


def _text(key: str, value: Any) -> str:
    """Return a value as the text of a note, which has a bound."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > NOTE_BYTES:
        raise TransportError(f"the note {key!r} has {len(text)} bytes", expected=f"at most {NOTE_BYTES}")
    return text


def _value(text: str) -> Any:
    """Return the value of a note; None, which no reader takes, for text that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _proof(secret: str, end: str, nonces: str) -> str:
    """Return the proof of one end, for which one has to know the secret."""
    return hmac.digest(secret.encode(), (end + nonces).encode(errors="backslashreplace"), "sha256").hex()
