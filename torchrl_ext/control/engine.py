"""`Engine`: the steps of an update, for every kind of engine, with errors that name the step and the engine's state.

It never lets an engine serve with a part of a version, or without weights.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import final

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    code_of,
    parsed,
)
from torchrl_ext.base.messages import (
    Finish,
    Inspect,
    Join,
    Load,
    Message,
    Poll,
    Prefetch,
    Rehearse,
    Reset,
    Start,
    State,
    Verify,
    partial_version,
    replaced_by,
    stamped,
)
from torchrl_ext.base.reports import EngineRow, least
from torchrl_ext.base.types import EngineInfo, Info, Part
from torchrl_ext.control.client import EngineClient, _nothing
from torchrl_ext.control.port import TAGS, EngineState, Port, check_sleep, check_wake, restated

__all__ = ["Engine"]

log = logging.getLogger("torchrl_ext")

_UNTOUCHED = "the engine's weights and its pause are unchanged"
_PART = "part of an update"
_REPLACED = "another sender drives the engine; this call changed nothing"
_KV = frozenset({"kv_cache"})
_WEIGHTS = frozenset({"weights"})


class Engine(EngineClient):
    """Drives one engine through a `Port`.

    Args:
        port: the port of the engine.
    """

    rehearsed: tuple[Info, ...] = ()

    def __init__(self, port: Port) -> None:
        self.kind = port.kind  # type: ignore[misc]
        self._own = self.port = port
        self._connection = ""  # the sender's that joined last through this client
        self._torn = False  # this client has sent only a part of a version; used if workers do not report `whole`
        self._before = EngineState(paused=None)  # before the current update
        self._since: float | None = None  # start of the pause
        self._row = EngineRow(engine=port.url, kind=self.kind, state="serving", proof="sent")
        self._loads, self._digest, self._workers = 0, "", 1  # of the current update; and that have to confirm it

    @property
    def url(self) -> str:
        return self.port.url

    def info(self) -> EngineInfo:
        info = self.port.describe()
        self._workers = max(1, info.world_size // max(1, info.dp_size))  # another process may serve each replica
        return info if info.weight_version else replace(info, weight_version=str(self._row.version or ""))

    @property
    def verifies(self) -> bool:
        return self.port.proves

    @property
    def proof(self) -> str:
        return self._row.proof

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._step("compute log-probabilities"):
            return self.port.logprobs(prompts)

    def load_adapter(self, name: str, path: str) -> None:
        with self._step(f"serve adapter {name!r} from {path}"):
            self.port.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        with self._step(f"unload adapter {name!r}"):
            self.port.unload_adapter(name)

    def tell(self, message: Message) -> list[Info]:
        """Send every worker a message and return their answers, if they give any.

        Raises:
            EngineRefusedError: a worker refused, or the engine lacks our plugin.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        return self.port.tell(stamped(message, self._connection))

    def inspect(self, question: Inspect) -> list[Info]:
        """Ask every worker about its environment (`torchrl_ext.sync.inspection`) and return at least one answer.

        Raises:
            EngineRefusedError: the engine lacks our plugin.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        answers = [found for found in self.tell(question) if "torchrl_ext" in found and "host" in found]
        if not answers:
            raise EngineRefusedError(
                f"no worker of {self.url} answered",
                expected="an answer of torchrl_ext's plugin",
                hint="install this version of torchrl_ext in the engine's environment",
            )
        return answers

    def state(self) -> EngineState:
        """Ask the engine for its state.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: the engine gives no answer, or an unusable one.
        """
        return self.port.state()

    # the sender

    @final
    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`. The engine keeps generating.

        Raises:
            ConfigError: the engine would serve wrong weights with this client's settings.
            EngineRefusedError: the engine cannot use this transport, its model does not fit the parameters, or its
                world size differs from the transport's. It keeps serving its earlier weights.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        with self._step("join the transport", state=_UNTOUCHED):
            port, before = self._own.port_for(info), self.port
            if before is not port:
                before.close(self._connection)  # the old port may hold a group from before a failure
            self.port, message = port, Join.from_json(info)
            self._connection = message.connection
            port.tell(message)
            self._wait_until_staged("join the transport")

    def replaced(self, connection: str) -> str:
        if not connection or not self.port.proves:
            return ""
        return replaced_by(self.port.tell, connection)

    @final
    def rehearse(self, how: str = "once") -> None:
        """See `EngineClient.rehearse`. Wakes sleeping weights; `proof` stays ``"sent"`` if workers cannot rehearse."""
        if not self.port.proves:
            return
        self._wake_weights()
        with self._step("rehearse an update"):
            answers = self._rehearsal(Rehearse(how=how, ask=True))
            if any(answer.get("needed") for answer in answers):
                answers = self._rehearse(Rehearse(how=how))
        self.rehearsed = tuple(answers)
        self._row = replace(self._row, proof=least(str(answer.get("proof", "sent")) for answer in answers))

    def _rehearse(self, message: Rehearse) -> list[Info]:
        served = self.pause()  # False if someone else paused it or put it to sleep
        try:
            answers = self._rehearsal(message)  # as slow as loading the weights a few times
        except (EngineError, DeadlineError):
            if served and all(answer.get("restored", True) for answer in self._rehearsal(Rehearse(ask=True))):
                self.resume()
            raise
        if served:
            self.resume()
        return answers

    def _rehearsal(self, message: Rehearse) -> list[Info]:
        return [answer for answer in self.tell(message) if "proof" in answer]

    # one update

    @final
    def prefetch(self, version: int, part: Part | None = None) -> None:
        with self._step(f"prefetch version {version}", state=f"{self.url} was asked for nothing"):
            state = self.port.state() if self.port.pauses else None
        self._wake_weights(state)  # staging checks the changes against the weights
        with self._step(f"prefetch version {version}", state="the engine still serves its previous weights"):
            self.tell(Prefetch(version=version, part=part))
            self._wait_until_staged(f"stage version {version}")

    @final
    def begin(self, version: int) -> None:
        """See `EngineClient.begin`. On failure no weight has changed, and an engine that served serves again."""
        self._loads, self._digest = 0, ""
        before = self._before = self._pause_and_remember(f"pause for version {version}")
        undo = partial(self._undo, before)
        with self._step(f"drop what it cached for version {version}", undo=undo):
            if self.port.drops_first:
                self.port.drop_cached()
        with self._step(f"start version {version}", undo=partial(self._cancel_and_undo, before)):
            if self._connection and self.port.proves:
                self.port.tell(State(connection=self._connection))  # refused if another sender has joined since
            self._wake_weights(before)
            self.tell(Start())

    def _cancel_and_undo(self, before: EngineState) -> str:
        """End the update on workers that started it, then undo; return the engine's state as text."""
        try:
            self.port.cancel()
        except (EngineError, DeadlineError) as error:
            return self._paused(f"its previous weights, which could not be confirmed: {error.what}")
        return self._undo(before)

    @final
    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._torn = True
        known = {"params"} if self.port.proves else ()  # from the join; megabytes of very many would lengthen the pause
        with self._step("load the new weights", holding=_PART):
            self.tell(Load.from_json({name: value for name, value in info.items() if name not in known}))
        self._loads += 1

    @final
    def _compare(self, digests: Mapping[str, str], digest: str) -> None:
        self._torn, self._digest = True, digest
        with self._step("keep the digests of the new weights", holding=_PART):
            if digests:
                self.tell(Verify(digests={**digests}))

    @final
    def commit(self, version: int) -> None:
        holding = _PART if self._loads else "its previous weights"
        with self._step(f"finish version {version}", holding=holding):
            self._refuse_unconfirmed(version, self.tell(Finish(version=version, loads=self._loads)))
        self._torn, before = False, self._row.version
        with self._step(f"resume with version {version}", holding=f"version {version}, whole"):
            self.port.set_label(version)
            if not self.port.drops_first:
                self.port.drop_cached()
            self._row = replace(self._row, version=version)
            self._wake(_KV, self._before, serving=False)
            self._resume()
        if self._connection and self.port.proves:
            self._refuse_stranger(version, before)

    def _refuse_stranger(self, version: int, before: int | None) -> None:
        """Raise an error unless the engine that answered the resume is the one that took ``version``.

        It may have been started again since, or its name may mean another one.
        """
        row, self._row = self._row, replace(self._row, state="unreachable", version=before)
        with self._step(
            f"resume with version {version}",
            state=f"{self.url} was asked to resume with version {version}, and does not say whether it is the engine "
            "that took it",
            replaced=f"{self.url} is not, or not any more, the engine that took version {version} from this sender: "
            "that one has another sender now, was started again, or stays paused at another address",
        ):
            self.port.tell(State(connection=self._connection))
        self._row = row

    def _refuse_unconfirmed(self, version: int, answers: Sequence[Info]) -> None:
        """Raise EngineRefusedError unless every worker says that it holds the version, as the trainer knows it.

        Something between may have answered in the engine's place. Engines without our plugin say nothing, and prove
        nothing.
        """
        wanted = {"version": version, **({"digest": self._digest} if self._digest else {})}
        others = [one for one in answers if any(one.get(name) != value for name, value in wanted.items())]
        if self.port.proves and (others or sum(one.get("workers", 1) for one in answers) < self._workers):
            raise EngineRefusedError(
                f"{self.url} does not confirm version {version}: it answers {reprlib.repr(others or [*answers])}",
                expected=f"{wanted} of {self._workers} worker(s)",
                hint="check that nothing between trainer and engine answers in the engine's place; send again",
            )

    # pause and sleep

    @final
    def pause(self) -> bool:
        """See `EngineClient.pause`. If the pause fails, an engine that served is resumed."""
        return self._pause_and_remember("pause").serves

    @final
    def resume(self) -> None:
        """See `EngineClient.resume`.

        Raises:
            EngineRefusedError: the engine sleeps, has no weights, holds a part of a version, or refuses.
        """
        with self._step("resume"):
            state = self.port.state(fit=True)
            self._refuse_unfit(state)
            if "weights" in state.asleep:
                raise EngineRefusedError(
                    f"{self.url} is asleep",
                    state="asleep",
                    hint="call wake_up, or update_weights, which wakes the engine",
                )
            self._wake(_KV, state, serving=False)
            self._resume()

    @final
    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        wanted = check_sleep(level, tags)
        with self._step(f"sleep at level {level}", state=f"{self.url} was not asked to pause"):
            self.port.refuse_sleep(level, wanted)
        before = self._pause_and_remember("pause")
        if not wanted:
            return
        with self._step(f"sleep at level {level}", undo=partial(self._undo, before)):
            self.port.make_idle()
        with self._step(f"sleep at level {level}", holding="its previous weights, or none"):
            if level == 2 and "weights" in wanted:
                self._tell_gone()
            self.port.sleep(level, None if tags is None else wanted, before)

    @final
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """See `EngineClient.wake_up`. If the server cannot report its sleep state, the wake is sent anyway.

        Raises:
            EngineRefusedError: the engine would serve without weights, or with a part of a version.
        """
        wanted = check_wake(tags)
        with self._step("wake up"):
            state = self.port.state(fit=True)
            if "kv_cache" in wanted or state.asleep <= wanted:  # the engine may be fully awake, and serve, after this
                self._refuse_unfit(state)
            self._set_row_state("paused")
            if state.known:
                self._wake(wanted, state, serving=True)
                return
            self.port.wake(wanted, state)
            if wanted == TAGS:
                self._mark_serving()  # the engine resumes itself when its last part wakes

    # helpers

    def _pause_and_remember(self, what: str) -> EngineState:
        """Pause the engine and return its earlier state."""
        before = EngineState(paused=False)
        if self.port.pauses:
            with self._step(what, state=f"{self.url} was not asked to pause"):
                before = self._query_state()
            with self._step(what, undo=partial(self._undo, before)):
                self.port.pause(before)
            self._since = time.perf_counter() if self._since is None else self._since
        self._set_row_state("paused")
        return before

    def _query_state(self) -> EngineState:
        """Return the engine's state; if it does not report ``paused``, take that from this client's last call."""
        state = self.port.state()
        return replace(state, paused=self._row.state != "serving") if state.paused is None else state

    def _resume(self) -> None:
        self.port.resume()
        self._mark_serving()

    def _mark_serving(self) -> None:
        """Record that the engine serves."""
        pause_s = self._row.pause_s if self._since is None else time.perf_counter() - self._since
        self._since = None
        self._row = replace(self._row, state="serving", error=None, pause_s=pause_s)

    def _set_row_state(self, state: str) -> None:
        self._row = replace(self._row, state=state)

    def _undo(self, before: EngineState) -> str:
        """Resume the engine if it served before the failed step, which changed no weight; return its state as text."""
        if not before.serves:
            self._set_row_state("paused")
            return self._paused("its previous weights")
        if not self.port.pauses:
            self._mark_serving()
            return self._paused("")
        try:
            if self.port.state(fit=True).whole is False:
                return self._paused("a part of another sender's version")
            self.port.resume()
            state = self.port.state()
        except (EngineError, DeadlineError) as error:
            self._set_row_state("unreachable" if isinstance(error, EngineUnreachableError) else "paused")
            return f"no weight was changed; {self.url} may still be paused: {error.what}"
        if state.paused:
            self._set_row_state("paused")
            return f"no weight was changed; {self.url} was asked to resume but reports that it is paused"
        self._mark_serving()
        if state.paused is None:
            return f"no weight was changed; {self.url} was asked to resume and cannot report whether it serves"
        return f"no weight was changed; {self.url} reports that it serves again"

    def _refuse_unfit(self, state: EngineState) -> None:
        """Raise an error if the engine has no weights to serve, or a part of a version."""
        if state.empty:
            raise EngineRefusedError(
                f"{self.url} slept at level 2 and holds no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )
        if not (not self._torn if state.whole is None else state.whole):
            raise partial_version(self.url)

    def _wake(self, wanted: frozenset[str], state: EngineState, *, serving: bool) -> None:
        """Wake the sleeping parts of ``wanted``; keep the engine paused unless ``serving`` and it is fully awake."""
        if not state.asleep & wanted:
            if serving and not state.asleep:
                self._resume()
            return
        self.port.wake(wanted, state)
        after = self.port.state()  # some engines serve as soon as their last part wakes
        if not serving:
            if not after.paused and not after.asleep:
                self.port.pause(after)
        elif not after.asleep:
            self._resume()

    def _wake_weights(self, state: EngineState | None = None) -> None:
        """Wake only the weights; ``state`` is from before the pause (None: query it)."""
        if self.port.pauses:
            with self._step("wake its weights", state=f"{self.url} sleeps"):
                state = self.port.state() if state is None else state
                if state.dropped:
                    self._tell_gone()  # another client may have put it to sleep without telling the workers
                if "weights" in state.asleep:
                    self._wake(_WEIGHTS, state, serving=False)

    def _tell_gone(self) -> None:
        """Tell the workers that their weights are gone; workers without our plugin keep no record of it."""
        try:
            self.port.tell(Reset(weights="gone"))
        except EngineRefusedError as error:
            if not self.port.lacks_plugin(error):
                raise

    def _wait_until_staged(self, what: str) -> None:
        """Wait until the workers have no work in progress; ``what`` names the work in a `DeadlineError`."""
        if self.port.proves:
            Deadline(self.port.timeout_s).poll(
                lambda: not any(answer.get("working") for answer in self.tell(Poll())), f"{self.url} did not {what}"
            )

    def rows(self) -> tuple[EngineRow, ...]:
        return (self._row,)

    def look(self) -> tuple[EngineRow, ...]:
        row = self._row  # a question changes nothing: its answer may come when a step has noted more than it knows
        try:
            state = self.port.state()
        except EngineUnreachableError:
            return (replace(row, state="unreachable"),)
        except (EngineError, DeadlineError):
            return (replace(row, state="paused"),)  # or worse
        known = state.paused is not None
        return (replace(row, state="serving" if state.serves else "paused") if known else row,)

    def close(self) -> None:
        connection, self._connection = self._connection, ""
        self.port.close(connection)

    def _paused(self, holding: str, *, answered: bool = True) -> str:
        if not self.port.pauses:
            version = "no version" if self._row.version is None else f"version {self._row.version}"
            return f"{self.url} still serves, with {version}"
        # one that does not answer may have another sender by now
        is_holding = "is paused and holds" if answered else "was paused when it answered last, and may hold"
        return f"{self.url} {is_holding} {holding}; the next successful update resumes it"

    @contextmanager
    def _step(
        self,
        what: str,
        state: str | None = None,
        undo: Callable[[], str] | None = None,
        holding: str | None = None,
        replaced: str = _REPLACED,
    ) -> Iterator[None]:
        """Add the step and the engine's state to an error of the body, and keep the error for the report.

        Args:
            what: the step, for "the engine did not ``what``".
            state: the engine's state after a failure, as text.
            undo: instead of ``state``: restores the engine and returns its state as text.
            holding: instead of ``state``: what a paused engine holds after a failure.
            replaced: the state after a refusal because another sender has joined, or none has since a new start.
        """
        try:
            yield
        except (EngineError, DeadlineError) as error:
            if code_of(error) == "replaced":  # no undo: the other sender may be in the middle of an update
                state = replaced
            elif undo is not None:
                state = undo()
            elif isinstance(error, EngineUnreachableError):
                self._set_row_state("unreachable")
            if state is None and holding is not None:
                silent = isinstance(error, (DeadlineError, EngineUnreachableError))
                state = self._paused(holding, answered=not silent)
            reason, rest = parsed(
                error.reason if isinstance(error, EngineRefusedError) and error.reason else error.what
            )
            rest |= {"state": state or error.state or rest.get("state", "")}
            found = restated(error, f"{reason}; {self.url} did not {what}", **rest)
            self._row = replace(self._row, error=str(found))
            raise found from error
        except BaseException:  # from an interrupted wait, or from an engine in this process
            if undo is not None:
                undo()
            raise
