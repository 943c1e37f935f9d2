"""``torchrl-ext demo``: train a tiny policy and keep an engine at its newest weights, with proof.

A tiny causal LM is trained with GRPO on a task with a checkable reward. An engine in a process of its own makes the
rollouts; after each step the new weights go back to it. At the end the proof: the engine's weights are bit-equal to
the trainer's, and its greedy continuations equal the trainer's own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.cli.demo.terminal import Progress
from torchrl_ext.cli.interrupts import Interrupts
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import EngineInfo, Info, SyncReport

if TYPE_CHECKING:
    from torchrl_ext.cli.demo.ranks import Team

__all__ = ["add_parser", "run"]

_MAX_TOKENS = 24
_TENSOR_PARALLEL = "tensor_parallel_size"


_STORIES = {
    "vime": ("external", "vllm"),
    "slime": ("external", "sglang"),
    "torchrl": ("torchrl", "vllm"),
    "skyrl": ("skyrl", "vllm"),
    "switching": ("switching", "vllm"),
}
"""Name of a system -> the module under ``stories`` that acts out what it promises, and the engines that it uses."""


class _Seed(argparse.Action):
    """Takes a number, for ``seed``, or a name, for ``story``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        if value in _STORIES:
            namespace.story = value
            return
        try:
            namespace.seed = int(value)
        except ValueError:
            parser.error(f"argument {option}: {value!r} is neither a number nor one of {', '.join(_STORIES)}")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny policy and keep an engine at its newest weights, with proof",
        description=__doc__.partition("\n\n")[2],
    )
    parser.add_argument("--transport", default="collective", help="how weights travel (default: %(default)s)")
    parser.add_argument(
        "--engine",
        help="the engine to start: embedded, vllm or sglang (default: embedded, or the one that a NAME is about)",
    )
    parser.add_argument("--engines", nargs="+", metavar="URL", help="follow with these running engines instead")
    parser.add_argument("--model", help="checkpoint directory to start from (default: a random tiny Qwen3)")
    parser.add_argument("--root", help="directory for transports that use files, seen by trainer and engines")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--seed",
        action=_Seed,
        default=0,
        metavar="N|NAME",
        help="a number, of weights and sampling (default: 0); or a name, of the system whose promises are acted out "
        f"and checked in place of a training: {', '.join(_STORIES)}",
    )
    parser.add_argument("--random-seed", type=int, dest="seed", metavar="N", help="the number alone, beside a name")
    parser.set_defaults(story=None, verify=True)
    parser.add_argument(
        "--trainer-ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the policy, sharded by FSDP2 (default: %(default)s)",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="workers that share the started engine's model (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser


@dataclass(kw_only=True)
class _Result:
    """The rewards, losses and updates of a run, and what was proven."""

    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    syncs: list[SyncReport] = field(default_factory=list)
    on_policy: bool = False
    weights_equal: bool = False
    greedy_equal: bool = False

    @property
    def verified(self) -> bool:
        proven = self.on_policy and self.weights_equal and self.greedy_equal
        return proven and all(report.verified for report in self.syncs)


def run(args: argparse.Namespace) -> int:
    """Train with an update after each step, then compare both ends; return 0 where everything was verified, else 1."""
    if args.story is not None:
        return _act(args)
    args.engine = args.engine or "embedded"
    _check(args)
    started = time.perf_counter()
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-demo-"))
        progress = stack.enter_context(Progress(args.steps))
        progress.say("preparing the model")
        urls, model_dir = _engines(args, Path(root), stack, progress)
        team = stack.enter_context(_team(args, Path(root), model_dir, progress))
        kinds, result = _train(args, urls, team, progress, interrupts)
        progress.conclude(result.verified, result.weights_equal, result.greedy_equal, result.rewards)
    if args.json:
        print(json.dumps(_document(args, kinds, urls, result, time.perf_counter() - started)))
    return 0 if result.verified else 1


def _act(args: argparse.Namespace) -> int:
    """Act out a story; return 0 where everything in it held, else 1."""
    module, own = _STORIES[args.story]
    args.engine = args.engine or own
    for flag, given in (
        ("--transport", args.transport != "collective"),
        ("--root", args.root is not None),
        ("--trainer-ranks", args.trainer_ranks != 1),
        ("--tp", args.tp != 1),
    ):
        if given:
            raise ConfigError(f"{flag} is of the training, and demo {args.story!r} takes its own way")
    if args.engine not in ("embedded", own):
        raise ConfigError(f"demo {args.story!r} is about {own}", expected=f"--engine {own} or embedded")
    if args.engines and args.story == "switching":
        raise ConfigError("demo 'switching' is about an engine of its own process", hint="leave --engines out")
    from torchrl_ext.cli.demo.stage import Stage

    started = time.perf_counter()
    story = importlib.import_module(f"torchrl_ext.cli.demo.stories.{module}")
    _quiet()
    with Interrupts(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-demo-")))
        stage = stack.enter_context(
            Stage(kind=args.engine, urls=args.engines or (), model=args.model, seed=args.seed, folder=folder)
        )
        story.run(stage)
        stage.conclude()
    if args.json:
        print(json.dumps(stage.to_json(args.story, time.perf_counter() - started)))
    return 0 if stage.verified else 1


def _check(args: argparse.Namespace) -> None:
    from torchrl_ext.registry import engines, transports

    transports.load(args.transport)
    if args.transport == "memory":
        raise ConfigError(
            "transport 'memory' works within one process, and the demo's engine is a process of its own",
            expected=f"one of {', '.join(sorted(set(transports.names()) - {'memory'}))}",
        )
    for flag, given in (("--steps", args.steps), ("--trainer-ranks", args.trainer_ranks), ("--tp", args.tp)):
        if given < 1:
            raise ConfigError(f"{flag} is {given}", expected="at least 1")
    if not args.engines:
        engines.part(args.engine, "server")
    if args.tp > 1 and args.engines:
        raise ConfigError("--tp is of an engine that the demo starts, and --engines names some that run already")
    if args.tp > 1 and _TENSOR_PARALLEL not in engines.part(args.engine, "server").settings():
        raise ConfigError(
            f"--tp is {args.tp}, and a model of the {args.engine} engine is never shared by several workers",
            expected="1, or --engine vllm or sglang",
        )


def _engines(
    args: argparse.Namespace, root: Path, stack: contextlib.ExitStack, progress: Progress
) -> tuple[list[str], str]:
    """Find or start the engines; return their addresses, and the checkpoint that they and the trainer start from."""
    if args.engines:
        from torchrl_ext.compat.flags.options import WeightUpdateConfig

        found = _discovered(args)
        args.engine = found[0].kind
        if args.transport == "collective":
            args.transport = WeightUpdateConfig().transport_config(found).name  # another, where some lack our plugin
        args.verify = "outputs" if any(info.stock for info in found) else True  # those compare no digests
        return [info.url for info in found], args.model or _served_model(args)
    from torchrl_ext.cli.environments import settings_for
    from torchrl_ext.registry import engines
    from torchrl_ext.serving.server import start
    from torchrl_ext.testing.tiny import make_tiny_lm

    model_dir = args.model or str(make_tiny_lm(root / "model", seed=args.seed))
    progress.say(f"starting the {args.engine} engine")
    make = engines.part(args.engine, "server")
    threads = None if args.model else 1
    wanted: Info = {"dtype": "float32", "threads": threads, "log_path": root / "engine.log", _TENSOR_PARALLEL: args.tp}
    wanted = {name: value for name, value in wanted.items() if name in make.settings()}
    server = start(make(model_dir, **wanted, **settings_for(args.engine, report=progress.say)))
    return [stack.enter_context(server).url], model_dir


def _discovered(args: argparse.Namespace) -> list[Any]:
    from torchrl_ext.rpc.discovery import discover

    return discover(*args.engines)


def _served_model(args: argparse.Namespace) -> str:
    model = _discovered(args)[0].model
    needed = ("config.json", "tokenizer_config.json")  # SGLang names what it loaded last, which may have no tokenizer
    if not all((Path(model) / name).is_file() for name in needed):
        raise ConfigError(
            f"{args.engines[0]} serves {model!r}, which is no checkpoint directory with a tokenizer on this machine",
            hint="name the directory that training starts from with --model",
        )
    return model


def _team(args: argparse.Namespace, folder: Path, model_dir: str, progress: Progress) -> Team:
    """Return the ranks that train, of which this process is the first."""
    from torchrl_ext.cli.demo.ranks import Seat, Team
    from torchrl_ext.registry import transports

    if args.trainer_ranks > 1:
        progress.say(f"starting {args.trainer_ranks - 1} more trainer rank(s)")
    return Team(
        Seat(
            ranks=args.trainer_ranks,
            folder=str(folder),
            model_dir=model_dir,
            seed=args.seed,
            transport=args.transport,
            settings=_taken(
                transports.load(args.transport), root=args.root or str(folder / "updates"), make=args.engine
            ),
            verify=args.verify,
            threads=None if args.model else 1,
        )
    )


def _train(
    args: argparse.Namespace, urls: Sequence[str], team: Team, progress: Progress, interrupts: Interrupts
) -> tuple[list[str], _Result]:
    import torch
    from tensordict import set_list_to_stack
    from torchrl.collectors.llm import LLMCollector

    import torchrl_ext as tx
    from torchrl_ext.cli.demo.ranks import GROUP
    from torchrl_ext.cli.demo.training import Trainer
    from torchrl_ext.rollout.torchrl.lag import MaxLag

    _quiet()
    torch.manual_seed(args.seed)
    if not args.model:
        torch.set_num_threads(1)  # products this small lose more to waiting threads than they gain
    transport = tx.make_transport(args.transport, **team.seat.settings)
    fleet = tx.connect(*urls)
    infos = fleet.infos()
    for info in infos:
        if args.transport not in info.transports:
            raise ConfigError(
                f"{info.url} cannot follow by {args.transport!r}", expected=f"one of {', '.join(info.transports)}"
            )
    trainer = Trainer(team.seat.model_dir, group=GROUP, seed=args.seed, mesh=team.meet())
    sender = tx.WeightSender(transport, fleet, verify=team.seat.verify)
    sender.register_model(trainer.model)
    client = tx.InferenceClient(list(urls), kind=[info.kind for info in infos])
    policy = tx.RemoteLLMPolicy(
        client,
        tokenizer=trainer.tokenizer,
        input_mode="text",
        generate_kwargs={"max_new_tokens": _MAX_TOKENS, "ignore_eos": True},  # to end early would be an easy reward
        seed=args.seed * 1_000_003,
    )
    fresh, result = MaxLag(0, lambda: sender.version), _Result()
    with set_list_to_stack(True):  # as TorchRL's chat environments want it
        turns = trainer.task.turns
        collector = LLMCollector(
            trainer.task.env(),
            policy=policy,
            dialog_turns_per_batch=turns,
            total_dialog_turns=args.steps * turns,
            track_policy_version=True,
            postproc=fresh,
        )
        sender.register_collector(collector)
        try:
            with interrupts.deferred("the first update"):
                progress.say("bringing the engine to the trainer's weights")
                team.tell("update")
                result.syncs.append(sender.update_weights())
            for step, rollouts in enumerate(collector, 1):
                team.tell("step", rollouts)
                reward, loss = trainer.step(rollouts)
                with interrupts.deferred("the update under way"):
                    team.tell("update")
                    report = sender.update_weights()
                result.rewards.append(reward)
                result.losses.append(loss)
                result.syncs.append(report)
                progress.step(step, reward, loss, report)
            progress.say("comparing the engine with the trainer")
            team.tell("whole")
            model = trainer.whole()
            team.end()
            result.on_policy = fresh.seen > 0 and fresh.stale == 0
            result.weights_equal = _same_weights(model, urls, result.syncs[-1])
            result.greedy_equal = all(_same_greedy(model, trainer.task.prompts, info) for info in infos)
            return [info.kind for info in infos], result
        finally:
            sender.shutdown()
            client.close()
            collector.shutdown()


def _quiet() -> None:
    """Leave standard output to our document alone, and standard error to our progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it so
    for handler in logging.getLogger("torchrl").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def _taken(cls: Any, **settings: Any) -> dict[str, Any]:
    """Return those of ``settings`` that the constructor of ``cls`` takes."""
    known = inspect.signature(cls).parameters
    return {name: value for name, value in settings.items() if name in known}


def _same_weights(model: Any, urls: Sequence[str], last: SyncReport) -> bool:
    """Return whether every engine holds the bytes of ``model``.

    An engine that can is asked for digests of its live weights now. Others took and compared them, parameter by
    parameter, when the last version landed, or answered as the model does: that is what ``verified`` of a report says.
    """
    from torchrl_ext.rpc.http import HTTPSession
    from torchrl_ext.weights.digests import tensor_digest
    from torchrl_ext.weights.source import as_source

    own = {name: tensor_digest(tensor) for name, tensor in as_source(model)}
    for url in urls:
        answer = HTTPSession(url).call("GET", "/weights_digest")
        held = answer.json()["digests"] if answer.ok else own
        if any(held.get(name) != digest for name, digest in own.items()):
            return False  # what else it lists are second names of tied tensors, and buffers that no checkpoint has
    return last.verified


def _same_greedy(model: Any, prompts: Sequence[Sequence[int]], engine: EngineInfo) -> bool:
    """Return whether ``engine`` continues every prompt as ``model`` does."""
    from torchrl_ext.cli.demo.policy import greedy
    from torchrl_ext.rollout.client import InferenceClient

    client = InferenceClient(engine.url, kind=engine.kind)
    found = client.generate(list(prompts), max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    client.close()
    return [one.token_ids for one in found] == [greedy(model, prompt, _MAX_TOKENS) for prompt in prompts]


def _document(
    args: argparse.Namespace, kinds: Sequence[str], urls: Sequence[str], result: _Result, seconds: float
) -> Info:
    return {
        "verified": result.verified,
        "on_policy": result.on_policy,
        "weights_equal": result.weights_equal,
        "greedy_equal": result.greedy_equal,
        "transport": args.transport,
        "engine": ", ".join(dict.fromkeys(kinds)),
        "engines": list(urls),
        "trainer_ranks": args.trainer_ranks,
        "tp": args.tp,
        "steps": args.steps,
        "seed": args.seed,
        "rewards": result.rewards,
        "losses": result.losses,
        "syncs": [report.to_json() for report in result.syncs],
        "seconds": seconds,
    }
