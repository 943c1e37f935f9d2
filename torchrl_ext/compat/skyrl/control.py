"""SkyRL's control calls and update steps, under its names; each goes to every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.http import HTTPSession, normalise_urls
from torchrl_ext.rpc.makes.http import session
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.types import Info

__all__ = ["EngineControl", "PauseMode"]

_T = TypeVar("_T")
_TIMEOUT_S = 60.0  # for calls that wait for no worker


class PauseMode(Enum):
    """What a pause does to running requests: see `EngineControl.pause`."""

    ABORT = "abort"
    KEEP = "keep"
    WAIT = "wait"


@dataclass(kw_only=True)
class EngineControl:
    """Controls engines with the methods of SkyRL's client; each method calls all engines at the same time.

    The four steps of an update use vLLM's own routes; the caller provides what the trainer's transport says. Unless
    documented otherwise, a call returns ``{url: {"status", "body"}}``. It waits for every engine and may raise

    * EngineError: the call failed on an engine; has one row per engine, with its current state;
    * ConfigError: the address of an engine is a router's.

    Attributes:
        server_urls: base address of every engine; control calls refuse a router's address.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        control_timeout_s: deadline of a control call, in seconds.
    """

    server_urls: Sequence[str]
    kind: str = "vllm"
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    control_timeout_s: float = 600.0
    _sessions: Mapping[str, HTTPSession] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.server_urls = tuple(normalise_urls(self.server_urls))
        self._sessions = {url: session(url, self.api_key, _TIMEOUT_S) for url in self.server_urls}

    def fleet(self, **settings: Any) -> Pool:
        """Return a client with which `WeightSender` runs whole updates on every engine.

        Args:
            settings: arguments of `torchrl_ext.connect`.
        """
        return connect(*self.server_urls, api_key=self.api_key, **settings)

    # pause, sleep, caches

    async def pause(self, mode: PauseMode | str = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes running requests, ``wait`` lets them finish, ``abort`` ends them (this client then
                requests the rest once an engine serves again).
            clear_cache: drop the prefix cache as well.

        Returns:
            By address; the body is the server's answer with a ``status`` from the states of
            `torchrl_ext.types.EngineRow`. `resume`, `sleep` and `wake_up` return the same.

        Raises:
            ConfigError: unknown mode.
        """
        how = mode.value if isinstance(mode, PauseMode) else mode.lower()
        paused = await self._state_after("pause", Pool.pause, pause_mode=how)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Resume generation on every engine; one that sleeps without weights, or holds half an update, refuses."""
        return await self._state_after("resume", Pool.resume)

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine release its device memory: see `torchrl_ext.rpc.client.EngineClient.sleep`.

        Args:
            level: 1 keeps weights on the host, 2 drops them.
            tags: None, or ``["kv_cache"]``.

        Raises:
            ConfigError: engines of this kind cannot sleep, or not with this level or tag.
        """
        return await self._state_after("sleep", lambda fleet: fleet.sleep(level, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine restore its device memory; one that is fully awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None for everything.

        Raises:
            ConfigError: engines of this kind cannot sleep, or have no such tag.
        """
        return await self._state_after("wake up", lambda fleet: fleet.wake_up(tags))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Make every engine drop its cached keys and values.

        Args:
            reset_running_requests: also drop those of running requests, which then recompute them. SGLang's engines do
                not receive this, and refuse while any request runs.
        """
        if self.kind == "sglang":
            return await self._posted("drop its cache", "/flush_cache")
        query = {"reset_running_requests": str(reset_running_requests).lower()}
        return await self._posted("drop its cache", "/reset_prefix_cache", query=query)

    async def weight_versions(self) -> dict[str, str]:
        """Return the label of the weights that each engine serves, by address."""
        return await self._everywhere("tell its version", lambda engine: engine.info().weight_version)

    async def world_sizes(self) -> dict[str, int]:
        """Return the number of workers of each engine that receive weights, by address."""
        return await self._everywhere("tell its world size", lambda engine: engine.world_size)

    # the steps of an update

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with its own rank offset.

        Args:
            init_info: JSON-safe mapping, or a dataclass; its ``rank_offset`` (default 1) is the first engine's.

        Raises:
            ConfigError: the engines are SGLang's, which have no such steps.
        """
        info, bodies = _plain(init_info), dict[str, Any]()
        offset = info.get("rank_offset", 1)
        for url, workers in (await self.world_sizes()).items():
            bodies[url] = {"init_info": {**info, "rank_offset": offset}}
            offset += workers
        return await self._step("join the transport", "/init_weight_transfer_engine", bodies.__getitem__)

    async def start_weight_update(self) -> dict[str, Info]:
        """Call vLLM's ``/start_weight_update`` on every engine. Errors as of `init_weight_update_communicator`."""
        return await self._step("start the update", "/start_weight_update")

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/update_weights`` on every engine, for one chunk of an update, while the trainer sends it.

        Args:
            update_info: JSON-safe mapping, or a dataclass. Errors as of `init_weight_update_communicator`.
        """
        body = {"update_info": _plain(update_info)}
        return await self._step("load", "/update_weights", lambda url: body)

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version, if given, labels its weights.

        Errors as of `init_weight_update_communicator`.
        """
        body = {} if weight_version is None else {"weight_version": str(weight_version)}
        return await self._step("finish the update", "/finish_weight_update", lambda url: body)

    # helpers

    async def _step(
        self, what: str, route: str, body: Callable[[str], Info | None] = lambda url: None
    ) -> dict[str, Info]:
        """Run a step of an update; ``body`` takes an address."""
        if self.kind == "sglang":
            hint = "use WeightSender(transport, client.fleet())"
            raise ConfigError("SGLang's weight routes need arguments that only a transport knows", hint=hint)
        return await self._everywhere(what, lambda engine: engine.port.post(route, body(engine.url)))

    async def _posted(self, what: str, route: str, **how: Any) -> dict[str, Info]:
        return await self._everywhere(what, lambda engine: engine.port.post(route, **how))

    async def _everywhere(self, what: str, call: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the result of ``call`` for each engine's client, by address."""
        return await self._driven(lambda fleet: fleet.everywhere(what, call))

    async def _state_after(self, what: str, call: Callable[[Pool], object], **settings: Any) -> dict[str, Info]:
        def called(fleet: Pool) -> list[Info]:
            call(fleet)
            members: Sequence[Any] = fleet.engines
            answers = [getattr(engine.port, "answer", {}) for engine in members]
            rows = zip(answers, fleet.rows(), strict=True)
            return [{"status": 200, "body": {**answer, "status": row.state}} for answer, row in rows]

        return await self._driven(called, **settings)

    async def _driven(self, call: Callable[[Pool], Sequence[_T]], **settings: Any) -> dict[str, _T]:
        """Run ``call`` in a thread on a pool of the engines, whose clients have ``settings``; return its results, one
        per engine, by address. Errors are those of the class."""
        settings |= {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}
        made = [engines.make(self.kind, url=url, **settings) for url in self._sessions]
        for engine, http in zip(made, self._sessions.values(), strict=True):
            engine.port.http = http  # it looks only once whether a router is there
        fleet = Pool(made)

        def driving() -> Sequence[_T]:
            try:
                return call(fleet)
            except (EngineError, DeadlineError) as error:
                errors = [row.error for row in getattr(error, "rows", ())] or [str(error)]  # a fleet of one: its own
                rows = [replace(row, error=one) for row, one in zip(fleet.look(), errors, strict=True)]
                parts = {"expected": error.expected, "state": error.state, "hint": error.hint}
                raise EngineError(error.what, rows=tuple(rows), **parts) from error
            finally:
                fleet.close()

        return dict(zip(self._sessions, await asyncio.to_thread(driving), strict=True))


def _plain(info: Any) -> dict[str, Any]:
    return dict(info) if isinstance(info, Mapping) else asdict(info)
