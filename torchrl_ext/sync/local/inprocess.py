"""`InProcessEngine` drives an engine in the trainer's process by direct calls, and switches its weights online."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from torchrl_ext.base.errors import ConfigError, EngineError, ManifestError, UpdateError, WeightSyncError, why
from torchrl_ext.base.messages import NOBODY, replaced_by
from torchrl_ext.base.registry import Make, transports
from torchrl_ext.base.reports import SyncReport
from torchrl_ext.base.types import ParamMeta, is_torchrl
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.port import restated
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.sync.local.module import LocalPort, ModulePort, VLLMObjectPort
from torchrl_ext.sync.sender import WeightSender

__all__ = ["InProcessEngine"]

_VLLM = {"vllm.entrypoints.llm.LLM", "vllm.v1.engine.async_llm.AsyncLLM"}


class InProcessEngine(Engine):
    """Drives an engine object of this process, and switches its weights between requests.

    Args:
        engine: vLLM's `AsyncLLM` or `LLM`, TorchRL's `LocalLLMWrapper` of one, a `WeightReceiver`, or a module,
            TensorDict or mapping of tensors to wrap in one.
        url: name for reports.
        pause_mode: what happens to running requests of vLLM: ``"keep"`` freezes them, ``"wait"`` lets them finish,
            ``"abort"`` aborts them.
        keep_cache: keep the KV cache of the old weights: frozen requests continue with it, and later requests to vLLM
            with the same prefix reuse it. Each token still has the version that sampled it.
        loop: event loop of an `AsyncLLM`; None finds it.
        transport: name of the transport for `update_model_weights`; None chooses it by the kind of ``engine``.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.
    """

    def __init__(
        self,
        engine: Any,
        *,
        url: str = "inprocess",
        pause_mode: str = "keep",
        keep_cache: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        transport: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if keep_cache and pause_mode != "keep":
            raise ConfigError(f"keep_cache means nothing with pause mode {pause_mode!r}", expected="pause_mode='keep'")
        if is_torchrl(engine, "LocalLLMWrapper"):  # its own `update_weights` does nothing
            engine = engine.llm_instance
        bases = {f"{base.__module__}.{base.__name__}" for base in type(engine).__mro__}  # there may be no vLLM here
        self._object: LocalPort
        if bases & _VLLM:
            self._object = VLLMObjectPort(engine, pause_mode=pause_mode, keep_cache=keep_cache, loop=loop)
        else:
            self._object = ModulePort(engine)
        self._object.url, self._object.timeout_s = url, timeout_s
        super().__init__(lambda: self._object, kind=self._object.kind, url=url)
        self._transport = transport or self._object.transport
        self._turn = threading.Lock()
        self._good: WeightSource | None = None  # the last weights that it was switched to
        self._sent_by = ""  # the connection that sent them

    @property
    def serving(self) -> threading.Event:
        """Event that is cleared while a module is paused; a generation loop has to wait on it between tokens.

        Raises:
            AttributeError: the engine is not a module, and holds requests back itself.
        """
        if not isinstance(self._object, ModulePort):
            raise AttributeError("only a module has such an event")
        return self._object.serving

    # online switching

    async def update_model_weights(self, model_weights_path: str | os.PathLike[str]) -> SyncReport:
        """Serve the weights of a checkpoint directory, and return the `SyncReport`; concurrent updates run one by one.

        Args:
            model_weights_path: the directory.

        Raises:
            ManifestError: the engine's model has no tensor of a name and shape in it.
            UpdateError: the update failed; the engine serves its old weights unless the message says otherwise.
        """
        return await self._beside(lambda: self._switch(CheckpointSource(model_weights_path)))

    async def update_model_weights_from_state_dict(
        self, state_dict: Mapping[str, Tensor], *, mapper: Callable[[str], str] | None = None
    ) -> SyncReport:
        """Serve these tensors, leave all other parameters unchanged, and return the `SyncReport`.

        Args:
            state_dict: tensors by name, full shapes, on any device.
            mapper: name in ``state_dict`` -> checkpoint name.

        Raises:
            ManifestError: no parameter has a tensor's name and shape, or a tensor has no data.
            UpdateError: as for `update_model_weights`.
        """
        return await self._beside(partial(self._merge, state_dict, mapper))

    async def _beside(self, switch: Callable[[], SyncReport]) -> SyncReport:
        """Run ``switch`` in a thread, after earlier switches have ended."""
        if isinstance(self._object, VLLMObjectPort):
            self._object.at_home(asyncio.get_running_loop())

        def in_turn() -> SyncReport:
            with self._turn:
                return switch()

        return await asyncio.to_thread(in_turn)

    @cached_property
    def _sender(self) -> WeightSender:
        sender = WeightSender(transports.make(self._transport), self)
        sender.holds(0)
        return sender

    def _held(self) -> WeightSource | None:
        """Return the engine's weights, to fall back on; None if they are another sender's and cannot be read."""
        since = replaced_by(self._object.call, self._sent_by or "none")
        others = bool(since) and not since.startswith(NOBODY)
        if others and not isinstance(self._object, ModulePort):
            return None
        if self._good is None or (others and self._object.state().whole):
            self._good = self._object.start_weights()
        return self._good

    def _merge(self, tensors: Mapping[str, Tensor], mapper: Callable[[str], str] | None = None) -> SyncReport:
        """Serve these tensors, cast to the current dtypes, and the current values of all other parameters."""
        given, good = UpdateSource(as_source(tensors), mapper=mapper), self._held()
        if good is None:
            raise UpdateError(
                f"{self.url} holds another sender's weights, so the parameters that this update leaves out cannot be "
                "kept",
                expected="an engine that only this client updates",
                state="it still serves its previous weights",
                hint="first switch to a whole checkpoint",
            )
        dtypes = {meta.name: meta.dtype for meta in good.params()}
        copies = {name: tensor.to("cpu", dtypes.get(name), copy=True) for name, tensor in given}
        return self._switch(Layered(good, copies), frozenset(copies))

    def _switch(self, source: WeightSource, names: frozenset[str] | None = None) -> SyncReport:
        """Serve ``source``, in which only ``names`` differ from the current weights; on failure restore those."""
        self._object.check()
        good = self._held()
        try:
            only = names if transports.load(self._transport).abilities.parts else None
            report = self._sender.update_weights(source, only=only)
            self._object.check()
        except WeightSyncError as error:
            rows = error.rows if isinstance(error, EngineError) else ()
            if all(row.state == "serving" for row in rows):
                raise
            if good is None:
                raise restated(
                    error, f"{why(error)}; the previous weights came from another sender and cannot be restored"
                ) from error
            try:
                self._sender.update_weights(good)
                self._sent_by = self._joined.connection  # it joined anew
            except WeightSyncError as second:
                raise UpdateError(
                    f"{why(error)}; the previous weights could not be restored either: {why(second)}",
                    state=second.state,
                    hint=second.hint,
                    rows=rows,
                ) from error
            raise UpdateError(
                f"{why(error)}; the previous weights were restored and serve again",
                expected=error.expected,
                rows=rows,
            ) from error
        self._good, self._sent_by = source, self._joined.connection
        return report


class Layered(WeightSource):
    """A source in which some tensors take the place of those of another source.

    Args:
        below: the source of all tensors.
        above: tensors that take the place of its own, by name.

    Raises:
        ManifestError: ``below`` has no tensor of a name, or one of another shape.
    """

    def __init__(self, below: WeightSource, above: Mapping[str, Tensor]) -> None:
        # a layer over a layer would keep alive tensors that are never yielded any more
        if isinstance(below, Layered):
            above = {**below._above, **above}
            below = below._below
        self._below: WeightSource = below
        self._above: Mapping[str, Tensor] = above
        known = {meta.name: meta for meta in below.params()}
        for name, tensor in above.items():
            if name not in known:
                raise ManifestError(
                    f"the engine's model has no parameter {name!r}",
                    expected="names of the checkpoint that the engine was started with",
                    state="nothing was changed; the engine still serves its previous weights",
                    hint="map the names with mapper=",
                )
            if tuple(tensor.shape) != known[name].shape:
                raise ManifestError(
                    f"parameter {name!r} arrives with shape {list(tensor.shape)}",
                    expected=str(list(known[name].shape)),
                    state="nothing was changed; the engine still serves its previous weights",
                )

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(
            ParamMeta.of(meta.name, self._above[meta.name]) if meta.name in self._above else meta
            for meta in self._below.params()
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._below:
            yield name, self._above.get(name, tensor)

    def pairs(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        below = self._below.pairs([name for name in names if name not in self._above])
        for meta in self.params():
            if meta.name in names:
                yield (meta.name, self._above[meta.name]) if meta.name in self._above else next(below)

    def files(self) -> Mapping[str, bytes]:
        return self._below.files()


INPROCESS = Make(client=InProcessEngine)
