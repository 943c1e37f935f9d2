"""Event loops: one in a thread of its own for callers that have none, and an object for each loop that asks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError

__all__ = ["Background", "PerLoop", "each"]

_T = TypeVar("_T")


class Background:
    """Runs coroutines for any number of threads, on a loop that is opened when it is needed, also after `close`.

    Its thread is a daemon, so that nobody has to wait for it; it ends with `close`, or when nobody holds it any more.
    """

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._loop: _Loop | None = None

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """The result of ``call``; it is cancelled where the caller leaves.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            EngineError: `close` was called meanwhile.
            ConfigError: called from a coroutine of this very loop, which would wait for itself.
        """
        with self._opening:
            if self._loop is None or not self._loop.alive:
                self._loop = _Loop()
            loop = self._loop
        return loop.run(call, timeout_s)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, so that each `run` ends with an error, await ``last``, and end the thread.

        May be called twice.

        Raises:
            DeadlineError: something did not end in time.
        """
        with self._opening:
            loop, self._loop = self._loop, None
        if loop is None:
            last.close()
        else:
            loop.stop(last)


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
                del self._found[ended]  # what was made for it holds it
            if loop not in self._found:
                self._found[loop] = self._make()
            return self._found[loop]

    async def close(self) -> None:
        """Close that of the loop that runs; a later call of `here` makes a new one."""
        with self._lock:
            found = self._found.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.close()


class _Loop:
    """An event loop and its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="inference-loop", daemon=True)
        self._lock, self._calls, self._stopped = threading.Lock(), set[concurrent.futures.Future[Any]](), False
        self._thread.start()
        weakref.finalize(self, _end, self._loop)

    @property
    def alive(self) -> bool:
        """Whether it takes calls: not stopped, and not the copy that a fork left without its thread."""
        return not self._stopped and self._thread.is_alive()

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """See `Background.run`."""
        with self._lock:
            if self._stopped or threading.current_thread() is self._thread:
                call.close()
                if self._stopped:
                    raise _closed(call)
                raise ConfigError(f"{call.__qualname__} would wait for itself", hint="await it in place of run")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            self._calls.add(future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            if self._stopped:
                raise _closed(call) from None
            raise
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"{call.__qualname__} took longer than {timeout_s:g} s") from error
        except BaseException:
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float = 10.0) -> None:
        """See `Background.close`."""
        with self._lock:
            ends, self._stopped = self.alive, True
            calls = tuple(self._calls)
        if not ends:
            last.close()
            return
        for call in calls:
            call.cancel()
        try:
            asyncio.run_coroutine_threadsafe(_after_the_others(last), self._loop).result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(
                f"requests did not end within {timeout_s:g} s of their cancellation", state="the loop is told to stop"
            ) from None
        finally:
            _end(self._loop)
        self._thread.join(timeout_s)


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
    loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def _closed(call: Coroutine[Any, Any, Any]) -> EngineError:
    return EngineError(
        f"the client was closed before {call.__qualname__} had its answer",
        state="the request is cancelled",
        hint="close a client when nobody waits for it any more; a call after that opens it anew",
    )
