"""``torchrl-ext demo``: train a tiny policy and keep an engine at its newest weights, with proof."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.commands.push import check_engines
from torchrl_ext.cli.frame import Interrupts, answer, note

if TYPE_CHECKING:
    from torchrl_ext.base.types import EngineInfo, Info

__all__ = ["app"]

_MAX_TOKENS = 24

app = typer.Typer()


@app.command()
def demo(
    transport: Annotated[str, typer.Option(help="Transport of the weights.")] = "collective",
    engine: Annotated[str, typer.Option(help="Engine to start: embedded, vllm or sglang.")] = "embedded",
    engines: Annotated[
        list[str] | None, typer.Option("--engines", metavar="URL", help="Use these running engines instead.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory to start from. Default: a tiny random Qwen3.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Directory for transports that use files.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of weights and sampling.")] = 0,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Workers that share the started engine's model.")] = 1,
) -> int:
    """Train a tiny policy and keep an engine at its newest weights, with proof.

    The demo trains a tiny causal LM with GRPO on a task with a checkable reward. An engine in another process generates
    the rollouts, and receives the new weights after each step. At the end, the demo checks that the engine's weights
    are bit-equal to the trainer's and that its greedy continuations equal the trainer's own; if not, the exit status
    is 1.

    Examples:
    * `torchrl-ext demo`
    * `torchrl-ext demo --engine vllm --transport disk`
    * `torchrl-ext demo --transport sharded --engine vllm --tp 2`
    * `torchrl-ext demo --model policy --engines 127.0.0.1:8000 127.0.0.1:8001`
    """
    from torchrl_ext.base.registry import engines as makes
    from torchrl_ext.base.registry import transports

    began = time.perf_counter()
    known = inspect.signature(transports.load(transport)).parameters
    sizes = {"tensor_parallel_size": tp} if tp > 1 else {}
    if not engines and not sizes.keys() <= {*makes.part(engine, "server").settings()}:
        raise ConfigError(f"--tp is {tp}, and several workers never share a model of the {engine} engine")
    if transport == "memory" or (transport == "native" and not engines):
        raise ConfigError(
            f"transport {transport!r} does not reach an engine of our plugin in another process",
            hint="name stock engines with --engines, or another transport",
        )
    if root is not None and "root" not in known:
        raise ConfigError(f"transport {transport!r} uses no directory", hint="leave --root out")
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-demo-")))
        if engines:
            infos, transport, model_dir = _running(engines, transport, model)
        else:
            infos, model_dir = _started(engine, model, seed, sizes, folder, stack)
        check_engines(infos, transport)
        known = inspect.signature(transports.load(transport)).parameters
        settings = {"root": root or str(folder / "updates"), "make": infos[0].kind}
        settings = {name: value for name, value in settings.items() if name in known}
        if not model:
            import torch

            torch.set_num_threads(1)  # products of the tiny model lose more to waiting threads than they gain
        outcome = _train(infos, interrupts, transports.make(transport, **settings), model_dir, steps, seed)
    outcome |= {"transport": transport, "tp": tp, "steps": steps, "seed": seed}
    return answer({**outcome, "seconds": time.perf_counter() - began}, status=0 if outcome["verified"] else 1)


def _running(addresses: Sequence[str], transport: str, model: str | None) -> tuple[list[EngineInfo], str, str]:
    """Return the running engines, the transport that they can follow by, and the checkpoint that training starts from.

    Raises:
        ConfigError: the engines have no broadcast in common, or this machine has no checkpoint to start from.
    """
    from torchrl_ext.compat.flags.options import WeightUpdateConfig
    from torchrl_ext.control.discovery import discover

    infos = discover(*addresses)
    if transport == "collective":
        transport = WeightUpdateConfig().transport_config(infos).name  # another one, if some lack our plugin
    served = infos[0].model
    needed = ("config.json", "tokenizer_config.json")  # SGLang names what it loaded last, which may have no tokenizer
    if model is None and not all((Path(served) / name).is_file() for name in needed):
        raise ConfigError(
            f"{infos[0].url} serves {served!r}, which is not a checkpoint directory with a tokenizer on this machine",
            hint="name the directory that training starts from with --model",
        )
    return infos, transport, model or served


def _started(
    engine: str, model: str | None, seed: int, sizes: Info, folder: Path, stack: contextlib.ExitStack
) -> tuple[list[EngineInfo], str]:
    """Start an engine that ends with ``stack``; return its description, and the checkpoint that it started from."""
    from torchrl_ext.base.registry import engines
    from torchrl_ext.cli.environments import settings_for
    from torchrl_ext.control.discovery import discover
    from torchrl_ext.control.serving.server import start
    from torchrl_ext.testing.tiny import make_tiny_lm

    make, model_dir = engines.part(engine, "server"), model or str(make_tiny_lm(folder / "model", seed=seed))
    wanted: Info = {"dtype": "float32", "threads": None if model else 1, "log_path": folder / "engine.log"}
    wanted = {name: value for name, value in {**wanted, **sizes}.items() if name in make.settings()}
    note(f"starting the {engine} engine")
    server = stack.enter_context(start(make(model_dir, **wanted, **settings_for(engine))))
    return discover(server.url), model_dir


def _train(
    infos: Sequence[EngineInfo], interrupts: Interrupts, transport: Any, model_dir: str, steps: int, seed: int
) -> Info:
    """Train with an update at the start and after each step; return the document of ``--json``."""
    import torch
    from tensordict import set_list_to_stack
    from torchrl.collectors.llm import LLMCollector

    import torchrl_ext as tx
    from torchrl_ext.cli.training import Trainer, quiet
    from torchrl_ext.rl.versions import MaxLag

    quiet()
    torch.manual_seed(seed)
    urls, kinds, rewards, losses = [info.url for info in infos], [info.kind for info in infos], [], []
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_list_to_stack(True))  # as TorchRL's chat environments want it
        note("preparing the model")
        trainer = Trainer(model_dir, seed=seed)
        verify: bool | str = "outputs" if any(info.stock for info in infos) else True
        sender = stack.enter_context(tx.WeightSender(transport, tx.connect(*urls), verify=verify))
        sender.register_model(trainer.model)
        client = tx.InferenceClient(urls, kind=kinds)
        policy = tx.RemoteLLMPolicy(
            client,
            tokenizer=trainer.tokenizer,
            input_mode="text",
            generate_kwargs={"max_new_tokens": _MAX_TOKENS, "ignore_eos": True},  # to end early would be an easy reward
            seed=seed * 1_000_003,
        )
        fresh, turns = MaxLag(0, lambda: sender.version), trainer.task.turns
        collector = LLMCollector(
            trainer.task.env(),
            policy=policy,
            dialog_turns_per_batch=turns,
            total_dialog_turns=steps * turns,
            track_policy_version=True,
            postproc=fresh,
        )
        stack.callback(collector.shutdown)
        sender.register_collector(collector)
        note("loading the trainer's weights into the engine")
        with interrupts.deferred("the first update"):
            syncs = [sender.update_weights()]
        for step, rollouts in enumerate(collector, 1):
            reward, loss = trainer.step(rollouts)
            with interrupts.deferred("the update under way"):
                syncs.append(sender.update_weights())
            rewards.append(reward)
            losses.append(loss)
            version, size = syncs[-1].version, syncs[-1].bytes
            note(f"step {step}  reward {reward:.3f}  loss {loss:+.4f}  version {version}  {size:,} bytes")
        note("comparing the engine with the trainer")
        found = {
            "on_policy": fresh.seen > 0 and fresh.stale == 0,
            "weights_equal": syncs[-1].verified and all(_same_weights(trainer.model, url) for url in urls),
            "greedy_equal": all(_same_greedy(trainer.model, trainer.task.prompts, info) for info in infos),
        }
    verified = all(found.values()) and all(report.verified for report in syncs)
    words = {True: "yes", False: "no"}
    note(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    note(f"engine's weights bit-equal to the trainer's: {words[found['weights_equal']]}")
    note(f"engine's greedy continuations equal to the trainer's: {words[found['greedy_equal']]}")
    note("verified" if verified else "NOT verified")
    return {
        "verified": verified,
        **found,
        "engine": ", ".join(dict.fromkeys(kinds)),
        "engines": urls,
        "rewards": rewards,
        "losses": losses,
        "syncs": [report.to_json() for report in syncs],
    }


def _same_weights(model: Any, url: str) -> bool:
    """Return whether an engine's own digests (``/weights_digest``) are the model's; True where it reports none."""
    from torchrl_ext.control.http import HTTPSession
    from torchrl_ext.data.weights.derived import as_source
    from torchrl_ext.data.weights.digests import digests_of

    said = HTTPSession(url).call("GET", "/weights_digest")
    held = said.json()["digests"] if said.ok else None  # more names than here: second ones of tied tensors, and buffers
    return held is None or all(held.get(name) == one.hex() for name, one in digests_of(as_source(model)).items())


def _same_greedy(model: Any, prompts: Sequence[Sequence[int]], engine: EngineInfo) -> bool:
    """Return whether ``engine`` continues every prompt as ``model`` does."""
    from torchrl_ext.cli.training import greedy
    from torchrl_ext.control.requests.client import InferenceClient

    client = InferenceClient(engine.url, kind=engine.kind)
    found = client.generate(list(prompts), max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in found] == [greedy(model, prompt, _MAX_TOKENS) for prompt in prompts]
