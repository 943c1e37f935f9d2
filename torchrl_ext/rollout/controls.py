"""Control calls of an inference client: to every engine itself, at the same time, never by way of a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, WeightSyncError
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http.async_session import AsyncSession
from torchrl_ext.rpc.http.session import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import EngineRow, Info

__all__ = ["Call", "cache_call", "check_kind", "drive", "fan_out", "label_call", "refuse_routers"]

_LOOK_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One route with what it is told."""

    route: str
    method: str = "POST"
    body: Any = None
    query: Mapping[str, Any] | None = None


_KINDS = {
    "vllm": ("/reset_prefix_cache", "/weight_info"),
    "embedded": ("/reset_prefix_cache", "/weight_info"),
    "sglang": ("/flush_cache", "/model_info"),
}
"""By kind of engine: what drops keys and values of old weights, and what tells the label of the weights in service."""


def check_kind(kind: str) -> None:
    """Raises ConfigError where nobody knows such engines."""
    if kind not in _KINDS:
        raise ConfigError(f"there is no engine kind {kind!r}", expected=f"one of {', '.join(_KINDS)}")


def cache_call(kind: str, reset_running_requests: bool) -> Call:
    """Drop keys and values of old weights."""
    query = None if kind == "sglang" else {"reset_running_requests": str(reset_running_requests).lower()}
    return Call(route=_KINDS[kind][0], query=query)


def label_call(kind: str) -> Call:
    """Ask for the label of the weights in service, under ``weight_version``."""
    return Call(route=_KINDS[kind][1], method="GET")


async def refuse_routers(urls: Sequence[str], api_key: str | None) -> None:
    """Make sure that each address is an engine's own.

    Raises:
        ConfigError: one is a router's.
        EngineUnreachableError, DeadlineError: nobody answers at one.
    """

    def look(url: str) -> None:
        session = HTTPSession(url, api_key=api_key, timeout_s=_LOOK_TIMEOUT_S)
        try:
            refuse_router(session)
        finally:
            session.close()

    await asyncio.gather(*(asyncio.to_thread(look, url) for url in urls))


async def fan_out(
    session: AsyncSession,
    calls: Mapping[str, Call],
    *,
    what: str,
    timeout_s: float,
    rows: Callable[[Mapping[str, Exception]], Sequence[EngineRow]],
) -> dict[str, Info]:
    """One call to each engine, all at once; every one of them gets to its end before anything is raised.

    Args:
        session: of this event loop.
        calls: by base address.
        what: the verb of an error's message.
        timeout_s: deadline of each, in seconds.
        rows: how the engines are, after what went wrong on some of them.

    Returns:
        ``{url: {"status": HTTP status, "body": JSON or text}}``.

    Raises:
        EngineError: some engine did not; has a row per engine.
    """
    until = time.monotonic() + timeout_s

    async def one(url: str, call: Call) -> Info:
        answer = await session.call(call.method, url + call.route, call.body, query=call.query, until=until)
        if not answer.ok:
            raise EngineRefusedError(f"{url}{call.route} answered {answer.status}: {answer.message()}")
        try:
            return {"status": answer.status, "body": answer.json()}
        except ValueError:
            return {"status": answer.status, "body": answer.text}  # SGLang's /flush_cache says it in words

    found = await asyncio.gather(*(one(url, call) for url, call in calls.items()), return_exceptions=True)
    for told in found:
        if isinstance(told, BaseException) and not isinstance(told, WeightSyncError):
            raise told
    failed = {url: told for url, told in zip(calls, found, strict=True) if isinstance(told, WeightSyncError)}
    if failed:
        lines = "; ".join(f"{url}: {error}" for url, error in failed.items())
        raise EngineError(
            f"{len(failed)} of {len(calls)} engines did not {what}: {lines}",
            state="the others did",
            rows=tuple(await asyncio.to_thread(rows, failed)),
        )
    return dict(zip(calls, found, strict=True))


async def drive(fleet: Fleet, what: str, call: Callable[[Fleet], object]) -> dict[str, Info]:
    """A call of the clients that drive engines (`torchrl_ext.rpc`), beside this event loop; closes them.

    Returns:
        ``{url: {"status": 200, "body": {"status": state}}}``, with the states of `EngineRow`.

    Raises:
        ConfigError: nothing was asked.
        EngineError: some engine did not; has a row per engine.
    """

    def driving() -> Sequence[EngineRow]:
        try:
            call(fleet)
            return fleet.rows()
        except (EngineError, DeadlineError) as error:
            if len(fleet.engines) > 1:
                raise
            rows = tuple(replace(row, error=str(error)) for row in fleet.rows())
            raise EngineError(f"1 of 1 engines did not {what}: {error}", rows=rows) from error
        finally:
            fleet.close()

    rows = await asyncio.to_thread(driving)
    return {row.engine: {"status": 200, "body": {"status": row.state}} for row in rows}
