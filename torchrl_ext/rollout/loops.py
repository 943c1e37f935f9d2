"""Event loops: one in a thread of its own for callers that have none, and an object for each loop that asks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError

__all__ = ["Background", "PerLoop", "each"]

_T = TypeVar("_T")
_END_TIMEOUT_S, _DROP_TIMEOUT_S = 10.0, 1.0


class Background:
    """Runs coroutines for any number of threads, on a loop that is opened when it is needed, also after `close`.

    The loop is not the one that control calls share: what it runs may be a caller's own coroutine, which may make such
    a call and wait for it. Its thread is a daemon, so that nobody has to wait for it; it ends with `close`, or when
    nobody holds it any more.
    """

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), set[concurrent.futures.Future[Any]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """The result of ``call``; it is cancelled where the caller leaves.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            EngineError: `close` was called meanwhile.
            ConfigError: called from a coroutine of this very loop, which would wait for itself.
        """
        with self._lock:
            if threading.current_thread() is self._thread:
                call.close()
                raise ConfigError(f"{_name(call)} would wait for itself", hint="await it in place of run")
            loop = self._opened()
            future = asyncio.run_coroutine_threadsafe(call, loop)
            self._calls.add(future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            if self._loop is loop:
                raise
            raise EngineError(
                f"the client was closed before {_name(call)} had its answer",
                state="the request is cancelled",
                hint="close a client when nobody waits for it any more; a call after that opens it anew",
            ) from None
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            raise DeadlineError(f"{_name(call)} took longer than {timeout_s:g} s") from error
        finally:
            future.cancel()
            self._calls.discard(future)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, so that each `run` ends with an error, await ``last``, and end the thread.

        May be called twice.

        Raises:
            DeadlineError: something did not end in time.
        """
        with self._lock:
            loop, thread, calls = self._loop, self._thread, tuple(self._calls)
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            last.close()
            return
        for call in calls:
            call.cancel()
        try:
            asyncio.run_coroutine_threadsafe(_after_the_others(last), loop).result(_END_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(
                f"requests did not end within {_END_TIMEOUT_S:g} s of their cancellation",
                state="the loop is told to stop",
            ) from None
        finally:
            _end(loop)
        thread.join(_END_TIMEOUT_S)

    def _opened(self) -> asyncio.AbstractEventLoop:
        """The loop; a new one where there is none, or only the copy that a fork left without its thread."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="inference-loop", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._loop)
        return self._loop


class _Closable(Protocol):
    async def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)


class PerLoop(Generic[_C]):
    """One object for each event loop that asks.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], _C]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._found: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _C] = weakref.WeakKeyDictionary()

    def here(self) -> _C:
        """That of the loop that runs."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for ended in [known for known in self._found if known.is_closed()]:
                del self._found[ended]  # what was made for it may hold it, as aiohttp's connections do
            if loop not in self._found:
                self._found[loop] = self._make()
            return self._found[loop]

    async def close(self) -> None:
        """Close that of the loop that runs; a later call of `here` makes a new one."""
        with self._lock:
            found = self._found.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.close()


async def each(calls: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Every result, in order; the first error ends the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _after_the_others(last: Coroutine[Any, Any, None]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    with contextlib.suppress(RuntimeError):  # it was told to stop once more
        loop.run_until_complete(_dropped())
    loop.close()


async def _dropped() -> None:
    """Wait a moment for connections that are being dropped."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_DROP_TIMEOUT_S)


def _name(call: Any) -> str:
    return str(call.__qualname__)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
