"""`Engine` drives one engine through a `Port`, and `EngineUpdate` takes one version to it.

They never let an engine serve with a part of a version, or without weights.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
    code_of,
    parsed,
)
from torchrl_ext.base.messages import (
    WHOLE,
    Commit,
    Finish,
    Inspect,
    Join,
    Keep,
    Leave,
    Load,
    Message,
    Poll,
    Prefetch,
    Rehearse,
    Reset,
    Start,
    State,
    Undo,
    Verify,
    partial_version,
    replaced_by,
    stamped,
)
from torchrl_ext.base.reports import EngineRow, least
from torchrl_ext.base.routes import merged
from torchrl_ext.base.types import EngineInfo, Info, Part, label_number
from torchrl_ext.control.client import EngineClient, Manner, Update, nothing
from torchrl_ext.control.port import TAGS, EngineState, Port, ServesAdapters, no_adapters, restated

__all__ = ["Engine", "EngineUpdate", "Steps"]

log = logging.getLogger("torchrl_ext")

_PART = "part of an update"
_REPLACED = "another sender drives the engine; this call changed nothing"
_ATTEMPTS = 3
_REHEARSES = (
    "%s rehearses an update before its first one, once per start of the engine: it is paused, and loads its model "
    "several times, which proves that updates lead to the weights of a cold start. The update then goes on by itself; "
    "spans['rehearse'] of its report has the seconds"
)
_KV = frozenset({"kv_cache"})
_WEIGHTS = frozenset({"weights"})


@final
class Steps:
    """One call of an engine's client, or one update, step by step; thrown away afterwards.

    Args:
        port: the engine's.
        proof: what a confirmed update proves.

    Attributes:
        row: the engine's row, as far as the steps know it.
    """

    def __init__(self, port: Port, proof: str = "sent") -> None:
        self.port = port
        self.row = EngineRow(engine=port.url, kind=port.kind, state="serving", proof=proof)
        self._since: float | None = None  # start of the pause
        self._pauses = True

    def note(self, state: str) -> None:
        """Set the state in the row."""
        self.row = replace(self.row, state=state)

    def look(self, what: str) -> EngineState:
        """Note whether the engine serves, and return its state, for step ``what``, which has changed nothing yet."""
        with self.step(what, state=f"{self.port.url} was asked for nothing"):
            paused, state = self.port.paused(), self.port.state()
        self._pauses = paused is not None
        self.note("paused" if paused or state.asleep else "serving")
        return state

    def pause(self, what: str) -> bool:
        """Pause the engine, and return whether it served before; if that fails, one that served is resumed."""
        with self.step(what, state=f"{self.port.url} was not asked to pause"):
            paused = self.port.paused()
        self._pauses = paused is not None
        with self.step(what, undo=partial(self.undo, not paused)):
            self.port.pause()
        self._since = time.perf_counter()
        self.note("paused")
        return not paused

    def resume(self, version: int | None = None) -> None:
        """Let the engine generate again, with ``version`` if it has a new one."""
        self.port.resume()
        pause_s = 0.0 if self._since is None else time.perf_counter() - self._since
        version = self.row.version if version is None else version
        self.row = replace(self.row, state="serving", error=None, pause_s=pause_s, version=version)

    def wake(self, tags: frozenset[str], asleep: frozenset[str]) -> None:
        """Wake the parts of ``tags`` that sleep; the engine stays paused, although some serve when the last one wakes.

        A kind of engine's own tags belong to the cache.
        """
        sleeping = frozenset(tag for tag in asleep if tag in tags or ("kv_cache" in tags and tag != "weights"))
        if sleeping:
            self.port.wake(sleeping)
            if sleeping == asleep and self.port.paused() is False:
                self.port.pause()

    def undo(self, served: bool) -> str:
        """Resume the engine if it served before the failed step, which changed no weight; return its state as text."""
        url = self.port.url
        if not served:
            self.note("paused")
            return self.holding("its previous weights")
        if not self._pauses:
            self.note("serving")
            return self.holding("")
        try:
            state = self.port.state()
            if state.whole is False:
                return self.holding("a part of another sender's version")
            if state.asleep or state.empty:
                return self.holding("its previous weights, or none: some of its memory is released")
            self.port.resume()
            paused = self.port.paused()
        except (EngineError, DeadlineError) as error:
            self.note("unreachable" if isinstance(error, EngineUnreachableError) else "paused")
            return f"no weight was changed; {url} may still be paused: {error.what}"
        if paused:
            self.note("paused")
            return f"no weight was changed; {url} was asked to resume but reports that it is paused"
        self.note("serving")
        return f"no weight was changed; {url} reports that it serves again"

    def holding(self, weights: str, *, answered: bool = True) -> str:
        """Return the state of an engine that a failed step leaves paused with ``weights``, as text."""
        if not self._pauses:
            return f"{self.port.url} still serves"
        # one that does not answer may have another sender by now
        is_holding = "is paused and holds" if answered else "was paused when it answered last, and may hold"
        return f"{self.port.url} {is_holding} {weights}; the next successful update resumes it"

    @contextmanager
    def step(
        self,
        what: str,
        *,
        state: str | None = None,
        undo: Callable[[], str] | None = None,
        holding: str | None = None,
        replaced: str = _REPLACED,
    ) -> Iterator[None]:
        """Add the step and the engine's state to an error of the body, and the engine's row.

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
                self.note("unreachable")
            if state is None and holding is not None:
                silent = isinstance(error, (DeadlineError, EngineUnreachableError))
                state = self.holding(holding, answered=not silent)
            reason, rest = parsed(
                error.reason if isinstance(error, EngineRefusedError) and error.reason else error.what
            )
            state = state or error.state or rest.pop("state", "")
            more: dict[str, Any] = {**rest, "state": state}
            gone = isinstance(error, EngineUnreachableError) and reason.startswith(self.port.url)
            found = restated(error, reason if gone else f"{reason}; {self.port.url} did not {what}", **more)
            self.row = replace(self.row, error=str(found))
            if isinstance(found, EngineError):
                found.rows = (self.row,)
            raise found from error
        except BaseException:  # from an interrupted wait, or from an engine in this process
            if undo is not None:
                undo()
            raise


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """How a sender's transport was joined; another join replaces it.

    Attributes:
        port: the port that suited the server then.
        connection: id of the sender's connection; "" before the first join.
        rehearsed, proof: what `Engine.rehearse` found.
    """

    port: Port
    connection: str = ""
    rehearsed: tuple[Info, ...] = ()
    proof: str = "sent"

    def call(self, message: Message) -> list[Info]:
        """Send every worker a message as this connection's, and return their answers."""
        return self.port.call(stamped(message, self.connection))

    def wait(self, what: str) -> list[Info]:
        """Wait until the workers have no work in progress, and return their last answers.

        Args:
            what: the work, for a `DeadlineError`.
        """
        answers: list[Info] = []

        def over() -> bool:
            answers[:] = self.call(Poll())
            return not any(one.get("working") for one in answers)

        if self.port.plugin:
            Deadline(self.port.timeout_s).poll(over, f"{self.port.url} did not {what}")
        return answers


class Engine(EngineClient):
    """Drives one engine.

    Args:
        find: returns the port that suits the engine as it is now: a server may have been started anew, with our plugin
            or without. Asked before the first call, and before each join.
        kind, url: the port's.
    """

    def __init__(self, find: Callable[[], Port], *, kind: str, url: str) -> None:
        self.kind = kind  # type: ignore[misc]
        self._find, self._url = find, url
        self._now: _Joined | None = None
        # A server without our plugin cannot tell that it holds a part of a version, so its client remembers
        self._torn = False

    @classmethod
    def of(cls, port: Port) -> Engine:
        """Return the client of an engine that one port always suits."""
        return Engine(partial(_itself, port), kind=port.kind, url=port.url)

    @property
    def url(self) -> str:
        return self._url

    @property
    def port(self) -> Port:
        """The port in use."""
        return self._joined.port

    @property
    def _joined(self) -> _Joined:
        if self._now is None:
            try:
                self._now = _Joined(port=self._find())
            except (EngineError, DeadlineError) as error:
                gone = isinstance(error, EngineUnreachableError) and error.what.startswith(self.url)
                what = error.what if gone else f"{error.what.rstrip('.')}; {self.url} did not describe itself"
                raise restated(error, what) from error
        return self._now

    def info(self) -> EngineInfo:
        return self.port.describe()

    @property
    def verifies(self) -> bool:
        return self._now is None or self._now.port.plugin

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return () if self._now is None else self._now.rehearsed

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        with Steps(self.port).step("compute log-probabilities"):
            return self.port.logprobs(prompts)

    def load_adapter(self, name: str, path: str) -> None:
        with Steps(self.port).step(f"serve adapter {name!r} from {path}"):
            self._adapters().load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        with Steps(self.port).step(f"unload adapter {name!r}"):
            self._adapters().unload_adapter(name)

    def _adapters(self) -> ServesAdapters:
        port = self.port
        if not isinstance(port, ServesAdapters):
            raise no_adapters(self.kind)
        return port

    def inspect(self, question: Inspect) -> list[Info]:
        """Ask every worker about its environment (`torchrl_ext.sync.inspection`) and return at least one answer.

        Raises:
            EngineRefusedError: the engine lacks our plugin.
        """
        answers = [found for found in self.port.call(question) if "torchrl_ext" in found and "host" in found]
        if not answers:
            raise EngineRefusedError(
                f"no worker of {self.url} answered",
                expected="an answer of torchrl_ext's plugin",
                hint="install this version of torchrl_ext in the engine's environment",
            )
        return answers

    def paused(self) -> bool | None:
        """Ask whether the engine is paused; None if it is never paused."""
        return self.port.paused()

    def state(self) -> EngineState:
        """Ask for the state of the engine's memory and weights."""
        return self.port.state()

    # the sender

    def join(self, offer: Info, on_failure: Callable[[], None] = nothing) -> None:
        """See `EngineClient.join`. The engine keeps generating; an update that was left open is ended first.

        Raises:
            ConfigError: the engine would serve wrong weights with this client's settings.
            EngineRefusedError: the engine cannot use this transport, its model does not fit the parameters, or its
                world size differs from the transport's. It keeps serving its earlier weights.
        """
        message, before = Join.from_json(offer), self._joined
        with Steps(before.port).step("join the transport", state="the engine's weights and its pause are unchanged"):
            if not before.port.plugin:
                before.port.call(Leave(connection=before.connection))  # it may be in a group of an earlier transport
            port = self._find()
            self._now = joined = _Joined(port=port, connection=message.connection)
            joined.call(message)
            joined.wait("join the transport")

    def replaced(self, connection: str) -> str:
        return replaced_by(self.port.call, connection) if connection and self.port.plugin else ""

    def rehearse(self, how: str = "once") -> str:
        """See `EngineClient.rehearse`. Wakes sleeping weights; workers that cannot rehearse prove ``"sent"``."""
        joined = self._joined
        if not joined.port.plugin:
            return joined.proof
        steps, what = Steps(joined.port), "rehearse an update"
        state = steps.look(what)
        with steps.step(what):
            steps.wake(_WEIGHTS, state.asleep)
            answers = _rehearsal(joined, Rehearse(how=how, ask=True))
            if any(answer.get("needed") for answer in answers):
                answers = _rehearse(joined, steps, Rehearse(how=how))
        self._now = replace(
            joined,
            rehearsed=tuple(answers),
            proof=least(str(answer.get("proof", "sent")) for answer in answers),
        )
        return self._now.proof

    def update(self, version: int, manner: Manner = Manner()) -> EngineUpdate:
        return EngineUpdate(self, self._joined, version, manner)

    # pause and sleep

    def pause(self) -> bool:
        """See `EngineClient.pause`. If the pause fails, an engine that served is resumed."""
        return Steps(self.port).pause("pause")

    def resume(self) -> None:
        steps = Steps(self.port)
        with steps.step("resume"):
            state = self.port.state()
            self._refuse_unfit(state)
            if "weights" in state.asleep:
                raise EngineRefusedError(
                    f"{self.url} is asleep",
                    state="asleep",
                    hint="call wake_up, or update_weights, which wakes the engine",
                )
            steps.wake(_KV, state.asleep)
            steps.resume()

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        wanted = _known(tags)
        if level not in (0, 1, 2):
            raise ConfigError(f"there is no sleep of level {level}", expected="level 0, 1 or 2")
        if level > 0 and "kv_cache" not in wanted:
            raise ConfigError("weights sleep only together with the cache", expected="no tags, or ['kv_cache']")
        steps = Steps(self.port)
        served = steps.pause("pause")
        if level == 0:
            return
        with steps.step(f"sleep at level {level}", undo=partial(steps.undo, served)):
            if level == 2 and "weights" in wanted and self.port.plugin:
                self.port.call(Reset(weights="gone"))
            self.port.sleep(level, wanted)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        wanted, steps = _known(tags), Steps(self.port)
        with steps.step("wake up"):
            state = self.port.state()
            awake = wanted == TAGS or state.asleep <= wanted
            if awake or "kv_cache" in wanted:  # some engines serve as soon as their last part wakes
                self._refuse_unfit(state)
            steps.wake(wanted, state.asleep)
            if awake:
                steps.resume()

    def _refuse_unfit(self, state: EngineState) -> None:
        """Raise an error if the engine has no weights to serve, or a part of a version."""
        if state.empty:
            raise EngineRefusedError(
                f"{self.url} slept at level 2 and holds no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )
        if self._torn if state.whole is None else not state.whole:
            raise partial_version(self.url)

    def look(self) -> tuple[EngineRow, ...]:
        try:
            port = self.port
            paused, version = port.paused(), label_number(port.describe().weight_version)
            state = "paused" if paused else "serving"
        except EngineUnreachableError:
            state, version = "unreachable", None
        except (EngineError, DeadlineError):
            state, version = "paused", None  # or worse
        return (EngineRow(engine=self.url, kind=self.kind, state=state, version=version),)

    def close(self) -> None:
        joined, self._now = self._now, None
        if joined is not None:
            joined.port.call(Leave(connection=joined.connection))


def _itself(port: Port) -> Port:
    return port


def _known(tags: Collection[str] | None) -> frozenset[str]:
    wanted = TAGS if tags is None else frozenset(tags)
    if not wanted <= TAGS:
        raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"tags from {', '.join(sorted(TAGS))}")
    return wanted


def _rehearse(joined: _Joined, steps: Steps, message: Rehearse) -> list[Info]:
    log.warning(_REHEARSES, joined.port.url)
    served = steps.pause("rehearse an update")  # False if someone else paused it or put it to sleep
    try:
        answers = _rehearsal(joined, message)  # as slow as loading the weights a few times
    except (EngineError, DeadlineError):
        if served and all(answer.get("restored", True) for answer in _rehearsal(joined, Rehearse(ask=True))):
            steps.resume()
        raise
    if served:
        steps.resume()
    return answers


def _rehearsal(joined: _Joined, message: Rehearse) -> list[Info]:
    return [answer for answer in joined.call(message) if "proof" in answer]


@final
class EngineUpdate(Update):
    """Takes one version to one engine.

    Args:
        engine: its client.
        joined: how the sender's transport was joined.
        version, manner: the version, and how it is taken.
    """

    def __init__(self, engine: Engine, joined: _Joined, version: int, manner: Manner) -> None:
        super().__init__(version)
        self._engine, self._joined, self._manner = engine, joined, manner
        self._steps = Steps(joined.port, joined.proof)
        self._loads, self._digest, self._asleep = 0, "", frozenset[str]()
        self._leads_back = False  # whether the workers keep what the version replaces
        self._began: bool | None = None  # while this update has it paused: whether it served before

    def stage(self, part: Part | None = None) -> None:
        what = f"prefetch version {self.version}"
        self._wake_weights(what)  # staging checks the changes against the weights
        with self._steps.step(what, state="the engine still serves its previous weights"):
            self._joined.call(Prefetch(version=self.version, part=part))
            answers = self._joined.wait(f"stage version {self.version}")
            self.obstacle = self._found(answers)
            if self._manner.commit == "live" and self.obstacle not in ("", WHOLE):
                raise EngineRefusedError(
                    f"version {self.version} needs a pause: {self.obstacle}",
                    expected="an engine that takes it while it serves, as commit='live' demands",
                    hint="use commit='auto'",
                )

    def _found(self, answers: Sequence[Info]) -> str:
        """Return the obstacle to a live commit that this client knows of, or the one in the workers' last answers."""
        port, found = self._joined.port, merged(answers)
        self._leads_back = found.get("obstacle", WHOLE) != WHOLE
        if not self._leads_back:
            return WHOLE
        if self._manner.commit == "paused":
            return "commit='paused'"
        if not port.live:
            return "this kind of engine, or its client's pause_mode"
        if self._asleep or self._steps.row.state != "serving":
            return "the engine does not serve"
        return str(found["obstacle"])

    def begin(self) -> None:
        if not self.obstacle:
            return
        what = f"start version {self.version}"
        self._wake_weights(what)
        self._began = served = self._steps.pause(f"pause for version {self.version}")
        with self._steps.step(what, undo=partial(self._steps.undo, served)):
            self._joined.call(Start())

    def _wake_weights(self, what: str) -> None:
        state = self._steps.look(what)
        with self._steps.step("wake its weights", state=f"{self._joined.port.url} sleeps"):
            self._steps.wake(_WEIGHTS, state.asleep)
        self._asleep = state.asleep - _WEIGHTS

    def load(self, info: Info, on_failure: Callable[[], None] = nothing) -> None:
        if not self.obstacle:
            return  # the workers have it
        self._engine._torn = True
        known = {"params"} if self._joined.port.plugin else ()  # from the join: of very many they lengthen the pause
        with self._steps.step("load the new weights", holding=_PART):
            self._joined.call(Load.from_json({name: value for name, value in info.items() if name not in known}))
        self._loads += 1

    def verify(self, digests: Mapping[str, str], digest: str = "") -> None:
        self._digest = digest
        if digests and self.obstacle:
            with self._steps.step("keep the digests of the new weights", holding=_PART):
                self._joined.call(Verify(digests={**digests}))

    def commit(self) -> tuple[EngineRow, ...]:
        if self.obstacle:
            self._finish()
        else:
            self._switch()
        how = f"paused: {self.obstacle}" if self.obstacle else "live"
        self._steps.row = replace(self._steps.row, commit=how)
        return self.rows()

    def _finish(self) -> None:
        version, steps = self.version, self._steps
        with steps.step(f"finish version {version}", holding=_PART if self._loads else "its previous weights"):
            self._refuse_unconfirmed(self._joined.call(Finish(version=version, loads=self._loads)))
        self._engine._torn = False
        with steps.step(f"resume with version {version}", holding=f"version {version}, whole"):
            steps.wake(_KV, self._asleep)
            before = steps.row
            steps.resume(version)
        self._began = None
        if self._joined.connection and self._joined.port.plugin:
            self._refuse_stranger(before)

    def _switch(self) -> None:
        """Commit the version while the engine serves; where that fails, or the canary, return to the one before."""
        version, steps = self.version, self._steps
        with steps.step(f"commit version {version}", undo=self._returned):
            self._refuse_unconfirmed(self._asked(Commit(version=version)))
        steps.row = replace(steps.row, version=version)
        if self._manner.canary is not None:
            with steps.step(f"compute the outputs of version {version}", undo=self._returned):
                self._manner.canary(self._engine)

    def _returned(self) -> str:
        """`undo`, and return the engine's state as text."""
        try:
            self.undo()
        except WeightSyncError as error:
            return error.state or self._steps.holding(_PART)
        return f"{self._joined.port.url} serves its previous weights"

    def _asked(self, message: Message) -> list[Info]:
        """Send a message that may come twice; again, if the answer was lost."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(EngineUnreachableError):
                return self._joined.call(message)
        return self._joined.call(message)

    def undo(self) -> None:
        port, steps, version = self._joined.port, self._steps, self.version
        if not self._leads_back:
            self._leave_whole()
            return
        began, self._began = self._began, None
        paused = began is not None or not port.live
        if began is None and paused:
            began = steps.pause(f"pause, to take version {version} back")
        with steps.step(f"take version {version} back", undo=self._stays):
            answers = self._asked(Undo(version=version))
            if not answers or any(type(one.get("version")) is not int for one in answers):
                raise EngineRefusedError(f"{port.url} does not confirm that it went back: it answers {answers!r:.100}")
            found = answers[0]["version"]
            self._engine._torn = False
            steps.row = replace(steps.row, version=found, commit="")
            if paused or port.paused():  # one that failed may have paused itself
                if began is not False:
                    steps.wake(_KV, self._asleep)
                    steps.resume()
            else:
                steps.note("serving")

    def _stays(self) -> str:
        """Pause an engine that could not go back; return its state as text."""
        steps, version = self._steps, self.version
        try:
            steps.pause("pause")
        except (EngineError, DeadlineError):
            steps.note("unreachable")
            return f"{steps.port.url} gives no answer, and may serve version {version}"
        return steps.holding(f"version {version}, or a part of it")

    def _leave_whole(self) -> None:
        """Resume the engine where nothing was loaded; from what was loaded whole there is no way back."""
        if self._loads:
            if self._began is None:
                self._steps.pause("pause")
            words = f"{self._joined.port.url}: version {self.version} came whole, and cannot be taken back"
            raise EngineRefusedError(words, state=self._steps.holding(f"version {self.version}, or a part of it"))
        if self._began is not None:
            self._steps.undo(self._began)
            self._began = None

    def keep(self) -> None:
        if self._leads_back:
            try:
                self._joined.call(Keep())
            except WeightSyncError:
                log.warning("%s keeps the way back from version %d", self._joined.port.url, self.version, exc_info=True)

    def rows(self) -> tuple[EngineRow, ...]:
        return (self._steps.row,)

    def _refuse_stranger(self, before: EngineRow) -> None:
        """Raise an error unless the engine that answered the resume is the one that took the version.

        It may have been started again since, or its name may mean another one.
        """
        url, version, steps = self._joined.port.url, self.version, self._steps
        row, steps.row = steps.row, replace(before, state="unreachable")
        with steps.step(
            f"resume with version {version}",
            state=f"{url} was asked to resume with version {version}, and does not say whether it is the engine that "
            "took it",
            replaced=f"{url} is not, or not any more, the engine that took version {version} from this sender: that "
            "one has another sender now, was started again, or stays paused at another address",
        ):
            self._joined.call(State(connection=self._joined.connection))
        steps.row = row

    def _refuse_unconfirmed(self, answers: Sequence[Info]) -> None:
        """Raise EngineRefusedError unless every worker says that it holds the version, as the trainer knows it.

        Something between may have answered in the engine's place. Engines without our plugin say nothing, and prove
        nothing.
        """
        joined, url = self._joined, self._joined.port.url
        wanted = {"version": self.version, **({"digest": self._digest} if self._digest else {})}
        others = [one for one in answers if any(one.get(name) != value for name, value in wanted.items())]
        if joined.port.plugin and (others or not answers):
            raise EngineRefusedError(
                f"{url} does not confirm version {self.version}: it answers {reprlib.repr(others or [*answers])}",
                expected=f"{wanted} of every worker",
                hint="check that nothing between trainer and engine answers in the engine's place; send again",
            )
