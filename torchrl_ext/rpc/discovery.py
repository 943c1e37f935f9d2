"""What runs behind an address, and the client for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import HTTPSession, normalise_url
from torchrl_ext.rpc.server_info import parse_server_info
from torchrl_ext.types import EngineInfo

__all__ = ["connect", "discover"]

_TIMEOUT_S = 30.0


def discover(*addresses: str, timeout_s: float = _TIMEOUT_S, api_key: str | None = None) -> list[EngineInfo]:
    """What each engine says of itself, in the order of ``addresses``; all are asked at the same time.

    Args:
        addresses: ``host:port``, ``[ipv6]:port`` or URLs of engines, not of routers.
        timeout_s: deadline of each call, in seconds.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: no address, one twice, or one that is none.
        EngineUnreachableError: nobody listens at an address.
        EngineRefusedError: whoever listens there describes no engine; the message has the answers of both routes.
        DeadlineError: no answer in time.
    """
    urls = [normalise_url(address) for address in addresses]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if not urls or twice:
        raise ConfigError(f"address {twice[0]} is given twice" if twice else "there is no address to look at")

    def ask(url: str) -> EngineInfo:
        session = HTTPSession(url, timeout_s=timeout_s, api_key=api_key)
        try:
            return _describe(session)
        finally:
            session.close()

    with ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="discover") as pool:
        return list(pool.map(ask, urls))


def connect(*addresses: str, timeout_s: float = _TIMEOUT_S, api_key: str | None = None, **settings: Any) -> Fleet:
    """One client for the engines at ``addresses``, whatever their kinds.

    Args:
        addresses: as for `discover`.
        timeout_s: deadline of each short call, in seconds.
        api_key: sent as a bearer token.
        settings: for the client of each engine, such as ``pause_mode``.

    Raises:
        ConfigError: an engine of a kind that has no client, or settings that it does not take.
        EngineUnreachableError, EngineRefusedError, DeadlineError: as for `discover`.
    """
    found = discover(*addresses, timeout_s=timeout_s, api_key=api_key)
    settings = {"timeout_s": timeout_s, "api_key": api_key, **settings}
    return Fleet([engines.make(info.kind, url=info.url, **settings) for info in found])


def _describe(session: HTTPSession) -> EngineInfo:
    """``/server_info`` in its structured form, then ``/get_server_info``, the name that others give it."""
    answers = []
    for route, query in (("/server_info", {"config_format": "json"}), ("/get_server_info", None)):
        try:
            told = session.get(route, query=query)
            return parse_server_info(
                session.url,
                told,
                world_size=_optional(lambda: int(session.get("/get_world_size")["world_size"])),
                weight_version=_optional(lambda: str(session.get("/weight_info")["weight_version"])) or "",
            )
        except (EngineUnreachableError, DeadlineError):
            raise
        except EngineError as error:
            answers.append(error.what.rstrip("."))
    raise EngineRefusedError(
        f"{session.url} does not say what engine it is: {'; '.join(answers)}",
        expected="an answer to GET /server_info or GET /get_server_info",
        hint="give the engine's own address, not a router's; vLLM answers only with VLLM_SERVER_DEV_MODE=1",
    )


def _optional(read: Callable[[], Any]) -> Any:
    """A fact that an engine may not tell."""
    try:
        return read()
    except (EngineRefusedError, KeyError, TypeError, ValueError):
        return None
