"""`InProcessEngine` drives an engine of the trainer's own process by direct calls, and switches its weights online.

Online: between requests the engine takes other weights, or keeps those that it has where they do not land.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import Make
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.sync.engines.local import ModulePort, VLLMObjectPort, local_port
from torchrl_ext.sync.engines.switching import Switch
from torchrl_ext.sync.only import Only

__all__ = ["InProcessEngine"]


class InProcessEngine(Engine):
    """Drives an object of this process, and switches its weights between requests.

    Args:
        engine: vLLM's `AsyncLLM` or `LLM`, TorchRL's `LocalLLMWrapper` of one, the embedded engine's object, a
            `WeightReceiver`, or what one can wrap: a module, a TensorDict, a mapping of tensors.
        url: name for reports.
        pause_mode: what becomes of running requests of vLLM and the embedded engine: ``"keep"`` freezes them,
            ``"wait"`` lets them end, ``"abort"`` ends them.
        free_cache: give up the memory of keys and values for the time of a load, where the engine can; frozen requests
            are then computed again from their tokens. vLLM gives the memory back in sleep mode alone, and else only
            forgets what it cached.
        keep_cache: leave keys and values of the old weights where they are: frozen requests go on with them, and later
            requests to vLLM with the same prefix begin with them. Each token still has the version that sampled it.
        loop: event loop of an `AsyncLLM`; None finds it.
        transport: name of the transport of `update_model_weights`; None picks by the kind of ``engine``.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: settings that cannot work.

    `serving` is cleared while a module is paused: a loop that generates with it waits on it between tokens.
    """

    def __init__(
        self,
        engine: Any,
        *,
        url: str = "inprocess",
        pause_mode: str = "keep",
        free_cache: bool = False,
        keep_cache: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        transport: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if keep_cache and (free_cache or pause_mode != "keep"):
            raise ConfigError(
                "free_cache gives up what keep_cache keeps"
                if free_cache
                else f"keep_cache means nothing with pause mode {pause_mode!r}",
                expected="pause_mode='keep', and no free_cache",
            )
        settings: dict[str, Any] = {"pause_mode": pause_mode, "keep_cache": keep_cache, "loop": loop}
        self._object = local_port(engine, url=url, timeout_s=timeout_s, **settings)
        super().__init__(self._object, free_cache=free_cache)
        self._transport = transport or self._object.transport

    @property
    def serving(self) -> threading.Event:
        """The event that is set while a module serves.

        Raises:
            AttributeError: the engine is no module; it keeps its own requests back.
        """
        if not isinstance(self._object, ModulePort):
            raise AttributeError("only a module needs to be told when it may serve")
        return self._object.serving

    # online switching

    async def update_model_weights(
        self, model_weights_path: str | os.PathLike[str], *, only: Only | None = None
    ) -> Any:
        """Serve the weights of a checkpoint directory, without a restart; concurrent updates run one by one.

        Args:
            model_weights_path: the directory.
            only: which of its tensors (`torchrl_ext.sync.only.Only`); all others stay as they are, and only these are
                moved. None for all.

        Returns:
            The `SyncReport`.

        Raises:
            ManifestError: ``only`` means none of its tensors, or the engine's model has none of such a name and shape.
            UpdateError: they did not land; the engine serves what it served, unless the message says otherwise.
        """
        return await self._switched(lambda switch: switch.to_checkpoint(model_weights_path, only))

    async def update_model_weights_from_state_dict(
        self, state_dict: Mapping[str, Any], *, mapper: Callable[[str], str] | Mapping[str, str] | None = None
    ) -> Any:
        """Serve these tensors, which alone are moved; parameters that are left out stay as they are.

        Args:
            state_dict: tensors by name, full shapes, on any device.
            mapper: name in ``state_dict`` -> checkpoint name; a callable or a table of regular expressions.

        Returns:
            The `SyncReport`.

        Raises:
            ManifestError: no parameter has a tensor's name and shape, or a tensor has no data.
            UpdateError: as for `update_model_weights`.
        """
        return await self._switched(lambda switch: switch.to_state_dict(state_dict, mapper))

    async def _switched(self, how: Callable[[Switch], Any]) -> Any:
        if isinstance(self._object, VLLMObjectPort):
            self._object.at_home(asyncio.get_running_loop())
        return await asyncio.to_thread(how, self._switch)

    @cached_property
    def _switch(self) -> Switch:
        return Switch(self, self._object, transport=self._transport)


INPROCESS = Make(client=InProcessEngine)
