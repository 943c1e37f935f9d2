"""Ports of engines in this process: a module, a receiver, a vLLM object."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

from msgspec import structs

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
    parsed,
)
from torchrl_ext.base.messages import (
    Commit,
    Finish,
    Join,
    Leave,
    Load,
    Message,
    Poll,
    Prefetch,
    Start,
    State,
    answers_of,
)
from torchrl_ext.base.routes import CALL, confirmed, merged
from torchrl_ext.base.types import EngineInfo, Info
from torchrl_ext.control.port import EngineState, Port
from torchrl_ext.data.weights.checkpoint import CheckpointSource, opened
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.sync.outputs import score
from torchrl_ext.sync.receiver import WeightReceiver

__all__ = ["LocalPort", "ModulePort", "VLLMObjectPort"]

_PLUGIN: Final = "install this package beside vLLM; if VLLM_PLUGINS is set, add torchrl_ext to it"
_COPYING_S: Final = 10.0
_LOOK_S: Final = 1.0  # how often a wait checks that the engine's loop still runs


class LocalPort(Port):
    """An engine object of this process.

    Attributes:
        transport: name of the transport from this process to the object.
        handle: handles a message and returns the answer when it is done.
    """

    kind: ClassVar[str] = "inprocess"
    url: str = "inprocess"
    transport: ClassVar[str]
    handle: Callable[[Message], Info]

    def call(self, message: Message) -> list[Info]:
        if isinstance(message, Leave) and not message.connection:
            return []
        try:
            return [self.handle(message)]
        except (ConfigError, EngineError, DeadlineError):
            # it may be gone; and an `AsyncLLM` cannot be called from its own event loop, or after that has ended
            if isinstance(message, Leave):
                return []
            raise

    def describe(self) -> EngineInfo:
        return EngineInfo(url=self.url, kind=self.kind)

    def state(self) -> EngineState:
        return EngineState.of([self.handle(State())])

    def check(self) -> None:
        """Raise EngineError if the engine cannot be updated because it is dead or asleep."""

    @abstractmethod
    def start_weights(self) -> WeightSource:
        """Return the weights that the engine holds before the first update, to fall back on."""


class _Module:
    """A module's receiver and pause state, shared by all ports of the module."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.receiver = target if isinstance(target, WeightReceiver) else WeightReceiver(target)
        self.serving = threading.Event()
        self.serving.set()


_modules: WeakValueDictionary[int, _Module] = WeakValueDictionary()  # by id of the target, which a value keeps alive


class ModulePort(LocalPort):
    """A module, a mapping of tensors, a TensorDict, or a receiver."""

    transport = "memory"

    def __init__(self, target: Any) -> None:
        self._module = _modules.get(id(target)) or _modules.setdefault(id(target), _Module(target))
        self.handle = self._module.receiver.handle

    @property
    def serving(self) -> threading.Event:
        """Event that is cleared while the module is paused."""
        return self._module.serving

    def describe(self) -> EngineInfo:
        version = self._module.receiver.version
        return EngineInfo(url=self.url, kind=self.kind, weight_version=str(version or ""))

    def call(self, message: Message) -> list[Info]:
        if isinstance(message, (Start, Load)) and self.serving.is_set():
            raise EngineRefusedError(f"{self.url} is not paused", state="nothing was changed", hint="call pause first")
        return super().call(message)

    def paused(self) -> bool:
        return not self.serving.is_set()

    def pause(self) -> None:
        self.serving.clear()

    def resume(self) -> None:
        self.serving.set()

    def start_weights(self) -> WeightSource:
        held = as_source(self._module.receiver.target)
        return as_source({name: tensor.clone() for name, tensor in held})

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return score(self._module.receiver.target, prompts)


class VLLMObjectPort(LocalPort):
    """vLLM's `AsyncLLM` or `LLM`, without changes to vLLM's code, and however it was made.

    Messages go to workers by its collective call of our plugin's method. `LLM` generates only while its caller waits,
    so it needs no pause; it is not thread-safe, so do not update it while another thread generates.

    Args:
        llm: the engine, made in an environment with this package, whose plugin vLLM loads.
        pause_mode, keep_cache, loop: as for `InProcessEngine`; ``keep_cache`` also keeps cached image embeddings.

    Raises:
        ConfigError: ``keep_cache`` is set, and the engine has a KV connector.
    """

    transport = "ipc"

    def __init__(
        self, llm: Any, *, pause_mode: str, keep_cache: bool = False, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._llm = llm
        self._mode, self._keep_cache, self._loop = pause_mode, keep_cache, loop
        self._asynchronous = inspect.iscoroutinefunction(llm.collective_rpc)
        self.live = self._asynchronous and pause_mode == "keep"
        self._inner = llm if self._asynchronous else llm.llm_engine
        self._config = self._inner.vllm_config
        self._checkpoint = opened(self._config.model_config.model)
        if keep_cache and self._config.kv_transfer_config is not None:
            raise ConfigError(
                "this vLLM has a KV connector, which would go on serving keys and values of the old weights",
                expected="keep_cache=False, or an engine without a connector",
            )
        # an `LLM` has one of the engines, whatever it is a replica of
        self._engines = self._config.parallel_config.data_parallel_size if self._asynchronous else 1

    def call(self, message: Message) -> list[Info]:
        if isinstance(message, Commit):
            message = structs.replace(message, keep_cache=self._keep_cache)
        if not isinstance(message, (Commit, Finish)):
            answers = super().call(message)
            if isinstance(message, Start):
                self.drop_cached()
            return answers
        answers = confirmed(self._ask(message), self._engines, self.url)
        if isinstance(message, Finish):
            self.set_name(str(message.version))
        return answers

    def handle(self, message: Message) -> Info:
        answer = merged(self._ask(message))
        if isinstance(message, (Join, Prefetch)):
            poll = Poll(connection=message.connection)
            Deadline(self.timeout_s).poll(
                lambda: not merged(self._ask(poll)).get("working"), f"vLLM's workers did not {message.kind}"
            )
        return answer

    def _ask(self, message: Message) -> list[Info]:
        if CALL not in self._config.additional_config:
            raise EngineRefusedError("this vLLM was made without our plugin", state="nothing was changed", hint=_PLUGIN)
        rows = self._do(self._llm.collective_rpc, CALL, args=(json.dumps(message.to_json()),))
        return answers_of(rows, "vLLM")

    def describe(self) -> EngineInfo:
        if self._loop is not None and not self._loop.is_running():  # then a fleet continues without this engine
            raise _ended()
        parallel = self._config.parallel_config
        return EngineInfo(
            url=self.url,
            kind=self.kind,
            model=self._config.model_config.model,
            num_gpus=parallel.world_size,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            dp_size=parallel.data_parallel_size,
            world_size=parallel.world_size_across_dp,
        )

    def paused(self) -> bool | None:
        return bool(self._do(self._llm.is_paused)) if self._asynchronous else None

    def pause(self) -> None:
        if self._asynchronous:
            self._do(self._llm.pause_generation, mode=self._mode, clear_cache=False)

    def resume(self) -> None:
        if self._asynchronous:
            self._do(self._llm.resume_generation)

    def check(self) -> None:
        if self._asynchronous:
            self._do(self._llm.check_health)
            if merged(self._ask(State())).get("asleep"):
                raise EngineError("vLLM is asleep", expected="one that is awake", hint="await engine.wake_up() first")

    def start_weights(self) -> WeightSource:
        return self._checkpoint or CheckpointSource(self._config.model_config.model)

    def set_name(self, version: str) -> None:
        """Label the weights in service."""
        inner = self._inner
        self._do(inner.update_weight_version if self._asynchronous else inner.set_weight_version, version)

    def drop_cached(self) -> None:
        """Clear the KV cache, including a connector's and that of running requests, and cached image embeddings.

        Raises:
            EngineRefusedError: vLLM could not clear the KV cache.
        """
        if self._keep_cache:
            return
        Deadline(min(self.timeout_s, _COPYING_S)).poll(  # a connector holds blocks for a moment while it copies them
            lambda: self._do(self._llm.reset_prefix_cache, self._asynchronous, reset_connector=True),
            late=lambda: EngineRefusedError("vLLM could not drop cached keys and values of the old weights"),
        )
        if self._config.model_config.multimodal_config is not None:  # embeddings of images come from the old weights
            self._do(self._inner.reset_encoder_cache)

    def _do(self, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Call a method of vLLM, and return its answer; vLLM's errors become EngineRefusedError."""
        try:
            return self._done(call(*args, **settings))
        except WeightSyncError:
            raise
        except Exception as error:
            what, rest = parsed(str(error))
            more: dict[str, Any] = {**rest, "reason": str(error)}
            name = args[0] if call.__name__ == "collective_rpc" else call.__name__
            raise EngineRefusedError(f"{what}; vLLM refused {name}", **more) from error

    def _done(self, value: Any) -> Any:
        """Return ``value``; run a coroutine on the engine's loop, and return its result."""
        if not inspect.iscoroutine(value):
            return value
        try:
            home = self._home()
        except WeightSyncError:
            value.close()  # otherwise Python warns that it was never awaited
            raise
        future = asyncio.run_coroutine_threadsafe(value, home)
        within = Deadline(self.timeout_s, "vLLM")
        while not wait([future], min(_LOOK_S, within.left_s)).done:
            if not home.is_running():
                raise _ended()
            if within.over:
                future.cancel()
                raise within.error()
        try:
            return future.result()
        except CancelledError:  # the loop has ended, and cancelled its tasks
            raise _ended() from None

    def _home(self) -> asyncio.AbstractEventLoop:
        """Return the loop that `AsyncLLM` runs on; raise if it is unknown, has ended, or runs in this thread."""
        if self._loop is None:
            handler = self._llm.output_handler
            if handler is None:
                raise ConfigError(
                    "the event loop of this AsyncLLM is not known: it has served no request yet",
                    hint='pass it: tx.make_engine("inprocess", engine=llm, loop=asyncio.get_running_loop())',
                )
            self._loop = handler.get_loop()
        if self._loop is _running_here():
            raise ConfigError(
                "this call would block the event loop that the engine runs on",
                expected="await engine.update_model_weights(...), or await asyncio.to_thread(sender.update_weights)",
            )
        if not self._loop.is_running():
            raise _ended()
        return self._loop

    def at_home(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use ``loop`` as the loop that `AsyncLLM` runs on, unless it is known already."""
        if self._loop is None and self._asynchronous and self._llm.output_handler is None:
            self._loop = loop


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _ended() -> EngineUnreachableError:
    return EngineUnreachableError(
        "the event loop of this AsyncLLM has ended",
        expected="a loop that runs for as long as the engine is updated",
        state="the engine cannot serve requests",
        hint="make a new engine on a loop that keeps running",
    )
