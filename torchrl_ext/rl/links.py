"""Connects a collector's workers to their trainer over TCP, by JSON in frames of `torchrl_ext.data.group.store`.

=================================================  =================================================================
``{"token", "model_id", "worker", "pid"}``         worker, at once: introduces itself
``{"welcome": {"tied", "device"}}``                trainer; or ``{"refused": why}``
``{"number", "message"}``                          trainer: a message to handle; without one, the worker keeps its own
                                                   weights and need not wait for the first
``{"number", "answer"}``                           worker; or ``{"number", "error": text}``
=================================================  =================================================================
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, ClassVar, final

import msgspec

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    parsed,
    why,
)
from torchrl_ext.base.messages import Leave, Message, Poll
from torchrl_ext.base.types import EngineInfo, Info
from torchrl_ext.control.port import EngineState, Port
from torchrl_ext.data.group.store import LONGEST_BYTES, Channel, bound, connected_to, serve

__all__ = ["Hub", "LinkPort", "dial"]

_HELLO_BYTES = 4096
_LOOK_S = 0.1
"""Longest pause between two checks of which workers have connected or ended, in seconds."""


class _Hello(msgspec.Struct):
    token: str
    model_id: str
    worker: int
    pid: int


class Hub:
    """Listens for the workers of one model; a thread per connection accepts or refuses the worker.

    Args:
        host: address to listen on, which workers dial.
        workers: number of workers.
        welcome: what workers are told at first (JSON-safe).
        hello_s: how long a worker may take to introduce itself, and to read the answer, in seconds.

    Attributes:
        address: host, port and token that workers need to connect.
        links: connections of the accepted workers, by worker index.
    """

    def __init__(self, host: str, model_id: str, workers: int, welcome: Info, *, hello_s: float = 10.0) -> None:
        self._model_id, self._workers, self._welcome, self._hello_s = model_id, workers, welcome, hello_s
        listener, self._lock = bound(host, 0), threading.Lock()
        self.address = (host, int(listener.getsockname()[1]), secrets.token_hex(16))
        self.links: dict[int, Channel] = {}
        self._stop_listening = serve(listener, self.meet, f"torchrl-ext-hub-{model_id}")

    def wait(self, timeout_s: float, ended: Callable[[], list[int]] = list) -> list[int]:
        """Wait until every worker has connected or has ended.

        Args:
            ended: returns the indices of workers whose processes have ended.

        Returns:
            Indices of workers that ended before they connected; empty if all workers connected.

        Raises:
            DeadlineError: names the missing workers.
        """

        def late() -> DeadlineError:
            missing = self._missing()
            host, port, _ = self.address
            return DeadlineError(
                f"{len(missing)} of {self._workers} workers of model {self._model_id!r} did not connect to "
                f"{host}:{port} within {timeout_s:g} s: {', '.join(map(str, missing))}",
                expected="init_on_receiver and connect in each worker",
                hint="find out why they do not start, or raise start_timeout_s",
            )

        Deadline(timeout_s).poll(lambda: {*self._missing()} <= {*ended()}, late=late, longest_s=_LOOK_S)
        return self._missing()

    def close(self) -> None:
        """Stop listening and close every connection. May be called twice."""
        self._stop_listening()
        for link in [*self.links.values()]:
            link.close()

    def meet(self, connection: socket.socket, address: Any) -> None:
        """Accept the worker that dialled from ``address``, or tell it why it is refused."""
        link = Channel(connection, f"{address[0]}:{address[1]}", longest_bytes=_HELLO_BYTES)
        try:
            hello = link.read(Deadline(self._hello_s), _Hello)
            refusal = "it did not introduce itself" if hello is None else self._refusal(hello, link)
            if refusal is not None:
                link.send({"refused": refusal}, Deadline(self._hello_s))
                link.close()
        except WeightSyncError:  # the peer left, does not read, or does not speak our protocol
            link.close()

    def _missing(self) -> list[int]:
        return [idx for idx in range(self._workers) if idx not in self.links]

    def _refusal(self, hello: _Hello, link: Channel) -> str | None:
        """Accept the worker and return None, or return why it is refused."""
        idx, who = hello.worker, f"worker {hello.worker} of model {self._model_id!r} (pid {hello.pid})"
        if not hmac.compare_digest(hello.token.encode(), self.address[2].encode()):
            return "this is another trainer's address"
        if not 0 <= idx < self._workers:
            return f"{who} is not among the {self._workers} workers"
        if hello.model_id != self._model_id:
            return f"this scheme carries model {self._model_id!r}, not {hello.model_id!r}"
        with self._lock:
            known = self.links.get(idx)
            if known is not None and known.alive:  # a new process may replace a dead one
                return f"{known.peer} is connected already"
            link.peer, link.longest_bytes = who, LONGEST_BYTES
            link.send({"welcome": self._welcome}, Deadline(self._hello_s))
            self.links[idx] = link
        return None


def dial(address: tuple[str, int, str], model_id: str, worker: int, timeout_s: float) -> tuple[Channel, Info]:
    """Connect a worker to the trainer's hub.

    Returns:
        The link and the trainer's welcome message.

    Raises:
        NotConnectedError: nothing listens at the address, or the trainer refuses this worker (its index is already
            connected, or it wants another model); gives the reason.
        DeadlineError: the trainer did not answer within ``timeout_s``.
    """
    host, port, token = address
    trainer, who = f"the trainer at {host}:{port}", f"worker {worker} of model {model_id!r}"
    try:
        connection = connected_to(host, port, timeout_s)
    except OSError as error:
        raise NotConnectedError(
            f"{who} cannot reach {trainer}: {error}",
            hint="the trainer must call init_on_sender before its workers start",
        ) from error
    link, within = Channel(connection, trainer), Deadline(timeout_s, trainer)
    link.send({"token": token, "model_id": model_id, "worker": worker, "pid": os.getpid()}, within)
    answer = link.read(within)
    if answer is not None and "welcome" in answer:
        return link, answer["welcome"]
    link.close()
    if answer is None:
        raise within.error(f"{trainer} did not answer {who}")
    raise NotConnectedError(
        f"{trainer} refused {who}: {answer.get('refused', 'no reason given')}",
        expected="one scheme per model, one worker per index",
    )


@final
class LinkPort(Port):
    """Controls the receiver in one collector worker; the worker keeps collecting while weights land, as in TorchRL.

    Args:
        link: connection to the worker.
        timeout_s: deadline of each answer, in seconds.
    """

    kind: ClassVar[str] = "collector"

    def __init__(self, link: Channel, *, timeout_s: float) -> None:
        self.link, self.url, self.timeout_s = link, link.peer, timeout_s
        self._numbers = itertools.count(1)

    def describe(self) -> EngineInfo:
        return EngineInfo(url=self.url, kind=self.kind)

    def paused(self) -> None:
        """Return None: a worker keeps collecting while weights land."""
        if not self.link.alive:
            raise EngineUnreachableError(f"{self.url} ended")

    def state(self) -> EngineState:
        return EngineState()

    def pause(self) -> None:
        """Do nothing, see `paused`."""

    def resume(self) -> None:
        """Do nothing, like `pause`."""

    def call(self, message: Message) -> list[Info]:
        # a worker handles each message before it answers
        if isinstance(message, Poll) or (isinstance(message, Leave) and not self.link.alive):
            return []
        return [self._ask({"message": message.to_json()}, message.kind)]

    def keep(self) -> None:
        """Tell the worker that it keeps its own weights, instead of waiting for the first."""
        self._ask({}, "the start")

    def _ask(self, question: Info, what: str) -> Info:
        number, within = next(self._numbers), Deadline(self.timeout_s, self.url)
        try:
            self.link.send({"number": number, **question}, within)
            answer = self.link.read(within)
            while answer is not None and answer.get("number") != number:  # a late answer to an earlier message
                answer = self.link.read(within)
        except TransportError as error:
            raise EngineUnreachableError(f"{why(error)}; {self.url} ended during {what!r}") from error
        if answer is None:
            raise within.error(f"{self.url} gave no answer to {what!r}")
        if "error" in answer:
            said, parts = parsed(str(answer["error"]))
            raise EngineRefusedError(f"{said}; {self.url} refused {what!r}", status=None, **parts)
        found = answer.get("answer")
        return found if isinstance(found, dict) else {}
