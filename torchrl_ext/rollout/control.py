"""Control calls of an inference client: they go to every engine itself, at the same time, never through a router."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.connections import each
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import Info

__all__ = ["EngineControl"]

_T = TypeVar("_T")
_LOOK_TIMEOUT_S = 30.0


class EngineControl(ABC):
    """Controls engines with the methods of SkyRL's client; each method calls every engine.

    A call waits for every engine; where some failed, it then raises one error with a row for each. All calls go through
    a `Fleet`; the single steps of an update are vLLM's own routes.
    """

    @property
    @abstractmethod
    def _engines(self) -> tuple[str, Sequence[str], dict[str, Any]]:
        """The kind of the engines, the base address of each, and settings of their clients."""

    async def pause(self, mode: Any = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes what runs, ``wait`` lets it end, ``abort`` ends it (this client then asks for the
                rest as soon as an engine serves again); a string, or an enum with such a value.
            clear_cache: drop the prefix cache as well.

        Returns:
            ``{url: {"status", "body"}}``, as every control call; here the body is ``{"status": state}``, with the
            states of `torchrl_ext.types.EngineRow`.

        Raises:
            ConfigError: no such mode, or the address of an engine is a router's.
            EngineError: some engine did not pause; has a row per engine.
        """
        how = {"pause_mode": str(getattr(mode, "value", mode))}
        paused = await self._state_after("pause", lambda fleet: fleet.pause(), **how)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Let every engine generate again."""
        return await self._state_after("resume", lambda fleet: fleet.resume())

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine give its device memory back: see `torchrl_ext.rpc.client.EngineClient.sleep`."""
        return await self._state_after("sleep", lambda fleet: fleet.sleep(level, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine take its device memory again; one that is wholly awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None stands for everything.
        """
        return await self._state_after("wake up", lambda fleet: fleet.wake_up(tags))

    async def weight_versions(self) -> dict[str, str]:
        """Ask every engine for the label of the weights that it serves; return the labels by address."""
        infos = await self._driven("tell its version", lambda fleet: fleet.infos())
        return {info.url: info.weight_version for info in infos}

    async def world_sizes(self) -> dict[str, int]:
        """Ask every engine how many of its workers receive weights; return the numbers by address."""
        infos = await self._driven("tell its world size", lambda fleet: fleet.infos())
        return {info.url: info.world_size for info in infos}

    async def get_world_size(self) -> tuple[int, int]:
        """Return the number of workers of all engines together, and of one engine.

        Raises:
            ConfigError: engines differ in size; `world_sizes` has each.
        """
        sizes = await self.world_sizes()
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"engines differ in world size: {sizes}", hint="call world_sizes")
        return sum(sizes.values()), next(iter(sizes.values()))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Make every engine drop its cached keys and values."""
        if self._engines[0] == "sglang":
            return await self._posted("drop its cache", "/flush_cache")
        query = {"reset_running_requests": str(reset_running_requests).lower()}
        return await self._posted("drop its cache", "/reset_prefix_cache", query=query)

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with a rank offset of its own.

        Args:
            init_info: JSON-safe mapping, or a dataclass. Its ``rank_offset`` (1) is the first engine's.
        """
        self._refuse_sglang()
        info = _plain(init_info)
        offset, bodies = info.get("rank_offset", 1), {}
        for url, workers in (await self.world_sizes()).items():
            bodies[url] = {"init_info": {**info, "rank_offset": offset}}
            offset += workers
        return await self._posted("join the transport", "/init_weight_transfer_engine", bodies)

    async def start_weight_update(self) -> dict[str, Info]:
        """Call vLLM's ``/start_weight_update`` on every engine."""
        self._refuse_sglang()
        return await self._posted("start the update", "/start_weight_update")

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/update_weights`` on every engine, for one piece of an update, while the trainer broadcasts."""
        self._refuse_sglang()
        body = {"update_info": _plain(update_info)}
        return await self._posted("load", "/update_weights", dict.fromkeys(self._engines[1], body))

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version becomes the label of what it serves."""
        self._refuse_sglang()
        body = None if weight_version is None else {"weight_version": str(weight_version)}
        return await self._posted("finish the update", "/finish_weight_update", dict.fromkeys(self._engines[1], body))

    def _refuse_sglang(self) -> None:
        if self._engines[0] == "sglang":
            raise ConfigError(
                "SGLang's weight routes need what a transport knows", hint="use WeightSender(transport, client.fleet())"
            )

    async def _posted(
        self, what: str, route: str, bodies: Mapping[str, Any] | None = None, **how: Any
    ) -> dict[str, Info]:
        """Call a route of each engine, all at the same time: a step of an update may wait until every engine joins."""
        urls, given = self._engines[1], bodies or {}
        told = await self._driven(
            what, lambda fleet: fleet.everywhere(what, lambda engine: engine.post(route, given.get(engine.url), **how))
        )
        return dict(zip(urls, told, strict=True))

    async def _state_after(self, what: str, call: Callable[[Fleet], object], **more: Any) -> dict[str, Info]:
        rows = await self._driven(what, lambda fleet: (call(fleet), fleet.rows())[1], **more)
        return {row.engine: {"status": 200, "body": {"status": row.state}} for row in rows}

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
                told = f"1 of 1 engines did not {what}: {error}" if alone else error.what
                raise EngineError(told, state=error.state, rows=tuple(rows)) from error
            finally:
                fleet.close()

        return await asyncio.to_thread(driving)


def _plain(info: Any) -> dict[str, Any]:
    return dict(info) if isinstance(info, Mapping) else asdict(info)
