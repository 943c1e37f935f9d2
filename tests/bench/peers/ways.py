"""Ways to bring a version into an engine: a block each, which yields a call that makes one update."""

from __future__ import annotations

import base64
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import save_file

import torchrl_ext as tx
from tests.bench.peers.site import Site, Weights

Sent = dict[str, Any]
"""``bytes`` and ``encode_s`` of an update."""
Update = Callable[[Weights], Sent]


@dataclass(frozen=True)
class Way:
    """One way, the server that it needs (a name of `tests.bench.peers.site.serving`), and what makes it ready.

    ``trainer`` names what it does on the trainer, where other ways do the same.
    """

    name: str
    server: str
    open: Callable[[Site], AbstractContextManager[Update]]
    ours: bool = False
    trainer: str = ""


@contextmanager
def ours(site: Site, transport: str, **settings: Any) -> Iterator[Update]:
    """A transport of this package."""
    if transport in ("disk", "delta") and settings.get("carrier") != "collective":
        settings["root"] = site.folder()
    if transport == "disk":
        settings["files"] = site.checkpoints.folder
    sender = tx.WeightSender(tx.make_transport(transport, **settings), tx.connect(site.url))

    def update(weights: Weights) -> Sent:
        report = sender.update_weights(weights)
        pause_s, encode_s = max(row.pause_s for row in report.engines), report.spans.get("prepare", 0.0)
        return {"bytes": report.bytes, "encode_s": encode_s, "reported_pause_s": pause_s, "proof": report.proof}

    with sender:
        yield update


@contextmanager
def reload_by_hand(site: Site, mode: str = "retract") -> Iterator[Update]:
    """`safetensors` and the engine's own reload, as one writes it by hand; ``mode`` is that of SGLang's pause."""
    folder = site.folder() / "model"
    shutil.copytree(site.checkpoints.folder, folder)

    def update(weights: Weights) -> Sent:
        began = time.perf_counter()
        save_file(weights, folder / "new", {"format": "pt"})
        os.replace(folder / "new", folder / "model.safetensors")
        written = time.perf_counter() - began
        if site.kind == "vllm":
            site.call("/pause", mode="keep")
            site.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            site.call("/reset_prefix_cache", reset_running_requests="true")
            site.call("/resume")
        else:
            with paused_sglang(site, mode):
                body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
                site.call("/update_weights_from_disk", body)
        return {"bytes": (folder / "model.safetensors").stat().st_size, "encode_s": written}

    yield update


@contextmanager
def paused_sglang(site: Site, mode: str) -> Iterator[None]:
    """Stops what runs, empties the cache, and goes on after the block.

    Mode ``"retract"`` returns running requests to the queue. ``"abort"`` ends them, as slime does; SGLang's server then
    sleeps a second before it looks whether they have ended (`TokenizerManager.pause_generation` of 0.5.23).
    """
    site.call("/pause_generation", {"mode": mode})
    site.call("/flush_cache", timeout=10)
    yield
    site.call("/continue_generation", {})


@contextmanager
def from_tensor(site: Site, mode: str = "retract") -> Iterator[Update]:
    """SGLang's ``update_weights_from_tensor``: tensors in shared memory, pickled as its own client does."""
    torch.multiprocessing.set_sharing_strategy("file_system")

    def update(weights: Weights) -> Sent:
        began = time.perf_counter()
        buffer = io.BytesIO()
        shared = [(name, tensor.clone()) for name, tensor in weights.items()]  # `dump` moves storages
        ForkingPickler(buffer).dump(shared)
        encoded = time.perf_counter() - began
        with paused_sglang(site, mode):
            site.call("/begin_weight_update", {})
            tensors = [base64.b64encode(buffer.getvalue()).decode()]
            site.call("/update_weights_from_tensor", {"serialized_named_tensors": tensors, "flush_cache": False})
            site.call("/end_weight_update", {})
        return {"bytes": sum(tensor.nbytes for tensor in weights.values()), "encode_s": encoded}

    try:
        yield update
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


OURS: dict[str, dict[str, Any]] = {
    "disk": {"transport": "disk"},  # the first of each server: its outputs are what others have to give
    "delta": {"transport": "delta", "keyframe_every": 0},
    "delta, ulp": {"transport": "delta", "encoding": "ulp", "keyframe_every": 0},
    "delta, context": {"transport": "delta", "encoding": "context", "keyframe_every": 0},
    "delta by broadcast": {"transport": "delta", "carrier": "collective", "keyframe_every": 0},
    "collective": {"transport": "collective"},
    "sharded": {"transport": "sharded"},
    "ipc": {"transport": "ipc"},
}
FILE, TENSOR = "safetensors", "update_weights_from_tensor"
HAND: dict[str, Callable[..., AbstractContextManager[Update]]] = {FILE: reload_by_hand, TENSOR: from_tensor}
"""What others do on the trainer."""
WAYS = [
    *(Way(name, make, partial(ours, **how), ours=True) for make in ("vllm", "sglang") for name, how in OURS.items()),
    Way(f"{FILE} + reload_weights by hand", "vllm", reload_by_hand, trainer=FILE),
    Way("native", "sglang", partial(ours, transport="native", make="sglang"), ours=True),
    Way(f"{FILE} + update_weights_from_disk by hand", "sglang", reload_by_hand, trainer=FILE),
    Way(f"{TENSOR} by hand", "sglang", from_tensor, trainer=TENSOR),
    Way(
        f"{FILE} + update_weights_from_disk as slime does",
        "sglang",
        partial(reload_by_hand, mode="abort"),
        trainer=FILE,
    ),
    Way(f"{TENSOR} as slime does", "sglang", partial(from_tensor, mode="abort"), trainer=TENSOR),
]
