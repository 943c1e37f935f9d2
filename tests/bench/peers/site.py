"""One engine of a make and its server, the checkpoints that it follows, and what it answers meanwhile."""

from __future__ import annotations

import itertools
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from tests.bench.data import Step, Training, chain_shape
from tests.bench.models import plain_linears
from torchrl_ext.base.registry import engines
from torchrl_ext.cli.bench import changes
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.serving.server import start
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.testing.tiny import make_tiny_lm

PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]
ANSWER_S, START_S = 60.0, 180.0
SIZES: dict[str, dict[str, Any]] = {
    "full": {"shape": (768, 12, 16_000), "pretrain_steps": 8, "warm_steps": 4, "batch": 1},
    "small": {"shape": (256, 2, 2000), "pretrain_steps": 10, "warm_steps": 4, "batch": 2},
}
"""Hidden size, layers and vocabulary of the model; how it is trained. 110 M parameters, and 2.8 M."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoints:
    """What an engine starts with, and consecutive steps of AdamW that it follows."""

    folder: Path
    start: Weights
    steps: Sequence[Weights]

    @property
    def nbytes(self) -> int:
        """Size of the model."""
        return sum(tensor.nbytes for tensor in self.start.values())

    def changed(self) -> list[int]:
        """Count the elements that each step changes."""
        pairs = itertools.pairwise(self.steps)
        return [sum(changes(name, old[name], new[name])[0].size for name in new) for old, new in pairs]


def make_checkpoints(folder: Path, size: str, updates: int) -> tuple[Checkpoints, Step]:
    """Train a model, and write another one of its shape as a checkpoint, with which engines start.

    Returns:
        The checkpoints, and the step that follows the last one.
    """
    hidden, layers, vocabulary = SIZES[size]["shape"]
    settings = {name: value for name, value in SIZES[size].items() if name != "shape"}
    training = Training(hidden, layers, vocabulary, **settings)
    steps = [training.checkpoint()]
    for _ in range(updates):
        training.run(1)
        steps.append(training.checkpoint())
    before = training.masters()
    training.run(1)
    model = make_tiny_lm(folder, seed=1, dtype=torch.bfloat16, **chain_shape(hidden, layers, vocabulary))
    start = {name: tensor.clone() for name, tensor in CheckpointSource(model)}
    return Checkpoints(model, start, steps), Step(before, training.masters())


class Site:
    """A running server, and one client that asks it for one token after the other.

    Attributes:
        kind: ``"vllm"`` or ``"sglang"``.
        url: of the server.
        checkpoints: that it follows.
    """

    def __init__(self, kind: str, url: str, checkpoints: Checkpoints, folder: Path) -> None:
        self.kind, self.url, self.checkpoints = kind, url, checkpoints
        self._folder, self._count = folder, 0
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S)
        self._answers: list[float] = []
        self._asking, self._done = threading.Event(), threading.Event()
        self._asking.set()
        self._request = threading.Lock()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def folder(self) -> Path:
        """Return a new folder."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(parents=True)
        return folder

    def call(self, route: str, body: Any = None, **params: Any) -> httpx.Response:
        """Post to a route of the server.

        Raises:
            httpx.HTTPStatusError: it refused.
        """
        response = self._http.post(route, json=body, params=params)
        if response.is_error:
            raise httpx.HTTPStatusError(f"{route}: {response.text[:400]}", request=response.request, response=response)
        return response

    def generate(self, count: int) -> list[Any]:
        """Return the greedy continuation of a prompt: token ids, or vLLM's words for them."""
        sampling = {"temperature": 0, "ignore_eos": True}
        if self.kind == "sglang":
            body = {"input_ids": PROMPT, "sampling_params": sampling | {"max_new_tokens": count}}
            found = self.call("/generate", body).json()
            complete = found["meta_info"]["finish_reason"]["type"] == "length"
            return found["output_ids"] if complete else []
        asked = {"model": "policy", "prompt": PROMPT, "max_tokens": count, "logprobs": 0, **sampling}
        (choice,) = self.call("/v1/completions", asked | {"return_tokens_as_token_ids": True}).json()["choices"]
        return choice["logprobs"]["tokens"] if choice["finish_reason"] == "length" else []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The client asks nothing in the block: rows of a batch would change roundings."""
        self._asking.clear()
        try:
            with self._request:  # its last one ends
                yield
        finally:
            self._asking.set()

    def usual_gap(self) -> float:
        """Return the usual seconds between two answers, from a moment without updates."""
        time.sleep(0.4)
        recent = self._answers[-20:]
        return statistics.median(b - a for a, b in itertools.pairwise(recent))

    def longest_gap(self, began: float, ended: float) -> float:
        """Return the most seconds between two answers of which one at least lies in, or after, an update."""
        until = time.perf_counter() + ANSWER_S
        while not self._answers or self._answers[-1] <= ended:
            if time.perf_counter() > until:
                raise TimeoutError("the engine answers no more")
            time.sleep(0.01)
        times = list(self._answers)
        pairs = itertools.pairwise(times)
        return max((b - a for a, b in pairs if b >= began and a <= ended), default=0.0)

    def close(self) -> None:
        """End the client."""
        self._done.set()
        self._asking.set()
        self._thread.join(2)

    def _ask(self) -> None:
        while not self._done.is_set():
            self._asking.wait()
            try:
                with self._request:
                    answered = self.generate(1)
                if answered:
                    self._answers.append(time.perf_counter())
                    continue
            except (httpx.HTTPError, KeyError, ValueError):
                pass
            time.sleep(0.005)  # it aborted the request, or is gone


@contextmanager
def serving(kind: str, checkpoints: Checkpoints, folder: Path) -> Iterator[Site]:
    """A server of ``vllm``, which keeps linear weights unpacked, or of ``sglang``; both with our plugin."""
    settings: dict[str, Any] = settings_for(kind) | {"max_model_len": 256, "dtype": "bfloat16"}
    settings |= {"start_timeout_s": START_S, "log_path": folder / f"{kind}.log"}
    with plain_linears() if kind == "vllm" else nullcontext():
        server = start(engines.part(kind, "server")(checkpoints.folder, **settings))
    scratch = folder / kind
    with server:
        site = Site(kind, server.url, checkpoints, scratch)
        try:
            yield site
        finally:
            site.close()
            shutil.rmtree(scratch, ignore_errors=True)
