"""JSON over HTTP, for clients of engines, routers and rollout routes, on one event loop per process.

Proxies from the environment are ignored, because a control call must reach exactly the engine that it names. Each call
opens its own connection: a call over a kept one would fail if the server, or a gateway, was just closing it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
from yarl import URL

from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError, RouteAbsent
from torchrl_ext.base.types import is_loopback

__all__ = ["HTTP", "Answer", "HTTPSession", "begin", "each", "normalise_url", "normalise_urls", "run"]

log = logging.getLogger("torchrl_ext")

_T = TypeVar("_T")

HTTP = "torchrl-ext-http"
"""The name of the thread that runs this process's loop."""

_lock = threading.RLock()  # a finalizer may make a call at any time, also while it is held
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by pid: a child that closed its parent's would change its epoll
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop; a daemon thread runs it from the first use to the end of the process."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=HTTP, daemon=True).start()
        return _loops[os.getpid()]


def begin(call: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
    """Start ``call`` on the loop; cancelling the future cancels the call."""
    return asyncio.run_coroutine_threadsafe(call, _loop())


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """Run ``call`` on the loop and return its result; an interrupted wait (ctrl-c) cancels it.

    Raises:
        ConfigError: the caller runs on the loop itself, or while the interpreter shuts down: it would wait for ever.
    """
    if threading.current_thread().name == HTTP or sys.is_finalizing():
        call.close()
        raise ConfigError("this call would block the event loop that it runs on", hint="await the coroutine instead")
    loop = _loop()
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


_CONNECT_S = 10.0  # how long connecting may take, over all addresses of a name
_SHORTEST_S = 0.05  # every call gets at least this long, even at its deadline
_CHECK = "check that the engine runs and that the address is right"
_CROWDED = "check that it runs; if it is overloaded, try again or send fewer requests at a time"
_MESSAGE_CHARS = 2000
_UNAUTHORIZED = 401
_NO_ROUTE = (404, 405, 501)
_ADDRESS = "host:port, [ipv6]:port, or an http(s) URL without query"

Keys = str | tuple[str, ...] | None


def normalise_url(address: str) -> str:
    """Return the base URL, without a trailing slash, of ``"host:8000"``, ``"[::1]:8000"`` or a URL.

    Raises:
        ConfigError: the address has no host, another scheme than http or https, a bad port, a query, a fragment or a
            user name.
    """
    text = address.strip()
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number, or out of range
    except ValueError as error:
        raise ConfigError(f"{address!r} is not an engine address: {error}", expected=_ADDRESS) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is not an engine address", expected=_ADDRESS)
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{address!r} has a query, a fragment or a user name, which a base address cannot have", expected=_ADDRESS
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def normalise_urls(addresses: Iterable[str]) -> list[str]:
    """Return `normalise_url` of each address.

    Raises:
        ConfigError: an address is invalid or repeated, or there is none.
    """
    urls = [normalise_url(address) for address in addresses]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if not urls or twice:
        raise ConfigError(
            f"address {twice[0]} is given twice" if twice else "no engine address was given",
            hint="give the address of each engine once, such as 127.0.0.1:8000",
        )
    return urls


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A server's answer to one HTTP call, whatever its status.

    Attributes:
        where: method and URL of the call.
        status: HTTP status.
        text: the body, decoded as UTF-8.
    """

    where: str
    status: int
    text: str

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def absent(self) -> bool:
        """Whether the server lacks the route or the method: status 404, 405 or 501."""
        return self.status in _NO_ROUTE

    def json(self) -> Any:
        """Return the body, parsed as JSON; ``{}`` if it is empty.

        Raises:
            ValueError: the body is not JSON.
        """
        try:
            return json.loads(self.text) if self.text.strip() else {}
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def message(self) -> str:
        """Return the server's message: ``error``, ``detail`` or ``message`` of a JSON body, or the body; shortened."""
        try:
            found = self.json()
        except ValueError:
            found = self.text
        for key in ("error", "detail", "message"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
        text = " ".join(text.split())
        text = text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)  # terminals obey control characters

    def checked(self) -> Answer:
        """Return this answer if its status is 2xx.

        Raises:
            RouteAbsent: the server lacks the route (see `absent`).
            EngineRefusedError: any other status, which the error's ``status`` holds.
        """
        if self.ok:
            return self
        log.debug("%s answered %d: %s", self.where, self.status, self.text)
        words = self.message() or "no reason given"
        says_why = self.status not in (401, 403) and self.text.strip(" {}") != ""  # else the status is the reason
        raise (RouteAbsent if self.absent else EngineRefusedError)(
            f"{self.where} answered {self.status}: {words}", status=self.status, reason=words if says_why else ""
        )

    def checked_json(self, *fields: str) -> Any:
        """Return the JSON body if the status is 2xx.

        Args:
            fields: what the server's true answer has. With them, a body that says ``"success": false``, or lacks a
                field, is no success, whatever its status: a gateway may have answered in the server's place.

        Raises:
            RouteAbsent, EngineRefusedError: as for `checked`, or the body is not JSON, or no success.
        """
        try:
            found = self.checked().json()
            if not fields:
                return found
            if isinstance(found, dict) and found.get("success", True) is True and found.keys() >= {*fields}:
                return found
            words = self.message()
            raise EngineRefusedError(
                f"{self.where} answered {self.status}: {words or 'nothing'}",
                expected=f"an answer with {', '.join(map(repr, fields))} that reports success",
                hint="check that this is the engine's own address; nothing else may answer in its place",
                status=self.status,
                reason=words,
            )
        except ValueError:
            raise EngineRefusedError(
                f"{self.where} answered with something other than JSON: {self.text[:120]!r}",
                hint="check that this is an engine's address",
                status=self.status,
            ) from None


class HTTPSession:
    """Calls routes of one server; safe across threads and forks.

    Args:
        url: base address; without a scheme, ``http://`` is assumed.
        api_key: sent as a bearer token. With several keys, the session tries the next one after a 401: SGLang has one
            key for requests (``--api-key``) and another for control (``--admin-api-key``).
        timeout_s: deadline of a call, from the DNS look-up to the last byte of the answer, in seconds.
        max_body_bytes: larger answers are refused.
        check: called with a similar session before each `call`, within its deadline, until it has succeeded once.

    Raises:
        ConfigError: the address is invalid, or a header cannot carry a key.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: Keys = None,
        timeout_s: float = 60.0,
        max_body_bytes: int = 64 << 20,
        check: Callable[[HTTPSession], None] | None = None,
    ) -> None:
        self.url, self.api_key, self.timeout_s = normalise_url(url), api_key, timeout_s
        self._bearers = _bearers(api_key)
        host = urlsplit(self.url).hostname or ""
        if api_key and "://" not in url and not is_loopback(host):
            log.warning(
                "the API key goes to %s unencrypted, because the address has no scheme: write https:// or http://", host
            )
        self._max_body_bytes, self._check = max_body_bytes, check

    def get(self, route: str, *, fields: Sequence[str] = (), **how: Any) -> Any:
        """Call ``GET route`` with the arguments of `call`; return `Answer.checked_json` of ``fields``."""
        return self.call("GET", route, **how).checked_json(*fields)

    def post(self, route: str, body: Any = None, *, fields: Sequence[str] = (), **how: Any) -> Any:
        """Call ``POST route`` with ``body`` as JSON, as `get` does."""
        return self.call("POST", route, body, **how).checked_json(*fields)

    def call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Run `exchange` from any thread but the loop's; raises also as `run` and as the session's ``check``."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit_s
        if self._check is not None:  # concurrent threads may each run it
            self._check(HTTPSession(self.url, api_key=self.api_key, timeout_s=limit_s))
            self._check = None
        return run(self.exchange(method, route, body, query=query, timeout_s=until - time.monotonic()))

    async def exchange(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Call a route, on the loop of `run` and `begin`, and return its answer, whatever the status.

        Args:
            body: sent as JSON; None for no body.
            timeout_s: deadline of this call, in seconds, in place of the session's.

        Raises:
            EngineUnreachableError: nothing listens at the address, or the connection broke.
            EngineRefusedError: the server redirects, or its answer exceeds ``max_body_bytes``.
            DeadlineError: the answer is not complete in time.
        """
        limit_s = max(_SHORTEST_S, self.timeout_s if timeout_s is None else timeout_s)
        until, where = time.monotonic() + limit_s, f"{method} {self.url}{route}"
        url = URL(self.url + route + (f"?{urlencode(query, doseq=True)}" if query else ""), encoded=True)
        given: dict[str, Any] = {"allow_redirects": False}
        if body is not None:
            given["data"] = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            headers = {**(headers or {}), "content-type": "application/json"}
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), cookie_jar=aiohttp.DummyCookieJar()
            ) as client:
                for bearer in self._bearers:
                    left_s = max(_SHORTEST_S, until - time.monotonic())
                    given["timeout"] = aiohttp.ClientTimeout(total=left_s, connect=_CONNECT_S)
                    given["headers"] = {**bearer, **(headers or {})}
                    async with client.request(method, url, **given) as response:
                        answer = await self._read(response, where)
                    if answer.status != _UNAUTHORIZED:
                        break
        except aiohttp.ConnectionTimeoutError:  # aiohttp's tracebacks add nothing to any of these errors
            if limit_s <= _CONNECT_S:
                raise _late(where, limit_s) from None
            raise _unreachable(
                f"{self.url} does not answer", f"no connection within {_CONNECT_S:g} s", _CROWDED
            ) from None
        except asyncio.TimeoutError:
            raise _late(where, limit_s) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise _unreachable(f"{self.url} does not answer", str(error.certificate_error)) from None
        except aiohttp.ClientConnectorError as error:
            unnamed = f"; it names no port, and port {url.port} was tried" if url.explicit_port is None else ""
            raise _unreachable(f"{self.url} does not answer", str(error.os_error), _CHECK + unnamed) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(where, f"the connection broke: {error or type(error).__name__}") from None
        if 300 <= answer.status < 400:
            raise EngineRefusedError(
                f"{where} answered with a redirect ({answer.status})",
                expected="an answer of the engine itself",
                hint="give the engine's own address; redirects are not followed",
                status=answer.status,
            )
        return answer

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> Answer:
        found = bytearray()
        async for chunk in response.content.iter_any():
            found += chunk
            if len(found) > self._max_body_bytes:
                raise EngineRefusedError(
                    f"{where} answered with more than {self._max_body_bytes} bytes",
                    hint="check that this is an engine's address; if it is, raise max_body_bytes",
                    status=response.status,
                )
        return Answer(where=where, status=response.status, text=found.decode("utf-8", "replace"))


def _bearers(api_key: Keys) -> list[dict[str, str]]:
    keys = [key for key in ((api_key,) if isinstance(api_key, str) else api_key or ()) if key]
    if not all(key.isprintable() and key.isascii() for key in keys):
        raise ConfigError(
            "an API key has characters that an HTTP header cannot carry", expected="printable ASCII, on one line"
        )
    return [{"authorization": f"Bearer {key}"} for key in keys] or [{}]


def _unreachable(where: str, why: str, hint: str = _CHECK) -> EngineUnreachableError:
    if "CERTIFICATE_VERIFY_FAILED" in why:
        hint = "set SSL_CERT_FILE to the certificate of the authority that signed the server's"
    elif "SSL" in why:
        hint = "if the server speaks plain HTTP, write http:// before the address"
    return EngineUnreachableError(f"{where}: {why}", expected="an engine that listens there", hint=hint)


def _late(where: str, limit_s: float) -> DeadlineError:
    return DeadlineError(
        f"{where}: no complete answer within {round(limit_s, 2):g} s",
        state="the server may still be working on the call",
        hint="check whether the engine is paused, read its log, or raise timeout_s",
    )
