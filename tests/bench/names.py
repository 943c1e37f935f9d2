"""``python -m tests.bench names``: a checkpoint of some 37,000 names, through an engine's loader and through ours."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
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
from tests.bench.frame import say
from tests.models import VOCAB, tiny_tokenizer
from torchrl_ext.base.registry import engines
from torchrl_ext.cli.bench.runner import seconds
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving.embedded import EmbeddedSpec
from torchrl_ext.control.serving.server import start

EXPERTS, WIDTH = 128, 32
TIMED = Path(__file__).with_name("timed")
TIMEOUT_S = 400.0
Row = dict[str, Any]


def measure(
    *,
    engine: Literal["embedded", "vllm", "sglang"] = "embedded",
    layers: int = 94,
    transport: list[str] = ["delta", "disk"],  # noqa: B006 - read only
    repeats: int = 3,
) -> dict[str, Any]:
    """Update one engine by each --transport: the first update, then of one tensor in a hundred, of none and of all.

    "ours of own" divides what an update takes in the engine, without what the engine's own code takes in it, by the
    engine's own loading of the same checkpoint; "trainer of copy" divides the trainer's work by a copy of each tensor.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-names-") as name:
        folder = Path(name)
        weights = checkpoint(folder / "model", layers)
        copied = statistics.median(seconds(lambda: [t.clone() for t in weights.values()]) for _ in range(5))
        found: dict[str, Any] = {"engine": engine, "names": len(weights), "copy_s": copied}
        rows, own = dict[str, Row](), 0.0
        with serving(engine, folder) as site:
            for number, kind in enumerate(transport):
                rows |= {f"{kind}, {what}": row for what, row in site.follow(kind, weights, repeats).items()}
                if not number:  # not before: the first update is rehearsed only while nothing was loaded
                    own = found["own_load_s"] = site.reload(repeats)
    for row in rows.values():
        row["ours of own"] = row["ours_s"] / own
        row["trainer of copy"] = row["trainer_s"] / copied
    return found | {"rows": rows}


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
    """Write a checkpoint that both engines load, and return its tensors."""
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random).mul_(0.1).bfloat16() for name, shape in shapes(layers)}
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=WIDTH,
        max_position_embeddings=512,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@contextmanager
def serving(engine: str, folder: Path) -> Iterator[Site]:
    """A server of a checkpoint, which writes down what calls take."""
    say(f"starting {engine}")
    calls = folder / "calls"
    settings: dict[str, Any] = settings_for(engine) | {"dtype": "bfloat16", "start_timeout_s": TIMEOUT_S}
    settings |= {"max_model_len": 256, "log_path": folder / f"{engine}.log"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHRL_EXT_TIMED", str(calls))
        patch.setenv("PYTHONPATH", str(TIMED), prepend=os.pathsep)
        patch.setenv("VLLM_PLUGINS", "timed_calls,torchrl_ext_cpu")
        spec = _TimedEmbedded if engine == "embedded" else engines.part(engine, "server")
        server = start(spec(folder / "model", **settings))
    with server:
        yield Site(engine, server.url, folder, calls)


class _TimedEmbedded(EmbeddedSpec):
    def command(self, port: int) -> list[str]:
        return [*super().command(port), "--routes", "timed_calls:routes"]


class Site:
    """A running server, and what its calls took."""

    def __init__(self, engine: str, url: str, folder: Path, calls: Path) -> None:
        self._engine, self._url, self._folder, self._calls, self._read = engine, url, folder, calls, 0

    def follow(self, transport: str, weights: dict[str, Tensor], repeats: int) -> dict[str, Row]:
        """Update by a transport; the rows of updates after the first are medians of ``repeats``."""
        rows: dict[str, list[Row]] = defaultdict(list)
        with tempfile.TemporaryDirectory(dir=self._folder) as root:
            made = tx.make_transport(transport, root=root, timeout_s=TIMEOUT_S, files=self._folder / "model")
            with tx.WeightSender(made, tx.connect(self._url, timeout_s=TIMEOUT_S)) as sender:
                names = list(weights)
                plan = {"first": [], "1 % of tensors": names[::100], "nothing": [], "every tensor": names}
                for what, changed in plan.items():
                    for turn in range(1 if what == "first" else repeats):
                        say(f"{self._engine}, {transport}: {what} {turn}")
                        for name in changed:
                            weights[name].view(torch.int16).view(-1)[turn] += 1
                        rows[what].append(row := self._row(sender, weights))
                        say(json.dumps(row))
        return {what: sorted(found, key=lambda row: row["total_s"])[len(found) // 2] for what, found in rows.items()}

    def _row(self, sender: tx.WeightSender, weights: dict[str, Tensor]) -> Row:
        with sent() as (bodies, took):
            report = sender.update_weights(weights)
        found: Row = {"total_s": report.spans["total"], "proof": report.proof}
        found["trainer_s"] = report.spans["prepare"] + took["source"]
        found["messages_bytes"] = sum(len(json.dumps(body)) for body in bodies)
        found |= {f"{name}_s": report.spans.get(name, 0.0) for name in ("connect", "rehearse", "prefetch", "pause")}
        lines = self._calls.read_text().splitlines()
        spent = [json.loads(line) for line in lines[self._read :]]
        self._read = len(lines)
        return found | {f"{whose}_s": sum(call.get(whose, 0.0) for call in spent) for whose in ("engine", "ours")}

    def reload(self, repeats: int) -> float:
        """Return the seconds in which the engine loads the checkpoint itself; `transformers` for the embedded one."""
        self._load()  # the first one imports
        found = statistics.median(seconds(self._load) for _ in range(repeats))
        say(f"{self._engine}: its own loading takes {found:.2f} s")
        return found

    def _load(self) -> None:
        path, http = str(self._folder / "model"), HTTPSession(self._url, timeout_s=TIMEOUT_S)
        if self._engine == "embedded":
            AutoModelForCausalLM.from_pretrained(path)
        elif self._engine == "vllm":
            http.call("POST", "/pause", query={"mode": "keep"}).checked()
            body: Row = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            http.call("POST", "/collective_rpc", body).checked()
            http.call("POST", "/resume").checked()
        else:
            body = {"model_path": path, "load_format": "auto", "flush_cache": False}
            http.call("POST", "/update_weights_from_disk", body).checked()


@contextmanager
def sent() -> Iterator[tuple[list[Any], dict[str, float]]]:
    """What is sent by HTTP in the block, and the seconds of `WeightSender._source`."""
    bodies: list[Any] = []
    took: dict[str, float] = defaultdict(float)
    exchange, source = HTTPSession.exchange, tx.WeightSender._source

    def exchanged(session: HTTPSession, method: str, route: str, body: Any = None, **how: Any) -> Any:
        bodies.append(body)
        return exchange(session, method, route, body, **how)

    def made(*given: Any, **settings: Any) -> Any:
        began = time.perf_counter()
        try:
            return source(*given, **settings)
        finally:
            took["source"] += time.perf_counter() - began

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPSession, "exchange", exchanged)
        patch.setattr(tx.WeightSender, "_source", made)
        yield bodies, took
