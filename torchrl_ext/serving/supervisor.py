"""`Supervisor` watches the engines that a job owns and restarts lost ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_ext.deadline import Deadline, in_thread
from torchrl_ext.errors import EngineError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.health import Health
from torchrl_ext.rpc.http import HTTPSession, normalise_url
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.processes import GuardedProcess
from torchrl_ext.serving.topology import EnginePlan

__all__ = ["SupervisedEngine", "Supervisor"]

log = logging.getLogger("torchrl_ext")

_STOP_S = 60.0  # within this a cancelled restart ends its processes
_ALIVE_S = 1.0
_PARTY = "supervisor"
_WORDS = 500  # characters of a lost engine's log that are copied into ours


@dataclass(eq=False)
class SupervisedEngine:
    """One engine that a `Supervisor` watches; `engine` is None before the first start."""

    plan: EnginePlan
    engine: GuardedProcess | None = None
    restarts: int = 0
    failures: int = field(default=0, repr=False)
    checking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def url(self) -> str:
        """The base address, which a restart keeps; empty before the first start."""
        return "" if self.engine is None else normalise_url(self.engine.url)

    def alive(self) -> bool:
        """Return whether the engine's process runs."""
        return self.engine is not None and self.engine.alive()


class Supervisor:
    """Starts engines, checks their health, and restarts lost ones; a context manager.

    The supervisor complains about a lost engine to `Health`, as ``"supervisor"``, until the engine runs again. A
    restarted engine has the weights of its checkpoint; if its model follows the trainer, the supervisor then complains
    as ``"update"`` until a report shows the newest. Each engine has its own thread: a slow start delays no other.

    Args:
        plans: the engines to start; encoders start first.
        launcher: starts the engines.
        health: gets the complaints; None creates one.
        first_wait_s: seconds before the first health call; an ended process is noticed after about a second anyway.
        interval_s: seconds between health calls; 0 for none except those of `recover`.
        timeout_s: deadline of one health call, in seconds.
        patience: health calls in a row that may fail while the process runs; an ended process is restarted at once.

    Raises:
        ConfigError, EngineError, DeadlineError: an engine could not be started; the others were cancelled or ended.
    """

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        launcher: LocalLauncher,
        health: Health | None = None,
        *,
        first_wait_s: float = 300.0,
        interval_s: float = 10.0,
        timeout_s: float = 5.0,
        patience: int = 3,
    ) -> None:
        self._launcher, self._timeout_s, self._patience = launcher, timeout_s, patience
        self.health = health or Health()
        self._over = threading.Event()
        self.engines = tuple(SupervisedEngine(plan) for plan in plans)
        try:
            for encoders in (True, False):
                group = [one for one in self.engines if (one.plan.worker_type == "encoder") == encoders]
                starts = [in_thread(partial(self._start, one), f"launch {one.plan.name}") for one in group]
                for start in as_completed(starts):
                    start.result()
        except BaseException:
            self.stop()  # the first failure cancels the other starts
            raise
        if interval_s > 0:
            for engine in self.engines:
                waits_s, name = (first_wait_s, interval_s), f"supervisor {engine.plan.name}"
                threading.Thread(target=self._watch, args=(engine, *waits_s), name=name, daemon=True).start()

    def recover(self) -> tuple[SupervisedEngine, ...]:
        """Check every engine now, restart lost ones at the same time, and return the restarted engines.

        The next check retries an engine that could not be started, whatever the reason.
        """
        with ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="supervisor") as pool:
            restarted = list(pool.map(self._check, self.engines))
        return tuple(one for one, again in zip(self.engines, restarted, strict=True) if again)

    def stop(self) -> None:
        """Cancel restarts, end every engine and wait for them. May be called twice."""
        self._over.set()

        def end(one: SupervisedEngine) -> None:
            nobody_checks = one.checking.acquire(timeout=_STOP_S)
            try:
                if one.engine is not None:
                    one.engine.stop()
            finally:
                if nobody_checks:
                    one.checking.release()

        with ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="stop") as pool:
            list(pool.map(end, self.engines))

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _start(self, one: SupervisedEngine) -> None:
        with one.checking:
            if not self._over.is_set():
                self._launch(one)

    def _launch(self, one: SupervisedEngine) -> None:
        others = (other for other in self.engines if other.plan.model == one.plan.model and other is not one)
        encoders = tuple(other.url for other in others if other.plan.worker_type == "encoder")
        one.engine = engine = self._launcher.launch(one.plan, encoders, cancel=self._over)
        if self._over.is_set():
            engine.stop()

    def _watch(self, one: SupervisedEngine, first_wait_s: float, interval_s: float) -> None:
        """Check an engine until `stop`: at intervals, and at once when its process has ended."""
        wait_s = first_wait_s
        while not self._over.is_set():
            ran = _runs(one)  # an engine that could not be started waits for the next check
            for _ in Deadline(wait_s, stop=self._over).pauses(shortest_s=_ALIVE_S, longest_s=_ALIVE_S):
                if ran and not _runs(one):
                    break
            self._check(one)
            wait_s = interval_s

    def _check(self, one: SupervisedEngine) -> bool:
        """Restart an engine if it is lost; return whether that was done."""
        with one.checking:
            before, engine = one.restarts, one.engine
            if engine is None or self._over.is_set():
                return False
            try:
                if not self._healthy(one):
                    self._restart(one, engine)
                self.health.mend(one.url, by=_PARTY)
            except Exception as error:  # this thread keeps watching its engine
                unforeseen = not isinstance(error, WeightSyncError)
                log.error("%s could not be restarted: %s", one.plan.name, error, exc_info=unforeseen)
                with suppress(Exception):  # a failed subscriber hears of it at the next check
                    self.health.fail(one.url, error, by=_PARTY)
            return one.restarts > before

    def _healthy(self, one: SupervisedEngine) -> bool:
        if not one.alive():
            return False
        one.failures += 1
        for route in engines.part(one.plan.kind, "server").probes:
            with suppress(WeightSyncError):
                if HTTPSession(one.url, timeout_s=self._timeout_s).call("GET", route).status == 200:
                    one.failures = 0
                    break
        return one.failures <= self._patience

    def _restart(self, one: SupervisedEngine, lost: GuardedProcess) -> None:
        words = ""
        with suppress(Exception):  # an unreadable log must not prevent the restart
            words = lost.log()[-_WORDS:]
        log.warning("%s at %s is lost and is being restarted; its log ends with: %s", one.plan.name, one.url, words)
        self.health.fail(one.url, EngineError(f"{one.plan.name} is lost", state="it is being restarted"), by=_PARTY)
        lost.stop()
        began = time.monotonic()
        self._launch(one)
        one.restarts, one.failures = one.restarts + 1, 0
        log.warning("%s is up again after %.1f s", one.plan.name, time.monotonic() - began)
        if one.plan.follows:
            self.health.fail(one.url, EngineError(f"{one.plan.name} has the weights of its checkpoint"), by="update")


def _runs(one: SupervisedEngine) -> bool:
    with suppress(Exception):  # the next check logs it
        return one.alive()
    return False
