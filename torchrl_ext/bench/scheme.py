"""``torchrl-ext bench scheme``: one update of a collector's workers, beside TorchRL's own multi-process scheme.

The same worker processes follow both schemes, each in a policy of its own, and between two updates the trainer's policy
changes everywhere. ``scheme.send`` is timed, which returns when every worker has acknowledged. TorchRL's scheme is
measured twice. On a CPU its workers' parameters *are* the tensors that the scheme was made with, by shared memory:
sending those again moves nothing, and the workers see every step of an optimizer on them at once, sent or not
(``torchrl_shared``). Weights from elsewhere, such as a GPU or shards, are copied, as ours always are (``torchrl``).
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError
from torchrl_ext.types import Info

__all__ = ["measure"]

TIMEOUT_S = 300.0
LAYERS = 6


def measure(
    say: Callable[[str], None],
    *,
    parameters: int = 100_000_000,
    workers: int = 4,
    transport: str = "ipc",
    repeats: int = 7,
    folder: str | None = None,
) -> Info:
    """Measure both schemes in turns.

    Args:
        say: called with each step.
        parameters: of the policy, in float32.
        workers: worker processes.
        transport: name of the transport of our scheme.
        repeats: rounds.
        folder: where transports that need a directory write; default: the system's temporary directory.

    Raises:
        ConfigError: the transport does not reach other processes.
        IntegrityError: a worker does not hold what was sent.
        DeadlineError: a worker does not answer.
    """
    if transport == "memory":
        raise ConfigError("the memory transport does not reach other processes", expected="another --transport")
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder))
        settings = {"root": f"{root}/updates"} if transport in ("disk", "delta") else {}
        say(f"starting {workers} workers with {parameters / 1e6:.0f} M parameters")
        followers = _Workers(transport, settings, parameters, workers, stack)
        say("measuring")
        seconds = rounds({way: partial(followers.timed, way) for way in _WAYS}, repeats)
        say("comparing the workers' weights")
        followers.compare()
        unsent = followers.sees_unsent_changes()
    return {
        "transport": transport,
        "parameters": parameters,
        "workers": workers,
        "torch": torch.__version__,
        "seconds": seconds,
        "ours / torchrl": ratio(seconds["ours"], seconds["torchrl"]),
        "ours / torchrl_shared": ratio(seconds["ours"], seconds["torchrl_shared"]),
        "workers see unsent changes": unsent,
    }


_WAYS = ("ours", "torchrl", "torchrl_shared")


class _Workers:
    """The worker processes that follow both schemes, with the trainer end of each scheme; ``stack`` ends them."""

    def __init__(
        self, transport: str, settings: dict[str, Any], parameters: int, workers: int, stack: ExitStack
    ) -> None:
        from tensordict import TensorDict
        from torchrl.weight_update import MultiProcessWeightSyncScheme

        from torchrl_ext.collectors.scheme import TransportWeightSyncScheme

        self._policy = _policy(parameters)
        self._weights = TensorDict.from_module(self._policy).data
        self._shared = self._weights.clone()  # TorchRL's workers will have these very tensors for parameters
        ours = TransportWeightSyncScheme(transport, timeout_s=TIMEOUT_S, **settings)
        theirs = MultiProcessWeightSyncScheme()
        context = multiprocessing.get_context("spawn")
        ours.init_on_sender(model_id="policy", weights=self._weights, num_workers=workers)
        devices = [torch.device("cpu")] * workers
        theirs.init_on_sender(model_id="policy", weights=self._shared, devices=devices, ctx=context)
        self._schemes: dict[str, Any] = {"ours": ours, "torchrl": theirs}
        self._pipes = []
        for idx in range(workers):
            pipe, other = context.Pipe()
            child = context.Process(target=_follow, args=(self._schemes, idx, parameters, other), daemon=True)
            child.start()
            self._pipes.append(pipe)
            stack.callback(child.join, TIMEOUT_S)
            stack.callback(child.kill)
        for scheme in self._schemes.values():
            stack.callback(scheme.shutdown)
            scheme.connect()
        self._ask("ready")

    def timed(self, way: str) -> float:
        """Change the policy everywhere, send it, and return the seconds that sending took."""
        self._step()
        scheme, weights = self._way(way)
        began = time.perf_counter()
        scheme.send(weights)
        return time.perf_counter() - began

    def compare(self) -> None:
        """Compare each worker's weights from each scheme with the trainer's policy."""
        for way in _WAYS:
            self.timed(way)
            for idx, sums in enumerate(self._ask(way.removesuffix("_shared"))):
                if sums != _sums(self._policy):
                    raise IntegrityError(f"worker {idx} does not hold what {way!r} sent")

    def sees_unsent_changes(self) -> dict[str, bool]:
        """Return by scheme whether workers see a change of the trainer's tensors that nobody sent."""
        self._step()
        self._shared.update_(self._weights)
        return {way: any(sums == _sums(self._policy) for sums in self._ask(way)) for way in self._schemes}

    @torch.no_grad()
    def _step(self) -> None:
        for parameter in self._policy.parameters():
            parameter.add_(1e-3)

    def _way(self, way: str) -> tuple[Any, Any]:
        """Return a way's scheme, and the weights that it sends."""
        if way == "ours":
            return self._schemes["ours"], self._weights
        if way == "torchrl":
            return self._schemes["torchrl"], self._weights.clone()
        return self._schemes["torchrl"], self._shared.update_(self._weights)

    def _ask(self, what: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(what)
        answers = []
        for idx, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise DeadlineError(f"worker {idx} did not answer within {TIMEOUT_S:g} s")
            answers.append(pipe.recv())
        return answers


def _policy(parameters: int) -> nn.Module:
    width = max(1, math.isqrt(parameters // LAYERS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def _sums(policy: nn.Module) -> list[int]:
    """Return the bits of each parameter, summed as integers."""
    return [int(each.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)) for each in policy.parameters()]


def _follow(schemes: dict[str, Any], idx: int, parameters: int, pipe: Any) -> None:
    """Run a worker process: follow both schemes, and answer questions until the pipe closes."""
    torch.set_num_threads(1)  # as TorchRL sets it in its collectors' workers
    policies = {name: _policy(parameters) for name in schemes}
    for name, scheme in schemes.items():
        scheme.init_on_receiver(model_id="policy", model=policies[name], worker_idx=idx)
        scheme.connect(worker_idx=idx)
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        pipe.send(_sums(policies[what]) if what in policies else what)
