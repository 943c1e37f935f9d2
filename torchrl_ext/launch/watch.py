"""Engines that a job owns are watched and started again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from torchrl_ext.errors import WeightSyncError
from torchrl_ext.launch.launchers import EngineLauncher, RunningEngine
from torchrl_ext.launch.topology import EnginePlan

__all__ = ["Keeper", "Kept"]

log = logging.getLogger("torchrl_ext")


def _nothing(kept: Kept) -> None:
    return None


@dataclass(eq=False)
class Kept:
    """One engine of a job.

    Attributes:
        plan: what it is.
        engine: what runs now.
        restarts: how often it was started again.
    """

    plan: EnginePlan
    engine: RunningEngine
    encoders: tuple[str, ...] = ()
    restarts: int = 0
    failures: int = field(default=0, repr=False)

    @property
    def url(self) -> str:
        """Base address; a restart keeps it."""
        return self.engine.url


class Keeper:
    """Starts the engines of plans, looks at their health, and starts them again; a context manager.

    An engine that was started again has the weights of its checkpoint: it needs an update before it is used.

    Args:
        plans: what to start; encoders first.
        launcher: how.
        first_wait_s: seconds before the first look.
        interval_s: seconds between looks; 0 for no looks but those of `recover`.
        timeout_s: deadline of one health call, in seconds.
        patience: health calls that may fail in a row, where the process runs. A process that ended is not waited for.
        on_lost: called with an engine that is about to be started again, from the thread that looks.
        on_restarted: called with it once it is healthy.

    Raises:
        ConfigError, EngineError, DeadlineError: an engine could not be started; the others were ended again.
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
        on_lost: Callable[[Kept], None] = _nothing,
        on_restarted: Callable[[Kept], None] = _nothing,
    ) -> None:
        self._launcher, self._timeout_s, self._patience = launcher, timeout_s, patience
        self._on_lost, self._on_restarted = on_lost, on_restarted
        self._over, self._looking = threading.Event(), threading.Lock()
        self.engines: tuple[Kept, ...] = ()
        try:
            encoders = [plan for plan in plans if plan.worker_type == "encoder"]
            self._start(encoders)
            self._start([plan for plan in plans if plan.worker_type != "encoder"])
        except BaseException:
            self.stop()
            raise
        if interval_s > 0:
            arguments = (first_wait_s, interval_s)
            threading.Thread(target=self._run, args=arguments, name="keeper", daemon=True).start()

    def recover(self) -> tuple[Kept, ...]:
        """Look now, and start again whatever has ended or does not answer; returns those that were.

        An engine that cannot be started is tried again with the next look.
        """
        with self._looking:
            if self._over.is_set():
                return ()
            with ThreadPoolExecutor(max_workers=max(1, len(self.engines)), thread_name_prefix="health") as pool:
                lost = [
                    kept
                    for kept, well in zip(self.engines, pool.map(self._well, self.engines), strict=True)
                    if not well
                ]
            return tuple(kept for kept in lost if self._restart(kept))

    def stop(self) -> None:
        """End every engine and wait for them. May be called twice."""
        self._over.set()
        with self._looking, ThreadPoolExecutor(max_workers=max(1, len(self.engines))) as pool:
            list(pool.map(lambda kept: kept.engine.stop(), self.engines))

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _start(self, plans: Sequence[EnginePlan]) -> None:
        """All at the same time; what has started is kept even where another one fails, so that it can be ended."""
        urls: dict[str, list[str]] = {}
        for kept in self.engines:
            urls.setdefault(kept.plan.model, []).append(kept.url)

        def one(plan: EnginePlan) -> Kept | BaseException:
            encoders = tuple(urls.get(plan.model, ()))
            try:
                return Kept(plan, self._launcher.launch(plan, encoders), encoders)
            except Exception as error:  # noqa: BLE001 - raised below, when the others are known
                return error

        with ThreadPoolExecutor(max_workers=max(1, len(plans)), thread_name_prefix="launch") as pool:
            found = list(pool.map(one, plans))
        self.engines += tuple(kept for kept in found if isinstance(kept, Kept))
        for error in found:
            if isinstance(error, BaseException):
                raise error

    def _run(self, first_wait_s: float, interval_s: float) -> None:
        wait_s = first_wait_s
        while not self._over.wait(wait_s):
            self.recover()
            wait_s = interval_s

    def _well(self, kept: Kept) -> bool:
        if not kept.engine.alive():
            return False
        try:
            status = httpx.get(f"{kept.url}/health", timeout=self._timeout_s, trust_env=False).status_code
            kept.failures = 0 if status == 200 else kept.failures + 1
        except httpx.HTTPError:
            kept.failures += 1
        return kept.failures <= self._patience

    def _restart(self, kept: Kept) -> bool:
        log.warning("%s at %s is lost and is started again; its log ended with: %s", kept.plan.name, kept.url,
                    kept.engine.log()[-500:])  # fmt: skip
        self._on_lost(kept)
        kept.engine.stop()
        began = time.monotonic()
        try:
            kept.engine = self._launcher.launch(kept.plan, kept.encoders)
        except WeightSyncError as error:
            log.error("%s could not be started again: %s", kept.plan.name, error)
            return False
        kept.restarts, kept.failures = kept.restarts + 1, 0
        log.warning("%s is up again after %.1f s", kept.plan.name, time.monotonic() - began)
        self._on_restarted(kept)
        return True
