"""``python -m tests.bench switch``: what an in-process switch of weights does to requests that run.

Of vLLM: gaps between the tokens of 32 streams. Of the embedded engine: the first token after a switch of weights, with
keys and values kept and dropped.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
from typing import Any, Literal

from tests.bench.frame import say
from tests.bench.models import in_vllm, make_model
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest


def measure(
    *,
    repeats: int = 7,
    size: Literal["full", "small"] = "small",
    requests: int = 32,
    tokens: int = 64,
    switches: int = 3,
    engine: Literal["both", "embedded"] = "both",
    prompt: int = 512,
    rows: int = 8,
    way: Literal["path", "state dict"] = "state dict",
) -> dict[str, Any]:
    """The same requests without and with switches, and with keys kept and dropped, in turns.

    vLLM: --requests streams of --tokens each, and --switches while they stream, from the --way that holds the weights.
    The embedded engine: --rows requests with prompts of --prompt tokens.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making two models")
        models = [str(make_model(f"{folder}/model{seed}", size, seed=seed)) for seed in range(2)]
        say("an embedded engine goes on with and without its keys")
        keys = _first_tokens(models, prompt, rows, repeats)
        if engine == "embedded":
            return {"cores": os.cpu_count(), "size": size, "keys": keys}
        say("vLLM streams and switches")
        asked = {
            "models": models,
            "requests": requests,
            "tokens": tokens,
            "switches": switches,
            "repeats": repeats,
            "way": way,
        }
        found = in_vllm("vllm_switch.py", asked)
    turns = found["rounds"]
    gaps = {
        which: {at: statistics.median(turn[which][f"{at}_s"] for turn in turns) for at in ("p50", "p95", "max")}
        for which in ("without", "with")
    }
    return {
        "cores": os.cpu_count(),
        "size": size,
        "way": way,
        "gaps_s": gaps,
        "ratios": {at: gaps["with"][at] / gaps["without"][at] for at in gaps["with"]},
        "pause_s": statistics.median(pause for turn in turns for pause in turn["pauses_s"]),
        "requests": sum(turn["with"]["requests"] for turn in turns),
        "complete_with_versions": sum(turn["with"]["complete_with_versions"] for turn in turns),
        "spanned_a_switch": sum(turn["with"]["spanned_a_switch"] for turn in turns),
        "keys": keys,
        **found,
    }


def _first_tokens(models: list[str], prompt: int, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds from the resume after a switch to the next token of each request, and their ratio kept / dropped."""
    engine, marks = Engine(models[0], context=prompt + 64), queue.Queue[float]()
    engine._model.register_forward_hook(lambda *_: marks.put(time.perf_counter()))
    sampling = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}

    def first(kept: bool) -> float:
        prompts = [[3 + (row + 7 * place) % 3000 for place in range(prompt)] for row in range(rows)]
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
        found = rounds({"kept": lambda: first(True), "dropped": lambda: first(False)}, repeats)
    finally:
        engine.close()
    seconds = {which: statistics.median(row) for which, row in found.items()}
    return {
        "rows": rows,
        "prompt": prompt,
        "seconds": seconds,
        "ratio": ratio(found["dropped"], found["kept"]),  # kept / dropped
    }
