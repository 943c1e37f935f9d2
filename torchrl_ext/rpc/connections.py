"""Coroutines from synchronous code; and what connections need: look-up of names, TLS authorities."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, final

import aiohttp
import aiohttp.abc
import certifi

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError

__all__ = ["Background", "PerLoop", "Resolver", "authorities", "each", "run"]

_T = TypeVar("_T")
_END_TIMEOUT_S, _DROP_TIMEOUT_S = 10.0, 1.0


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """Run ``call`` in an event loop of its own and return its result; ctrl-c cancels it.

    The loop runs in the calling thread, and in another one if that runs a loop already.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _in_new_loop(call)
    return in_thread(lambda: _in_new_loop(call), "torchrl-ext-http").result()


def _in_new_loop(call: Coroutine[Any, Any, _T]) -> _T:
    """Do as `asyncio.run`, which would also take the thread's current loop away from others."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(call)
    finally:
        left = asyncio.all_tasks(loop)  # of a call that was interrupted
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


class Background:
    """Runs coroutines for any number of threads, on a loop that is opened when it is needed, also after `close`.

    The loop's thread is a daemon, so that the process can end without it; it ends with `close`, or when nobody refers
    to this object any more.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None, what: str = "") -> _T:
        """Run ``call`` on the loop and return its result; cancel it where the wait is interrupted, as by ctrl-c.

        Args:
            call: to be awaited there.
            timeout_s: deadline, in seconds.
            what: names the call in errors; empty takes the coroutine's own name.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            EngineError: `close` was called meanwhile.
            ConfigError: called from a coroutine of this very loop, which would wait for itself.
        """
        what = what or str(getattr(call, "__qualname__", call))
        with self._lock:
            if threading.current_thread() is self._thread:
                call.close()
                raise ConfigError(f"{what} would wait for itself", hint="await it in place of run")
            loop = self._opened()
            future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            if self._loop is loop:
                raise
            raise EngineError(
                f"the client was closed before {what} had its answer",
                state="the request is cancelled",
                hint="close a client when nobody waits for it any more; a call after that opens it anew",
            ) from None
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            raise DeadlineError(f"{what} took longer than {timeout_s:g} s") from error
        finally:
            future.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, so that each `run` ends with an error; then await ``last`` and end the thread.

        It may be called twice.

        Raises:
            DeadlineError: something did not end in time.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            last.close()
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result(_END_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(
                f"requests did not end within {_END_TIMEOUT_S:g} s of their cancellation",
                state="the loop is told to stop",
            ) from None
        finally:
            _stop(loop)
        thread.join(_END_TIMEOUT_S)

    def _opened(self) -> asyncio.AbstractEventLoop:
        """Return the loop; open a new one where there is none, or only the copy that a fork left without its thread."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            # not run at the end of the process: other finalizers may still make calls then
            weakref.finalize(self, _stop, self._loop).atexit = False
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    left = asyncio.all_tasks(loop)  # connections that are being dropped
    with contextlib.suppress(RuntimeError):  # it was told to stop once more
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_DROP_TIMEOUT_S))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


class _Closable(Protocol):
    async def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)


class PerLoop(Generic[_C]):
    """Holds one object for each event loop that asks for one.

    Args:
        make: makes the object of a loop.
    """

    def __init__(self, make: Callable[[], _C]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._found: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _C] = weakref.WeakKeyDictionary()

    def here(self) -> _C:
        """Return the object of the running loop; make it first where the loop has none."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for ended in [known for known in self._found if known.is_closed()]:
                del self._found[ended]  # its object may refer to it, as aiohttp's connections do, and keep it alive
            if loop not in self._found:
                self._found[loop] = self._make()
            return self._found[loop]

    async def close(self) -> None:
        """Close the object of the running loop; a later call of `here` makes a new one."""
        with self._lock:
            found = self._found.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.close()


async def each(calls: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await ``calls`` at the same time and return their results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def authorities() -> ssl.SSLContext:
    """Return the TLS context that trusts the authorities that SSL_CERT_FILE and SSL_CERT_DIR name; without these
    variables those of the system and of certifi.

    Raises:
        ConfigError: what the variables name cannot be read.
    """
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Read the authorities, once per value of the two variables: it takes longer than a call."""
    try:
        if file or folder:
            return ssl.create_default_context(cafile=file, capath=folder)
    except OSError as error:
        raise ConfigError(
            f"SSL_CERT_FILE={file or ''} SSL_CERT_DIR={folder or ''} in the environment cannot be read: {error}",
            expected="a file of certificates (PEM), a directory of them, or neither variable",
        ) from None
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    return context


@final
class Resolver(aiohttp.abc.AbstractResolver):
    """Looks names up, each in a thread that nobody has to join, since a look-up cannot be interrupted."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        look = in_thread(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM), f"look up {host}")
        rows = await asyncio.wrap_future(look)
        if not rows:
            raise OSError(f"the name {host!r} has no address")
        return [
            {"hostname": host, "host": str(row[4][0]), "port": port, "family": row[0], "proto": row[2], "flags": 0}
            for row in rows
        ]

    async def close(self) -> None:
        return None
