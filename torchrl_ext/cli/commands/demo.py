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
    from torchrl_ext.base.reports import SyncReport
    from torchrl_ext.base.types import EngineInfo, Info
    from torchrl_ext.control.client import EngineClient

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
    is 1. By `delta`, training is in float32, and an engine that the demo starts serves bfloat16, as in practice: the
    trainer's weights are compared as rounded, and log-probabilities in place of continuations.

    Examples:
    * `torchrl-ext demo`
    * `torchrl-ext demo --engine vllm --transport disk`
    * `torchrl-ext demo --transport sharded --engine vllm --tp 2`
    * `torchrl-ext demo --model policy --engines 127.0.0.1:8000 127.0.0.1:8001`
    """
    from torchrl_ext.base.registry import engines as makes
    from torchrl_ext.base.registry import transports

    dtype = "bfloat16" if transport == "delta" and not engines else "float32"
    began = time.perf_counter()
    note(f"a tiny policy trains for {steps} steps, and an engine follows by {transport}; loading PyTorch")
    known = inspect.signature(transports.load(transport)).parameters
    sizes = {"tensor_parallel_size": tp} if tp > 1 else {}
    if not engines and not sizes.keys() <= {*makes.part(engine, "server").settings()}:
        raise ConfigError(
            f"--tp is {tp}, and several workers never share a model of the {engine} engine",
            hint="--engine vllm or sglang",
        )
    if transport == "memory":
        raise ConfigError("transport 'memory' reaches no other process", hint="use --transport ipc or collective")
    if transport == "native" and not engines:
        raise ConfigError(
            "transport 'native' is for servers without torchrl_ext, and the demo starts one with it",
            hint="name a running vLLM or SGLang with --engines, or use --transport collective",
        )
    if root is not None and "root" not in known:
        raise ConfigError(f"transport {transport!r} uses no directory", hint="leave --root out")
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-demo-")))
        if engines:
            infos, transport, model_dir = _running(engines, transport, model)
        else:
            infos, model_dir = _started(engine, model, seed, {**sizes, "dtype": dtype}, folder, stack)
        check_engines(infos, transport)
        known = inspect.signature(transports.load(transport)).parameters
        settings = {"root": root or str(folder / "updates"), "make": infos[0].kind}
        settings = {name: value for name, value in settings.items() if name in known}
        if not model:
            import torch

            torch.set_num_threads(1)  # products of the tiny model lose more to waiting threads than they gain
        outcome = _train(infos, interrupts, transports.make(transport, **settings), model_dir, steps, seed, dtype)
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
    engine: str, model: str | None, seed: int, more: Info, folder: Path, stack: contextlib.ExitStack
) -> tuple[list[EngineInfo], str]:
    """Start an engine that ends with ``stack``; return its description, and the checkpoint that it started from."""
    from torchrl_ext.base.registry import engines
    from torchrl_ext.cli.environments import settings_for
    from torchrl_ext.control.discovery import discover
    from torchrl_ext.control.serving.server import start
    from torchrl_ext.testing.tiny import make_tiny_lm

    make, model_dir = engines.part(engine, "server"), model or str(make_tiny_lm(folder / "model", seed=seed))
    wanted: Info = {"threads": None if model else 1, "log_path": folder / "engine.log"}
    wanted = {name: value for name, value in {**wanted, **more}.items() if name in make.settings()}
    note(f"starting the {engine} engine")
    server = stack.enter_context(start(make(model_dir, **wanted, **settings_for(engine))))
    return discover(server.url), model_dir


def _train(
    infos: Sequence[EngineInfo],
    interrupts: Interrupts,
    transport: Any,
    model_dir: str,
    steps: int,
    seed: int,
    dtype: str,
) -> Info:
    """Train with an update at the start and after each step; return the document of ``--json``.

    Args:
        dtype: in which engines serve what is trained in float32.
    """
    import torch
    from tensordict import set_list_to_stack
    from torchrl.collectors.llm import LLMCollector

    import torchrl_ext as tx
    from torchrl_ext.cli.training import Trainer, quiet, rounded
    from torchrl_ext.rl.versions import MaxLag

    quiet()
    torch.manual_seed(seed)
    urls, kinds, rewards, losses = [info.url for info in infos], [info.kind for info in infos], [], []
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_list_to_stack(True))  # as TorchRL's chat environments want it
        note("preparing the model")
        trainer = Trainer(model_dir, seed=seed)
        cast = None if dtype == "float32" else getattr(torch, dtype)  # else the dtype of training
        verify: bool | str = "outputs" if any(info.stock for info in infos) else True
        sender = stack.enter_context(tx.WeightSender(transport, tx.connect(*urls), verify=verify, dtype=cast))
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
            note(f"step {step}  reward {reward:.3f}  loss {loss:+.4f}  {_line(syncs[-1])}")
        note("comparing the engine with the trainer")
        served, prompts = trainer.model if cast is None else rounded(trainer.model, cast), trainer.task.prompts
        found = {
            "on_policy": fresh.seen > 0 and fresh.stale == 0,
            "weights_equal": syncs[-1].verified and all(_same_weights(served, url) for url in urls),
        }
        if cast is None:
            found["greedy_equal"] = all(_same_greedy(served, prompts, info) for info in infos)
            outputs = "greedy continuations equal to the trainer's"
        else:
            gap, bound = _gap(served, prompts, sender.engine)
            found["outputs_close"] = gap <= bound
            outputs = f"log-probabilities at most {bound:g} nats from the trainer's (they are {gap:.2g} off)"
    verified = all(found.values()) and all(report.verified for report in syncs)
    words = {True: "yes", False: "no"}
    note(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    as_rounded = "" if cast is None else f", rounded to {dtype}"
    note(f"engine's weights bit-equal to the trainer's{as_rounded}: {words[found['weights_equal']]}")
    note(f"engine's {outputs}: {words[found.get('greedy_equal', found.get('outputs_close', False))]}")
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


def _line(report: SyncReport) -> str:
    """Return an update's version, bytes, pause and proof."""
    share = f"{report.bytes:,} of {report.model_bytes:,} bytes"
    live = all(row.commit == "live" for row in report.engines)
    pause = "no pause" if live else f"paused {1e3 * max(row.pause_s for row in report.engines):.0f} ms"
    return f"version {report.version}  {share}  {pause}  proof: {report.proof}"


def _gap(model: Any, prompts: Sequence[Sequence[int]], fleet: EngineClient) -> tuple[float, float]:
    """Return how far an engine's log-probabilities of the prompts are from the model's, and may be, in nats."""
    from torchrl_ext.data.weights.derived import as_source
    from torchrl_ext.sync.outputs import bound_of, gaps, score

    expected, bound = score(model, prompts), bound_of(as_source(model).params())
    return max(gaps(expected, engine.logprobs(prompts))[0] for engine in fleet.each()), bound


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
