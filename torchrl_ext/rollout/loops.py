"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from torchrl_ext.errors import DeadlineError

__all__ = ["BackgroundLoop"]

_T = TypeVar("_T")


class BackgroundLoop:
    """Runs coroutines; its thread is a daemon, so that nobody has to wait for it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inference-loop", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """The result of ``call``; it is cancelled where the caller leaves.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"{call.__qualname__} took longer than {timeout_s:g} s") from error
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
