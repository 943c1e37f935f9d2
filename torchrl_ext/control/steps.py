"""`Steps`: calls of one port whose errors name the step, the engine and its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

from torchrl_ext.base.errors import (
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    code_of,
    parsed,
)
from torchrl_ext.base.reports import EngineRow
from torchrl_ext.control.port import EngineState, Port, restated

__all__ = ["REPLACED", "Steps"]

REPLACED = "another sender drives the engine; this call changed nothing"


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

    def look(self, what: str) -> tuple[bool, EngineState]:
        """Ask whether the engine serves, and how its weights are, for step ``what``, which has changed nothing yet."""
        with self.step(what, state=f"{self.port.url} was asked for nothing"):
            paused, state = self.port.paused(), self.port.state()
        self._pauses = paused is not None
        self.note("paused" if paused or state.asleep else "serving")
        return not (paused or state.asleep), state

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
        replaced: str = REPLACED,
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
            found = restated(error, f"{reason}; {self.port.url} did not {what}", **more)
            self.row = replace(self.row, error=str(found))
            if isinstance(found, EngineError):
                found.rows = (self.row,)
            raise found from error
        except BaseException:  # from an interrupted wait, or from an engine in this process
            if undo is not None:
                undo()
            raise
