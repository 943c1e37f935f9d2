"""``python -m tests.bench names``: a checkpoint of some 37,000 names, through an engine's loader and through ours."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torchrl_ext as tx
from tests.bench.data import say
from tests.models import SIZES, VOCAB, tiny_tokenizer
from torchrl_ext.base.registry import engines
from torchrl_ext.cli.bench import seconds
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving.server import start

EXPERTS, WIDTH = 128, 32
TIMEOUT_S = 400.0


def measure(
    *, engine: Literal["embedded", "vllm", "sglang"] = "embedded", layers: int = 94, repeats: int = 3
) -> dict[str, Any]:
    """Update one engine by delta: the first update, then of one tensor in a hundred, of none and of all.

    "engine of own" divides the seconds that an update spends in the engine by those of the engine's own loading of the
    same checkpoint; "trainer of copy" divides the trainer's work by a copy of each tensor.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-names-") as name:
        model = Path(name, "model")
        weights = checkpoint(model, layers)
        copied = statistics.median(seconds(lambda: [t.clone() for t in weights.values()]) for _ in range(5))
        say(f"starting {engine}")
        settings: dict[str, Any] = settings_for(engine) | {"dtype": "bfloat16", "start_timeout_s": TIMEOUT_S}
        settings |= {"max_model_len": 256, "log_path": Path(name, f"{engine}.log")}
        spec = engines.part(engine, "server")
        settings = {key: value for key, value in settings.items() if key in spec.settings()}
        with start(spec(model, **settings)) as server:
            version = tx.discover(server.url)[0].version
            rows = follow(server.url, weights, repeats, Path(name))
            # after the first update, which is rehearsed only while nothing was loaded; the first loading imports
            own = statistics.median([seconds(lambda: load(engine, server.url, model)) for _ in range(repeats + 1)][1:])
    for row in rows.values():
        row["engine of own"] = row["engine_s"] / own
        row["trainer of copy"] = row["trainer_s"] / copied
    versions = {} if engine == "embedded" else {engine: version}
    found = {"engine": engine, "versions": versions, "names": len(weights)}
    return {**found, "copy_s": copied, "own_load_s": own, "rows": rows}


def shapes(layers: int, experts: int = EXPERTS) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of Qwen3-235B-A22B's checkpoint, 36,945 for its 94 layers, with the shapes of a narrow model."""
    heads, one = 2 * WIDTH, WIDTH  # two query heads, one of keys and values
    yield "model.embed_tokens.weight", (VOCAB, WIDTH)
    for layer in range(layers):
        path = f"model.layers.{layer}"
        for expert in range(experts):
            for part in ("gate", "up", "down"):
                yield f"{path}.mlp.experts.{expert}.{part}_proj.weight", (WIDTH, WIDTH)
        yield f"{path}.mlp.gate.weight", (experts, WIDTH)
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            yield f"{path}.{norm}.weight", (WIDTH,)
        for part, shape in {"q": (heads, WIDTH), "k": (one, WIDTH), "v": (one, WIDTH), "o": (WIDTH, heads)}.items():
            yield f"{path}.self_attn.{part}_proj.weight", shape
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCAB, WIDTH)


def checkpoint(folder: Path, layers: int) -> dict[str, Tensor]:
    """Write a checkpoint that every engine loads, and return its tensors."""
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random).mul_(0.1).bfloat16() for name, shape in shapes(layers)}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), WIDTH)
    heads = {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    routing = {"num_experts": EXPERTS, "num_experts_per_tok": 8, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**SIZES | sizes | heads | routing, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def follow(url: str, weights: dict[str, Tensor], repeats: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Update the engine; the rows of updates after the first are medians of ``repeats``."""
    rows, names = dict[str, dict[str, Any]](), list(weights)
    transport = tx.DeltaTransport(folder / "updates", timeout_s=TIMEOUT_S)
    with tx.WeightSender(transport, tx.connect(url, timeout_s=TIMEOUT_S)) as sender:
        for what, changed in {"first": [], "1 % of tensors": names[::100], "none": [], "every tensor": names}.items():
            found = []
            for turn in range(1 if what == "first" else repeats):
                for name in changed:
                    weights[name].view(torch.int16).view(-1)[turn] += 1
                with sent_bytes() as sent:
                    report = sender.update_weights(weights)
                spent = {name: report.spans.get(name, 0.0) for name in ("connect", "rehearse", "prefetch", "commit")}
                trainer_s, total_s = report.spans["total"] - sum(spent.values()), report.spans["total"]
                row = {"total_s": total_s, "trainer_s": trainer_s, "engine_s": total_s - trainer_s}
                found.append(row | {"pause_s": spent["commit"], "messages_bytes": sum(sent), "proof": report.proof})
                say(f"{what}: {json.dumps(found[-1])}")
            rows[what] = sorted(found, key=lambda row: row["total_s"])[len(found) // 2]
    return rows


def load(engine: str, url: str, model: Path) -> None:
    """Have the engine load the checkpoint itself; `transformers` does it for the embedded one."""
    http = HTTPSession(url, timeout_s=TIMEOUT_S)
    if engine == "embedded":
        AutoModelForCausalLM.from_pretrained(model)
    elif engine == "vllm":
        http.call("POST", "/pause", query={"mode": "keep"}).checked()
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        http.call("POST", "/collective_rpc", body).checked()
        http.call("POST", "/resume").checked()
    else:
        body = {"model_path": str(model), "load_format": "auto", "flush_cache": False}
        http.call("POST", "/update_weights_from_disk", body).checked()


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Note the size of what is sent by HTTP in the block."""
    sizes, exchange = list[int](), HTTPSession.exchange

    def exchanged(session: HTTPSession, method: str, route: str, body: Any = None, **how: Any) -> Any:
        sizes.append(len(json.dumps(body)))
        return exchange(session, method, route, body, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPSession, "exchange", exchanged)
        yield sizes
