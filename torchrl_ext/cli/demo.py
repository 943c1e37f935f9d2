"""``torchrl-ext demo``: the main job, small enough to watch.

A tiny causal LM is trained with GRPO on a task with a checkable reward. An engine in a process of its own makes the
rollouts; after each step the new weights go back to it. At the end the proof: the engine's weights are bit-equal to
the trainer's, and its greedy continuations equal the trainer's own.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_ext.cli.interrupts import Interrupts
from torchrl_ext.cli.progress import Progress
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import Info, SyncReport

__all__ = ["add_parser", "run"]

_ENGINES = ("embedded", "vllm")
_GROUP = 16
_MAX_TOKENS = 24


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny policy and keep an engine at its newest weights, with proof",
        description=__doc__.partition("\n\n")[2],
    )
    parser.add_argument("--transport", default="collective", help="how weights travel (default: %(default)s)")
    parser.add_argument("--engine", default="embedded", help="the engine to start: embedded or vllm")
    parser.add_argument("--engines", nargs="+", metavar="URL", help="follow with these running engines instead")
    parser.add_argument("--model", help="checkpoint directory to start from (default: a random tiny Qwen3)")
    parser.add_argument("--root", help="directory for transports that use files, seen by trainer and engines")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sampling (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser


@dataclass(kw_only=True)
class _Result:
    """What a run found out."""

    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    syncs: list[SyncReport] = field(default_factory=list)
    weights_equal: bool = False
    greedy_equal: bool = False

    @property
    def verified(self) -> bool:
        return self.weights_equal and self.greedy_equal and all(report.verified for report in self.syncs)


def run(args: argparse.Namespace) -> int:
    """Train, sync, prove; 0 where everything was verified, else 1."""
    _check(args)
    started = time.perf_counter()
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-demo-"))
        progress = stack.enter_context(Progress(args.steps))
        progress.say("preparing the model")
        urls, model_dir = _engines(args, Path(root), stack, progress)
        kinds, result = _train(args, urls, model_dir, args.root or str(Path(root) / "updates"), progress, interrupts)
        progress.conclude(result.verified, result.weights_equal, result.greedy_equal, result.rewards)
    if args.json:
        print(json.dumps(_document(args, kinds, urls, result, time.perf_counter() - started)))
    return 0 if result.verified else 1


def _check(args: argparse.Namespace) -> None:
    from torchrl_ext.registry import transports

    transports.load(args.transport)
    if args.transport == "memory":
        raise ConfigError(
            "transport 'memory' works within one process, and the demo's engine is a process of its own",
            expected=f"one of {', '.join(sorted(set(transports.names()) - {'memory'}))}",
        )
    if args.engine not in _ENGINES:
        raise ConfigError(f"the demo has no engine called {args.engine!r}", expected=f"one of {', '.join(_ENGINES)}")
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}", expected="at least 1")


def _engines(
    args: argparse.Namespace, root: Path, stack: contextlib.ExitStack, progress: Progress
) -> tuple[list[str], str]:
    """Addresses of running engines, and the directory of the checkpoint that they and the trainer start from."""
    if args.engines:
        return [info.url for info in _discovered(args)], args.model or _served_model(args)
    from torchrl_ext.launch.tiny import make_tiny_lm

    model_dir = args.model or str(make_tiny_lm(root / "model", seed=args.seed))
    progress.say(f"starting the {args.engine} engine")
    if args.engine == "vllm":
        from torchrl_ext.launch.vllm import VLLMServer

        server: Any = VLLMServer(model_dir, dtype="float32", log_path=root / "engine.log", report=progress.say)
    else:
        from torchrl_ext.launch.embedded import EmbeddedServer

        server = EmbeddedServer(
            model_dir, dtype="float32", threads=None if args.model else 1, log_path=root / "engine.log"
        )
    return [stack.enter_context(server).url], model_dir


def _discovered(args: argparse.Namespace) -> list[Any]:
    from torchrl_ext.rpc.discovery import discover

    return discover(*args.engines)


def _served_model(args: argparse.Namespace) -> str:
    model = _discovered(args)[0].model
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(
            f"{args.engines[0]} serves {model!r}, which is no checkpoint directory on this machine",
            hint="name the directory that training starts from with --model",
        )
    return model


def _train(
    args: argparse.Namespace, urls: Sequence[str], model_dir: str, root: str, progress: Progress, interrupts: Interrupts
) -> tuple[list[str], _Result]:
    import torch
    from transformers.utils import logging as transformers_logging

    import torchrl_ext as tx
    from torchrl_ext.cli.training import Trainer
    from torchrl_ext.registry import transports
    from torchrl_ext.rollout.client import InferenceClient

    transformers_logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    trainer = Trainer(model_dir, group=_GROUP)
    if not args.model:
        torch.set_num_threads(1)  # products this small lose more to waiting threads than they gain
    takes = inspect.signature(transports.load(args.transport)).parameters
    transport = tx.make_transport(args.transport, **({"root": root} if "root" in takes else {}))
    fleet = tx.connect(*urls)
    for info in fleet.infos():
        if args.transport not in info.transports:
            raise ConfigError(
                f"{info.url} cannot follow by {args.transport!r}", expected=f"one of {', '.join(info.transports)}"
            )
    sender = tx.WeightSender(transport, fleet)
    sender.register_model(trainer.model)
    clients = [InferenceClient(url) for url in urls]
    prompts, result = trainer.task.prompts, _Result()
    try:
        with interrupts.deferred("the first update"):
            progress.say("bringing the engine to the trainer's weights")
            result.syncs.append(sender.update_weights())
        for step in range(args.steps):
            client = clients[step % len(clients)]
            generations = client.generate(
                prompts,
                n=_GROUP,
                max_tokens=_MAX_TOKENS,
                seed=args.seed * 1_000_003 + step * 10_007,
                ignore_eos=True,  # equal lengths: batches need no padding
            )
            reward, loss = trainer.step(prompts, generations)
            with interrupts.deferred("the update under way"):
                report = sender.update_weights()
            result.rewards.append(reward)
            result.losses.append(loss)
            result.syncs.append(report)
            progress.step(step + 1, reward, loss, report)
        progress.say("comparing the engine with the trainer")
        result.weights_equal = _same_weights(trainer.model, fleet.infos(), result.syncs[-1])
        result.greedy_equal = _same_greedy(trainer, clients)
        return [info.kind for info in fleet.infos()], result
    finally:
        sender.shutdown()
        for client in clients:
            client.close()


def _same_weights(model: Any, engines: Sequence[Any], last: SyncReport) -> bool:
    """Whether every engine holds the bytes of ``model``.

    The embedded engine is asked for digests of its live weights now. Others took and compared them, parameter by
    parameter, when the last version landed: that is what ``verified`` of a report says.
    """
    from torchrl_ext.rpc.http import HTTPSession
    from torchrl_ext.weights.digest import tensor_digest
    from torchrl_ext.weights.source import as_source

    own = {name: tensor_digest(tensor) for name, tensor in as_source(model)}
    for info in engines:
        if info.kind != "embedded":
            continue
        session = HTTPSession(info.url)
        try:
            held = session.get("/weights_digest")["digests"]
            if any(held.get(name) != digest for name, digest in own.items()):
                return False  # what else it lists are second names of tied tensors, and buffers that no checkpoint has
        finally:
            session.close()
    return last.verified


def _same_greedy(trainer: Any, clients: Sequence[Any]) -> bool:
    """Whether every engine continues every prompt as the trainer does."""
    own = [trainer.greedy(prompt, _MAX_TOKENS) for prompt in trainer.task.prompts]
    found = [client.generate(trainer.task.prompts, max_tokens=_MAX_TOKENS, temperature=0.0) for client in clients]
    return all([generation.token_ids for generation in generations] == own for generations in found)


def _document(
    args: argparse.Namespace, kinds: Sequence[str], urls: Sequence[str], result: _Result, seconds: float
) -> Info:
    return {
        "verified": result.verified,
        "weights_equal": result.weights_equal,
        "greedy_equal": result.greedy_equal,
        "transport": args.transport,
        "engine": ", ".join(dict.fromkeys(kinds)),
        "engines": list(urls),
        "steps": args.steps,
        "seed": args.seed,
        "rewards": result.rewards,
        "losses": result.losses,
        "syncs": [report.to_json() for report in result.syncs],
        "seconds": seconds,
    }
