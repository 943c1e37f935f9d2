"""Event loops for callers that have none, and a loop's connections: look-up of names, reuse, TLS authorities."""

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

__all__ = ["Background", "PerLoop", "authorities", "connections", "each", "let_go", "number_from"]

_T = TypeVar("_T")
_END_TIMEOUT_S, _DROP_TIMEOUT_S = 10.0, 1.0


class Background:
    """Runs coroutines for any number of threads, on a loop that is opened when it is needed, also after `close`.

    Control calls of a process share one. A client for requests has its own, since what it runs may be a caller's
    coroutine, which may make a control call and wait for it. The loop's thread is a daemon, so that the process can end
    without it; it ends with `close`, or when nobody refers to this object any more.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock, self._calls = threading.Lock(), set[concurrent.futures.Future[Any]]()
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
            self._calls.add(future)
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
            self._calls.discard(future)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, so that each `run` ends with an error; then await ``last`` and end the thread.

        It may be called twice.

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
        """Return the loop; open a new one where there is none, or only the copy that a fork left without its thread."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            # not run at the end of the process: other finalizers may still make calls then
            weakref.finalize(self, _end, self._loop).atexit = False
        return self._loop


async def _after_the_others(last: Coroutine[Any, Any, None]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    async def dropped() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_DROP_TIMEOUT_S)  # connections that are being dropped

    loop.run_forever()
    with contextlib.suppress(RuntimeError):  # it was told to stop once more
        loop.run_until_complete(dropped())
    loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
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


def number_from(variable: str, default: int) -> int:
    """Return the number that an environment variable holds; ``default`` where it is not set.

    Raises:
        ConfigError: it holds something else.
    """
    given = os.environ.get(variable)
    if given is not None and not given.isdecimal():
        raise ConfigError(f"{variable}={given!r} in the environment", expected="a whole number")
    return default if given is None else int(given)


def connections(keep_s: float, limit: int = 0) -> aiohttp.ClientSession:
    """Return a session of the running event loop, with at most ``limit`` connections; 0 for as many as there are calls.

    A connection is kept for ``keep_s`` seconds after its last call. With 0 it is dropped at once; each call then looks
    its name up anew, too, and waits for no other call's look-up.
    """
    keeping: dict[str, Any] = {"keepalive_timeout": keep_s} if keep_s else {"force_close": True, "use_dns_cache": False}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, resolver=_Resolver(), **keeping),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def let_go(client: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Drop connections that nobody closed, from any thread; else aiohttp logs an error about them.

    Args:
        client: as `connections` made it.
        loop: in which it was made; it may be closed.
    """
    connector = client.connector
    if connector is None or connector.closed:
        return
    client.detach()

    async def close() -> None:
        await connector.close()

    here = None
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        here = asyncio.get_running_loop()
    if loop.is_closed() or here is loop:
        with contextlib.suppress(StopIteration):
            close().send(None)  # the first step closes them; the rest only waits until they are closed
    else:
        asyncio.run_coroutine_threadsafe(close(), loop)


def authorities() -> ssl.SSLContext:
    """Return the TLS context that trusts the authorities of the system and of certifi.

    As with OpenSSL, SSL_CERT_FILE and SSL_CERT_DIR name other authorities of the system.
    """
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Read the authorities, once per value of the two variables, which OpenSSL reads itself: it takes longer than a
    call."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    return context


@final
class _Resolver(aiohttp.abc.AbstractResolver):
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
