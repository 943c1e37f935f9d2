"""Set which engines a router sends requests to, and tell a router from an engine.

A router forwards an unknown route to one worker of its choice and returns that worker's answer with status 200, so a
pause sent to a router pauses one engine of many. Control calls therefore check the address first (`refuse_router`).

Routes of vLLM's router (vllm-router 0.1.17) and of SGLang's (sglang-router 0.3.2):

=======================================  ===========================================================================
``GET /workers``                         ``{"workers": [{"url", "worker_type", ...}], ...}``
``POST /workers``                        ``{"url", "worker_type"[, "bootstrap_port"]}``
``DELETE /workers/{id or quoted url}``
=======================================  ===========================================================================
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.control.http import Answer, HTTPSession, normalise_url

__all__ = ["WORKER_TYPES", "RouterClient", "RouterWorker", "engine_key", "listed_workers", "refuse_router"]

WORKER_TYPES = ("regular", "prefill", "decode")
"""The worker types that routers know."""

_LOOK_S = 0.05
_STATIC = "a router with prefill and decode pools gets its workers when it starts; name them in its spec"
_HAS_POOLS = ("PD router", "add_prefill_server")  # in the errors of vllm-router and sglang-router
_DONE = "already exists"  # in the errors of both

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RouterWorker:
    """One engine in a router's list.

    Attributes:
        url: base address, without a trailing slash.
        worker_type: ``"regular"``, ``"prefill"`` or ``"decode"``.
        key: the router's id for the engine; "" if the router uses the address.
    """

    url: str
    worker_type: str = "regular"
    key: str = ""


class RouterClient:
    """Adds engines to one router and removes them.

    Args:
        url: base address of the router.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        timeout_s: deadline of each call and of each change's appearance in the router's list, in seconds.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, url: str, *, api_key: str | tuple[str, ...] | None = None, timeout_s: float = 30.0) -> None:
        self._http = HTTPSession(url, api_key=api_key, timeout_s=timeout_s)
        self._api_key, self._timeout_s = api_key, timeout_s

    @property
    def url(self) -> str:
        """The router's base address."""
        return self._http.url

    def workers(self) -> tuple[RouterWorker, ...]:
        """Return the engines that the router sends requests to, in its order.

        Raises:
            EngineUnreachableError, DeadlineError: the router does not answer.
            EngineRefusedError: the server is not a router.
        """
        found = listed_workers(self._http)
        if found is None:
            raise EngineRefusedError(f"{self.url} lists no workers", expected="a router that answers GET /workers")
        return found

    def add(self, url: str, worker_type: str = "regular", *, bootstrap_port: int | None = None) -> None:
        """Make the router send requests to the engine at ``url``; do nothing if it already does.

        The engine's ``/health`` is checked first, because a router waits minutes for an engine that is not there.

        Args:
            url: base address of the engine, as the router reaches it.
            worker_type: one of `WORKER_TYPES`.
            bootstrap_port: the connector's bootstrap port of a prefill engine, if it has one.

        Raises:
            ConfigError: the worker type is unknown, or this router cannot take it.
            EngineUnreachableError, EngineRefusedError, DeadlineError: the engine or the router does not answer, or
                refuses.
        """
        url = normalise_url(url)
        if worker_type not in WORKER_TYPES:
            raise ConfigError(f"no router has workers of type {worker_type!r}", expected=" or ".join(WORKER_TYPES))
        known = self._find(url)
        if known is None:
            engine = HTTPSession(url, api_key=self._api_key, timeout_s=self._timeout_s, check=refuse_router)
            engine.call("GET", "/health").checked()
            body: dict[str, Any] = {"url": url, "worker_type": worker_type}
            body |= {} if bootstrap_port is None else {"bootstrap_port": bootstrap_port}
            self._finish(self._http.call("POST", "/workers", body))
            known = self._until(lambda: self._find(url), f"list {url}")
        if known is not None and known.worker_type != worker_type:
            self.remove(url)  # a router without pools accepts any type and sends it whole requests
            raise ConfigError(
                f"{self.url} takes {url} as a {known.worker_type} worker", expected=worker_type, hint=_STATIC
            )

    def expect(self, urls: Iterable[str]) -> None:
        """Wait until the router lists the engines at ``urls``, with which it was started.

        Raises:
            DeadlineError: the router does not list an engine in time.
            EngineUnreachableError, EngineRefusedError: as for `workers`.
        """
        for url in urls:
            self._until(partial(self._find, url), f"list {url}")

    def remove(self, url: str) -> None:
        """Make the router stop sending requests to the engine at ``url``; running requests continue.

        Raises:
            ConfigError: the router cannot remove workers.
            EngineUnreachableError, EngineRefusedError, DeadlineError: as for `add`.
        """
        url = normalise_url(url)
        known = self._find(url)
        if known is None:
            return
        self._finish(self._http.call("DELETE", f"/workers/{quote(known.key or known.url, safe='')}"))
        self._until(lambda: self._find(url) is None, f"remove {url}")

    def _find(self, url: str) -> RouterWorker | None:
        return next((worker for worker in self.workers() if engine_key(worker.url) == engine_key(url)), None)

    def _finish(self, answer: Answer) -> None:
        """Check the answer to a change of workers."""
        if not answer.ok and any(words in answer.message() for words in _HAS_POOLS):
            raise ConfigError(f"{answer.where} answered {answer.status}: {answer.message()}", hint=_STATIC)
        if _DONE not in answer.message():
            answer.checked()

    def _until(self, happened: Callable[[], _T], what: str) -> _T:
        """Wait for a true value of ``happened`` and return it: a router may accept a change before making it."""
        return Deadline(self._timeout_s).poll(happened, f"{self.url} did not {what}", longest_s=_LOOK_S)


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


def listed_workers(session: HTTPSession) -> tuple[RouterWorker, ...] | None:
    """Return the workers of the router at the session's address, in its order; None if the server is not a router.

    Raises:
        EngineUnreachableError, DeadlineError: nothing answers at the address.
    """
    try:
        rows: Any = session.call("GET", "/workers").json()
        rows = rows["workers"]
        return tuple(map(_worker, rows)) if isinstance(rows, list) else None
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


def _worker(row: Any) -> RouterWorker:
    return RouterWorker(
        url=normalise_url(row["url"]),
        worker_type=str(row.get("worker_type") or "regular").lower(),
        key=str(row.get("id") or ""),
    )
