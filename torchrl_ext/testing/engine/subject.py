"""`Subject`: the engine that the kit judges, the weights that it gets, and what its outputs should be then."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import torchrl_ext as tx
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineUnreachableError
from torchrl_ext.proof.known_weights import changed
from torchrl_ext.proof.outputs import bound_of, gaps, random_prompts
from torchrl_ext.proof.scoring import score
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.transports.base import Handoff, Transport, Update
from torchrl_ext.types import ParamMeta, SyncReport
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.source import WeightSource

__all__ = ["Outputs", "Subject", "Tensors", "Weights", "gap"]

log = logging.getLogger("torchrl_ext")

Outputs = list[list[float]]
Tensors = dict[str, Tensor]

_WAIT_S: Final = 60.0
_SHORT_S: Final = 5.0  # how long an engine that may be paused has for an answer
_VISIBLE: Final = 1e-3  # nats
_LARGE: Final = 2 << 30  # bytes; transformers would need them once more
_EXPERT: Final = re.compile(r"(?P<layer>.*)\.experts\.(?P<number>\d+)\.")


def gap(one: Outputs, other: Outputs) -> float:
    """Return the largest difference in nats; infinite if there is a NaN."""
    return gaps(one, other)[0]


class Weights(WeightSource):
    """Tensors beside the other files of a checkpoint.

    Args:
        tensors: by name.
        files: the others, as `WeightSource.files` returns them.
        halfway: called when half of the tensors were read, once `armed` is set.
    """

    def __init__(
        self, tensors: Tensors, files: Mapping[str, bytes] | None = None, halfway: Callable[[], None] | None = None
    ) -> None:
        self.tensors, self._files, self.halfway = tensors, files or {}, halfway
        self.armed = False

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self.tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(self.tensors.items()):
            if self.armed and self.halfway is not None and place == len(self.tensors) // 2:
                self.halfway()
            yield pair

    def files(self) -> Mapping[str, bytes]:
        return self._files


class Subject:
    """A running engine, which serves the checkpoint in ``model``.

    Args:
        url, kind, model, transport, root: as the options of the kit; "" for ``kind`` and ``model`` asks the engine.

    Attributes:
        start: the checkpoint's tensors, on the CPU.
        config: its ``config.json``.
        prompts: token ids that the engine is asked about.
        cold: its log-probabilities of them before the first update.
        noise: how far its answers to one question are apart, in nats.
        bound: how far engine and transformers may be apart, in nats.
        reference: whether transformers can say what an engine should answer; `why_not` says why it cannot.

    Raises:
        ConfigError: there is no such kind, transport or checkpoint.
        EngineError, DeadlineError: the engine does not answer.
    """

    def __init__(self, url: str, kind: str, model: str, transport: str, root: str) -> None:
        self.url, self.transport, self.root = url, transport, Path(root)
        self.kind = kind or tx.discover(url)[0].kind
        self.client = tx.make_engine(self.kind, url=url)
        self.info = self.client.info()
        source = CheckpointSource(model or self.info.model)
        self.model, self._files, self.start = str(source.directory), source.files(), dict(source)
        self.config = json.loads(self._files.get("config.json", b"{}"))
        text = self.config.get("text_config", self.config)
        self.prompts: Sequence[Sequence[int]] = random_prompts(int(text["vocab_size"]), sequences=3)
        self._sender: tx.WeightSender | None = None
        self._count = 0
        self.why_not = ""

    def look(self) -> None:
        """Ask the engine for its outputs before any update."""
        self.cold = self.says()
        self.noise = 2 * max(gap(self.cold, self.says()) for _ in range(2))
        self.bound = max(bound_of(Weights(self.start).params()), self.noise)
        try:
            found = gap(self.cold, self._computed(self.start))
        except Exception as error:  # transformers may raise anything for a model that it does not know
            log.warning("transformers computes no reference", exc_info=error)
            self.why_not = f"transformers cannot load the checkpoint ({type(error).__name__}: {str(error)[:80]})"
        else:
            if found > self.bound:
                self.why_not = f"transformers computes something else from the checkpoint (by {found:.2g} nats)"
        self.reference = not self.why_not

    def describe(self) -> dict[str, str]:
        """Return what identifies the engine in a table."""
        named = {"kind": self.kind, "release": self.info.version, "transport": self.transport}
        plugin = "stock" if self.info.stock else "embedded" if self.kind == "embedded" else "plugin"
        return {**named, "plugin": plugin, "model": str(self.config.get("model_type", Path(self.model).name)), **(
            {"tied": "tied"} if self.tied else {}
        )}  # fmt: skip

    # weights

    def shuffled(self, seed: int) -> Tensors:
        """Return other weights of the same scale: each tensor's elements in a random order, some of them changed."""
        order = torch.Generator().manual_seed(seed)
        return {
            name: changed(name, tensor.flatten()[torch.randperm(tensor.numel(), generator=order)].view(tensor.shape))
            for name, tensor in self.start.items()
        }

    def changed(self, names: Sequence[str] | None = None) -> Tensors:
        """Return the start weights with a visible change in each tensor of ``names``; None for all."""
        names = list(self.start) if names is None else names
        return {**self.start, **{name: changed(name, self.start[name]) for name in names}}

    @property
    def tied(self) -> str:
        """The name of the embedding that is the output head, too; "" if none is."""
        text = self.config.get("text_config", self.config)
        tied = self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        apart = any(name.endswith("lm_head.weight") for name in self.start)
        names = (name for name in self.start if name.endswith("embed_tokens.weight"))
        return next(names, "") if tied and not apart else ""

    def swapped_experts(self, *, routers: bool) -> Tensors:
        """Return the start weights with experts 0 and 1 of each layer swapped; {} without experts."""
        found, layers = dict(self.start), set()
        for name in self.start:
            match = _EXPERT.match(name)
            if match and match["number"] in "01":
                layers.add(match["layer"])
                other = str(1 - int(match["number"])).join((name[: match.start("number")], name[match.end("number") :]))
                found[name] = self.start[other]
        for name, tensor in self.start.items() if routers else ():
            if name.rpartition(".")[0].rpartition(".")[0] in layers and ".gate." in name:
                found[name] = torch.cat((tensor[1:2], tensor[:1], tensor[2:]))
        return found if layers else {}

    # updates

    @contextmanager
    def trainer(self) -> Iterator[tx.WeightSender]:
        """Be another trainer, with files of its own, until the end of the block."""
        self._count += 1
        root = self.root / f"trainer{os.getpid()}-{self._count}"
        settings: dict[str, Any] = {"disk": {"root": root}, "delta": {"root": root}, "native": {"make": self.kind}}
        transport = tx.make_transport(self.transport, timeout_s=_WAIT_S, **settings.get(self.transport, {}))
        engine = tx.make_engine(self.kind, url=self.url, timeout_s=_WAIT_S, load_timeout_s=_WAIT_S)
        sender = tx.WeightSender(transport, engine, finite="send")
        try:
            yield sender
        finally:
            sender.shutdown()

    def send(self, tensors: Tensors, sender: tx.WeightSender | None = None, **how: Any) -> SyncReport:
        """Send weights by ``sender``, or by the trainer that every case shares."""
        if sender is None:
            if self._sender is None:
                self._entered = self.trainer()
                self._sender = self._entered.__enter__()
            sender = self._sender
        return sender.update_weights(Weights(tensors, self._files), **how)

    def drop_sender(self) -> None:
        """Let the next update come from a new trainer."""
        if self._sender is not None:
            self._sender = None
            self._entered.__exit__(None, None, None)

    def send_half(self, tensors: Tensors, do: Callable[[], None]) -> None:
        """Send weights by a new trainer, and call ``do`` in the pause, when half of the tensors went out if they do."""
        source = Weights(tensors, self._files, do)
        with self.trainer() as sender:
            _interrupt(sender._transport, source)
            sender.update_weights(source)

    def lose_trainer(self, seed: int) -> None:
        """Have a process send the `shuffled` weights of ``seed``, and be killed in the middle.

        Raises:
            AssertionError: it ended otherwise.
        """
        given = json.dumps([self.url, self.kind, self.model, self.transport, str(self.root)])
        command = [sys.executable, "-m", __name__, given, str(seed)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, env=environ)
        assert done.returncode == -signal.SIGKILL, f"the trainer was not killed: {done.stderr[-500:]}"

    # outputs

    def says(self, prompts: Sequence[Sequence[int]] | None = None) -> Outputs:
        """Return the engine's log-probabilities."""
        return self.client.logprobs(self.prompts if prompts is None else prompts)

    def same(self, one: Outputs, other: Outputs) -> bool:
        """Return whether two answers of the engine are of the same weights."""
        return gap(one, other) <= self.noise

    def moved(self, one: Outputs, other: Outputs) -> bool:
        """Return whether two answers of the engine are visibly of different weights."""
        return gap(one, other) > max(5 * self.noise, _VISIBLE)

    def assert_computes(self, tensors: Tensors) -> None:
        """Fail if the engine's answers are not those of transformers, where these are known."""
        if self.reference:
            found = gap(self.says(), self._computed(tensors))
            assert found <= self.bound, f"outputs are {found:.2g} nats from those that transformers computes"

    def assert_consistent(self, *whole: Outputs) -> None:
        """Fail unless the engine lives, and serves one of these answers or none."""
        answer = HTTPSession(self.url, timeout_s=_WAIT_S).call("GET", "/health")
        assert answer.status in (200, 503), f"/health answers {answer.status}"
        short = {"timeout_s": _SHORT_S, "load_timeout_s": _SHORT_S}
        engine = tx.make_engine(self.kind, url=self.url, **short)
        if engine.look()[0].state != "serving":
            return
        try:
            found = engine.logprobs(self.prompts)
        except EngineUnreachableError:
            raise
        except (EngineError, DeadlineError):
            return
        near = min(gap(found, one) for one in whole)
        assert near <= self.noise, f"it serves weights that are no whole version ({near:.2g} nats from the nearest)"

    def restore(self) -> None:
        """Send the start weights; fail if the engine does not answer as it did before the first update."""
        self.send(self.start)
        found = gap(self.says(), self.cold)
        assert found <= self.noise, f"the start weights do not bring its outputs back: they are {found:.2g} nats off"

    def _computed(self, tensors: Tensors) -> Outputs:
        if sum(tensor.nbytes for tensor in tensors.values()) > _LARGE:
            raise ConfigError(f"the model has more than {_LARGE} bytes")
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            for name, data in self._files.items():
                Path(folder, name).write_bytes(data)
            save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
            return score(model, self.prompts)


def _interrupt(transport: Transport, source: Weights) -> None:
    """Make the transport's next updates call ``source.halfway`` between an engine's pause and its resume."""
    prepare = transport.prepare

    def interrupted(update: Update, within: Deadline) -> Handoff:
        handoff = prepare(update, within)

        def transfer(within: Deadline) -> None:
            source.armed = True  # what reads the source only now is interrupted at its half
            handoff.transfer(within)
            if source.halfway is not None:
                source.halfway()

        return replace(handoff, transfer=transfer)

    transport.prepare = interrupted  # type: ignore[method-assign]  # any transport, of other packages too


def _be_killed(given: str, seed: str) -> None:
    subject = Subject(*json.loads(given))
    subject.send_half(subject.shuffled(int(seed)), lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    _be_killed(*sys.argv[1:])
