"""`InProcessEngine` drives an engine of the trainer's own process by direct calls, and switches its weights online.

Online: between requests the engine takes other weights, or keeps those that it has where they do not land.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, WeightSyncError
from torchrl_ext.messages import (
    Finish,
    Join,
    Leave,
    Load,
    Message,
    Prefetch,
    Rehearse,
    Start,
    State,
    Verify,
    partial_version,
    replaced_by,
    stamped,
)
from torchrl_ext.registry import Make
from torchrl_ext.rpc.client import EngineClient, Stopwatch, _nothing
from torchrl_ext.sync.engines.hosts import Host, ModuleHost, VLLMHost, host_of
from torchrl_ext.sync.engines.switching import Switch
from torchrl_ext.sync.only import Only
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part

__all__ = ["InProcessEngine"]


class InProcessEngine(EngineClient):
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

    kind: ClassVar[str] = "inprocess"
    url: str = "inprocess"

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
        self._host: Host = host_of(engine, pause_mode=pause_mode, keep_cache=keep_cache, loop=loop, timeout_s=timeout_s)
        self.url, self._transport = url, transport or self._host.transport
        self._free_cache, self._freed = free_cache, False
        self._connection: str | None = None  # of the sender that joined last through this client
        self._state, self._watch = "serving", Stopwatch()
        self._version: int | None = None
        self._proof = "sent"
        self._rehearsed: tuple[Info, ...] = ()

    @property
    def serving(self) -> threading.Event:
        """The event that is set while a module serves.

        Raises:
            AttributeError: the engine is no module; it keeps its own requests back.
        """
        if not isinstance(self._host, ModuleHost):
            raise AttributeError("only a module needs to be told when it may serve")
        return self._host.serving

    def info(self) -> EngineInfo:
        return replace(self._host.info(self.url), kind=self.kind, weight_version=str(self._version or ""))

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        message = Join.of(info)
        self._connection = message.connection
        self._host.handle(message)

    def replaced(self, connection: str) -> str:
        return replaced_by(self._host.handle, connection)

    def _handle(self, message: Message) -> Info:
        return self._host.handle(stamped(message, self._connection or ""))

    @property
    def proof(self) -> str:
        return self._proof

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return self._rehearsed

    def rehearse(self, how: str = "once") -> None:
        """Rehearse an update where the host needs it, paused meanwhile; see `EngineClient.rehearse`."""
        told = self._host.handle(Rehearse(how=how, ask=True))
        if told.get("needed"):
            served = self.pause()
            try:
                told = self._handle(Rehearse(how=how))
            except WeightSyncError:
                if served and self._host.handle(Rehearse(ask=True)).get("restored", True):
                    self.resume()
                raise
            if served:
                self.resume()
        self._rehearsed = (told,)
        self._proof = str(told["proof"])

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._handle(Prefetch(version=version, part=part))

    def begin(self, version: int) -> None:
        served = self.pause()
        try:
            if self._free_cache and not self._freed:  # an update that failed before left it freed
                self._freed = True  # first: of one that fails at its deadline nobody knows what it freed
                self._host.free()
            self._handle(Start())
        except BaseException:
            if served:
                self.resume()  # nothing was changed
            raise

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._handle(Load.of(info))

    def _compare(self, digests: Mapping[str, str]) -> None:
        self._handle(Verify(digests={**digests}))

    def commit(self, version: int) -> None:
        self._handle(Finish(version=version))
        self._version = version
        self.resume()

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return, per prompt, the log-probability of each token after the first; see `EngineClient.logprobs`.

        A module, and the embedded engine's object, answer while paused too.

        Raises:
            ConfigError: what takes the weights is no causal LM, or its `WeightReceiver` hides it behind a loader.
        """
        return self._host.logprobs(prompts)

    def pause(self) -> bool:
        served, self._state = self._state == "serving", "paused"
        try:
            self._host.pause()
        except BaseException:
            if served:  # one that was to wait for requests may hold new ones back already
                self.resume()
            raise
        self._watch.start()
        return served

    def resume(self) -> None:
        """See `EngineClient.resume`.

        Raises:
            EngineRefusedError: a part of a version landed, and the rest did not.
        """
        if not self._host.handle(State()).get("whole", True):
            raise partial_version(self.url)
        if self._freed:
            self._host.regain()
        self._freed = False
        self._host.resume()
        self._watch.stop()
        self._state = "serving"

    def rows(self) -> tuple[EngineRow, ...]:
        return (
            EngineRow(
                engine=self.url,
                kind=self.kind,
                state=self._state,
                version=self._version,
                pause_s=self._watch.seconds,
                proof=self._proof,
            ),
        )

    def close(self) -> None:
        """See `EngineClient.close`. An `AsyncLLM` cannot be told on its own event loop, nor once that has ended."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(ConfigError, EngineError, DeadlineError):  # it may be gone
                self._host.handle(Leave(connection=connection))

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
        if isinstance(self._host, VLLMHost):
            self._host.at_home(asyncio.get_running_loop())
        return await asyncio.to_thread(how, self._switch)

    @cached_property
    def _switch(self) -> Switch:
        return Switch(self, self._host, transport=self._transport)


INPROCESS = Make(client=InProcessEngine)
