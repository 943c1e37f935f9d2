"""`Background` runs a sender's update in a thread, and keeps its error until the caller has seen it."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import DeadlineError
from torchrl_ext.types import SyncReport

__all__ = ["Background"]

log = logging.getLogger("torchrl_ext")


@final
class _Job(Future[SyncReport]):
    """A future that notes whether its error was retrieved."""

    seen = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.seen = True
        return found

    def result(self, timeout: float | None = None) -> SyncReport:
        self.exception(timeout)
        return super().result()


@final
class Background:
    """The update of a sender that runs in a thread, if there is one."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._changing = threading.Lock()

    def begin(self, update: Callable[[], SyncReport]) -> Future[SyncReport]:
        """Run ``update`` in a daemon thread, on the current CUDA device of this one, and return its future."""
        cuda = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        device: AbstractContextManager[object] = nullcontext() if cuda is None else cuda

        def run() -> SyncReport:
            try:
                with device:
                    return update()
            except BaseException as error:
                log.error("an update in the background failed: %s", error)  # the caller may ask for it late
                raise

        job, context = _Job(), contextvars.copy_context()  # a span that is current here is the parent of the update's
        in_thread(lambda: context.run(run), "torchrl-ext-update", job)
        with self._changing:
            self._job = job
        return job

    def settle(self, timeout_s: float) -> None:
        """Wait until no update runs, and raise the error of the last one if its future was not asked for it.

        Raises:
            DeadlineError: the update runs for longer than ``timeout_s`` from now; it goes on.
        """
        job = self._job
        if job is None:
            return
        if not wait([job], timeout_s).done:
            raise DeadlineError(
                f"the update in the background did not end within {timeout_s:g} s",
                state="it goes on; nothing else was sent",
                hint="wait for its future, and look at the engines",
            )
        with self._changing:
            if self._job is job:  # no other thread has begun one since
                self._job = None
            seen, error = job.seen, job.exception()
        if error is not None and not seen:
            raise error
