"""``python -m tests.bench landing``: what a pause costs, when a delta lands and when everything does.

Without ``--engine``: the commit alone, in vLLM's own model class without a server, by density and by model size, beside
a full reload and vLLM's own `load_checkpoint_weight_patches`. With ``--engine vllm``: end to end, a server that
generates while it follows by delta and by full files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bench.models import SIZES, in_vllm, make_model, plain_linears
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.makes.vllm import vllm_engine
from torchrl_ext.serving.engines.vllm import VLLMServer
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.weights.checkpoint import CheckpointSource

DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.5, 1.0)
PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--engine", choices=["vllm"], help="end to end in a server of this kind")
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 418 M parameters")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES))
    parser.add_argument("--packed", action="store_true", help="end to end: let a CPU server pack its linear weights")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Either of the two.

    Raises:
        EngineError: the process with the model failed.
    """
    numbers = {"size": args.size, "cores": os.cpu_count(), "torch": torch.__version__}
    if args.engine:
        return numbers | {"end_to_end": end_to_end(args.size, args.repeats, say, packed=args.packed)}
    return numbers | {"commit": measure_commit(args.size, args.densities, args.repeats, say)}


def measure_commit(size: str, densities: list[float], repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Two sweeps: by density at one size; by size at a fixed number of changed elements (1 % of the largest).

    Raises:
        EngineError: the process with the model failed; the message has the end of what it printed.
    """
    layers = SIZES[size]["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making a model")
        model = make_model(f"{folder}/model", size)
        total = sum(meta.numel for meta in CheckpointSource(model).params())
        say(f"commit by density, {total:,} parameters")
        largest = _in_vllm(model, [round(density * total) for density in densities], repeats)
        by_size = []
        for share in (4, 2):
            say(f"commit by size, 1/{share} of the layers")
            part = make_model(f"{folder}/part{share}", size, num_hidden_layers=layers // share)
            found = _in_vllm(part, [round(0.01 * total)], repeats)
            by_size.append({"parameters": found["parameters"], **found["rows"][0], "reload_s": found["reload_s"]})
    for row in largest["rows"]:
        row["ratios"] = {
            "commit / reload": row["commit_s"] / largest["reload_s"],
            "commit / load from memory": row["commit_s"] / largest["load_in_memory_s"],
            "commit / vLLM's patches": row["commit_s"] / row["vllm_s"],
            "extra memory / payload": row["extra_bytes"] / row["payload_bytes"],
        }
    return {**largest, "by_size": by_size}


def end_to_end(size: str, repeats: int, say: Callable[[str], None], *, packed: bool = False) -> dict[str, Any]:
    """Pauses of a server that generates meanwhile, by delta at 1 % and by full files; then a cold start beside it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-")))
        say("making a model")
        start = make_model(folder / "model", size)
        weights = {name: tensor.clone() for name, tensor in CheckpointSource(start)}
        say("starting vLLM")
        settings = settings_for("vllm") | {"max_model_len": 256}
        if not packed:
            stack.enter_context(plain_linears())
        server = stack.enter_context(VLLMServer(start, **settings))
        busy = stack.enter_context(_Busy(server.url))
        pauses: dict[str, list[float]] = {"delta": [], "disk": []}
        reports = []
        for turn in range(2):  # each trainer in turn, so that drift of the machine weighs on both
            for way in pauses:
                engine = vllm_engine(server.url)
                root = folder / f"{way}{turn}"
                transport = DeltaTransport(root) if way == "delta" else DiskTransport(root, files=start)
                sender = WeightSender(transport, engine)
                for step in range(-(-repeats // 2) + 1):
                    _step(weights, seed=1000 * turn + step)
                    say(f"{way}, update {step}")
                    report = sender.update_weights(weights)
                    if step:  # the first one of a chain is full
                        pauses[way].append(report.engines[0].pause_s)
                        reports.append(report.to_json())
                sender.shutdown()
        generated = busy.stop()
        say("one more by delta, which a cold start has to agree with")
        transport = DeltaTransport(folder / "last", keyframe_every=0)
        sender = WeightSender(transport, vllm_engine(server.url))
        sender.update_weights(weights)
        _step(weights, seed=7)
        last = sender.update_weights(weights)
        said = _tokens(server.url)
        sender.shutdown()
        checkpoint = _cold(folder / "cold-start", start, weights)
        server.stop()
        say("starting vLLM cold")
        with VLLMServer(checkpoint, **settings) as cold:
            fresh = _tokens(cold.url)
    middle = {way: statistics.median(found) for way, found in pauses.items()}
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "packed": packed,
        "density": last.density,
        "pauses_s": pauses,
        "median_pause_s": middle,
        "ratio": middle["delta"] / middle["disk"],
        "tokens_meanwhile": generated,
        "tokens_equal_a_cold_load": said == fresh,
        "reports": reports,
    }


class _Busy:
    """Requests that follow each other while the engine is measured."""

    def __init__(self, url: str, clients: int = 2) -> None:
        self._http = HTTPSession(url, timeout_s=600)
        self._pool, self._running, self._tokens = ThreadPoolExecutor(clients), True, [0] * clients
        self._clients = clients

    def __enter__(self) -> _Busy:
        self._ends = [self._pool.submit(self._generate, client) for client in range(self._clients)]
        return self

    def __exit__(self, *_: Any) -> None:
        self._running = False
        self._pool.shutdown()

    def stop(self) -> int:
        """End; returns the number of tokens that came. Raises what a request raised."""
        self._running = False
        for end in self._ends:
            end.result()
        return sum(self._tokens)

    def _generate(self, client: int) -> None:
        while self._running:
            self._tokens[client] += len(_generate(self._http, 64, temperature=1.0))


def _generate(http: HTTPSession, count: int, **sampling: Any) -> list[int]:
    parameters = {"temperature": 0, "max_tokens": count, "ignore_eos": True, **sampling}
    body = {"token_ids": PROMPT, "sampling_params": parameters}
    return http.post("/inference/v1/generate", body)["choices"][0]["token_ids"]


def _tokens(url: str) -> list[int]:
    return _generate(HTTPSession(url, timeout_s=300), 32)


def _step(weights: dict[str, Tensor], seed: int, density: float = 0.01) -> None:
    """Move ``density`` of the elements by one unit in the last place, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        count = max(1, round(density * bits.numel()))
        where = torch.randint(0, bits.numel(), (count,), generator=generator)
        bits[where] ^= 1


def _cold(folder: Path, start: Path, weights: dict[str, Tensor]) -> Path:
    """A checkpoint of these weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    for file in start.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _in_vllm(model: Path, elements: list[int], repeats: int) -> dict[str, Any]:
    asked = {"model": str(model), "elements": elements, "repeats": repeats, "port": free_port()}
    return in_vllm("vllm_landing.py", asked)
