"""Drives a worker of a collector as an engine: the trainer asks over a `Link`, a `WeightReceiver` there answers."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torchrl_ext import errors
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    TransportError,
    why,
)
from torchrl_ext.messages import (
    Finish,
    Join,
    Leave,
    Load,
    Message,
    Prefetch,
    Rehearse,
    Start,
    Verify,
    read,
    replaced_by,
    stamped,
)
from torchrl_ext.rpc.client import EngineClient, Stopwatch, _nothing
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.links import Link
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part

__all__ = ["SchemeWorkerEnd", "WorkerEngine"]

log = logging.getLogger("torchrl_ext")
_GRACE_S = 5.0
"""Seconds that the trainer waits longer than a transport does, so that the transport's own error arrives."""
_ANSWER_S = 60.0
"""Seconds that an answer may wait for a trainer that does not read."""


class Keep(Message, frozen=True, kw_only=True):
    """Tells a worker that waits for its first weights that none will come, and to keep what it has."""


class WorkerEngine(EngineClient):
    """Drives the receiver in one worker of a collector.

    The worker goes on collecting while weights land, as with TorchRL's own schemes.

    Args:
        link: to the worker.
        timeout_s: deadline of the transport's waits, in seconds.
    """

    kind: ClassVar[str] = "collector"

    def __init__(self, link: Link, *, timeout_s: float) -> None:
        self.link, self._timeout_s = link, timeout_s + _GRACE_S
        self._numbers = itertools.count(1)
        self._connection = ""
        self._watch = Stopwatch()
        self._state, self._version, self._proof = "serving", 0, "sent"

    @property
    def url(self) -> str:
        return self.link.peer

    def info(self) -> EngineInfo:
        return EngineInfo(url=self.url, kind=self.kind, weight_version=str(self._version))

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        message = Join.of(info)
        self._connection = message.connection
        self.ask(message)

    def replaced(self, connection: str) -> str:
        """Return whether the sender has to join again; "" also of a worker that is gone, as the next step says so."""
        return replaced_by(self.ask, connection)

    @property
    def proof(self) -> str:
        return self._proof

    def rehearse(self, how: str = "once") -> None:
        """Ask what an update proves; weights land in the very tensors that a worker computes with."""
        self._proof = str(self.ask(Rehearse(how=how))["proof"])

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self.ask(Prefetch(version=version, part=part))

    def begin(self, version: int) -> None:
        self._watch.start()
        self._state = "paused"
        self.ask(Start())

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self.ask(Load.of(info))

    def _compare(self, digests: Mapping[str, str]) -> None:
        self.ask(Verify(digests={**digests}))

    def commit(self, version: int) -> None:
        self.ask(Finish(version=version))
        self._watch.stop()
        self._state, self._version = "serving", version

    def pause(self) -> bool:
        """Return True and pause nothing: a worker collects on while weights land, as with TorchRL's own schemes."""
        return True

    def resume(self) -> None:
        """Do nothing, as `pause` does."""

    def rows(self) -> tuple[EngineRow, ...]:
        state = self._state if self.link.alive else "unreachable"
        return (
            EngineRow(
                engine=self.url,
                kind=self.kind,
                state=state,
                version=self._version,
                pause_s=self._watch.seconds,
                proof=self._proof,
            ),
        )

    def close(self) -> None:
        if self.link.alive:
            self.ask(Leave())

    def ask(self, message: Message) -> Any:
        """Send the worker a message, wait until it has done what it says, and return the answer.

        Raises:
            EngineUnreachableError: the worker is gone.
            EngineRefusedError: the worker failed or refused; says why.
            DeadlineError: no answer came in time.
        """
        number = next(self._numbers)
        try:
            request = {"number": number, "message": stamped(message, self._connection).to_json()}
            self.link.send(request, Deadline(self._timeout_s))
            within = Deadline(self._timeout_s)
            answer = self.link.read(within)
            while answer is not None and answer.get("number") != number:  # an answer that came too late
                answer = self.link.read(within)
        except TransportError as error:
            raise EngineUnreachableError(
                f"{why(error)}; {self.url} ended during {message.kind!r}",
                state=f"its last weights version was {self._version}",
            ) from error
        if answer is None:
            raise DeadlineError(f"no answer to {message.kind!r} within {self._timeout_s:g} s from {self.url}")
        refusal = answer.get("error")
        if refusal is not None:
            parts = refusal if isinstance(refusal, dict) else {"what": refusal}
            raise EngineRefusedError(
                f"{parts.get('what')}; {self.url} refused {message.kind!r}",
                expected=parts.get("expected"),
                state=parts.get("state"),
                hint=parts.get("hint"),
            )
        return answer.get("told")


class SchemeWorkerEnd:
    """Answers the trainer at the worker end, in the caller's thread until the first weights are in, then in its own.

    Args:
        link: to the trainer.
        receiver: lands the weights.
        landed: called with each version that is in place.
    """

    def __init__(self, link: Link, receiver: WeightReceiver, landed: Callable[[int], None]) -> None:
        self._link, self._receiver, self._landed = link, receiver, landed
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()
        self.version = 0

    def until_first(self, timeout_s: float) -> None:
        """Answer until the first version is in place, or the trainer says that there is none to wait for.

        Raises:
            DeadlineError: nothing came within ``timeout_s``.
            NotConnectedError: the trainer is gone.
            WeightSyncError: what came cannot land here.
        """
        while True:
            request = self._link.read(Deadline(timeout_s))
            if request is None:
                raise DeadlineError(f"no weights came from {self._link.peer} within {timeout_s:g} s")
            message = self._answer(request)
            if isinstance(message, Exception):
                raise message
            if isinstance(message, (Finish, Keep)):
                return

    def start(self) -> None:
        """Start the thread that answers from here on."""
        self._thread = threading.Thread(target=self._run, name="torchrl-ext-worker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the first weights are in, and the thread answers."""
        return self._thread is not None

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait ``timeout_s`` seconds at most, and return whether a version newer than ``version`` is in place."""
        with self._news:
            return self._news.wait_for(lambda: self.version > version, timeout_s)

    def stop(self) -> None:
        """Leave the trainer. May be called twice, and by this end's own thread."""
        self._stopped = True
        self._receiver.abort()
        self._link.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._receiver.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                request = self._link.read(None)
                if request is not None:
                    self._answer(request)
        except (TransportError, DeadlineError) as error:
            if not self._stopped:
                log.info("%s; this worker keeps its weights, version %d", error.what, self.version)

    def _answer(self, request: Info) -> Message | Exception:
        """Do what the message of a request says, answer it, and return the message, or what went wrong."""
        number = request.get("number")
        try:
            message = read(request.get("message"))
            answer = {} if isinstance(message, Keep) else self._receiver.handle(message)
            if isinstance(message, Finish):
                self._landed(message.version)
        except Exception as error:  # noqa: BLE001 - the trainer learns of it, whatever it is
            self._link.send({"number": number, "error": _described(error)}, Deadline(_ANSWER_S))
            return error
        self._link.send({"number": number, "told": answer}, Deadline(_ANSWER_S))
        if isinstance(message, Finish):
            with self._news:  # now that it is answered: whoever waited may close the link
                self.version = message.version
                self._news.notify_all()
        return message


def _described(error: Exception) -> Info:
    """Return the four parts of an error, JSON-safe."""
    if isinstance(error, errors.WeightSyncError):
        return {"what": error.what, "expected": error.expected, "state": error.state, "hint": error.hint}
    return {"what": f"{type(error).__name__}: {error}", "expected": None, "state": None, "hint": None}
