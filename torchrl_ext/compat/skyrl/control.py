"""Control calls of an inference client: they go to every engine itself, at the same time, never through a router."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, why
from torchrl_ext.registry import engines
from torchrl_ext.rpc.connections import each
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import Info

__all__ = ["EngineControl", "PauseMode"]

_T = TypeVar("_T")
_LOOK_TIMEOUT_S = 30.0
_SKYRL, _EXTENSION = "skyrl", "NewInferenceWorkerWrap"


class PauseMode(Enum):
    """What a pause does to requests that run: see `EngineControl.pause`."""

    ABORT = "abort"
    KEEP = "keep"
    WAIT = "wait"


class EngineControl(ABC):
    """Controls engines with the methods of SkyRL's client; each method calls every engine.

    A call waits for every engine; where some failed, it then raises one error with a row for each. All calls go through
    a `Fleet`.

    Attributes:
        data_parallel_size: how many engines in a row are servers of one deployment.
    """

    data_parallel_size: int
    _sizes: ClassVar[tuple[int, int] | None] = None  # of an object: what `get_world_size` found
    _backends: ClassVar[Mapping[str, str] | None] = None  # of an object: what `_taught` found

    @property
    @abstractmethod
    def _engines(self) -> tuple[str, Sequence[str], dict[str, Any]]:
        """The kind of the engines, the base address of each, and settings of their clients."""

    @property
    def _keeps_base(self) -> bool:
        """Whether updates bring adapters alone, so that base weights which are given up never come back."""
        return False

    async def pause(self, mode: Any = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes what runs, ``wait`` lets it end, ``abort`` ends it (this client then asks for the
                rest as soon as an engine serves again); a string, or an enum with such a value, as `PauseMode`.
            clear_cache: drop the prefix cache as well.

        Returns:
            ``{url: {"status", "body"}}``, as every control call; here the body is what the server answered, with a
            ``status`` from the states of `torchrl_ext.types.EngineRow`.

        Raises:
            ConfigError: no such mode, or the address of an engine is a router's.
            EngineError: some engine did not pause; has a row per engine.
        """
        how = {"pause_mode": str(getattr(mode, "value", mode)).lower()}
        paused = await self._state_after("pause", lambda fleet: fleet.pause(), **how)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Let every engine generate again.

        Raises:
            ConfigError: the address of an engine is a router's, as for every control call.
            EngineError: some engine did not resume; it is asleep, or holds half an update. Has a row per engine.
        """
        return await self._state_after("resume", lambda fleet: fleet.resume())

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine with mode ``keep``: see `pause`."""
        return await self.pause(PauseMode.KEEP, clear_cache)

    async def resume_generation(self) -> dict[str, Info]:
        """Let every engine generate again: see `resume`."""
        return await self.resume()

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine give its device memory back: see `torchrl_ext.rpc.client.EngineClient.sleep`.

        Args:
            level: 1 keeps weights on the host, 2 drops them. Where updates bring adapters alone it is never above 1.
            tags: None, or ``["kv_cache"]``.

        Raises:
            ConfigError: engines of this kind cannot sleep, or not so.
            EngineError: some engine does not sleep; has a row per engine.
        """
        found = min(level, 1) if self._keeps_base else level
        return await self._state_after("sleep", lambda fleet: fleet.sleep(found, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine take its device memory again; one that is wholly awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None stands for everything.

        Raises:
            ConfigError: engines of this kind cannot sleep, or have no such tag.
            EngineError: some engine did not wake, or would serve without weights; has a row per engine.
        """
        return await self._state_after("wake up", lambda fleet: fleet.wake_up(tags))

    async def sleep_for_weight_sync(self, offload_kv: bool = True) -> dict[str, Info]:
        """Pause every engine with what it runs frozen, and make it give the memory of its weights back.

        Args:
            offload_kv: keep keys and values on the host. Only SkyRL's own servers do; others compute those of frozen
                requests anew after the wake.

        Raises:
            ConfigError: engines of this kind cannot sleep.
            EngineError: some engine does not sleep; has a row per engine.
        """
        if _SKYRL in (await self._taught()).values():
            return await self._worker_method("sleep", "skyrl_sleep_for_weight_sync", {"offload_kv": offload_kv})
        level = 1 if self._keeps_base else 2
        return await self._state_after("sleep", lambda fleet: fleet.sleep(level), pause_mode="keep")

    async def wake_for_weight_sync(self, tags: Sequence[str]) -> dict[str, Info]:
        """Give every engine device memory again; it stays paused, until `resume_generation`.

        Args:
            tags: ``["weights"]`` before an update, ``["kv_cache"]`` after it; both where weights were kept on the host.

        Raises:
            ConfigError: engines of this kind cannot sleep, or have no such tag.
            EngineError: some engine did not wake, or not paused, or would have no weights; has a row per engine.
        """
        if _SKYRL in (await self._taught()).values():
            return await self._worker_method("wake up", "skyrl_wake_for_weight_sync", {"tags": list(tags)})

        def wake(fleet: Fleet) -> None:  # each engine is paused by its own call, and waits for no other
            fleet.everywhere("wake up", lambda engine: engine.wake_up(tags, paused=True))

        return await self._state_after("wake up", wake, pause_mode="keep")

    async def weight_versions(self) -> dict[str, str]:
        """Ask every engine for the label of the weights that it serves; return the labels by address.

        Raises:
            EngineError: some engine does not say; has a row per engine.
        """
        infos = await self._driven("tell its version", lambda fleet: fleet.infos())
        return {info.url: info.weight_version for info in infos}

    async def world_sizes(self) -> dict[str, int]:
        """Ask every engine how many of its workers receive weights; return the numbers by address.

        Raises:
            EngineError: some engine does not say; has a row per engine.
        """
        what = "tell its world size"
        told = await self._driven(what, lambda fleet: fleet.everywhere(what, lambda engine: engine.world_size))
        return dict(zip(self._engines[1], told, strict=True))

    async def get_world_size(self) -> tuple[int, int]:
        """Return the number of workers of all engines together, and the number that one engine reports.

        Servers of one deployment (``data_parallel_size``) report the workers of all, which count once. Engines are
        asked in the first call, and again after ``teardown``.

        Raises:
            ConfigError: engines differ in size; `world_sizes` has each.
        """
        if self._sizes is None:
            sizes = await self.world_sizes()
            self._keep(_sizes=(len(sizes) // self.data_parallel_size * _alike(sizes), _alike(sizes)))
        assert self._sizes is not None
        return self._sizes

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Make every engine drop its cached keys and values.

        Args:
            reset_running_requests: also of requests that run, which then compute them anew. SGLang's engines are not
                told: they refuse while any runs.

        Raises:
            EngineError: some engine did not; has a row per engine.
        """
        if self._engines[0] == "sglang":
            return await self._posted("drop its cache", "/flush_cache")
        query = {"reset_running_requests": str(reset_running_requests).lower()}  # vLLM's route reads this
        body = {"reset_running_requests": reset_running_requests}  # and SkyRL's this
        bodies = dict.fromkeys(self._engines[1], body)
        return await self._posted("drop its cache", "/reset_prefix_cache", bodies, query=query)

    async def _posted(
        self, what: str, route: str, bodies: Mapping[str, Any] | None = None, **how: Any
    ) -> dict[str, Info]:
        """Call a route of each engine, all at the same time: a step of an update may wait until every engine joins."""
        urls, given = self._engines[1], bodies or {}
        told = await self._driven(
            what, lambda fleet: fleet.everywhere(what, lambda engine: engine.post(route, given.get(engine.url), **how))
        )
        return dict(zip(urls, told, strict=True))

    async def _worker_method(self, what: str, method: str, kwargs: Info | None = None) -> dict[str, Info]:
        """Call a method of the workers of SkyRL's own servers."""
        body = {"method": method, **({} if kwargs is None else {"kwargs": kwargs})}
        return await self._posted(what, "/collective_rpc", dict.fromkeys(self._engines[1], body))

    async def _taught(self) -> Mapping[str, str]:
        """Ask every vLLM server what receives weights in it, once; return the answers by address.

        An answer is "skyrl" for the workers of SkyRL's own servers, a weight-transfer backend of vLLM, or "" where the
        server does not say.
        """
        kind, urls, settings = self._engines
        if kind == "vllm" and self._backends is None:
            look = {"api_key": settings["api_key"], "timeout_s": _LOOK_TIMEOUT_S}
            found = await each([asyncio.to_thread(_backend, HTTPSession(url, **look)) for url in urls])
            self._keep(_backends=dict(zip(urls, found, strict=True)))
        return self._backends or dict.fromkeys(urls, "")

    def _keep(self, **found: Any) -> None:
        """Remember what engines said; an object that is frozen may."""
        for name, value in found.items():
            object.__setattr__(self, name, value)

    async def _state_after(self, what: str, call: Callable[[Fleet], object], **more: Any) -> dict[str, Info]:
        def called(fleet: Fleet) -> list[tuple[str, Info]]:
            call(fleet)
            rows = zip(fleet.rows(), fleet.engines, strict=True)
            return [(row.engine, {**getattr(engine, "told", {}), "status": row.state}) for row, engine in rows]

        return {url: {"status": 200, "body": body} for url, body in await self._driven(what, called, **more)}

    async def _driven(self, what: str, call: Callable[[Fleet], _T], **more: Any) -> _T:
        """Make a fleet of the engines, and return what ``call`` returns for it, from a thread beside this event loop.

        Raises:
            ConfigError: the address of an engine is a router's; no engine was called then.
            EngineError: the call failed on some engine; has a row per engine, with the state that it reports now.
        """
        kind, urls, settings = self._engines
        look = {"api_key": settings["api_key"], "timeout_s": _LOOK_TIMEOUT_S}
        await each([asyncio.to_thread(refuse_router, HTTPSession(url, **look)) for url in urls])
        fleet = Fleet([engines.make(kind, url=url, **settings, **more) for url in urls])

        def driving() -> _T:
            try:
                return call(fleet)
            except (EngineError, DeadlineError) as error:
                alone = len(fleet.engines) == 1
                errors = [str(error)] if alone else [row.error for row in fleet.rows()]
                rows = [replace(row, error=one) for row, one in zip(fleet.look(), errors, strict=True)]
                words = f"{why(error)}; 1 of 1 engines did not {what}" if alone else error.what
                more = {"expected": error.expected, "hint": error.hint} if alone else {}
                raise EngineError(words, state=error.state, rows=tuple(rows), **more) from error
            finally:
                fleet.close()

        return await asyncio.to_thread(driving)


def _alike(sizes: Mapping[str, int]) -> int:
    """Return the size that all engines have.

    Raises:
        ConfigError: they differ.
    """
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"engines differ in world size: {dict(sizes)}", hint="call world_sizes")
    return next(iter(sizes.values()))


def _backend(http: HTTPSession) -> str:
    """Return what receives weights in a vLLM server: see `EngineControl._taught`."""
    try:
        told = http.get("/server_info", query={"config_format": "json"})
        config = told["vllm_config"]
        if str(config["parallel_config"].get("worker_extension_cls")).endswith(_EXTENSION):
            return _SKYRL
        return str((config.get("weight_transfer_config") or {}).get("backend") or "")
    except (EngineRefusedError, KeyError, TypeError, AttributeError):
        return ""
