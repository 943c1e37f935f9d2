"""Control calls of an inference client: to every engine itself, at the same time, never by way of a router."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError, EngineUnreachableError, WeightSyncError
from torchrl_ext.rpc.async_http import AsyncSession
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import EngineRow, Info

__all__ = ["Call", "ControlRoutes", "SGLangRoutes", "VLLMRoutes", "control_routes", "fan_out", "refuse_routers"]

_LOOK_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One route with what it is told."""

    route: str
    method: str = "POST"
    body: Any = None
    query: Mapping[str, Any] | None = None


class ControlRoutes(ABC):
    """What a kind of engine calls pausing, sleeping and the like."""

    @abstractmethod
    def pause(self, mode: str, clear_cache: bool) -> Call:
        """Make no more tokens."""

    @abstractmethod
    def resume(self) -> Call:
        """Make tokens again."""

    @abstractmethod
    def sleep(self, level: int, tags: Sequence[str] | None) -> Call:
        """Give device memory back."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None) -> Call:
        """Take device memory again."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool) -> Call:
        """Drop keys and values of old weights."""

    @abstractmethod
    def weight_version(self) -> Call:
        """Ask for the label of the weights in service, under ``weight_version``."""


class VLLMRoutes(ControlRoutes):
    """vLLM's (`vllm.entrypoints.rl.online` and `vllm.entrypoints.serve.dev`, 0.32), and the embedded engine's."""

    _MODES: ClassVar[tuple[str, ...]] = ("abort", "wait", "keep")

    def pause(self, mode: str, clear_cache: bool) -> Call:
        _known(mode, self._MODES)
        return Call(route="/pause", query={"mode": mode, "clear_cache": str(clear_cache).lower()})

    def resume(self) -> Call:
        return Call(route="/resume")

    def sleep(self, level: int, tags: Sequence[str] | None) -> Call:
        if tags:
            raise ConfigError("vLLM puts weights and caches to sleep together", expected="no tags; wake_up takes some")
        return Call(route="/sleep", query={"level": level})

    def wake_up(self, tags: Sequence[str] | None) -> Call:
        return Call(route="/wake_up", query={"tags": list(tags)} if tags else None)

    def reset_prefix_cache(self, reset_running_requests: bool) -> Call:
        query = {"reset_running_requests": str(reset_running_requests).lower()}
        return Call(route="/reset_prefix_cache", query=query)

    def weight_version(self) -> Call:
        return Call(route="/weight_info", method="GET")


class SGLangRoutes(ControlRoutes):
    """SGLang's (0.5.23)."""

    _MODES: ClassVar[dict[str, str]] = {
        "abort": "abort",
        "keep": "retract",
        "retract": "retract",
        "in_place": "in_place",
    }

    def pause(self, mode: str, clear_cache: bool) -> Call:
        _known(mode, self._MODES)
        return Call(route="/pause_generation", body={"mode": self._MODES[mode]})

    def resume(self) -> Call:
        return Call(route="/continue_generation", body={})

    def sleep(self, level: int, tags: Sequence[str] | None) -> Call:
        return Call(route="/release_memory_occupation", body={"tags": list(tags)} if tags else {})

    def wake_up(self, tags: Sequence[str] | None) -> Call:
        return Call(route="/resume_memory_occupation", body={"tags": list(tags)} if tags else {})

    def reset_prefix_cache(self, reset_running_requests: bool) -> Call:
        return Call(route="/flush_cache")

    def weight_version(self) -> Call:
        return Call(route="/model_info", method="GET")


def control_routes(kind: str) -> ControlRoutes:
    """The routes of a kind of engine.

    Raises:
        ConfigError: nobody knows the kind.
    """
    known = {"vllm": VLLMRoutes, "embedded": VLLMRoutes, "sglang": SGLangRoutes}
    if kind not in known:
        raise ConfigError(f"there is no engine kind {kind!r}", expected=f"one of {', '.join(known)}")
    return known[kind]()


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
    session: AsyncSession, calls: Mapping[str, Call], *, kind: str, what: str, timeout_s: float
) -> dict[str, Info]:
    """One call to each engine, all at once; every one of them gets to its end before anything is raised.

    Args:
        session: of this event loop.
        calls: by base address.
        kind: of the engines, for the rows of an error.
        what: the verb of an error's message.
        timeout_s: deadline of each, in seconds.

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
    failed = {url: told for url, told in zip(calls, found, strict=True) if isinstance(told, BaseException)}
    for error in failed.values():
        if not isinstance(error, WeightSyncError):
            raise error
    if failed:
        lines = "; ".join(f"{url}: {error}" for url, error in failed.items())
        raise EngineError(
            f"{len(failed)} of {len(calls)} engines did not {what}: {lines}",
            state="the others did",
            rows=tuple(_row(url, kind, failed.get(url)) for url in calls),
        )
    return dict(zip(calls, found, strict=True))


def _row(url: str, kind: str, error: BaseException | None) -> EngineRow:
    state = "unreachable" if isinstance(error, EngineUnreachableError) else "serving"
    return EngineRow(engine=url, kind=kind, state=state, error=None if error is None else str(error))


def _known(mode: str, modes: Any) -> None:
    if mode not in modes:
        raise ConfigError(f"there is no pause mode {mode!r}", expected=f"one of {', '.join(modes)}")
