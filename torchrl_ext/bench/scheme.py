"""``torchrl-ext bench scheme``: one update of a collector's workers, beside TorchRL's own multi-process scheme.

The same worker processes follow both schemes, each in a policy of its own, and between two updates the trainer's policy
changes everywhere. What is timed is ``scheme.send``, which returns when every worker has acknowledged. TorchRL's scheme
is measured twice. On a CPU its workers' parameters *are* the tensors that the scheme was made with, by shared memory:
sending those again moves nothing, and every step of an optimizer on them is seen by the workers at once, sent or not
(``torchrl_shared``). Weights that come from elsewhere, a GPU or shards, are copied, as ours always are (``torchrl``).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import nn

from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError
from torchrl_ext.registry import transports

__all__ = ["add_arguments", "measure", "tables"]

TIMEOUT_S = 300.0
LAYERS = 6
SIZES = {"full": 100_000_000, "small": 1_000_000}
FASTEST = ("ipc", "collective", "disk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="full: 100 M parameters of float32")
    parser.add_argument("--parameters", type=int, help="number of parameters, in place of --size")
    parser.add_argument("--workers", type=int, default=4, help="worker processes")
    parser.add_argument("--transport", choices=sorted(transports.names()), help="default: the fastest that there is")
    parser.add_argument("--dir", help="where transports that need a directory write (default: the temporary directory)")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both schemes in turns.

    Raises:
        ConfigError: the transport does not reach other processes.
        IntegrityError: a worker does not hold what was sent.
        DeadlineError: a worker does not answer.
    """
    transport = args.transport or next(name for name in FASTEST if name in transports.names())
    if transport == "memory":
        raise ConfigError("the memory transport does not reach other processes", expected="another --transport")
    parameters = args.parameters or SIZES[args.size]
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        settings = {"root": f"{folder}/updates"} if transport in ("disk", "delta") else {}
        say(f"starting {args.workers} workers with {parameters / 1e6:.0f} M parameters")
        with _Workers(transport, settings, parameters, args.workers) as followers:
            say("measuring")
            ways = {way: partial(followers.timed, way) for way in ("ours", "torchrl", "torchrl_shared")}
            seconds = rounds(ways, args.repeats)
            say("comparing what the workers hold")
            followers.compare()
            unsent, total = followers.sees_what_was_not_sent(), followers.bytes
    return {
        "transport": transport,
        "parameters": total // 4,
        "bytes": total,
        "workers": args.workers,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "seconds": seconds,
        "send_vs_torchrl": ratio(seconds["ours"], seconds["torchrl"], target=1.0),
        "send_vs_torchrl_shared": ratio(seconds["ours"], seconds["torchrl_shared"]),
        "workers_see_what_was_not_sent": unsent,
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """Show the seconds of both, and their ratio."""
    title = f"{results['parameters'] / 1e6:.0f} M parameters to {results['workers']} workers"
    seen = "workers see each step of the optimizer at once"
    table = Table("scheme", "send, s", "ours is times as fast", title=title)
    table.add_row(
        f"TransportWeightSyncScheme({results['transport']!r})", f"{median(results['seconds']['ours']):.3f}", ""
    )
    names = {
        "torchrl": "MultiProcessWeightSyncScheme, weights from elsewhere",
        "torchrl_shared": f"MultiProcessWeightSyncScheme, weights in shared memory: nothing moves, {seen}",
    }
    for way, name in names.items():
        found = results[f"send_vs_{way}"]
        text = f"{found['median']:.2f} ({found['low']:.2f} .. {found['high']:.2f})"
        table.add_row(name, f"{median(results['seconds'][way]):.3f}", text)
    return [table]


class _Workers:
    """The worker processes that follow both schemes, with the trainer end of each scheme."""

    def __init__(self, transport: str, settings: dict[str, Any], parameters: int, workers: int) -> None:
        from tensordict import TensorDict
        from torchrl.weight_update import MultiProcessWeightSyncScheme

        from torchrl_ext.collectors.scheme import TransportWeightSyncScheme

        self._policy = _policy(parameters)
        self._weights = TensorDict.from_module(self._policy).data
        self._shared = self._weights.clone()  # TorchRL's workers will have these very tensors for parameters
        self.bytes = sum(4 * one.numel() for one in self._policy.parameters())
        self._schemes: dict[str, Any] = {
            "ours": TransportWeightSyncScheme(transport, timeout_s=TIMEOUT_S, **settings),
            "torchrl": MultiProcessWeightSyncScheme(),
        }
        context = multiprocessing.get_context("spawn")
        self._schemes["ours"].init_on_sender(model_id="policy", weights=self._weights, num_workers=workers)
        self._schemes["torchrl"].init_on_sender(
            model_id="policy", weights=self._shared, devices=[torch.device("cpu")] * workers, ctx=context
        )
        self._pipes, self._children = [], []
        for idx in range(workers):
            ours, theirs = context.Pipe()
            child = context.Process(target=_follow, args=(self._schemes, idx, parameters, theirs), daemon=True)
            self._pipes.append(ours)
            self._children.append(child)

    def __enter__(self) -> _Workers:
        try:
            for child in self._children:
                child.start()
            for scheme in self._schemes.values():
                scheme.connect()
            self._ask("ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for scheme in self._schemes.values():
            scheme.shutdown()
        for child in self._children:
            child.kill()
            child.join(TIMEOUT_S)

    def timed(self, way: str) -> float:
        """Change the policy everywhere, send it, and return the seconds that sending took."""
        self._step()
        scheme, weights = self._way(way)
        began = time.perf_counter()
        scheme.send(weights)
        return time.perf_counter() - began

    def compare(self) -> None:
        """Compare what every worker has from each scheme with the trainer's policy."""
        for way in ("ours", "torchrl", "torchrl_shared"):
            self._step()
            scheme, weights = self._way(way)
            scheme.send(weights)
            for idx, sums in enumerate(self._ask(way.removesuffix("_shared"))):
                if sums != _sums(self._policy):
                    raise IntegrityError(f"worker {idx} does not hold what {way!r} sent")

    def sees_what_was_not_sent(self) -> dict[str, bool]:
        """Tell whether workers see a change of the trainer's tensors that nobody sent."""
        self._step()
        self._shared.update_(self._weights)
        return {way: any(sums == _sums(self._policy) for sums in self._ask(way)) for way in self._schemes}

    @torch.no_grad()
    def _step(self) -> None:
        for parameter in self._policy.parameters():
            parameter.add_(1e-3)

    def _way(self, way: str) -> tuple[Any, Any]:
        """Return the scheme, and the weights that it is to send."""
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
    return [int(one.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)) for one in policy.parameters()]


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
