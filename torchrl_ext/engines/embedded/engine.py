"""The hosted model, a scheduler that generates with it, and a receiver that lands weights in it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.devices import usable_device
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Commit, Finish, Inspect, Join, Load, Message, Start, State, Undo, Verify
from torchrl_ext.base.routes import version_label
from torchrl_ext.base.types import Info, ParamMeta, dtype_from_name
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.source import named_tensors
from torchrl_ext.engines.embedded.scheduler import Scheduler
from torchrl_ext.sync import inspection
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.sync.outputs import score
from torchrl_ext.sync.receiver import WeightReceiver

__all__ = ["EmbeddedEngine", "followed"]

_BUSY_S = 30.0  # how long a control call waits for the previous one
_SEND_AGAIN = "send the weights again; the next complete update resumes the engine"

TAGS = frozenset({"weights", "kv_cache"})
"""vLLM's names for the memory that sleep releases."""


class EmbeddedEngine:
    """Hosts a model that generates and follows a trainer; the server's routes call its methods.

    Control calls run one at a time, and raise `DeadlineError` after 30 s of waiting for the previous one. Generation
    continues during calls that do not touch weights. It is a `torchrl_ext.engines.update_from_disk.ReloadableEngine`.

    Args:
        model: a Hugging Face checkpoint directory.
        dtype: ``"auto"`` (the checkpoint's) or a dtype's name.
        device: torch device of the model.
        context: most tokens of a sequence, prompt included; None for the model's own limit.

    Attributes:
        asleep: the `TAGS` whose memory was released.

    Raises:
        ConfigError: no causal LM can be loaded from ``model``, or there is no such device.
        ManifestError: torch has no such dtype.
    """

    def __init__(self, model: str, *, dtype: str = "auto", device: str = "cpu", context: int | None = None) -> None:
        self.model, self.dtype = model, dtype
        self._model = module = _load_model(model, dtype).to(usable_device(device)).eval().requires_grad_(False)
        self.context = context or module.config.max_position_embeddings
        ends = module.generation_config.eos_token_id
        end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        vocabulary = module.get_input_embeddings().weight.shape[0]
        self.scheduler = Scheduler(module, end_ids=end_ids, vocabulary=vocabulary, context=self.context)
        self._loader = TensorsLoader(module)
        self._receiver = WeightReceiver(self._loader)
        self._control = threading.Lock()
        self._released: list[tuple[Tensor, tuple[int, ...]]] = []  # while the weights sleep, and their strides
        self._arrived: list[ParamMeta] = []
        self.asleep: frozenset[str] = frozenset()

    def paused(self) -> bool:
        """Return whether generation is paused."""
        return self.scheduler.paused

    def pause(self, mode: str = "keep", timeout_s: float = 0.0) -> None:
        """Stop generating; see `Scheduler.pause`."""
        self.scheduler.pause(mode, timeout_s)

    def resume(self) -> None:
        """Resume generation; a version that was only started is given up.

        Raises:
            EngineRefusedError: the weights are not one whole version, or the engine is asleep.
        """
        with self._alone():
            if self.asleep:
                raise EngineRefusedError("the engine is asleep", expected="POST /wake_up", state="asleep")
            self._serve()

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, and release memory: none at level 0, the keys and values at 1 (weights stay), all at 2."""
        with self._alone():
            self.scheduler.pause(mode, timeout_s)
            if level == 0:
                return
            self._receiver.give_up()
            self.scheduler.forget()
            if level == 2:
                self._receiver.invalidate(empty=True)
                with self.scheduler.weights:
                    self._released = self._released or _release(self._model)
                    self._loader.asleep = True
            self.asleep = TAGS

    def release_kv_cache(self) -> None:
        """Drop the keys and values of paused requests.

        Raises:
            EngineRefusedError: the engine still generates.
        """
        with self._alone():
            if not self.scheduler.paused:
                raise EngineRefusedError("the cache is in use", expected="POST /pause first", state="unchanged")
            self.scheduler.forget()
            self.asleep |= {"kv_cache"}

    def wake_up(self, tags: Collection[str] | None) -> bool:
        """Restore the memory of ``tags`` (None for all), and resume generation once nothing is asleep.

        Returns:
            Whether nothing is asleep.

        Raises:
            ConfigError: there is no such tag.
            EngineRefusedError: generation would resume while the engine holds no whole version of the weights.
        """
        wanted = TAGS if tags is None else frozenset(tags) - {"scheduling"}
        if not wanted <= TAGS:
            raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
        with self._alone():
            if self.asleep <= wanted:
                self._refuse_torn()
            if "weights" in self.asleep & wanted:
                _restore(self._released)
                self._released, self._loader.asleep = [], False
            self.asleep -= wanted
            if not self.asleep:
                self._serve()
            return not self.asleep

    def handle(self, message: Message) -> Info:
        """Carry out a message and return the answer.

        Raises:
            ConfigError: this engine cannot follow by the transport that the message names.
            EngineRefusedError: weights would change while the engine generates or the weights are asleep, or another
                sender has joined.
            NotConnectedError: no update is open.
            WeightSyncError: the step failed.
        """
        self._receiver.refuse_replaced(message)
        match message:
            case State():
                answer = self._receiver.handle(message)
                return {"paused": self.scheduler.paused, "asleep": sorted(self.asleep), **answer}
            case Inspect():
                return {**inspect(message), "transports": followed()}
            case Join(transport=name) if name not in (known := followed()):
                raise ConfigError(
                    f"the embedded engine cannot follow by transport {name!r}", expected=f"one of {', '.join(known)}"
                )
            case Join():
                self._receiver.abort()  # a receive that still waits for an earlier connection
        with self._alone():
            if isinstance(message, (Commit, Undo)):
                return self._switched(message)
            if not isinstance(message, (Start, Load, Verify, Finish)):
                return self._receiver.handle(message)
            self._refuse_busy()
            with self.scheduler.weights:
                return self._updated(message)

    def _switched(self, message: Commit | Undo) -> Info:
        """Change the version between two rounds; a failed one is taken back, or the engine stays paused."""
        with self.scheduler.between_rounds():
            if isinstance(message, Commit) and self.scheduler.paused:
                raise EngineRefusedError("the engine is paused", expected="one that serves", state="unchanged")
            try:
                answer = self._receiver.handle(message)
            except WeightSyncError:
                if not self._receiver.whole:
                    with contextlib.suppress(WeightSyncError):
                        self._receiver.handle(Undo(version=message.version))
                if not self._receiver.whole:
                    self.scheduler.halt()
                raise
            self.set_name(version_label(answer["version"]))
            return answer

    def _updated(self, message: Message) -> Info:
        if isinstance(message, Start):
            self._arrived = []
        elif isinstance(message, Load):
            self._arrived += self._receiver.params_of(message)
        elif isinstance(message, Finish) and self._receiver.held.empty:
            self._loader.check(self._arrived)  # missing parameters have no older value to keep
        return self._receiver.handle(message)

    def call(self, message: Message) -> None:
        """Carry out a message as `handle` does; with a `Start`, drop the keys and values of requests."""
        self.handle(message)
        if isinstance(message, Start):
            self.scheduler.forget()

    def set_name(self, version: str) -> None:
        """Set the weight version."""
        self.scheduler.version = version

    def digests(self) -> dict[str, str]:
        """Return the digest of every parameter in the live model, by checkpoint name.

        Raises:
            EngineRefusedError: the weights were released.
        """
        with self._alone(), self.scheduler.weights:
            if self._receiver.held.empty:
                self._refuse_torn()
            return self._loader.digests()

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the natural-log probability of each prompt's tokens after the first; waits for the running step.

        Raises:
            ConfigError: a prompt is empty, too long, or has a token that the model does not know.
            EngineRefusedError: the engine holds half an update, or no weights.
        """
        for prompt in prompts:
            if not 1 <= len(prompt) <= self.context:
                raise ConfigError(f"a prompt has {len(prompt)} tokens", expected=f"1 to {self.context}")
            self.scheduler.check(prompt)
        with self._alone(), self.scheduler.weights:
            self._refuse_torn()
            return score(self._model, prompts)

    def close(self) -> None:
        """End generation and leave the transport."""
        self._receiver.abort()
        self.scheduler.stop()
        self._receiver.close()

    def _serve(self) -> None:
        self._refuse_torn()
        self._receiver.give_up()
        self.scheduler.resume()

    def _refuse_torn(self) -> None:
        if self._receiver.held.empty:
            reason = "the engine slept at level 2 and holds no weights"
        elif not self._receiver.whole:
            reason = "the engine holds a part of an update, which it must not serve"
        else:
            return
        raise EngineRefusedError(reason, state="paused", hint=_SEND_AGAIN)

    def _refuse_busy(self) -> None:
        if not self.scheduler.paused:
            reason, first = "weights cannot change while the engine generates", "POST /pause first"
        elif "weights" in self.asleep:
            reason, first = "the engine's weights are asleep", "POST /wake_up?tags=weights first"
        else:
            return
        raise EngineRefusedError(reason, expected=first, state="unchanged")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the control lock; a call that moves weights may hold it for as long as it takes."""
        if not self._control.acquire(timeout=_BUSY_S):
            raise DeadlineError(
                f"another control call has been running for {_BUSY_S:g} s",
                state="unchanged",
                hint="wait for its answer; a new connection ends a transfer whose sender is gone",
            )
        try:
            yield
        finally:
            self._control.release()


def followed() -> list[str]:
    """Return the names of the transports that this engine supports: not ``native``, as it has no wire of its own."""
    return [name for name in inspection.followed() if name != "native"]


def _load_model(model: str, dtype: str) -> Any:
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"{model} holds no model", expected="a Hugging Face checkpoint directory")
    from transformers import AutoModelForCausalLM

    wanted = "auto" if dtype == "auto" else dtype_from_name(dtype)
    allow_amx = getattr(torch.cpu, "_init_amx", None)
    if dtype == "bfloat16" and allow_amx is not None:
        allow_amx()  # on a processor with AMX, Linux requires a request before bfloat16 products use it
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=wanted, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no causal LM can be loaded from {model}: {error}") from error


@torch.no_grad()
def _release(module: nn.Module) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Give up the memory of a module's parameters and persistent buffers, and return these with their old strides.

    Values are lost; names, shapes and dtypes stay, and so do `nn.Parameter` objects, tied ones tied.
    """
    found = {id(tensor): (tensor, tensor.stride()) for _, tensor in named_tensors(module)}
    for tensor, _ in found.values():
        tensor.data = tensor.new_zeros(()).expand(tensor.shape)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps what is freed unless it is asked
        ctypes.CDLL(None).malloc_trim(0)
    return [*found.values()]


@torch.no_grad()
def _restore(released: list[tuple[Tensor, tuple[int, ...]]]) -> None:
    """Allocate the memory of tensors again, with undefined content."""
    for tensor, strides in released:
        tensor.data = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
