"""Connects the workers of a collector to their trainer, over TCP (`torchrl_ext.transports.links`).

A worker dials and says who it is, and is answered with ``{"welcome": ...}`` or ``{"refused": why}``. After that the
trainer asks and the worker answers.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, NotConnectedError, WeightSyncError
from torchrl_ext.transports.links import LONGEST_BYTES, Link, serve
from torchrl_ext.types import Info

__all__ = ["Hub", "dial"]

_HELLO_S, _HELLO_BYTES = 10.0, 4096
_LOOK_S = 0.2
"""Seconds between two looks at whether a worker has ended, while others are waited for."""


class Hub:
    """Listens for the workers of one model, and accepts their connections in a thread of its own.

    Args:
        host: address to listen on, and the one that workers dial.
        model_id: the model whose workers these are.
        workers: how many there are.
        welcome: returns what worker ``idx`` is told when it is accepted (JSON-safe).
    """

    def __init__(self, host: str, model_id: str, workers: int, welcome: Callable[[int], Info]) -> None:
        self.links: dict[int, Link] = {}
        self.token = secrets.token_hex(16)
        self._model_id, self._workers, self._welcome = model_id, workers, welcome
        listener = socket.create_server((host, 0), backlog=128)
        self.address = (host, int(listener.getsockname()[1]))
        self._changed = threading.Condition()
        self._stop = weakref.finalize(self, _close, listener, self.links, os.getpid())
        here = weakref.ref(self)

        def met(connection: socket.socket, address: Any) -> None:
            hub = here()
            if hub is not None:
                hub.welcome(Link(connection, f"{address[0]}:{address[1]}", longest_bytes=_HELLO_BYTES))

        serve(listener, met, f"torchrl-ext-hub-{model_id}")

    def wait(self, timeout_s: float, ended: Callable[[], list[int]] = list) -> list[int]:
        """Wait until every worker has connected or has ended.

        Args:
            timeout_s: how long at most.
            ended: indices of workers whose processes are known to have ended.

        Returns:
            Indices of workers that ended before they connected; empty where all of them connected.

        Raises:
            DeadlineError: names the workers that are missing.
        """
        until = Deadline(timeout_s).until
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

    def welcome(self, link: Link) -> None:
        """Accept a worker that dialled, or answer why it is refused."""
        try:
            hello = link.read(Deadline(_HELLO_S)) or {}
            refusal = self._refusal(hello, link)
            if refusal is not None:
                link.send({"refused": refusal}, Deadline(_HELLO_S))
                link.close()
        except WeightSyncError:  # it is gone, does not read, or sends no message of ours
            link.close()

    def _refusal(self, hello: Info, link: Link) -> str | None:
        """Accept the worker and return None, or return why it is refused."""
        token = str(hello.get("token", "")).encode(errors="replace")  # of text it compares ASCII alone
        if not hmac.compare_digest(token, self.token.encode()):
            return "this is another trainer's address"
        idx, pid, model_id = hello.get("worker"), hello.get("pid"), hello.get("model_id")
        if type(idx) is not int or type(pid) is not int or not 0 <= idx < self._workers:
            return f"worker {idx!r} (pid {pid!r}) is none of the {self._workers} workers of model {self._model_id!r}"
        if model_id != self._model_id:
            return f"this scheme carries model {self._model_id!r}, not {model_id!r}"
        with self._changed:
            known = self.links.get(idx)
            if known is not None and not known.alive:
                del self.links[idx]  # a new process in the place of one that died
            if idx in self.links:
                return f"{self.links[idx].peer} is connected already"
            link.peer = f"worker {idx} of model {self._model_id!r} (pid {pid})"
            link.longest_bytes = LONGEST_BYTES
            link.send({"welcome": self._welcome(idx)}, Deadline(_HELLO_S))
            self.links[idx] = link
            self._changed.notify_all()
        return None


def _close(listener: socket.socket, links: dict[int, Link], owner: int) -> None:
    if owner != os.getpid():
        return
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves a thread in accept()
    listener.close()
    for link in [*links.values()]:
        link.close()


def dial(address: tuple[str, int], model_id: str, worker: int, token: str, timeout_s: float) -> tuple[Link, Info]:
    """Connect a worker to the trainer's hub.

    Returns:
        The link, and the trainer's welcome.

    Raises:
        NotConnectedError: nobody listens there, or the trainer refuses this worker (a second one of the same index or
            for another model); says why.
        DeadlineError: no answer within ``timeout_s``.
    """
    trainer = f"the trainer at {address[0]}:{address[1]}"
    who = f"worker {worker} of model {model_id!r}"
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise NotConnectedError(
            f"{who} cannot reach {trainer}: {error}",
            hint="the trainer must call init_on_sender before its workers start",
        ) from error
    link, within = Link(connection, trainer), Deadline(timeout_s)
    link.send({"token": token, "model_id": model_id, "worker": worker, "pid": os.getpid()}, within)
    answer: Any = link.read(within)
    if answer is None or "welcome" not in answer:
        link.close()
        if answer is None:
            raise DeadlineError(f"{trainer} did not answer {who} within {timeout_s:g} s")
        raise NotConnectedError(
            f"{trainer} refused {who}: {answer.get('refused', 'it gives no reason')}",
            expected="one scheme per model, one worker per index",
        )
    return link, answer["welcome"]
