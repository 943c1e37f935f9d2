"""The event loop that all clients of a process share, DNS look-up and TLS contexts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import ssl
import sys
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar, final

import aiohttp
import aiohttp.abc
import certifi

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import ConfigError

__all__ = ["HTTP", "Resolver", "authorities", "begin", "can_wait", "each", "run"]

_T = TypeVar("_T")

HTTP = "torchrl-ext-http"
"""The name of the thread that runs this process's loop."""


@final
class _Loop(threading.Thread):
    """Runs an event loop in a daemon thread until the process ends."""

    def __init__(self) -> None:
        super().__init__(name=HTTP, daemon=True)
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        self.loop.run_forever()


_lock = threading.RLock()  # a finalizer may make a call at any time, also while it is held
_loops: dict[int, _Loop] = {}  # by pid: a child that closed its parent's loop would change its epoll
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _current() -> _Loop:
    """Return this process's loop; start it on first use."""
    pid = os.getpid()
    with _lock:
        if pid not in _loops:
            _loops[pid] = _Loop()
            _loops[pid].start()
        return _loops[pid]


def can_wait() -> bool:
    """Return whether the calling thread may wait for the loop.

    False in the loop's own thread (where finalizers may run too) and during interpreter shutdown (threads have ended).
    """
    return not sys.is_finalizing() and threading.current_thread() is not _current()


def begin(call: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
    """Start ``call`` on the loop; cancelling the future cancels the call."""
    return asyncio.run_coroutine_threadsafe(call, _current().loop)


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """Run ``call`` on the loop and return its result; an interrupted wait (ctrl-c) cancels it.

    Raises:
        ConfigError: the calling thread must not wait for the loop (`can_wait`).
    """
    if not can_wait():
        call.close()
        raise ConfigError("this call would block the event loop that it runs on", hint="await the coroutine instead")
    loop = _current().loop
    try:
        return begin(call).result()
    except BaseException:  # ctrl-c may also come after begin has started the call and before it returns the future
        loop.call_soon_threadsafe(_cancel, call, loop)
        raise


def _cancel(call: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        if task.get_coro() is call:
            task.cancel()


async def each(calls: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await ``calls`` concurrently and return their results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def authorities() -> ssl.SSLContext:
    """Return a TLS context that trusts SSL_CERT_FILE and SSL_CERT_DIR, or by default the system's and certifi's CAs.

    Raises:
        ConfigError: a file or directory that the variables name cannot be read.
    """
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache  # reading the certificates takes longer than a call
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
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
    """Resolves each name in its own daemon thread, because a look-up cannot be interrupted."""

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
