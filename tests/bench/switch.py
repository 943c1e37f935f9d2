"""``python -m tests.bench switch``: what an in-process switch of weights does to requests that run.

Of vLLM: gaps between the tokens of 32 streams. Of the embedded engine: the first token after a switch of weights, with
keys and values kept and dropped.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.bench.models import SIZES, in_vllm, make_model
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--size", choices=SIZES, default="small", help="full: 418 M parameters")
    parser.add_argument("--requests", type=int, default=32, help="streams at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--switches", type=int, default=3, help="while they stream")
    parser.add_argument("--engine", choices=["both", "embedded"], default="both", help="embedded: without vLLM")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, for the embedded engine")
    parser.add_argument("--rows", type=int, default=8, help="requests at the same time, for the embedded engine")
    parser.add_argument("--way", choices=["path", "state dict"], default="state dict", help="where weights come from")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The same requests without and with switches, and with keys kept and dropped, in turns.

    Raises:
        EngineError: the process with vLLM failed.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making two models")
        models = [str(make_model(f"{folder}/model{seed}", args.size, seed=seed)) for seed in range(2)]
        say("an embedded engine goes on with and without its keys")
        keys = _first_tokens(models, args)
        if args.engine == "embedded":
            return {"cores": os.cpu_count(), "size": args.size, "keys": keys}
        say("vLLM streams and switches")
        asked = {
            "models": models,
            "requests": args.requests,
            "tokens": args.tokens,
            "switches": args.switches,
            "repeats": args.repeats,
            "way": args.way,
        }
        found = in_vllm("vllm_switch.py", asked)
    turns = found["rounds"]
    gaps = {
        which: {at: statistics.median(turn[which][f"{at}_s"] for turn in turns) for at in ("p50", "p95", "max")}
        for which in ("without", "with")
    }
    return {
        "cores": os.cpu_count(),
        "size": args.size,
        "way": args.way,
        "gaps_s": gaps,
        "ratios": {at: gaps["with"][at] / gaps["without"][at] for at in gaps["with"]},
        "pause_s": statistics.median(pause for turn in turns for pause in turn["pauses_s"]),
        "requests": sum(turn["with"]["requests"] for turn in turns),
        "complete_with_versions": sum(turn["with"]["complete_with_versions"] for turn in turns),
        "spanned_a_switch": sum(turn["with"]["spanned_a_switch"] for turn in turns),
        "keys": keys,
        **found,
    }


def _first_tokens(models: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the resume after a switch to the next token of each request, and their ratio kept / dropped."""
    engine, marks = Engine(models[0], context=args.prompt + 64), queue.Queue[float]()
    engine._model.register_forward_hook(lambda *_: marks.put(time.perf_counter()))
    sampling = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}

    def first(kept: bool) -> float:
        prompts = [[3 + (row + 7 * place) % 3000 for place in range(args.prompt)] for row in range(args.rows)]
        bodies = [{"token_ids": prompt, "sampling_params": sampling} for prompt in prompts]
        jobs = [engine.scheduler.submit(GenerateRequest.from_json(body, "request")) for body in bodies]
        for _ in range(4):
            marks.get(timeout=600)
        engine.pause("keep", 600)
        engine.reload(models[1], None)
        if not kept:
            engine.scheduler.forget()
        while not marks.empty():
            marks.get()
        began = time.perf_counter()
        engine.resume()
        took = marks.get(timeout=600) - began
        for job in jobs:
            job.future.result(600)
        while not marks.empty():
            marks.get()
        return took

    try:
        found = rounds({"kept": lambda: first(True), "dropped": lambda: first(False)}, args.repeats)
    finally:
        engine.close()
    seconds = {which: statistics.median(row) for which, row in found.items()}
    return {
        "rows": args.rows,
        "prompt": args.prompt,
        "seconds": seconds,
        "ratio": ratio(found["dropped"], found["kept"]),  # kept / dropped
    }
