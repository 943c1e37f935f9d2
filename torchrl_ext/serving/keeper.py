"""`Keeper` watches the engines that a job owns, and starts again those that are lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.serving.launchers import EngineLauncher, RunningEngine
from torchrl_ext.serving.topology import EnginePlan

__all__ = ["Keeper", "Kept"]

log = logging.getLogger("torchrl_ext")

_STOP_S = 60.0  # by then a restart that is given up has ended its processes
_ALIVE_S = 1.0


@dataclass(eq=False)
class Kept:
    """One engine of a job, as a `Keeper` watches it.

    Attributes:
        plan: what it is.
        engine: what runs now.
        encoders: addresses of the encoders of its model.
        restarts: how often it was started again.
    """

    plan: EnginePlan
    engine: RunningEngine
    encoders: tuple[str, ...] = ()
    restarts: int = 0
    failures: int = field(default=0, repr=False)
    untold: bool = field(default=False, repr=False)
    looking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def url(self) -> str:
        """The base address, which a restart keeps."""
        return self.engine.url


class Keeper:
    """Starts engines, checks their health, and starts again those that are lost; a context manager.

    An engine that was started again has the weights of its checkpoint: it needs an update before it is used. Each is
    looked at by a thread of its own, so that one that takes long to start keeps no other one waiting.

    Args:
        plans: what to start; encoders first.
        launcher: how.
        first_wait_s: seconds before the first look. A process that ended is noticed within a second or so.
        interval_s: seconds between looks; 0 for no looks but those of `recover`.
        timeout_s: deadline of one health call, in seconds.
        patience: health calls that may fail in a row, where the process runs. A process that ended is not waited for.
        on_lost: called with an engine that is about to be started again, from the thread that looks at it.
        on_restarted: called with it once it is healthy; where that raises, again with the next look.

    Raises:
        ConfigError, EngineError, DeadlineError: an engine could not be started; the others were given up, or ended.
    """

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        launcher: EngineLauncher,
        *,
        first_wait_s: float = 300.0,
        interval_s: float = 10.0,
        timeout_s: float = 5.0,
        patience: int = 3,
        on_lost: Callable[[Kept], None] = lambda kept: None,
        on_restarted: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        self._launcher, self._timeout_s, self._patience = launcher, timeout_s, patience
        self._on_lost, self._on_restarted = on_lost, on_restarted
        self._over = threading.Event()
        self.engines: tuple[Kept, ...] = ()
        try:
            encoders = [plan for plan in plans if plan.worker_type == "encoder"]
            self._start(encoders)
            self._start([plan for plan in plans if plan.worker_type != "encoder"])
        except BaseException:
            self.stop()
            raise
        if interval_s > 0:
            self._watch_all(first_wait_s, interval_s)

    def recover(self) -> tuple[Kept, ...]:
        """Check every engine now, start again those that have ended or do not answer, and return what was started.

        They are started at the same time. One that cannot be started is tried again with the next look, whatever the
        reason was.
        """
        with ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="keeper") as pool:
            restarted = list(pool.map(self._look, self.engines))
            return tuple(kept for kept, again in zip(self.engines, restarted, strict=True) if again)

    def stop(self) -> None:
        """Give up restarts that are under way, end every engine and wait for them. May be called twice."""
        self._over.set()

        def end(kept: Kept) -> None:
            nobody_looks = kept.looking.acquire(timeout=_STOP_S)
            try:
                kept.engine.stop()
            finally:
                if nobody_looks:
                    kept.looking.release()

        with ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="stop") as pool:
            list(pool.map(end, self.engines))

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _start(self, plans: Sequence[EnginePlan]) -> None:
        """Start engines at the same time; the first that fails gives the others up; `stop` ends those that run."""
        urls: dict[str, list[str]] = {}
        for kept in self.engines:
            urls.setdefault(kept.plan.model, []).append(kept.url)

        def one(plan: EnginePlan) -> Kept:
            encoders = tuple(urls.get(plan.model, ()))
            return Kept(plan, self._launcher.launch(plan, encoders, cancel=self._over), encoders)

        starts: list[Future[Kept]] = []
        try:
            with ThreadPoolExecutor(max(1, len(plans)), thread_name_prefix="launch") as pool:
                try:
                    starts += [pool.submit(one, plan) for plan in plans]
                    for start in as_completed(starts):
                        start.result()
                except BaseException:
                    self._over.set()  # else the pool would wait for starts that nobody wants
                    raise
        finally:
            self.engines += tuple(start.result() for start in starts if start.exception() is None)

    def _watch_all(self, *waits_s: float) -> None:
        for kept in self.engines:
            name = f"keeper {kept.plan.name}"
            threading.Thread(target=self._watch, args=(kept, *waits_s), name=name, daemon=True).start()

    def _watch(self, kept: Kept, first_wait_s: float, interval_s: float) -> None:
        """Look at an engine until all is over: in intervals, and at once where its process has ended."""
        wait_s = first_wait_s
        while not self._over.is_set():
            ran = _runs(kept)  # one that could not be started waits for the next look
            for _ in Deadline(wait_s, stop=self._over).pauses(shortest_s=_ALIVE_S, longest_s=_ALIVE_S):
                if ran and not _runs(kept):
                    break
            self._look(kept)
            wait_s = interval_s

    def _look(self, kept: Kept) -> bool:
        """Start an engine again if it is lost, and return whether that was done."""
        with kept.looking:
            return not self._over.is_set() and self._again(kept)

    def _again(self, kept: Kept) -> bool:
        before = kept.restarts
        try:
            if not self._well(kept):
                self._restart(kept)
            if kept.untold:
                self._on_restarted(kept)
                kept.untold = False
        except WeightSyncError as error:
            log.error("%s is not up again: %s", kept.plan.name, error)
        except Exception:  # this thread looks after the others too
            log.exception("%s is not up again", kept.plan.name)
        return kept.restarts > before

    def _well(self, kept: Kept) -> bool:
        if not kept.engine.alive():
            return False
        kept.failures += 1
        for route in engines.part(kept.plan.kind, "server").spec.probes:
            with suppress(WeightSyncError):
                if HTTPSession(kept.url, timeout_s=self._timeout_s).call("GET", route).status == 200:
                    kept.failures = 0
                    break
        return kept.failures <= self._patience

    def _restart(self, kept: Kept) -> None:
        try:
            words = kept.engine.log()[-500:]
        except OSError as error:
            words = f"(it cannot be read: {error})"
        log.warning("%s at %s is lost and is started again; its log ended with: %s", kept.plan.name, kept.url, words)
        self._on_lost(kept)
        kept.engine.stop()
        began = time.monotonic()
        kept.engine = self._launcher.launch(kept.plan, kept.encoders, cancel=self._over)
        kept.restarts, kept.failures, kept.untold = kept.restarts + 1, 0, True
        log.warning("%s is up again after %.1f s", kept.plan.name, time.monotonic() - began)
        if self._over.is_set():
            kept.engine.stop()


def _runs(kept: Kept) -> bool:
    with suppress(Exception):  # the next look logs it
        return kept.engine.alive()
    return False
