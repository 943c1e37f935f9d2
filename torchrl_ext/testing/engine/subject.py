"""`Subject`: the engine that the kit judges, the weights that it gets, and what its outputs should be then."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from torch import Tensor

import torchrl_ext as tx
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, EngineError
from torchrl_ext.data.transports.base import Handoff, Update
from torchrl_ext.data.weights.checkpoint import CheckpointSource, companion_files
from torchrl_ext.engines.rehearsal import changed
from torchrl_ext.sync.outputs import bound_of, gaps, random_prompts, score
from torchrl_ext.testing.interrupted import Interrupted

__all__ = ["Outputs", "Subject", "Tensors"]

Outputs = list[list[float]]
Tensors = dict[str, Tensor]

_WAIT_S: Final = 60.0
_VISIBLE: Final = 1e-3  # nats


class Subject:
    """A running engine, which serves the checkpoint in ``model``.

    Args:
        url, kind, model, transport, root: as the options of the kit; "" for ``kind`` and ``model`` asks the engine.

    Attributes:
        start: the checkpoint's tensors, on the CPU.
        prompts: token ids that the engine is asked about.
        sender: a `trainer`, which the updates of a case share.
        cold: its log-probabilities of the prompts before the first update.
        noise: how far its answers to one question are apart, in nats.
        visible: how far answers are apart at least, in nats, if they are of different weights.
        bound: how far engine and transformers may be apart, in nats.
        why_not: why transformers cannot say what the engine should answer; "" if it can.

    Raises:
        ConfigError: there is no such kind, transport or checkpoint.
        EngineError, DeadlineError: the engine does not answer.
    """

    sender: tx.WeightSender
    why_not = ""

    def __init__(self, url: str, kind: str, model: str, transport: str, root: str) -> None:
        self.url, self.transport, self.root = url, transport, Path(root)
        self.kind = kind or tx.discover(url)[0].kind
        self._engine = partial(tx.make_engine, self.kind, url=url, timeout_s=_WAIT_S, load_timeout_s=_WAIT_S)
        self.client = self._engine()
        self.info = self.client.info()
        source = CheckpointSource(model or self.info.model)
        self.model, self.start, self.bound = source.directory, dict(source), bound_of(source.params())
        config = json.loads(source.files().get("config.json", b"{}"))
        self.architecture = str(config.get("model_type", self.model.name))
        self.vocabulary = int(config.get("text_config", config)["vocab_size"])
        self.prompts: Sequence[Sequence[int]] = random_prompts(self.vocabulary, sequences=3)

    def look(self) -> None:
        """Ask the engine for its outputs before any update."""
        self.cold = self.client.logprobs(self.prompts)
        self.noise = 2 * max(self.off(self.cold) for _ in range(2))
        self.visible, self.bound = max(5 * self.noise, _VISIBLE), max(self.bound, self.noise)
        try:
            self.assert_computes(self.start)
        except Exception as error:  # noqa: BLE001 - transformers may raise anything for a model that it does not know
            self.why_not = f"with the checkpoint, {type(error).__name__}: {str(error)[:80]}"

    def describe(self) -> dict[str, str]:
        """Return what identifies the engine in a table."""
        plugin = "stock" if self.info.stock else "embedded" if self.kind == "embedded" else "plugin"
        named = {"kind": self.kind, "release": self.info.version, "plugin": plugin, "transport": self.transport}
        return {**named, "model": self.architecture, "tied": "tied" if self.tied else ""}

    def other(self, seed: int) -> Tensors:
        """Return other weights of the same scale: each tensor's elements in other places, some of them changed."""
        return {name: changed(name, tensor.roll(seed)) for name, tensor in self.start.items()}

    def changed(self, names: Iterable[str]) -> Tensors:
        """Return the start weights with a visible change in each tensor of ``names``."""
        return {**self.start, **{name: changed(name, self.start[name]) for name in names}}

    @property
    def tied(self) -> str:
        """The name of the embedding that is the output head, too; "" if none is."""
        names = () if any("lm_head" in name for name in self.start) else self.start
        return next((name for name in names if name.endswith("embed_tokens.weight")), "")

    @contextmanager
    def trainer(self) -> Iterator[tx.WeightSender]:
        """Be a new trainer, with files of its own, until the end of the block."""
        files = {"root": self.root / uuid4().hex, "files": self.model}
        settings: dict[str, Any] = {"disk": files, "delta": files, "native": {"make": self.kind}}
        transport = tx.make_transport(self.transport, timeout_s=_WAIT_S, **settings.get(self.transport, {}))
        with tx.WeightSender(transport, self._engine(), finite=False) as sender:
            yield sender

    def restore(self) -> None:
        """Send the start weights; fail if the engine does not answer as it did before the first update."""
        self.sender.update_weights(self.start)
        off = self.off(self.cold)
        assert off <= self.noise, f"the start weights do not bring its outputs back: they are {off:.2g} nats off"

    def outputs_of(self, tensors: Tensors) -> Outputs:
        """Return the engine's answers with these weights; it has the start weights afterwards."""
        self.sender.update_weights(tensors)
        found = self.client.logprobs(self.prompts)
        self.restore()
        return found

    def send_half(self, tensors: Tensors, do: Callable[[], None]) -> None:
        """Send weights by a new trainer, and call ``do`` in the pause, when half of the tensors went out if they do."""
        source = Interrupted(tensors)
        with self.trainer() as sender:
            prepare = sender._transport.prepare

            def interrupted(update: Update, within: Deadline) -> Handoff:
                handoff = prepare(update, within)

                def transfer(within: Deadline) -> None:
                    source.call = do  # for a transport that reads the source only now
                    handoff.transfer(within)
                    do()

                return replace(handoff, transfer=transfer)

            sender._transport.prepare = interrupted  # type: ignore[method-assign]  # of any transport
            sender.update_weights(source)

    def lose_trainer(self, seed: int) -> None:
        """Have a process send the `other` weights of ``seed``, and be killed in the middle; fail if it is not."""
        given = (self.url, self.kind, str(self.model), self.transport, str(self.root))
        process = get_context("spawn").Process(target=_be_killed, args=(given, seed))
        process.start()
        process.join(_WAIT_S)
        ended = process.exitcode
        process.kill()
        assert ended == -signal.SIGKILL, f"the trainer was not killed: its exit status is {ended}"

    def off(self, expected: Outputs, prompts: Sequence[Sequence[int]] | None = None) -> float:
        """Return how far the engine's answers are from these, in nats; infinite if there is a NaN."""
        return gaps(self.client.logprobs(prompts or self.prompts), expected)[0]

    def assert_computes(self, tensors: Tensors) -> None:
        """Fail if the engine's answers are not those of transformers, where these are known."""
        if self.why_not:
            return
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            for name, data in companion_files(self.model).items():
                Path(folder, name).write_bytes(data)
            save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
            off = self.off(score(model, self.prompts))
        assert off <= self.bound, f"outputs are {off:.2g} nats from those that transformers computes"

    def assert_consistent(self, *whole: Outputs) -> None:
        """Fail unless the engine lives, and serves one of these answers or none."""
        if self.client.look()[0].state == "serving":
            with suppress(EngineError, DeadlineError):
                found = self.client.logprobs(self.prompts)
                near = min(gaps(found, one)[0] for one in whole)
                assert near <= self.noise, f"it serves weights of no whole version ({near:.2g} nats from the nearest)"
        assert self.client.look()[0].state != "unreachable", "it does not answer any more"


def _be_killed(given: tuple[str, str, str, str, str], seed: int) -> None:
    subject = Subject(*given)
    subject.send_half(subject.other(seed), lambda: os.kill(os.getpid(), signal.SIGKILL))
