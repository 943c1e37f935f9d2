"""JSON messages over TCP between a scheme's trainer end and the workers of its collector.

A message is four bytes of length (big endian) and that many bytes of UTF-8 JSON. A worker dials, says who it is, and is
answered with ``{"welcome": ...}`` or ``{"refused": why}``. After that the trainer asks and the worker answers.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchrl_ext.errors import DeadlineError, NotConnectedError
from torchrl_ext.transports.base import deadline
from torchrl_ext.types import Info

__all__ = ["Hub", "Link", "dial"]

_HELLO_S = 10.0
_LONGEST_BYTES = 256 << 20  # a list of a million parameters
_LOOK_S = 0.2
"""How often a wait for workers looks whether one of them has ended."""


# poll() sees a connection that another thread shuts down and closes at once; epoll may forget it and wait on
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Link:
    """One end of a connection; asks and answers go through it one at a time.

    Args:
        connection: a connected socket, owned from here on.
        peer: who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self.peer = connection, peer
        self._received = bytearray()
        self._closed = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)

    def put(self, message: Info, timeout_s: float) -> None:
        """Send one message.

        Raises:
            NotConnectedError: the other end is gone.
            DeadlineError: it does not read; the connection is closed, for it may have got a part.
        """
        data = json.dumps(message).encode()
        rest, until = memoryview(len(data).to_bytes(4, "big") + data), deadline(timeout_s)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if self._ready(selectors.EVENT_WRITE, max(0.0, until - time.monotonic())):
                    continue
                self.close()
                raise DeadlineError(
                    f"{self.peer} did not read what it was told ({len(data):,} bytes) within {timeout_s:g} s",
                    expected="a process that runs; a message is read as soon as it comes",
                    state="it may have got a part of the message, so the connection was closed",
                    hint="look for what keeps it from running, or start it again",
                ) from None
            except OSError as error:
                raise self._lost() from error

    def get(self, timeout_s: float | None) -> Info | None:
        """The next message, or None after ``timeout_s`` seconds (None: wait for as long as the other end lives).

        Raises:
            NotConnectedError: the other end is gone, or is no end of ours.
        """
        until = None if timeout_s is None else deadline(timeout_s)
        while True:
            message = self._next()
            if message is not None:
                return message
            wait_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                if not self._ready(selectors.EVENT_READ, wait_s):
                    return None
                data = self._socket.recv(1 << 16)
            except BlockingIOError:  # another thread took it
                continue
            except OSError as error:
                raise self._lost() from error
            if not data:
                raise self._lost()
            self._received += data

    def alive(self) -> bool:
        """Whether the other end has not closed the connection, as far as can be seen without a message."""
        if self._closed:
            return False
        try:
            return not self._ready(selectors.EVENT_READ, 0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End the connection; a wait in another thread ends too. May be called twice."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):  # the other end was first
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _ready(self, event: int, wait_s: float | None) -> bool:
        with _Selector() as selector:
            try:
                selector.register(self._socket, event)
            except ValueError as error:  # closed by another thread
                raise self._lost() from error
            return bool(selector.select(wait_s))

    def _next(self) -> Info | None:
        if len(self._received) < 4:
            return None
        size = int.from_bytes(self._received[:4], "big")
        if size > _LONGEST_BYTES:
            raise self._foreign(f"announces a message of {size:,} bytes")
        if len(self._received) < 4 + size:
            return None
        try:
            message = json.loads(bytes(self._received[4 : 4 + size]))
        except (ValueError, RecursionError):
            message = None
        del self._received[: 4 + size]
        if not isinstance(message, dict):
            raise self._foreign("sends what is no JSON object")
        return message

    def _foreign(self, does: str) -> NotConnectedError:
        self.close()
        return NotConnectedError(
            f"{self.peer} {does}",
            expected="the other end of a scheme of torchrl_ext",
            state="the connection was closed",
            hint="use one release of torchrl_ext on both ends",
        )

    def _lost(self) -> NotConnectedError:
        return NotConnectedError(f"{self.peer} closed its connection or died")


class Hub:
    """Where the workers of one model dial in; accepts them in a thread of its own.

    Args:
        host: address to listen on, and the one that workers dial.
        model_id: the model whose workers these are.
        workers: how many there are.
        welcome: what worker ``idx`` is told when it is admitted (JSON-safe).
    """

    def __init__(self, host: str, model_id: str, workers: int, welcome: Callable[[int], Info]) -> None:
        self.links: dict[int, Link] = {}
        self.pids: dict[int, int] = {}
        self.token = secrets.token_hex(16)
        self._model_id, self._workers, self._welcome = model_id, workers, welcome
        listener = socket.create_server((host, 0), backlog=128)
        self.address = (host, int(listener.getsockname()[1]))
        self._changed = threading.Condition()
        self._stop = weakref.finalize(self, _close, listener, self.links, os.getpid())
        threading.Thread(
            target=_accept, args=(listener, weakref.ref(self)), name=f"torchrl-ext-hub-{model_id}", daemon=True
        ).start()

    def wait(self, timeout_s: float, ended: Callable[[], list[int]] = list) -> list[int]:
        """Wait until every worker is here, or has ended.

        Args:
            timeout_s: how long at most.
            ended: indices of workers whose processes are known to have ended.

        Returns:
            Workers that ended before they dialled in.

        Raises:
            DeadlineError: names the workers that are missing.
        """
        until = deadline(timeout_s)
        with self._changed:
            while len(self.links) < self._workers:
                gone = [idx for idx in ended() if idx not in self.links]
                if gone and len(self.links) + len(gone) >= self._workers:
                    return gone
                left_s = until - time.monotonic()
                if left_s <= 0:
                    missing = [idx for idx in range(self._workers) if idx not in self.links]
                    raise DeadlineError(
                        f"{len(missing)} of {self._workers} workers of model {self._model_id!r} did not connect to "
                        f"{self.address[0]}:{self.address[1]} within {timeout_s:g} s: {', '.join(map(str, missing))}",
                        expected="init_on_receiver and connect in each worker",
                        hint="look for what keeps them from starting, or raise start_timeout_s",
                    )
                self._changed.wait(min(left_s, _LOOK_S))
        return []

    def close(self) -> None:
        """Stop listening and end every connection. May be called twice; a forked child leaves its parent's alone."""
        self._stop()

    def admit(self, link: Link) -> None:
        """Let one in that dialled, or tell it why not."""
        try:
            hello = link.get(_HELLO_S) or {}
            refusal = self._refusal(hello, link)
            if refusal is not None:
                link.put({"refused": refusal}, _HELLO_S)
                link.close()
        except (NotConnectedError, DeadlineError):
            link.close()

    def _refusal(self, hello: Info, link: Link) -> str | None:
        """Why not; or None, and the worker is in."""
        if not hmac.compare_digest(str(hello.get("token", "")), self.token):
            return "this is another trainer's address"
        idx, pid, model_id = hello.get("worker"), hello.get("pid"), hello.get("model_id")
        if type(idx) is not int or type(pid) is not int or not 0 <= idx < self._workers:
            return f"worker {idx!r} (pid {pid!r}) is none of the {self._workers} workers of model {self._model_id!r}"
        if model_id != self._model_id:
            return f"this scheme carries model {self._model_id!r}, not {model_id!r}"
        with self._changed:
            known = self.links.get(idx)
            if known is not None and not known.alive():
                del self.links[idx]  # a new process in the place of one that died
            if idx in self.links:
                return f"worker {idx} of model {self._model_id!r} is connected already (pid {self.pids[idx]})"
            if len(self.links) >= self._workers:
                return f"all {self._workers} workers of model {self._model_id!r} are connected already"
            link.peer = f"worker {idx} of model {self._model_id!r} (pid {pid})"
            link.put({"welcome": self._welcome(idx)}, _HELLO_S)
            self.links[idx], self.pids[idx] = link, pid
            self._changed.notify_all()
        return None


def _accept(listener: socket.socket, hub: weakref.ref[Hub]) -> None:
    while True:
        try:
            connection, address = listener.accept()
        except OSError:
            return  # closed
        here = hub()
        if here is None:
            return
        link = Link(connection, f"{address[0]}:{address[1]}")
        threading.Thread(target=here.admit, args=(link,), daemon=True).start()


def _close(listener: socket.socket, links: dict[int, Link], owner: int) -> None:
    if owner != os.getpid():
        return
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves a thread in accept()
    listener.close()
    for link in [*links.values()]:
        link.close()


def dial(address: tuple[str, int], model_id: str, worker: int, token: str, timeout_s: float) -> tuple[Link, Info]:
    """Worker end: connect to the trainer's hub.

    Returns:
        The link, and what the trainer says in welcome.

    Raises:
        NotConnectedError: nobody listens there, or the trainer refuses this worker (a second one of the same index or
            for another model); says why.
        DeadlineError: no answer within ``timeout_s``.
    """
    trainer = f"the trainer at {address[0]}:{address[1]}"
    who = f"worker {worker} of model {model_id!r}"
    try:
        connection = socket.create_connection(tuple(address), timeout=timeout_s)
    except OSError as error:
        raise NotConnectedError(
            f"{who} cannot reach {trainer}: {error}",
            hint="the trainer must call init_on_sender before its workers start",
        ) from error
    link = Link(connection, trainer)
    link.put({"token": token, "model_id": model_id, "worker": worker, "pid": os.getpid()}, timeout_s)
    answer: Any = link.get(timeout_s)
    if answer is None or "welcome" not in answer:
        link.close()
        if answer is None:
            raise DeadlineError(f"{trainer} did not answer {who} within {timeout_s:g} s")
        raise NotConnectedError(
            f"{trainer} refused {who}: {answer.get('refused', 'it gives no reason')}",
            expected="one scheme per model, one worker per index",
        )
    return link, answer["welcome"]
