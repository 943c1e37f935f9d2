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
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.collective.sockets import dial, listen
from torchrl_ext.transports.links import Link, close_in_children, serve
from torchrl_ext.transports.waits import pauses
from torchrl_ext.types import Info

__all__ = ["NOTE_BYTES", "NoteStore"]

NOTE_BYTES = 64 << 20
"""Bound on one note: a list of half a million parameters."""

LONGEST_WAIT_S = 0.5

_STORE_BYTES = 4 * NOTE_BYTES
_FORMAT = 2
_NONCE_BYTES = 16
_GREETING_BYTES = 1024
_GREET_S, _PATIENCE_S = 10.0, 60.0
"""For those who connect to say who they are, and to take an answer."""
_SLICE_S = 0.05
_MOST_CONNECTIONS = 4096


class NoteStore:
    """JSON notes that every rank of a group can read.

    Args:
        address: where workers reach the trainer.
        port: of the trainer; port 0 lets the trainer's own store pick a free one.
        host: this is the trainer, which keeps the notes.
        timeout_s: how long a worker waits for the trainer to listen, and then for each of its answers, in seconds.
        stop: set by another thread to end every wait.
        secret: what only trainer and workers know; "" lets in whoever finds the port.

    Raises:
        DeadlineError: no trainer listens at the address, or what listens does not answer.
        TransportError: the port is taken; or the trainer has another secret.
    """

    def __init__(
        self, address: str, port: int, *, host: bool, timeout_s: float, stop: threading.Event, secret: str = ""
    ) -> None:
        self.stop, self.secret = stop, secret
        self._keeper = _Kept(address, port, secret) if host else _Remote(address, port, secret, timeout_s, stop)
        self.host, self.port = address, self._keeper.port
        self.address = f"{address}:{self.port}"
        # at the end of a process its connections close by themselves: those of a fork would end its parent's
        weakref.finalize(self, self._keeper.close).atexit = False

    def limit_waits(self, timeout_s: float) -> None:
        """Worker: how long the trainer may take for an answer from now on."""
        self._keeper.patience_s = timeout_s

    def close(self) -> None:
        """Leave; the trainer's ends the notes. May be called twice."""
        self._keeper.close()

    def put(self, key: str, value: Any) -> None:
        """Write a note.

        Raises:
            TransportError: it is too large, or there are too many.
        """
        self._keeper.set(key, value)

    def get(self, key: str) -> Any:
        """Read a note that is known to be there.

        Raises:
            TransportError: it is not.
        """
        found = self.wait(key, 0.0)
        if not found:
            raise TransportError(f"there is no note {key!r} at {self.address}", state="nothing was moved")
        return found[0]

    def take(self, key: str) -> Any:
        """`get`, then `drop`."""
        value = self.get(key)
        self.drop(key)
        return value

    def drop(self, key: str) -> None:
        """Remove a note, if it is there."""
        self._keeper.drop(key)

    def sweep(self, *beginnings: str) -> None:
        """Trainer: remove every note whose name begins with one of these."""
        self._keeper.sweep(*beginnings)

    def has(self, key: str) -> bool:
        """Whether the note is there."""
        return bool(self.wait(key, 0.0))

    def missing(self, keys: Sequence[str], until: float) -> list[str]:
        """Wait for notes; those that are still missing at the deadline (or when stopped)."""
        for at, key in enumerate(keys):
            if not self.wait(key, until):
                return [key for key in keys[at:] if not self.has(key)]
        return []

    def wait(self, key: str, until: float) -> list[Any]:
        """A note, as a list of one; empty when it did not come by the monotonic moment ``until``, or when stopped."""
        return self._keeper.wait(key, until, self.stop)


class _Kept:
    """The notes, and a listener for the workers."""

    patience_s: float = 0.0
    """Nobody waits long for what is in this process; a worker does (`_Remote`)."""

    def __init__(self, address: str, port: int, secret: str) -> None:
        self._secret = secret
        self._held: dict[str, str] = {}
        self._awaited: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._ended = threading.Event()
        try:
            self._listener = listen(address, port)
        except OSError as error:
            raise TransportError(
                f"the trainer cannot listen at {address}:{port}: {error}",
                state="no group was formed",
                hint="pick another master_port, or 0 for a free one",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        close_in_children(self._listener)
        serve(self._listener, self._serve, "torchrl-ext-notes")

    def set(self, key: str, value: Any) -> None:
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

    def drop(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)

    def sweep(self, *beginnings: str) -> None:
        with self._lock:
            for key in [key for key in self._held if key.startswith(beginnings)]:
                del self._held[key]

    def wait(self, key: str, until: float, stop: threading.Event | None = None) -> list[Any]:
        with self._lock:
            if key in self._held or time.monotonic() >= until:
                return _read(self._held.get(key))
            event = threading.Event()
            self._awaited.setdefault(key, []).append(event)
        try:
            slice_s = LONGEST_WAIT_S if stop is None else _SLICE_S
            while not event.wait(min(slice_s, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until or self._ended.is_set() or (stop is not None and stop.is_set()):
                    break
        finally:
            with self._lock:
                self._awaited[key].remove(event)
                if not self._awaited[key]:
                    del self._awaited[key]
                text = self._held.get(key)
        return _read(text)

    def close(self) -> None:
        """Let every worker go. May be called twice."""
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
                    link.send({"number": asked["number"], **self._answer(asked)}, deadline(_PATIENCE_S))
        except (WeightSyncError, KeyError, TypeError, ValueError, OverflowError):
            pass  # it is gone, or does not speak our language; it sees its connection closed
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _proves_itself(self, link: Link) -> bool:
        own, until = os.urandom(_NONCE_BYTES).hex(), deadline(_GREET_S)
        link.send({"notes": _FORMAT, "nonce": own}, until)
        said = link.read(until) or {}
        nonces = own + str(said.get("nonce"))
        if not hmac.compare_digest(str(said.get("proof")).encode(), _proof(self._secret, "worker", nonces).encode()):
            return False
        link.send({"proof": _proof(self._secret, "trainer", nonces)}, until)
        return True

    def _answer(self, asked: Info) -> Info:
        if "set" in asked:
            self.set(str(asked["set"]), asked["value"])
        elif "drop" in asked:
            self.drop(str(asked["drop"]))
        else:
            wait_s = float(asked["seconds"])
            found = self.wait(str(asked["wait"]), deadline(wait_s if 0 <= wait_s <= LONGEST_WAIT_S else LONGEST_WAIT_S))
            return {"value": found[0]} if found else {}
        return {}


class _Remote:
    """A worker's connection to the notes of its trainer; arguments as for `NoteStore`."""

    def __init__(self, address: str, port: int, secret: str, timeout_s: float, stop: threading.Event) -> None:
        self.port, self.patience_s = port, timeout_s
        self._lock, self._asked = threading.Lock(), 0
        until = deadline(timeout_s)
        for _ in pauses(until, stop):
            self._link = Link(dial(address, port, until, stop), f"what listens at {address}:{port}")
            if self._greet(secret, timeout_s, until, stop):
                self._link.peer = f"the trainer (rank 0) at {address}:{port}"
                return
        raise _aborted() if stop.is_set() else self._silent(timeout_s)

    def set(self, key: str, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) > NOTE_BYTES:
            raise TransportError(f"the note {key!r} has {len(text)} bytes", expected=f"at most {NOTE_BYTES}")
        self._ask({"set": key, "value": value})

    def drop(self, key: str) -> None:
        self._ask({"drop": key})

    def sweep(self, *beginnings: str) -> None:
        """Only the trainer knows when nobody needs notes any more."""

    def wait(self, key: str, until: float, stop: threading.Event | None = None) -> list[Any]:
        while True:
            left_s = min(LONGEST_WAIT_S, max(0.0, until - time.monotonic()))
            answer = self._ask({"wait": key, "seconds": left_s}, stop if left_s else None)
            if "value" in answer:
                return [answer["value"]]
            if time.monotonic() >= until or (stop is not None and stop.is_set()):
                return []

    def close(self) -> None:
        """Leave. May be called twice."""
        self._link.close()

    def _greet(self, secret: str, timeout_s: float, until: float, stop: threading.Event) -> bool:
        """Show that both ends have the secret; False when the other one is just leaving."""
        own, greeting = os.urandom(_NONCE_BYTES).hex(), None
        try:
            greeting = self._link.read(until, stop)
            if greeting is None and not stop.is_set():
                raise self._silent(timeout_s)
            if greeting is not None and greeting.get("notes") == _FORMAT:
                nonces = str(greeting.get("nonce")) + own
                self._link.send({"nonce": own, "proof": _proof(secret, "worker", nonces)}, until)
                if (self._link.read(until, stop) or {}).get("proof") == _proof(secret, "trainer", nonces):
                    return True
        except NotConnectedError:
            if greeting is None:
                return False
        except DeadlineError:
            raise self._silent(timeout_s) from None
        except TransportError:
            pass  # it does not speak our language
        self._link.close()
        if stop.is_set():
            raise _aborted()
        raise TransportError(
            f"{self._link.peer} does not let this worker in",
            expected="a trainer of the same version of torchrl_ext, with the same secret",
            state="no group was joined",
            hint="check the address and the port, and give every rank the same secret; a trainer that sends through "
            "an engine client makes one for the engines",
        )

    def _silent(self, timeout_s: float) -> DeadlineError:
        self._link.close()
        return DeadlineError(
            f"{self._link.peer} did not answer within {timeout_s:g} s",
            expected="the trainer (rank 0), alive",
            state="no group was joined",
            hint="check master_address and master_port, and that the trainer is not frozen",
        )

    def _ask(self, question: Info, stop: threading.Event | None = None) -> Info:
        """The answer to one question; empty when stopped."""
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


def _read(text: str | None) -> list[Any]:
    return [] if text is None else [json.loads(text)]


def _proof(secret: str, who: str, nonces: str) -> str:
    """What only those can say who know the secret."""
    return hmac.digest(secret.encode(), (who + nonces).encode(errors="backslashreplace"), "sha256").hex()


def _aborted() -> TransportError:
    return TransportError("joining the trainer was aborted", state="no group was joined")
