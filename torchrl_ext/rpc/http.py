"""JSON over HTTP, for every client of an engine, a router or a rollout route.

`AsyncSession` is for event loops, with many requests for tokens at a time; its deadline holds over a whole call, from
the look-up of the name to the last byte of the answer. `HTTPSession` makes one such call at a time for everybody else,
each in an event loop of its own, so that no thread, no lock and no connection is left between two of them.

Connections for requests are kept for two seconds, which is less than servers keep them (uvicorn: five), so that none is
used that the server is about to drop. Connections for control calls live for one call: they are few, and one that a
gateway drops between two of them would turn a good update into a failed one. Proxies of the environment are not used:
a control call has to reach exactly the engine that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp
from yarl import URL

from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    RouteAbsent,
)
from torchrl_ext.rpc.connections import Resolver, authorities, run
from torchrl_ext.types import is_loopback

__all__ = ["Answer", "AsyncSession", "HTTPSession", "normalise_url", "normalise_urls"]

log = logging.getLogger("torchrl_ext")

_SHORTEST_S = 0.05  # a call gets this long, however near its deadline is
_CROWDED = "check that it runs; it may have more to accept than it can: try again, or send fewer requests at a time"
_MESSAGE_CHARS = 2000
_UNAUTHORIZED = 401
_NO_ROUTE = (404, 405, 501)
_ADDRESS = "host:port, [ipv6]:port, or an http(s) URL without query"

Keys = str | tuple[str, ...] | None


def normalise_url(address: str) -> str:
    """Return the base URL, without a trailing slash, of ``"host:8000"``, ``"[::1]:8000"`` or a URL.

    Raises:
        ConfigError: no host, a scheme other than http and https, a bad port, or parts that a base address has not.
    """
    text = address.strip()
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises when it is no number, or out of range
    except ValueError as error:
        raise ConfigError(f"{address!r} is no engine address: {error}", expected=_ADDRESS) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is no engine address", expected=_ADDRESS)
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{address!r} has parts that a base address cannot have", expected=_ADDRESS)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def normalise_urls(addresses: Iterable[str]) -> list[str]:
    """Return `normalise_url` of each address.

    Raises:
        ConfigError: as there, or no address, or one twice.
    """
    urls = [normalise_url(address) for address in addresses]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if not urls or twice:
        raise ConfigError(
            f"address {twice[0]} is given twice" if twice else "there is no engine to ask: no address was given"
        )
    return urls


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a server to one HTTP call, whatever its status.

    Attributes:
        status: HTTP status.
        text: the body, decoded as UTF-8.
        headers: by lower-case name.
    """

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def absent(self) -> bool:
        """Whether the server has no such route, or none that takes this method: 404, 405, 501."""
        return self.status in _NO_ROUTE

    def json(self) -> Any:
        """Return the body, parsed as JSON; ``{}`` where it is empty.

        Raises:
            ValueError: it is no JSON.
        """
        try:
            return json.loads(self.text) if self.text.strip() else {}
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def message(self) -> str:
        """Return the message of the server, from the usual places of an error body."""
        try:
            found = self.json()
        except ValueError:
            found = self.text
        for key in ("error", "detail", "message"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
        text = " ".join(text.split())
        return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."

    def wanted(self, where: str) -> Any:
        """Return the JSON of a call that has to succeed.

        Args:
            where: the method and the URL, for the message.

        Raises:
            RouteAbsent: the server has no such route.
            EngineRefusedError: any other status but 2xx, or an answer that is no JSON; `status` holds the former.
        """
        if not self.ok:
            log.debug("%s answered %d: %s", where, self.status, self.text)
            words = self.message() or "no reason given"
            says_why = self.status not in (401, 403) and self.text.strip(" {}") != ""  # else the status is the cause
            kind = RouteAbsent if self.absent else EngineRefusedError
            raise kind(f"{where} answered {self.status}: {words}", status=self.status, reason=words if says_why else "")
        try:
            return self.json()
        except ValueError:
            raise EngineRefusedError(
                f"{where} answered with something other than JSON: {self.text[:120]!r}",
                hint="is this an engine's address?",
                status=self.status,
            ) from None


class AsyncSession:
    """Calls routes of any server; belongs to the event loop that first used it.

    Args:
        api_key: sent as a bearer token. Of several, the next is sent where one is refused (401): SGLang wants one for
            requests (``--api-key``) and another for control (``--admin-api-key``).
        max_body_bytes: answers above this size are refused.
        connect_timeout_s: how long connecting may take, over all addresses of a name, in seconds.
        connection_limit: most connections at a time; 0 for as many as there are calls.
        keep_s: seconds for which a connection is kept after its last call.

    Raises:
        ConfigError: a key that no header can carry.
    """

    def __init__(
        self,
        *,
        api_key: Keys = None,
        max_body_bytes: int = 256 << 20,
        connect_timeout_s: float = 10.0,
        connection_limit: int = 0,
        keep_s: float = 2.0,
    ) -> None:
        self._bearers, self._limit, self._keep_s = _bearers(api_key), connection_limit, keep_s
        self._max_body_bytes, self._connect_timeout_s = max_body_bytes, connect_timeout_s
        self._client: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        until: float,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Call a route and return its answer, whatever the status.

        Args:
            url: of the route.
            body: sent as JSON; None for no body.
            until: deadline on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError: nobody listens, or the connection broke.
            EngineRefusedError: a redirect, or an answer above ``max_body_bytes``.
            DeadlineError: no complete answer in time.
            EngineError: the session was closed.
            ConfigError: the environment names TLS authorities that cannot be read.
        """
        if self._client is None:
            keep_s: dict[str, Any] = {"keepalive_timeout": self._keep_s} if self._keep_s else {"force_close": True}
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._limit, resolver=Resolver(), **keep_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
            weakref.finalize(self, _let_go, self._client, asyncio.get_running_loop())
        limit_s, where = max(_SHORTEST_S, until - time.monotonic()), f"{method} {url}"
        until = time.monotonic() + limit_s
        asked = URL(f"{url}?{urlencode(query, doseq=True)}" if query else url, encoded=True)
        try:
            for bearer in self._bearers:
                answer = await self._exchange(method, asked, body, {**bearer, **(headers or {})}, until)
                if answer.status != _UNAUTHORIZED:
                    break
        except aiohttp.ConnectionTimeoutError:  # tracebacks of aiohttp's add nothing to any of these errors
            if limit_s <= self._connect_timeout_s:
                raise _late(where, limit_s) from None
            raise _unreachable(where, f"no connection within {self._connect_timeout_s:g} s", _CROWDED) from None
        except asyncio.TimeoutError:
            raise _late(where, limit_s) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise _unreachable(where, str(error.certificate_error)) from None
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(where, str(error.os_error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(where, f"the connection broke: {error or type(error).__name__}") from None
        if 300 <= answer.status < 400:
            raise EngineRefusedError(
                f"{where} answered with a redirect ({answer.status})",
                expected="the engine itself at this address",
                hint="give the engine's own address; redirects are not followed",
                status=answer.status,
            )
        return answer

    async def json(self, method: str, url: str, body: Any = None, **how: Any) -> Any:
        """Call a route, which has to succeed, and return the JSON answer (``{}`` for an empty one).

        Raises:
            EngineUnreachableError, DeadlineError: as for `call`.
            EngineRefusedError: as for `Answer.wanted`.
        """
        return (await self.call(method, url, body, **how)).wanted(f"{method} {url}")

    async def close(self) -> None:
        """Drop all connections."""
        if self._client is not None:
            await self._client.close()

    async def _exchange(self, method: str, url: URL, body: Any, headers: Mapping[str, str], until: float) -> Answer:
        data, client = None, self._client
        if body is not None:
            data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            headers = {**headers, "content-type": "application/json"}
        if client is None or client.closed:
            raise EngineError(f"{method} {url}: the client was closed", state="the request gets no answer")
        left_s = max(_SHORTEST_S, until - time.monotonic())
        async with client.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=left_s, connect=self._connect_timeout_s),
            allow_redirects=False,
            ssl=authorities() if url.scheme == "https" else True,
        ) as response:
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > self._max_body_bytes:
                    raise EngineRefusedError(
                        f"{method} {url} answered with more than {self._max_body_bytes} bytes",
                        hint="is this an engine's address? If so raise max_body_bytes",
                        status=response.status,
                    )
                chunks.append(chunk)
            named = {name.lower(): value for name, value in response.headers.items()}
            return Answer(status=response.status, text=b"".join(chunks).decode("utf-8", "replace"), headers=named)


class HTTPSession:
    """Calls routes of one server; safe to use from many threads, and after a fork.

    Args:
        url: base address; ``http://`` is added where no scheme is given.
        api_key: as for `AsyncSession`.
        timeout_s: deadline of a whole call, from looking up the name to the last byte of the answer, in seconds.
        max_body_bytes: answers above this size are refused.
        until: deadline of all calls together on the monotonic clock, in seconds.
        check: called with a session like this one before the first call, within its deadline, and again until it
            raises nothing.

    Raises:
        ConfigError: the address cannot work, or a key that no header can carry.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: Keys = None,
        timeout_s: float = 60.0,
        max_body_bytes: int = 64 << 20,
        until: float = math.inf,
        check: Callable[[HTTPSession], None] | None = None,
    ) -> None:
        self.url, self.api_key, self.timeout_s = normalise_url(url), api_key, timeout_s
        _bearers(api_key)
        host = urlsplit(self.url).hostname or ""
        if api_key and "://" not in url and not is_loopback(host):
            log.warning("the API key goes to %s in the clear, as no scheme is given: write https:// or http://", host)
        self._max_body_bytes, self._until, self._check = max_body_bytes, until, check

    @property
    def left_s(self) -> float:
        """The seconds that a call may take which begins now."""
        return max(_SHORTEST_S, min(self.timeout_s, self._until - time.monotonic()))

    def get(self, route: str, *, query: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Call ``GET route`` and return the JSON answer (``{}`` for an empty one).

        Raises:
            EngineUnreachableError: nobody listens, or the connection broke.
            EngineRefusedError: as for `Answer.wanted`.
            DeadlineError: no complete answer in time.
        """
        return self.call("GET", route, query=query, timeout_s=timeout_s).wanted(f"GET {self.url}{route}")

    def post(
        self,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Call ``POST route`` with ``body`` as JSON; return and raise as `get` does."""
        return self.call("POST", route, body, query=query, timeout_s=timeout_s).wanted(f"POST {self.url}{route}")

    def call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Call a route and return its answer, whatever the status.

        Raises:
            EngineUnreachableError, DeadlineError: as for `get`.
            EngineRefusedError: a redirect, or an answer above `max_body_bytes`.
        """
        until = min(time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s), self._until)
        check = self._check
        if check is not None:  # threads that come at the same time may each make it
            check(HTTPSession(self.url, api_key=self.api_key, timeout_s=self.timeout_s, until=until))
            self._check = None
        session = AsyncSession(api_key=self.api_key, max_body_bytes=self._max_body_bytes, keep_s=0.0)

        async def exchange() -> Answer:
            try:
                return await session.call(method, self.url + route, body, until=until, query=query)
            finally:
                await session.close()

        return run(exchange())


def _let_go(client: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Drop connections that nobody closed, from any thread; else aiohttp logs an error about them."""

    def drop() -> None:
        with contextlib.suppress(StopIteration):
            client.close().send(None)  # the first step closes them; the rest only waits until they are closed

    if loop.is_closed():
        drop()
    else:
        loop.call_soon_threadsafe(drop)


def _bearers(api_key: Keys) -> list[dict[str, str]]:
    """Return the header of each key, in the order in which they are tried; without keys, one that is empty."""
    keys = [key for key in ((api_key,) if isinstance(api_key, str) else api_key or ()) if key]
    if not all(key.isprintable() and key.isascii() for key in keys):
        raise ConfigError("an API key has signs that no header can carry", expected="printable ASCII, on one line")
    return [{"authorization": f"Bearer {key}"} for key in keys] or [{}]


def _unreachable(where: str, why: str, hint: str = "check that it runs, and the address") -> EngineUnreachableError:
    if "CERTIFICATE_VERIFY_FAILED" in why:
        hint = "name the file of the authority that signed its certificate in SSL_CERT_FILE"
    elif "SSL" in why:
        hint = "it may speak plain http: try the address with http://"
    return EngineUnreachableError(f"{where}: {why}", expected="an engine that listens there", hint=hint)


def _late(where: str, limit_s: float) -> DeadlineError:
    return DeadlineError(
        f"{where}: no complete answer within {round(limit_s, 2):g} s",
        state="the other side may still be at work on it",
        hint="is the engine paused? Look at its log, or raise timeout_s",
    )
