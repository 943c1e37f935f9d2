"""The hosted model with its two sides: a scheduler that generates and a receiver that lands weights."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.embedded.scheduler import Scheduler
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, NotConnectedError
from torchrl_ext.landing.dormant import Dormant
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.messages import Finish, Inspect, Join, Load, Message, Reset, Seal, Start, State, Verify
from torchrl_ext.sync.inspection import followed, inspect
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.types import Info, ParamMeta, dtype_from_name
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.devices import usable_device
from torchrl_ext.weights.scoring import score

__all__ = ["Engine"]

_NUMBER = re.compile("[0-9]{1,18}")
_BUSY_S = 30.0  # that a control call waits for the one before it
_SEND_AGAIN = "send the weights again; the next update that arrives whole resumes the engine"

TAGS = frozenset({"weights", "kv_cache"})
"""The names of what can sleep, as in vLLM."""


class Engine:
    """Hosts a model that generates and follows a trainer; the routes call its methods.

    A control call waits for the one before it, with a deadline; generation goes on beside calls that touch no weights.

    Args:
        model_dir: a Hugging Face checkpoint directory.
        dtype: ``"auto"`` (the checkpoint's) or a dtype's name.
        device: where the model lives.
        context: most tokens of a sequence; None takes the model's own limit.

    Raises:
        ConfigError: no causal LM can be loaded from ``model_dir``, or there is no such device.
    """

    def __init__(self, model_dir: str, *, dtype: str = "auto", device: str = "cpu", context: int | None = None) -> None:
        self.model_dir, self.dtype = model_dir, dtype
        model = _load_model(model_dir, dtype).to(usable_device(device)).eval().requires_grad_(False)
        self.context = context or model.config.max_position_embeddings
        self._model = model
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ends = model.generation_config.eos_token_id
        end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.scheduler = Scheduler(model, end_ids=end_ids, vocabulary=vocabulary, context=self.context)
        self._loader = TensorsLoader(model)
        self._receiver = WeightReceiver(self._loader)
        self._control = threading.Lock()
        self._updating = False
        self._dormant = Dormant(model)
        self._arrived: list[ParamMeta] = []
        self.asleep: frozenset[str] = frozenset()
        """Those of `TAGS` whose memory was given up."""

    def pause(self, mode: str, timeout_s: float) -> None:
        """Make no more tokens; see `Scheduler.pause`."""
        self.scheduler.pause(mode, timeout_s)

    def resume(self) -> None:
        """Let the model generate again.

        Raises:
            EngineRefusedError: an update is open, the weights are not whole, or the engine sleeps.
        """
        with self._alone():
            if self.asleep:
                raise EngineRefusedError("the engine is asleep", expected="POST /wake_up", state="asleep")
            self._refuse_torn(updating=self._updating)
            self.scheduler.resume()

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, and give memory back: none at level 0, keys and values at 1 (weights are on a host already), all at 2.

        Raises:
            EngineRefusedError: an update is open.
        """
        with self._alone():
            if self._updating:
                raise EngineRefusedError("the engine cannot sleep in the middle of an update", state="paused")
            self.scheduler.pause(mode, timeout_s)
            if level == 0:
                return
            self.scheduler.forget()
            if level == 2:
                self._receiver.invalidate(empty=True)
                with self.scheduler.weights:
                    self._dormant.drop()
            self.asleep = TAGS

    def release_kv_cache(self) -> None:
        """Drop the keys and values of frozen requests.

        Raises:
            EngineRefusedError: the engine still generates.
        """
        with self._alone():
            if not self.scheduler.paused:
                raise EngineRefusedError("the cache is in use", expected="POST /pause first", state="unchanged")
            self.scheduler.forget()
            self.asleep |= {"kv_cache"}

    def wake_up(self, tags: Collection[str] | None) -> bool:
        """Restore the memory of what sleeps, generate again once nothing does, and return whether that is so.

        Raises:
            ConfigError: there is no such tag.
            EngineRefusedError: there would be no weights to generate with.
        """
        wanted = TAGS if tags is None else frozenset(tags) - {"scheduling"}
        if not wanted <= TAGS:
            raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
        with self._alone():
            if self.asleep <= wanted:
                self._refuse_torn(updating=self._updating)
            if "weights" in self.asleep & wanted:
                self._dormant.restore()
            self.asleep -= wanted
            if not self.asleep:
                self.scheduler.resume()
            return not self.asleep

    def _refuse_torn(self, *, updating: bool = False) -> None:
        """Raise where there are no weights, or not one version that arrived whole."""
        if updating:
            reason = "a weight update is open, and half of it must not be served"
        elif self._receiver.held.empty:
            reason = "the engine slept at level 2 and holds no weights"
        elif not self._receiver.whole:
            reason = "the engine holds half an update and cannot serve it"
        else:
            return
        raise EngineRefusedError(reason, state="paused", hint=_SEND_AGAIN)

    def handle(self, message: Message) -> Info:
        """Do what a message says, and return the answer when it is done.

        Raises:
            ConfigError: the transport that it names cannot reach this process.
            EngineRefusedError: weights would change while the engine generates, or while they sleep.
            NotConnectedError: no update was started.
            WeightSyncError: what the step raises.
        """
        self._receiver.refuse_replaced(message)
        match message:
            case State():
                return {**self._receiver.handle(message), **({"whole": False} if self._updating else {})}
            case Inspect():
                return inspect(message)
            case Join():
                self._connect(message)
            case Start():
                with self._alone():
                    self._refuse_busy()
                    self._receiver.handle(message)
                    self._arrived = []
                    self._updating = True
            case Load() | Verify() | Seal():
                with self._in_update():
                    self._receiver.handle(message)
                    if isinstance(message, Load):
                        self._arrived += [ParamMeta.from_json(row) for row in message.handoff.get("params", ())]
            case Finish():
                self.finish(str(message.version))
            case _:
                with self._alone():
                    return self._receiver.handle(message)
        return {}

    def _connect(self, message: Join) -> None:
        """Join the trainer's transport; a trainer that connects anew ends a receive that is still waiting."""
        if message.transport not in followed():
            raise ConfigError(
                f"the embedded engine cannot follow by transport {message.transport!r}",
                expected=f"one of {', '.join(followed())}",
            )
        self._receiver.abort()
        with self._alone():
            self._updating = False
            self._receiver.connect(message)

    def reload(self, path: str, label: str | None) -> None:
        """Load a checkpoint directory; ``label`` becomes the weight version.

        Raises:
            ConfigError, ManifestError, IntegrityError: there is no checkpoint, or one that does not fit.
            EngineRefusedError: the engine generates, or its weights sleep.
        """
        source = CheckpointSource(path)
        with self._alone():
            self._refuse_busy()
            with self.scheduler.weights:
                self._updating = False
                self._receiver.apply_weights(source)
                self._receiver.handle(Reset(weights="reloaded"))
                self.scheduler.changed(label)

    def _refuse_busy(self) -> None:
        """Raise where weights cannot change now."""
        if not self.scheduler.paused:
            reason, first = "weights cannot change while the engine generates", "POST /pause first"
        elif "weights" in self.asleep:
            reason, first = "the engine's weights are asleep", "POST /wake_up?tags=weights first"
        else:
            return
        raise EngineRefusedError(reason, expected=first, state="unchanged")

    def finish(self, label: str | None) -> None:
        """End an update of which every parameter arrived; ``label`` becomes the weight version.

        Requests that are frozen keep their keys and values of the old weights, until `Scheduler.forget`.
        """
        with self._in_update(last=True):
            if self._receiver.held.empty:
                self._loader.check(self._arrived)  # what did not come has no older value to fall back on
            version = int(label) if label is not None and _NUMBER.fullmatch(label) else self._receiver.version
            self._receiver.finish(version)
            self.scheduler.changed(label)

    def digests(self) -> dict[str, str]:
        """Return the digest of every parameter that the live model holds, by checkpoint name.

        Raises:
            EngineRefusedError: it holds none.
        """
        with self._alone(), self.scheduler.weights:
            if self._receiver.held.empty:
                self._refuse_torn()
            return self._loader.digests()

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the natural-log probability of each token after the first, while paused or between two steps.

        Raises:
            ConfigError: a prompt is empty or too long, or has a token that the model does not know.
            EngineRefusedError: the weights are half an update, or given up.
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the control lock, which a call that moves weights may keep for as long as it takes."""
        if not self._control.acquire(timeout=_BUSY_S):
            raise DeadlineError(
                f"another control call has been under way for {_BUSY_S:g} s",
                state="unchanged",
                hint="wait for its answer; connecting anew ends a transfer that nobody sends",
            )
        try:
            yield
        finally:
            self._control.release()

    @contextmanager
    def _in_update(self, *, last: bool = False) -> Iterator[None]:
        """Take a step of an open update, which ends with the ``last`` one, and with one that fails."""
        with self._alone():
            if not self._updating:
                raise NotConnectedError("no weight update is open", hint="POST /start_weight_update first")
            self._updating = False
            with self.scheduler.weights:
                yield
            self._updating = not last


def _load_model(model_dir: str, dtype: str) -> Any:
    """Return the model of a Hugging Face checkpoint directory.

    Raises:
        ConfigError: there is none, or no causal LM.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"{model_dir} holds no model", expected="a Hugging Face checkpoint directory")
    from transformers import AutoModelForCausalLM

    wanted = "auto" if dtype == "auto" else dtype_from_name(dtype)
    allow_amx = getattr(torch.cpu, "_init_amx", None)
    if dtype == "bfloat16" and allow_amx is not None:
        allow_amx()  # where the processor has AMX, the kernel wants a request before bfloat16 products may use it
    try:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=wanted, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no causal LM can be loaded from {model_dir}: {error}") from error
