"""Control calls as methods, for clients that know every engine."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.rollout.controls import Call, cache_call, drive, label_call
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.types import Info

__all__ = ["ControlCalls"]


class ControlCalls(ABC):
    """Each method reaches every engine, at the same time.

    Attributes:
        server_urls: base address of every engine.
        kind: of the engines.
    """

    server_urls: Sequence[str]
    kind: str

    @abstractmethod
    async def _fan_out(self, what: str, calls: Mapping[str, Call]) -> dict[str, Info]:
        """Send each engine its call; ``what`` is the verb of an error's message."""

    @abstractmethod
    async def _fleet(self, **settings: Any) -> Fleet:
        """Clients of the engines; ``settings`` are those of each."""

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
            ConfigError: no such mode, or one of ``server_urls`` is a router.
            EngineError: some engine did not; has a row per engine.
        """
        fleet = await self._fleet(pause_mode=str(getattr(mode, "value", mode)))
        paused = await drive(fleet, "pause", lambda fleet: fleet.pause())
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Let every engine make tokens again."""
        return await drive(await self._fleet(), "resume", lambda fleet: fleet.resume())

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Let every engine give its device memory back: see `torchrl_ext.rpc.client.EngineClient.sleep`."""
        return await drive(await self._fleet(), "sleep", lambda fleet: fleet.sleep(level, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Let every engine take its device memory again: all of it, or ``["weights"]``, ``["kv_cache"]``; one that is
        wholly awake serves again."""
        return await drive(await self._fleet(), "wake up", lambda fleet: fleet.wake_up(tags))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Let every engine drop its cached keys and values."""
        return await self._everywhere("drop its cache", cache_call(self.kind, reset_running_requests))

    async def weight_versions(self) -> dict[str, str]:
        """The label of the weights that each engine serves."""
        found = await self._everywhere("tell its version", label_call(self.kind))
        return {url: str(told["body"]["weight_version"]) for url, told in found.items()}

    async def world_sizes(self) -> dict[str, int]:
        """Workers that receive weights, per engine of kind ``vllm`` or ``embedded``."""
        found = await self._weights("tell its world size", Call(route="/get_world_size", method="GET"))
        return {url: int(told["body"]["world_size"]) for url, told in found.items()}

    async def get_world_size(self) -> tuple[int, int]:
        """Workers of all engines, and of one.

        Raises:
            ConfigError: engines differ in size; `world_sizes` has each.
        """
        sizes = await self.world_sizes()
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"engines differ in world size: {sizes}", hint="call world_sizes")
        return sum(sizes.values()), next(iter(sizes.values()))

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """vLLM's ``/init_weight_transfer_engine``, with a rank offset of its own for each engine.

        Args:
            init_info: JSON-safe mapping, or a dataclass. Its ``rank_offset`` (1) is the first engine's.
        """
        info = dict(init_info) if isinstance(init_info, Mapping) else dataclasses.asdict(init_info)
        offset, calls = info.get("rank_offset", 1), {}
        for url, workers in (await self.world_sizes()).items():
            body = {"init_info": {**info, "rank_offset": offset}}
            calls[url] = Call(route="/init_weight_transfer_engine", body=body)
            offset += workers
        return await self._fan_out("join the transport", calls)

    async def start_weight_update(self) -> dict[str, Info]:
        """vLLM's ``/start_weight_update``."""
        return await self._weights("start the update", Call(route="/start_weight_update"))

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """vLLM's ``/update_weights``: one piece; run it beside the trainer's broadcast."""
        info = dict(update_info) if isinstance(update_info, Mapping) else dataclasses.asdict(update_info)
        return await self._weights("load", Call(route="/update_weights", body={"update_info": info}))

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """vLLM's ``/finish_weight_update``; the version becomes the label of what is served."""
        body = None if weight_version is None else {"weight_version": str(weight_version)}
        return await self._weights("finish the update", Call(route="/finish_weight_update", body=body))

    async def _everywhere(self, what: str, call: Call) -> dict[str, Info]:
        return await self._fan_out(what, {url: call for url in self.server_urls})

    async def _weights(self, what: str, call: Call) -> dict[str, Info]:
        if self.kind == "sglang":
            raise ConfigError(
                "SGLang's weight routes need what a transport knows", hint="use WeightSender(transport, client.fleet())"
            )
        return await self._everywhere(what, call)
