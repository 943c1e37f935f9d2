"""Where connections come from: names and their addresses, whom TLS trusts, and the loop that owns them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from functools import cache
from typing import Any, final

import aiohttp
import aiohttp.abc
import certifi

from torchrl_ext.waiting import in_thread

__all__ = ["SharedLoop", "authorities", "connections", "let_go", "shared_loop"]


def connections(keep_s: float) -> aiohttp.ClientSession:
    """Connections of the running event loop, as many as there are calls; each is kept for ``keep_s`` seconds after its
    last call, and dropped at once where that is 0: then each call looks its name up anew, too, and waits for nobody
    else's look-up."""
    keeping: dict[str, Any] = {"keepalive_timeout": keep_s} if keep_s else {"force_close": True, "use_dns_cache": False}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver(), **keeping),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def let_go(client: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Drop connections that nobody closed, from whatever thread; aiohttp would call that a mistake in the log.

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

    if loop.is_closed() or _running_loop() is loop:
        with contextlib.suppress(StopIteration):
            close().send(None)  # that much closes them; the rest only waits until they are
    else:
        asyncio.run_coroutine_threadsafe(close(), loop)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def authorities() -> ssl.SSLContext:
    """Whom connections with TLS trust: the authorities of the system (SSL_CERT_FILE and SSL_CERT_DIR name others, as
    with OpenSSL) and those of certifi."""
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Reading them takes longer than a call; OpenSSL looks at the two variables by itself."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    return context


@final
class _Resolver(aiohttp.abc.AbstractResolver):
    """Looks names up, each in a thread that nobody waits for, since a look-up cannot be interrupted."""

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


@final
class SharedLoop:
    """An event loop in a thread of its own, for those who have none.

    Attributes:
        loop: runs until the process ends.
        connections: of that loop; none is kept after its call.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), name="torchrl-ext-http", daemon=True).start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        async def opened() -> aiohttp.ClientSession:
            return connections(keep_s=0.0)

        held = self.connections = self.loop.run_until_complete(opened())
        ready.set()
        self.loop.run_forever()
        del held  # never: at the end of a process nobody is told of connections that were not closed


_SHARED: list[SharedLoop] = []
_STARTING = threading.Lock()


def shared_loop() -> SharedLoop:
    """The one of this process; it is started by the first who asks."""
    with _STARTING:
        if not _SHARED:
            _SHARED.append(SharedLoop())
        return _SHARED[0]


def _forget() -> None:
    """In a process that was forked the thread is gone, and its lock may have been held."""
    global _STARTING
    _SHARED.clear()
    _STARTING = threading.Lock()


os.register_at_fork(after_in_child=_forget)
