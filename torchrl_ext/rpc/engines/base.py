"""The base class of clients of engines behind HTTP routes: the steps of an update, with errors that name the step."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
    parsed,
)
from torchrl_ext.messages import (
    REPLACED,
    Inspect,
    Message,
    Poll,
    Rehearse,
    State,
    partial_version,
    replaced_by,
    stamped,
)
from torchrl_ext.routes import merged
from torchrl_ext.rpc.client import EngineClient, Stopwatch, _nothing
from torchrl_ext.rpc.engines.sleep import SleepState, check_wake
from torchrl_ext.rpc.engines.workers import Workers
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import EngineRow, Info, least

__all__ = ["HTTPEngine", "is_absent", "restated"]

log = logging.getLogger("torchrl_ext")

_PROBE = [*range(3, 19)]
_SAME_NATS, _TRIES = 0.05, 3


class HTTPEngine(EngineClient):
    """Drives one engine behind one address; a subclass knows its routes.

    Args:
        url: base address of the server itself, never of a router.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        api_key: str | tuple[str, ...] | None = None,
    ) -> None:
        self._http = HTTPSession(url, api_key=api_key, timeout_s=timeout_s, check=refuse_router)
        self._load_timeout_s = load_timeout_s
        self._workers: Workers
        self._watch = Stopwatch()
        self._torn = False  # a part of a version was sent by this client, and counts where workers do not say more
        self._connection = ""  # of the sender that joined last through this client
        self._before = SleepState(paused=None)  # the engine's state before the current update
        self._state = "serving"
        self._version: int | None = None
        self._error: str | None = None
        self._proof = "sent"
        self._followed: tuple[str, ...] = ()
        self._rehearsed: tuple[Info, ...] = ()
        self.told: Info = {}  # the server's own answer to the last call that paused, resumed, put to sleep or woke it

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def proof(self) -> str:
        return self._proof

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return self._rehearsed

    def replaced(self, connection: str) -> str:
        return replaced_by(self.tell, connection) if connection and self.verifies else ""

    def speak_for(self, connection: str) -> None:
        """Take steps for a sender that joined by another client, as ``connection``."""
        self._connection = self._workers.connection = connection

    def rehearse(self, how: str = "once") -> None:
        """See `EngineClient.rehearse`. Where the plugin knows no rehearsals, `proof` stays ``"sent"``."""
        told = self._rehearsal(Rehearse(how=how, ask=True))
        if any(answer.get("needed") for answer in told):
            with self._step("rehearse an update", state=None):
                before = self._answers() if self._serves_in(self._told_state()) else None
                served = self.pause()  # others may have paused it, or put it to sleep
                try:
                    told = self._rehearsal(Rehearse(how=how))  # takes as long as loading the weights a few times
                except EngineError:
                    if served and all(answer.get("restored", True) for answer in self._rehearsal(Rehearse(ask=True))):
                        self.resume()
                    raise
                if served:
                    self.resume()
                    self._refuse_other_answers(before)
        self._rehearsed = tuple(told)
        self._proof = least(str(answer.get("proof", "sent")) for answer in told)

    def _answers(self) -> list[float] | None:
        """Return the log-probabilities of a fixed probe; None where the engine cannot be asked for them."""
        try:
            return [value for row in self.logprobs([_PROBE]) for value in row]
        except (ConfigError, EngineError, DeadlineError):
            return None

    def _refuse_other_answers(self, before: list[float] | None) -> None:
        """Refuse an engine whose answers to the probe changed: it shows what digests could not read. Other requests in
        the same batch may change the last bits of an answer, so the best of a few answers counts."""
        off = 0.0
        for _ in range(_TRIES if before is not None else 0):
            after = self._answers()
            if after is None:
                return
            off = max(abs(one - other) for one, other in zip(before or (), after, strict=True))
            if off <= _SAME_NATS:
                return
        if off > _SAME_NATS:
            self.pause()
            raise EngineRefusedError(
                f"{self.url} answers a probe otherwise than before the rehearsal, by {off:.3g} nats",
                expected=f"at most {_SAME_NATS:g}: it holds the weights that it was started with",
                state="the engine is paused; no weight of the trainer was loaded",
                hint="start it again, and report its version and kernel backends",
            )

    def _rehearsal(self, message: Rehearse) -> list[Info]:
        return [answer for answer in self.tell(stamped(message, self._connection)) if "proof" in answer]

    def _await_idle(self, what: str) -> None:
        """Wait until the workers have no work in progress.

        Raises:
            EngineRefusedError: the work failed.
            DeadlineError: they did not ``what`` in time.
        """
        Deadline(self._load_timeout_s).poll(
            lambda: not any(answer.get("working") for answer in self.tell(Poll(connection=self._connection))),
            f"{self.url} did not {what}",
        )

    @abstractmethod
    def tell(self, message: Message) -> list[Info]:
        """Send a message to every worker, and return the answers of those that have one.

        Raises:
            EngineRefusedError: a worker refuses, or the engine lacks our plugin.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """

    def inspect(self, question: Inspect) -> list[Info]:
        """Ask every worker about its environment (`torchrl_ext.sync.inspection`); return at least one answer.

        Raises:
            EngineRefusedError: the engine lacks our plugin.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        answers = [found for found in self.tell(question) if "torchrl_ext" in found and "host" in found]
        if not answers:
            raise EngineRefusedError(
                f"no worker of {self.url} answers",
                expected="an answer of torchrl_ext's plugin",
                hint="install this version of torchrl_ext in the engine's environment",
            )
        return answers

    def followed(self) -> tuple[str, ...]:
        """Return the names of the transports that all workers can follow, those of other packages among them.

        An answer is kept, and they are not asked again. Where they do not say, there are none, and a warning is logged.
        """
        if not self._followed:
            try:
                known = [answer.get("transports") for answer in self.inspect(Inspect())]
            except (EngineError, DeadlineError) as error:
                log.warning("%s does not say which transports it can follow: %s", self.url, error)
                return ()
            names = [set(map(str, told)) if isinstance(told, list) else set() for told in known]
            self._followed = tuple(sorted(set.intersection(*names)))
        return self._followed

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._torn = True
        with self._step("load the new weights", state=self._paused("part of an update")):
            self._load(info)

    def _compare(self, digests: Mapping[str, str]) -> None:
        self._torn = True
        with self._step("keep the digests of the new weights", state=self._paused("part of an update")):
            self._workers.verify(digests)

    def commit(self, version: int) -> None:
        with self._step(f"finish version {version}", state=self._paused("part of an update")):
            self._finish(version)
        self._torn = False
        with self._step(f"resume with version {version}", state=self._paused(f"version {version}, whole")):
            self._label(version)
            self._version = version
            self._wake(frozenset({"kv_cache"}), self._before)
            self._release()
        self._resumed()

    @abstractmethod
    def _load(self, info: Info) -> None:
        """Send one handoff to the workers."""

    @abstractmethod
    def _finish(self, version: int) -> None:
        """End the update to ``version``, in which every handoff was loaded."""

    @abstractmethod
    def _label(self, version: int) -> None:
        """Do what is left before ``version`` may serve requests: set its label, or drop stale caches."""

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `EngineClient.logprobs`. vLLM's ``--logprobs-mode`` must be one of log-probabilities, the default.
        SGLang reads no keys and values of a prefix. The embedded engine answers while it is paused, too, unless what it
        holds cannot be served. Of several data-parallel replicas one answers."""
        with self._step("compute log-probabilities"):
            return [self._logprobs(list(prompt)) for prompt in prompts]

    def _logprobs(self, prompt: list[int]) -> list[float]:
        route, body = self._scoring(prompt)
        told = self._http.post(route, body, timeout_s=self._load_timeout_s)
        try:
            found = self._scores(told, prompt)
            if len(found) != len(prompt) - 1:
                raise ValueError(f"there are {len(found)}")
            return [math.nan if value is None else float(value) for value in found]  # JSON has no NaN
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineRefusedError(
                f"{self.url}{route} answered without the log-probabilities of the prompt: {type(error).__name__}: "
                f"{error}",
                expected="one for each token after the first",
            ) from error

    @abstractmethod
    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        """Return the route and the body that ask for the log-probabilities of ``prompt``."""

    @abstractmethod
    def _scores(self, told: Any, prompt: list[int]) -> list[Any]:
        """Return the log-probabilities in an answer, in nats, of the tokens after the first; raise anything where the
        answer lacks one."""

    def post(self, route: str, body: Any = None, *, query: Mapping[str, Any] | None = None) -> Info:
        """Call a route of the engine's own, and return ``{"status": HTTP status, "body": JSON, or text}``.

        Raises:
            EngineRefusedError: any status but 2xx.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        answer = self._http.call("POST", route, body, query=query, timeout_s=self._load_timeout_s)
        if not answer.ok:
            raise EngineRefusedError(
                f"{self.url}{route} answered {answer.status}: {answer.message()}", status=answer.status
            )
        try:
            return {"status": answer.status, "body": answer.json()}
        except ValueError:
            return {"status": answer.status, "body": answer.text}

    def pause(self) -> bool:
        """See `EngineClient.pause`. An engine that served, and fails to pause, is told to serve again."""
        return self._serves_in(self._halt("pause"))

    def resume(self) -> None:
        """See `EngineClient.resume`; the engine is asked afterwards whether it serves.

        Raises:
            EngineRefusedError: it sleeps, has no weights, or holds a part of a version; or it refuses, or says that it
                is still paused.
        """
        with self._step("resume"):
            state = self.sleep_state()
            self._refuse_unfit(state)
            if "weights" in state.asleep:
                raise EngineRefusedError(
                    f"{self.url} is asleep", state="asleep", hint="call wake_up, or update_weights: an update wakes it"
                )
            self._wake(frozenset({"kv_cache"}), state)
            self._release()
            if self.sleep_state().paused:
                raise EngineRefusedError(
                    f"{self.url} was told to resume, and says that it is paused",
                    state="paused",
                    hint="does somebody else pause it?",
                )
        self._resumed()

    def wake_up(self, tags: Collection[str] | None = None, *, paused: bool = False) -> None:
        """See `EngineClient.wake_up`. Parts that are awake already are left alone.

        Args:
            paused: the engine stays paused when it is wholly awake. vLLM serves with the wake of its last part, and is
                paused again at once.
        """
        wanted = check_wake(tags)
        with self._step("wake up"):
            state = self.sleep_state()
            if "kv_cache" in wanted or state.asleep <= wanted:  # the weights come first, so this may be the last one
                self._refuse_unfit(state, wanted)
            self._state = "paused"
            awake = self._wake(wanted, state)
            if paused:
                self._hold()
            elif awake:
                self._release()
                self._resumed()

    def _halt(self, what: str) -> SleepState:
        """Pause the engine, and return its state from before."""
        with self._step(what, state=f"{self.url} was not told to pause"):
            before = self._told_state()
        with self._step(what, undo=self._undo_of(before)):
            self._hold()
        self._watch.start()
        self._state = "paused"
        return before

    def _told_state(self) -> SleepState:
        """Return `sleep_state`; where the engine cannot say whether it is paused, this client's last call counts."""
        state = self.sleep_state()
        return replace(state, paused=self._state != "serving") if state.paused is None else state

    def _resumed(self) -> None:
        self._watch.stop()
        self._state, self._error = "serving", None

    def _serves_in(self, state: SleepState) -> bool:
        return not state.paused and not state.asleep

    def _undo_of(self, before: SleepState) -> Callable[[], str]:
        """Return the undo for a step that fails without a change of weights, by the engine's state before its pause."""
        return self._undone if self._serves_in(before) else lambda: self._paused("what it held before")

    def _undone(self) -> str:
        """Resume an engine after a step that failed and changed no weight; return, in words, the state it reports."""
        try:
            self._release()
            paused = self.sleep_state().paused
        except (EngineError, DeadlineError) as error:
            self._state = "unreachable" if isinstance(error, EngineUnreachableError) else "paused"
            return f"no weight was changed; it is not known whether {self.url} serves again: {error.what}"
        if paused:
            self._state = "paused"
            return f"no weight was changed; {self.url} was told to resume, and says that it is paused"
        self._resumed()
        if paused is None:
            return f"no weight was changed; {self.url} was told to resume, and has no way to say whether it serves"
        return f"nothing was changed, and it serves again: {self.url} says so"

    @abstractmethod
    def sleep_state(self) -> SleepState:
        """Ask the engine whether it is paused and what of it sleeps."""

    def _refuse_unfit(self, state: SleepState, waking: Collection[str] = ()) -> None:
        """Raise an error if the engine has no weights to serve, by its state before the parts of ``waking`` wake, or a
        part of a version."""
        if self._is_empty(state, waking):
            raise EngineRefusedError(
                f"{self.url} slept at level 2 and holds no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )
        answer: Info = {}
        try:
            answer = merged(self.tell(State())) if self.verifies else {}
        except EngineRefusedError as error:
            if not self._lacks_plugin(error):
                raise
        if not answer.get("whole", not self._torn):
            raise partial_version(self.url)

    def _lacks_plugin(self, error: EngineRefusedError) -> bool:
        """Return whether the server refused a message since it runs without our plugin."""
        return is_absent(error)

    @abstractmethod
    def _is_empty(self, state: SleepState, waking: Collection[str]) -> bool:
        """Return whether the workers gave their weights up, and no update filled them since; see `_refuse_empty`."""

    @abstractmethod
    def _wake(self, wanted: frozenset[str], state: SleepState) -> bool:
        """Wake the parts of ``wanted`` that sleep, and no others; return whether the whole engine is awake then."""

    @abstractmethod
    def _hold(self) -> None:
        """Call the route that pauses."""

    @abstractmethod
    def _release(self) -> None:
        """Call the route that resumes."""

    def rows(self) -> tuple[EngineRow, ...]:
        return (
            EngineRow(
                engine=self.url,
                kind=self.kind,
                state=self._state,
                version=self._version,
                pause_s=self._watch.seconds,
                error=self._error,
                proof=self._proof,
            ),
        )

    def look(self) -> tuple[EngineRow, ...]:
        """See `EngineClient.look`."""
        try:
            state = self.sleep_state()
        except EngineUnreachableError:
            self._state = "unreachable"
        except (EngineError, DeadlineError):
            self._state = "paused"  # or worse
        else:
            self._state = self._state if state.paused is None else "serving" if self._serves_in(state) else "paused"
        return self.rows()

    def close(self) -> None:
        """Do nothing: no connection is kept between calls."""

    def _paused(self, holding: str) -> str:
        return f"{self.url} is paused, serves nobody, and holds {holding}; the next good update resumes it"

    @contextmanager
    def _step(self, what: str, state: str | None = None, undo: Callable[[], str] | None = None) -> Iterator[None]:
        """Name the step and the engine's state in an error of the body, and keep the error for the report.

        Args:
            state: what holds after a failure.
            undo: in its place: restores the engine, and returns what holds then.
        """
        try:
            yield
        except (EngineError, DeadlineError) as error:
            if REPLACED in error.what:
                state = "another sender drives the engine, and nothing of what it did was touched"
            elif undo is not None:
                state = undo()
            elif isinstance(error, EngineUnreachableError):
                self._state = "unreachable"
            reason, rest = parsed(
                error.reason if isinstance(error, EngineRefusedError) and error.reason else error.what
            )
            rest |= {"state": state or error.state or rest.get("state", "")}
            found = restated(error, f"{reason}; {self.url} did not {what}", **rest)
            self._error = str(found)
            raise found from error


def restated(
    error: WeightSyncError,
    what: str,
    state: str | None = None,
    *,
    expected: str | None = None,
    hint: str | None = None,
    reason: str = "",
) -> Any:
    """Return an error of the same class with ``what`` as its message, its other parts replaced where they are given."""
    more: dict[str, Any] = {
        "expected": expected or error.expected,
        "state": state or error.state,
        "hint": hint or error.hint,
    }
    if isinstance(error, EngineError):
        more["rows"] = error.rows
    if isinstance(error, EngineRefusedError):
        more["status"] = error.status
        more["reason"] = reason or (error.reason if what == error.what else "")
    return type(error)(what, **more)


def is_absent(error: EngineRefusedError) -> bool:
    """Return whether a server refused because it lacks our plugin; SGLang's own route calls the action unsupported."""
    return error.status in (404, 405, 501) or "Unsupported action" in error.what
