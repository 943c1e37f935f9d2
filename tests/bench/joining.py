"""``python -m tests.bench joining``: how soon an engine that joins a running job serves the job's newest version."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

import torchrl_ext as tx
from tests.bench.frame import say, seconds
from tests.bench.models import make_model
from tests.embedded import EmbeddedServer
from tests.models import PROMPT
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.transports.base import Transport


def measure(
    *, repeats: int = 5, size: Literal["full", "small"] = "small", versions: int = 8, density: float = 0.02
) -> dict[str, Any]:
    """Seconds from an engine's "up" (it answers ``/health``) to a token of it that carries the job's version.

    The joiner starts from the checkpoint that the job began with, --versions versions ago, each of which changed a
    share --density of the elements. By delta it takes the chain, by disk the newest version, both at once; by
    collective it takes part in the next update, which sends everything to everyone.

    ``cold start`` is the alternative: start an engine (its process, from a fork that has imported everything) from a
    full checkpoint of the newest version, to its first token. ``read`` reads the files of that checkpoint once.
    """
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as folder:
        say("making a model")
        first, newest = make_model(f"{folder}/first", size), Path(folder, "newest")
        policy = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
        roots = {name: Path(folder, name) for name in ("delta", "disk")}
        made: dict[str, Transport] = {
            "delta": tx.make_transport("delta", root=roots["delta"], base=first),
            "disk": tx.make_transport("disk", root=roots["disk"]),
            "collective": tx.make_transport("collective"),
        }
        ways: dict[str, Callable[[], float]] = {}
        with _jobs(made, first) as senders:
            for _ in range(versions):
                _train(policy, density)
                for sender in senders.values():
                    sender.update_weights(policy)
            shutil.copytree(first, newest)
            policy.save_pretrained(newest)
            for name, sender in senders.items():
                ways[name] = partial(_joined, name, sender, policy, first)
            ways["cold start"] = partial(_cold, newest)
            ways["read"] = partial(seconds, lambda: [path.read_bytes() for path in newest.glob("*.safetensors")])
            say(f"{', '.join(ways)}, in turns")
            found = rounds(ways, repeats)
        joiners = [name for name in made if name in found]
        return {
            "bytes": sum(path.stat().st_size for path in newest.glob("*.safetensors")),
            "bytes of the chain": sum(path.stat().st_size for path in roots["delta"].rglob("*") if path.is_file()),
            "versions": versions,
            "density": density,
            "seconds": found,
            "cold start / joining": {name: ratio(found[name], found["cold start"]) for name in joiners},
            "joining / reading the files once": {name: ratio(found["read"], found[name]) for name in joiners},
        }


@contextmanager
def _jobs(made: dict[str, Transport], first: Path) -> Iterator[dict[str, tx.WeightSender]]:
    """A sender by each transport, with one engine of its own."""
    with EmbeddedServer(first) as one, EmbeddedServer(first) as two, EmbeddedServer(first) as three:
        servers = dict(zip(made, (one, two, three), strict=True))
        senders = {name: tx.WeightSender(each, tx.connect(servers[name].url)) for name, each in made.items()}
        yield senders
        for sender in senders.values():
            sender.shutdown()


def _joined(name: str, sender: tx.WeightSender, policy: Any, first: Path) -> float:
    fleet: Any = sender.engine
    with EmbeddedServer(first) as joiner:
        began = time.perf_counter()
        fleet.add(joiner.url)
        report = sender.update_weights(policy) if name == "collective" else sender.catch_up()
        version = _token(joiner)
        taken = time.perf_counter() - began
        assert version == str(sender.version) and report.verified, (version, report)
        fleet.remove(joiner.url)
    sender.catch_up()  # the fleet lets go of it, outside the time that counts
    return taken


def _cold(newest: Path) -> float:
    began = time.perf_counter()
    with EmbeddedServer(newest) as server:
        _token(server)
        return time.perf_counter() - began


def _token(server: EmbeddedServer) -> str:
    (found,) = InferenceClient(server.url, kind="embedded").generate([PROMPT], max_tokens=1, temperature=0)
    return found.weight_versions[-1].version


@torch.no_grad()
def _train(policy: torch.nn.Module, density: float) -> None:
    for tensor in policy.parameters():
        units = tensor.view(-1).view(torch.int16)
        units[torch.rand(len(units)) < density] += 1
