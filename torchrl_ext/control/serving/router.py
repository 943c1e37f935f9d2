"""Set which engines a router sends requests to, and tell a router from an engine.

A router forwards an unknown route to one worker of its choice and returns that worker's answer with status 200, so a
pause sent to a router pauses one engine of many. Control calls therefore check the address first (`refuse_router`).

Routes of vLLM's router (vllm-router 0.1.17) and of SGLang's (sglang-router 0.3.2):

=======================================  ==============================================
``GET /workers``                         ``{"workers": [{"url", "worker_type", ...}], ...}``
``POST /workers``                        ``{"url", "worker_type"}``
``DELETE /workers/{id or quoted url}``
=======================================  ==============================================
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Collection
from functools import partial
from urllib.parse import quote, urlsplit

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.control.http import HTTPSession, Keys, normalise_url

__all__ = ["RouterClient", "engine_key", "listed_workers", "refuse_router"]

_LOOK_S = 0.05


class RouterClient:
    """Adds regular engines to one router and removes them.

    Every method raises EngineUnreachableError, EngineRefusedError or DeadlineError if the router does not answer,
    refuses, or does not do what it accepted in time.

    Args:
        url: base address of the router.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        timeout_s: deadline of each call and of each change's appearance in the router's list, in seconds.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, url: str, *, api_key: Keys = None, timeout_s: float = 30.0) -> None:
        self._http, self._timeout_s = HTTPSession(url, api_key=api_key, timeout_s=timeout_s), timeout_s

    @property
    def url(self) -> str:
        """The router's base address."""
        return self._http.url

    def workers(self) -> dict[str, str]:
        """Return the engines that get requests, in the router's order: base address -> the router's name for it."""
        found = listed_workers(self._http)
        if found is None:
            raise EngineRefusedError(f"{self.url} lists no workers", expected="a router that answers GET /workers")
        return found

    def add(self, url: str) -> None:
        """Make the router send requests to the engine at ``url``; do nothing if it already does."""
        url = normalise_url(url)
        if self._find(url) is None:
            self._http.call("POST", "/workers", {"url": url, "worker_type": "regular"}).checked()
            self.expect([url])

    def expect(self, urls: Collection[str]) -> None:
        """Wait until the router lists the engines at ``urls``: it accepts changes before it makes them."""
        for url in urls:
            late = f"{self.url} did not list {url}"
            Deadline(self._timeout_s).poll(partial(self._find, url), late, longest_s=_LOOK_S)

    def remove(self, url: str) -> None:
        """Make the router stop sending requests to the engine at ``url``; running requests continue."""
        if known := self._find(url):
            self._http.call("DELETE", f"/workers/{quote(known, safe='')}").checked()
            late = f"{self.url} did not remove {url}"
            Deadline(self._timeout_s).poll(lambda: self._find(url) is None, late, longest_s=_LOOK_S)

    def _find(self, url: str) -> str | None:
        return next((name for one, name in self.workers().items() if engine_key(one) == engine_key(url)), None)


def engine_key(url: str) -> tuple[str, str, int | None, str]:
    """Return a key that equivalent addresses share, without a DNS look-up.

    All loopback and unspecified addresses (``localhost``, ``127.0.0.1``, ``[::1]``, ``0.0.0.0``) share one host.

    Raises:
        ConfigError: ``url`` is not a valid address.
    """
    parts = urlsplit(normalise_url(url))
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):  # the host is a name, not an address
        address = ipaddress.ip_address(host)
        host = "localhost" if address.is_loopback or address.is_unspecified else str(address)
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}[parts.scheme], parts.path


def listed_workers(session: HTTPSession) -> dict[str, str] | None:
    """Return `RouterClient.workers` of the router at the session's address; None if the server is not a router.

    Raises:
        EngineUnreachableError, DeadlineError: nothing answers at the address.
    """
    try:
        rows = session.call("GET", "/workers").json()["workers"]
        return {normalise_url(row["url"]): str(row.get("id") or row["url"]) for row in rows}
    except (EngineRefusedError, ValueError, KeyError, TypeError, AttributeError):  # ConfigError is a ValueError
        return None  # an engine, or a server whose refusal the caller's own call meets


def refuse_router(session: HTTPSession) -> None:
    """Raise an error if the session's address is a router's; an engine costs one request.

    Raises:
        ConfigError: a router listens at the session's address.
        EngineUnreachableError, DeadlineError: nothing answers at the address.
    """
    if listed_workers(session) is not None:
        raise ConfigError(
            f"{session.url} is a router: it would hand a control call to one engine of many",
            expected="the address of an engine itself",
            state="nothing was sent to any engine",
            hint="give each engine's own address; a router is for generation requests only",
        )
