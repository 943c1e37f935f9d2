"""Ways to bring a version into an engine: a block each, which yields a call that makes one update."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
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
from tests.peers import slime_trainer

SLIME_COMMIT = "624b824a8"
Sent = dict[str, Any]
"""``bytes`` and ``encode_s`` of an update; ``total_s`` where it is not that of the call."""
Update = Callable[[Weights], Sent]


@dataclass(frozen=True)
class Way:
    """One way, the server that it needs (a name of `tests.bench.peers.site.serving`), and what makes it ready."""

    name: str
    server: str
    open: Callable[[Site], AbstractContextManager[Update]]
    ours: bool = False


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
def reload_by_hand(site: Site) -> Iterator[Update]:
    """`safetensors` and the engine's own reload, as one writes it by hand."""
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
            site.call("/reset_prefix_cache")
            site.call("/resume")
        else:
            with paused_sglang(site):
                body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
                site.call("/update_weights_from_disk", body)
        return {"bytes": (folder / "model.safetensors").stat().st_size, "encode_s": written}

    yield update


@contextmanager
def paused_sglang(site: Site) -> Iterator[None]:
    """Aborts what runs and empties the cache, as slime does, and goes on after the block."""
    site.call("/pause_generation", {"mode": "abort"})
    site.call("/flush_cache", timeout=10)
    yield
    site.call("/continue_generation", {})


@contextmanager
def from_tensor(site: Site) -> Iterator[Update]:
    """SGLang's ``update_weights_from_tensor``: tensors in shared memory, pickled as its own client does."""
    torch.multiprocessing.set_sharing_strategy("file_system")

    def update(weights: Weights) -> Sent:
        began = time.perf_counter()
        buffer = io.BytesIO()
        shared = [(name, tensor.clone()) for name, tensor in weights.items()]  # `dump` moves storages
        ForkingPickler(buffer).dump(shared)
        encoded = time.perf_counter() - began
        with paused_sglang(site):
            site.call("/begin_weight_update", {})
            tensors = [base64.b64encode(buffer.getvalue()).decode()]
            site.call("/update_weights_from_tensor", {"serialized_named_tensors": tensors, "flush_cache": False})
            site.call("/end_weight_update", {})
        return {"bytes": sum(tensor.nbytes for tensor in weights.values()), "encode_s": encoded}

    try:
        yield update
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


@contextmanager
def slime(site: Site, encoding: str) -> Iterator[Update]:
    """slime's own writer of deltas and its own reader, both unchanged, in a process of their own."""
    if "TORCHRL_EXT_SLIME" not in os.environ:
        raise LookupError("not run: TORCHRL_EXT_SLIME names no git repository of slime")
    place = site.folder()
    git = ["git", "-C", os.environ["TORCHRL_EXT_SLIME"]]
    archive = subprocess.run([*git, "archive", SLIME_COMMIT, "slime"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
    patch = f"{SLIME_COMMIT}:docker/patch/latest/sglang-pull_weights.patch"
    shown = subprocess.run([*git, "show", patch], capture_output=True, check=True, text=True).stdout
    added = shown.partition("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[2].partition("\ndiff --git")[0]
    reader = place / "local_checkpoint.py"
    reader.write_text("".join(f"{line[1:]}\n" for line in added.splitlines() if line.startswith("+")))
    args = {
        "update_weight_disk_dir": str(place / "disk"),
        "update_weight_local_checkpoint_dir": str(place / "local"),
        "update_weight_delta_encoding": encoding,
        "update_weight_delta_checksum": "xxh3-128",
        "custom_update_weight_post_write_path": None,
        "hf_checkpoint": str(site.checkpoints.folder),
    }
    told = json.dumps({"slime": str(place), "url": site.url, "args": args, "reader": str(reader)})
    with open(place / "log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, slime_trainer.__file__, told],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip

        def update(weights: Weights) -> Sent:
            path = place / "weights.safetensors"
            save_file(weights, path)
            assert process.stdin and process.stdout
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise RuntimeError(log.read()[-400:])
            return json.loads(line)

        try:
            update(site.checkpoints.start)  # its first one only takes its baseline
            yield update
        finally:
            process.kill()
            process.wait()


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
WAYS = [
    *(Way(name, make, partial(ours, **how), ours=True) for make in ("vllm", "sglang") for name, how in OURS.items()),
    Way("safetensors + reload_weights by hand", "vllm", reload_by_hand),
    Way("native", "sglang", partial(ours, transport="native", make="sglang"), ours=True),
    Way("safetensors + update_weights_from_disk by hand", "sglang", reload_by_hand),
    Way("update_weights_from_tensor by hand", "sglang", from_tensor),
    Way("slime, xor", "sglang", partial(slime, encoding="xor")),
    Way("slime, overwrite", "sglang", partial(slime, encoding="overwrite")),
]
