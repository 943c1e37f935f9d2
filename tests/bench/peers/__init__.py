"""``python -m tests.bench peers``: our transports beside what a user would choose instead, on one machine.

Three parts: ``bits`` weighs layouts on a step of a real training run; ``vllm`` and ``sglang`` update one real engine of
each make in every way, while a client asks it for one token after the other. Whatever fails is a row with its error.
What a trainer needs of memory is measured by ``python -m tests.bench memory``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import torchrl_ext as tx
from tests.bench.data import Step, bounds, say
from tests.bench.peers.site import Checkpoints, Site, Weights, make_checkpoints, serving
from tests.bench.peers.ways import WAYS, Way
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.bench import OTHERS, OURS, compare, seconds

Row = dict[str, Any]
PARTS = ("bits", "vllm", "sglang")
DENSITIES = (0.0003, 0.001, 0.01, 0.1)
TOKENS = 24


def measure(
    *,
    repeats: int = 3,
    size: Literal["full", "small"] = "full",
    part: list[str] = list(PARTS),  # noqa: B006 - read only
    only: str = "",
) -> dict[str, Any]:
    """Compare.

    Each way makes --repeats updates that count. With --part, only this part (repeat it); with --only, only ways whose
    names have these words.

    Raises:
        ConfigError: there is no such part.
    """
    if not {*part} <= {*PARTS}:
        raise ConfigError(f"--part {' '.join(part)}", expected=f"one of {', '.join(PARTS)}, any number of times")
    rows, versions = list[Row](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as name:
        folder = Path(name)
        say("training a model")
        checkpoints, step = make_checkpoints(folder / "model", size, repeats)
        if "bits" in part:
            rows += _guarded({"part": "bits"}, partial(_bits, step, repeats))
        del step  # twice the model in float32
        for server in [make for make in ("vllm", "sglang") if make in part]:
            ways = [way for way in WAYS if way.server == server and only in way.name]
            work = partial(_on_server, server, ways, checkpoints, folder, versions)
            rows += _guarded({"part": "engine", "server": server, "name": server, "ours": False}, work)
    return {"versions": versions, "model": _model(checkpoints), "rows": rows}


def _model(checkpoints: Checkpoints) -> dict[str, Any]:
    (changed, *_), first = checkpoints.changed(), checkpoints.start
    parameters = sum(tensor.numel() for tensor in first.values())
    sizes = {"parameters": parameters, "bytes": checkpoints.nbytes, "tensors": len(first)}
    return sizes | {"density": changed / parameters}


def _bits(step: Step, repeats: int) -> Iterator[Row]:
    """Yield a row of each layout: bytes, bits per changed element, and seconds to find and code, beside a copy."""
    for density in DENSITIES:
        rate = step.rate_for(density)
        say(f"layouts, one step of AdamW at {rate:.2g}")
        pair = step.at(rate)
        found = compare(pair, repeats)
        spent = {way: statistics.median(taken) for way, taken in found["seconds"].items()}
        changed, _, least = map(sum, zip(*(bounds(old, new) for _, old, new in pair), strict=True))
        for name in (*OTHERS, *OURS):
            yield {
                "name": name,
                "rate": rate,
                "aim": density,
                "ours": name in OURS,
                "density": found["density"],
                **{key: found[key][name] for key in ("bytes", "bits_per_changed")},
                "least_bits": least / changed,
                "encode_of_copy": spent[name] / spent["copy"],
            }


def _guarded(head: Row, make: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield rows, each with a head; whatever fails is a row with its error."""
    try:
        yield from ({**head, **row} for row in make())
    except Exception as error:  # noqa: BLE001 - it is the result
        words = f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
        say(f"  {words}")
        yield {**head, "error": words}


def _on_server(
    name: str, ways: Sequence[Way], checkpoints: Checkpoints, folder: Path, versions: dict[str, str]
) -> Iterator[Row]:
    """Yield a row for each way. After one that failed the next gets a new server, since this one may still be paused.

    Raises:
        Exception: a server does not start, or does not end.
    """
    left, expected = list(ways), list[Any]()
    while left:
        say(f"starting {name}")
        with serving(name, checkpoints, folder) as site:
            versions[site.kind] = tx.discover(site.url)[0].version
            row: Row = {}
            while left and "error" not in row:
                way = left.pop(0)
                say(f"{name}: {way.name}")
                head = {"part": "engine", "server": name, "name": way.name, "ours": way.ours}
                head["trainer"] = way.trainer or way.name
                (row,) = _guarded(head, lambda way=way: [_followed(way, site, expected)])
                yield row


def copy(weights: Weights, target: Weights) -> None:
    """Copy every tensor: the reference of an update."""
    for name, tensor in weights.items():
        target[name].copy_(tensor)


def _followed(way: Way, site: Site, expected: list[Any]) -> Row:
    """Let an engine follow all steps in one way; the first two updates, another model's and a whole one, do not count.

    Raises:
        AssertionError: the engine says something else afterwards than after our first way, which is verified.
    """
    first, *rest = site.checkpoints.steps
    target = {name: torch.empty_like(tensor) for name, tensor in first.items()}
    spent: dict[str, list[float]] = {"total_s": [], "pause_s": [], "copy_s": []}
    found: list[dict[str, Any]] = []
    with way.open(site) as update:
        update(site.checkpoints.start)
        update(first)
        usual = site.usual_gap()
        for new in rest:
            spent["copy_s"].append(seconds(lambda new=new: copy(new, target)))
            began = time.perf_counter()
            sent = update(new)
            ended = time.perf_counter()
            spent["total_s"].append(ended - began)
            spent["pause_s"].append(max(0.0, site.longest_gap(began, ended) - usual))
            found.append(sent)
        with site.alone():
            tokens = site.generate(TOKENS)
    expected[:] = expected or tokens
    if tokens != expected:
        raise AssertionError(f"the engine does not serve what it was sent: {tokens[:4]}, expected {expected[:4]}")
    bits = [8 * sent["bytes"] / count for sent, count in zip(found, site.checkpoints.changed(), strict=True)]
    middle = {key: statistics.median(taken) for key, taken in spent.items()}
    for key in ("bytes", "encode_s", "reported_pause_s"):
        if key in found[0]:
            middle[key] = statistics.median(sent[key] for sent in found)
    return {
        **middle,
        **{f"{key}_of_copy": middle[f"{key}_s"] / middle["copy_s"] for key in ("encode", "pause", "total")},
        "bits_per_changed": statistics.median(bits),
        "usual_gap_s": usual,
        "proof": found[-1].get("proof", ""),
    }
