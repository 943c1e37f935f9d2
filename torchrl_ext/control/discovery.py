"""Find out which engine runs at an address, and create a client for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import DeadlineError, EngineError, EngineRefusedError, WeightSyncError, why
from torchrl_ext.base.registry import engines
from torchrl_ext.base.types import EngineInfo, is_torchrl
from torchrl_ext.control.client import EngineClient
from torchrl_ext.control.fleet import Fleet, Members
from torchrl_ext.control.http import HTTPSession, Keys, normalise_urls
from torchrl_ext.control.makes.server_info import server_info
from torchrl_ext.control.serving.router import listed_workers, refuse_router

__all__ = ["PASSING", "as_engine", "connect", "discover", "kind_of"]

_TIMEOUT_S = 30.0
_MAX_BODY_BYTES = 16 << 20
PASSING = (429, 500, 502, 503, 504)  # too many requests or a server fault; 501 and 505 are final (RFC 9110)


def discover(*addresses: str, timeout_s: float = _TIMEOUT_S, api_key: Keys = None) -> list[EngineInfo]:
    """Query the engines at ``addresses`` concurrently; return their descriptions in the same order.

    Args:
        addresses: ``host:port``, ``[ipv6]:port`` or URLs of engines, not of routers.
        timeout_s: total deadline, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.

    Raises:
        ConfigError: there is no address, or an address is invalid, repeated or a router's.
        EngineUnreachableError: nothing listens at an address.
        EngineRefusedError: the server describes no engine; the message has the answers of both routes.
        DeadlineError: an engine did not answer in time.
        EngineError: several addresses fail for different reasons. Every error's message names all failed addresses.
    """
    how: dict[str, Any] = {"timeout_s": timeout_s, "api_key": api_key, "max_body_bytes": _MAX_BODY_BYTES}

    def ask(url: str) -> EngineInfo | WeightSyncError:
        try:
            return _describe(HTTPSession(url, check=refuse_router, **how))
        except (EngineError, DeadlineError) as error:
            return error

    jobs = {url: in_thread(partial(ask, url), f"discover {url}") for url in normalise_urls(addresses)}
    wait(jobs.values(), timeout_s)
    late = f"did not describe itself within {timeout_s:g} s"
    answers = [job.result() if job.done() else DeadlineError(f"{url} {late}") for url, job in jobs.items()]
    failed = [answer for answer in answers if isinstance(answer, WeightSyncError)]
    if len(failed) == 1:
        raise failed[0]
    if failed:
        causes = "; ".join(map(why, failed))
        kind = type(failed[0]) if len(set(map(type, failed))) == 1 else EngineError
        what = f"{causes}; {len(failed)} of {len(answers)} engines did not describe themselves"
        raise kind(what, expected=failed[0].expected, hint=failed[0].hint)
    return [answer for answer in answers if isinstance(answer, EngineInfo)]


def kind_of(http: HTTPSession) -> str | None:
    """Return the kind of the engine at a session's address, or behind the router there; None if it does not say.

    Raises:
        EngineUnreachableError, DeadlineError: nothing answers at the address.
        EngineRefusedError: it answers only for now, such as a router without an engine.
    """
    try:
        return server_info(http).info.kind
    except EngineRefusedError as error:
        behind = listed_workers(http)  # a router may have no such route for its pools, however many engines it has
        if error.status in PASSING and not behind:
            raise
        if behind is not None:
            return None
    try:
        return _describe(http).kind
    except EngineRefusedError:
        return None


def connect(
    *addresses: str,
    timeout_s: float = _TIMEOUT_S,
    api_key: Keys = None,
    members: Members | None = None,
    **settings: Any,
) -> Fleet:
    """Return one client for the engines at ``addresses``, whatever their kinds.

    Args:
        addresses: as for `discover`.
        timeout_s: deadline of each short call, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        members: returns the addresses of the engines that should take part, and is asked now and before each update, in
            place of ``addresses``; there need be no engine yet.
        settings: for each engine's client, such as ``pause_mode``.

    Raises:
        ConfigError: an engine's kind has no client, or the client does not take these settings.
        EngineError, DeadlineError: as for `discover`.
    """
    infos = discover(*addresses, timeout_s=timeout_s, api_key=api_key) if addresses or members is None else []
    settings = {"timeout_s": timeout_s, "api_key": api_key, **settings}
    made = [engines.make(info.kind, url=info.url, **settings) for info in infos]
    fleet = Fleet(made, members=members, make=partial(_client_of, **settings))
    if members is not None:
        fleet.reconcile(timeout_s)
    return fleet


def _client_of(address: str, **settings: Any) -> EngineClient:
    return connect(address, **settings).engines[0]


def _describe(http: HTTPSession) -> EngineInfo:
    """Return the description by the first registered `Make` that recognises the engine.

    Raises:
        EngineRefusedError: no `Make` recognises the engine; the first refusal, if there was one.
    """
    refused: list[EngineRefusedError] = []
    for make in engines.having("describe"):
        try:
            info: EngineInfo | None = engines.part(make, "describe")(http)
        except EngineRefusedError as error:
            refused.append(error)
        else:
            if info is not None:
                return info
    if refused:
        raise refused[0]
    raise EngineRefusedError(
        f"{http.url} describes an engine of an unknown make",
        expected=f"one of {', '.join(engines.having('describe'))}",
        hint="install the package that provides its make (entry-point group torchrl_ext.engines)",
    )


def as_engine(engine: Any) -> EngineClient | None:
    """Return a client for ``engine``; None for None.

    Args:
        engine: None (data layer only); one or several `EngineClient`; one or several ``"host:port"``; TorchRL's
            `AsyncVLLM`; or an object in this process that `torchrl_ext.sync.local.inprocess.InProcessEngine` drives.

    Raises:
        ConfigError: no client can drive ``engine``.
        EngineError: no engine answers at an address.
    """
    if engine is None or isinstance(engine, EngineClient):
        return engine
    if isinstance(engine, str):
        return connect(engine)
    if isinstance(engine, Sequence) and engine:
        if all(isinstance(one, str) for one in engine):
            return connect(*engine)
        return Fleet([client for client in map(as_engine, engine) if client is not None])
    elsewhere = is_torchrl(engine, "RLvLLMEngine") and not is_torchrl(engine, "LocalLLMWrapper")
    return engines.make("ray" if elsewhere and "ray" in engines.names() else "inprocess", engine=engine)
