"""One small JSON-over-HTTP session, shared by every client that speaks to an engine, a router or a rollout route.

A connection lives for one call. Control calls are few, and a kept-alive connection that the server drops between two
of them would turn a good update into a failed one. Proxies of the environment are not used: a control call has to
reach exactly the engine that it names.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rpc.http.addresses import addresses_of
from torchrl_ext.rpc.http.tls import authorities
from torchrl_ext.rpc.http.watchdog import Watchdog
from torchrl_ext.types import is_loopback

__all__ = ["Answer", "HTTPSession", "bearers", "normalise_url"]

log = logging.getLogger("torchrl_ext")

_CONNECT_TIMEOUT_S = 10.0
_MESSAGE_CHARS = 2000


def normalise_url(address: str) -> str:
    """``"host:8000"``, ``"[::1]:8000"`` or a URL -> ``"http://host:8000"``, without a trailing slash.

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


def _warn_of_plain_http(address: str, url: str) -> None:
    """Say in the log that a key is about to travel where others can read it, though nobody asked for that."""
    host = urlsplit(url).hostname or ""
    if "://" not in address and not is_loopback(host):
        log.warning("the API key goes to %s in the clear, as no scheme is given: write https:// or http://", host)


_UNAUTHORIZED = 401
_ADDRESS = "host:port, [ipv6]:port, or an http(s) URL without query"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back.

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
        """Status 2xx."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON; ``{}`` where it is empty.

        Raises:
            ValueError: it is no JSON.
        """
        try:
            return json.loads(self.text) if self.text.strip() else {}
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def message(self) -> str:
        """What the other side says in its own words, from the usual places of an error body."""
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


def bearers(api_key: str | tuple[str, ...] | None) -> list[dict[str, str]]:
    """The header of each key, in the order in which they are tried; one empty where there is none."""
    keys = (api_key,) if isinstance(api_key, str) else api_key or ()
    return [{"authorization": f"Bearer {key}"} for key in keys if key] or [{}]


class HTTPSession:
    """Calls routes of one server; safe to use from many threads.

    Args:
        url: base address; ``http://`` is added where no scheme is given.
        api_key: sent as a bearer token. Of several, the next is sent where one is refused (401): SGLang wants one for
            requests (``--api-key``) and another for control (``--admin-api-key``).
        timeout_s: deadline of a whole call, from connecting to the last byte of the answer, in seconds.
        max_body_bytes: answers above this size are refused.
        max_connections: calls that may run at the same time; further ones wait, within their deadline.

    Raises:
        ConfigError: the address cannot work.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | tuple[str, ...] | None = None,
        timeout_s: float = 60.0,
        max_body_bytes: int = 64 << 20,
        max_connections: int | None = None,
    ) -> None:
        self.url = normalise_url(url)
        if api_key:
            _warn_of_plain_http(url, self.url)
        self.timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        # "close" ends a connection where its answer ends. httpcore's own limit on idle ones would close them a moment
        # later, after it may have given them to a call of another thread.
        self._headers = {"connection": "close"}
        self._keys = bearers(api_key)
        self._limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        self._client: httpx.Client | None = None
        self._opening = threading.Lock()

    def get(self, route: str, *, query: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """``GET route``; returns the JSON answer (``{}`` for an empty one).

        Raises:
            EngineUnreachableError: nobody listens, or the connection broke.
            EngineRefusedError: any status but 2xx, or an answer that is no JSON; `status` holds the former.
            DeadlineError: no complete answer in time.
        """
        return self._json("GET", route, None, query, timeout_s)

    def post(
        self,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """``POST route`` with ``body`` as JSON; returns and raises as `get` does."""
        return self._json("POST", route, body, query, timeout_s)

    def call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """One call, whatever its status says.

        Raises:
            EngineUnreachableError, DeadlineError: as for `get`.
            EngineRefusedError: a redirect, or an answer above `max_body_bytes`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        where = f"{method} {self.url}{route}"
        watchdog = Watchdog(limit_s)
        try:
            with watchdog:
                for bearer in self._keys:
                    answer = self._send(where, method, route, body, query, watchdog, bearer)
                    if answer.status != _UNAUTHORIZED:
                        break
        except httpx.ConnectTimeout as error:
            raise self._unreachable(where, f"no connection within {min(limit_s, _CONNECT_TIMEOUT_S):g} s") from error
        except (httpx.ConnectError, socket.gaierror) as error:
            raise self._unreachable(where, str(error)) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self._late(where, limit_s) from error
        except (httpx.HTTPError, OSError) as error:
            if watchdog.expired:
                raise self._late(where, limit_s) from error
            raise self._unreachable(where, f"the connection broke: {error or type(error).__name__}") from error
        if 300 <= answer.status < 400:
            raise EngineRefusedError(
                f"{where} answered with a redirect ({answer.status})",
                expected="the engine itself at this address",
                hint="give the engine's own address; redirects are not followed",
                status=answer.status,
            )
        return answer

    def close(self) -> None:
        """Drop all connections. May be called twice; a later call opens anew."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _http(self) -> httpx.Client:
        with self._opening:
            if self._client is None:
                self._client = httpx.Client(
                    headers=self._headers,
                    limits=self._limits,
                    follow_redirects=False,
                    trust_env=False,
                    verify=authorities(),
                )
            return self._client

    def _send(
        self,
        where: str,
        method: str,
        route: str,
        body: Any,
        query: Mapping[str, Any] | None,
        watchdog: Watchdog,
        bearer: Mapping[str, str],
    ) -> Answer:
        response = self._first_answer(method, route, body, query, watchdog, bearer)
        try:
            chunks, size = [], 0
            for chunk in response.iter_bytes():
                size += len(chunk)
                if size > self._max_body_bytes:
                    raise EngineRefusedError(
                        f"{where} answered with more than {self._max_body_bytes} bytes",
                        hint="is this an engine's address? If so raise max_body_bytes",
                        status=response.status_code,
                    )
                watchdog.left_s()
                chunks.append(chunk)
            watchdog.left_s()  # the watchdog's cut looks like a regular end where no length was announced
        finally:
            response.close()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(status=response.status_code, text=b"".join(chunks).decode("utf-8", "replace"), headers=headers)

    def _first_answer(
        self,
        method: str,
        route: str,
        body: Any,
        query: Mapping[str, Any] | None,
        watchdog: Watchdog,
        bearer: Mapping[str, str],
    ) -> httpx.Response:
        """From the first address of the host that takes a connection; each of them gets a share of the time left."""
        client, url = self._http(), httpx.URL(self.url + route)
        port = url.port or (443 if url.scheme == "https" else 80)
        found = addresses_of(url.host, port, watchdog.left_s())
        for number, address in enumerate(found, 1):
            left_s = watchdog.left_s()
            connect_s = min(left_s / (len(found) - number + 1), _CONNECT_TIMEOUT_S)
            request = client.build_request(
                method,
                url.copy_with(host=address),
                json=body,
                params=query,
                headers={"host": url.netloc.decode("ascii"), **bearer},
                timeout=httpx.Timeout(left_s, connect=connect_s),
                extensions={"trace": watchdog.trace, "sni_hostname": url.host},
            )
            try:
                return client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(found):
                    raise
        raise httpx.ConnectError(f"the name {url.host!r} has no address")

    def _json(
        self, method: str, route: str, body: Any, query: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        answer = self.call(method, route, body, query=query, timeout_s=timeout_s)
        if not answer.ok:
            raise EngineRefusedError(
                f"{method} {self.url}{route} answered {answer.status}: {answer.message() or 'no reason given'}",
                status=answer.status,
            )
        try:
            return answer.json()
        except ValueError:
            raise EngineRefusedError(
                f"{method} {self.url}{route} answered with something other than JSON: {answer.text[:120]!r}",
                hint="is this an engine's address?",
                status=answer.status,
            ) from None

    def _unreachable(self, where: str, why: str) -> EngineUnreachableError:
        hint = "check that it runs, and the address"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            hint = "name the file of the authority that signed its certificate in SSL_CERT_FILE"
        elif "SSL" in why:
            hint = "it may speak plain http: try the address with http://"
        return EngineUnreachableError(f"{where}: {why}", expected="an engine that listens there", hint=hint)

    def _late(self, where: str, limit_s: float) -> DeadlineError:
        return DeadlineError(
            f"{where}: no complete answer within {limit_s:g} s",
            state="the other side may still be at work on it",
            hint="look at the engine's log, or raise timeout_s",
        )
