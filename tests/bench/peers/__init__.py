"""``python -m tests.bench peers``: our transports beside what a user would choose instead, on one machine.

Four parts: ``bits`` weighs layouts on two steps of a real training run; ``vllm`` and ``sglang`` update one real engine
of each make in every way, while a client asks it for one token after the other; ``growth`` varies parameters, the share
that changes, tensors and engines. Whatever fails is a row with its error. ``--out`` writes what
``docs/draw_benchmarks.py`` reads.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

import torchrl_ext as tx
from tests.bench.frame import say, seconds
from tests.bench.peers import growth
from tests.bench.peers.layouts import Row, changed, weigh
from tests.bench.peers.site import BACKENDS, Checkpoints, Site, Weights, make_checkpoints, serving
from tests.bench.peers.ways import SLIME_COMMIT, WAYS, Way
from tests.memory import track_peak
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError

SCHEMA = 1
PARTS = ("bits", "vllm", "sglang", "growth")
SERVERS = {"vllm": ("vllm", *BACKENDS), "sglang": ("sglang",)}
WAY_S, START_S = 90.0, 180.0
TOKENS = 24
NO_TIME = "not run: the time of the command was over"


def measure(
    *,
    repeats: int = 3,
    size: Literal["full", "small"] = "full",
    part: list[str] = list(PARTS),  # noqa: B006 - read only
    minutes: float = 11.5,
    only: str = "",
    out: str = "",
) -> dict[str, Any]:
    """Compare, and with --out write the document to a file.

    Each way makes --repeats updates that count. With --part, only this part (repeat it); with --only, only ways whose
    names have these words. After --minutes nothing new is begun; what is not run is a row that says so.

    Raises:
        ConfigError: there is no such part.
    """
    if not {*part} <= {*PARTS}:
        raise ConfigError(f"--part {' '.join(part)}", expected=f"one of {', '.join(PARTS)}, any number of times")
    deadline = Deadline(60 * minutes)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": " ".join(["python -m tests.bench peers", *_chosen(size, part, only)]),
        "machine": _machine(),
        "versions": {name: version(name) for name in ("torch", "torchrl", "transformers", "numba", "zstandard")},
        "size": size,
        "repeats": repeats,
    }
    document["versions"] |= {"torchrl_ext": tx.__version__, "python": platform.python_version()}
    rows: list[Row] = []
    began, document["rows"] = time.monotonic(), rows
    slime = os.environ.get("TORCHRL_EXT_SLIME")
    if slime:
        document["versions"]["slime"] = SLIME_COMMIT
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as name:
        folder = Path(name)
        say("training a model")
        checkpoints = make_checkpoints(folder / "model", size, repeats)
        document["model"] = _model(checkpoints)
        if "bits" in part:
            rows += _guarded("bits", lambda: list(_bits(checkpoints, repeats)), deadline, 120)
        for make in part:
            for server in SERVERS.get(make, ()):
                ways = [way for way in WAYS if way.server == server and only in way.name]
                rows += _on_server(server, ways, checkpoints, folder, slime, deadline, document["versions"])
                document["seconds"] = round(time.monotonic() - began)
                _write(document, out)
        if "growth" in part:
            rows += _guarded("growth", lambda: list(growth.engines(size, 3, folder)), deadline, 90)
            rows += _guarded("growth", lambda: list(_each(growth.layouts(size, 3), deadline)), deadline, 180)
    document["seconds"] = round(time.monotonic() - began)
    _write(document, out)
    return document


def _write(document: dict[str, Any], out: str) -> None:
    if out:
        Path(out).write_text(json.dumps(document, indent=1) + "\n")
        say(f"wrote {out}, {len(document['rows'])} rows, after {document['seconds']} s")


def _chosen(size: str, part: list[str], only: str) -> list[str]:
    chosen = [f"--size {size}"] if size != "full" else []
    chosen += [f"--part {name}" for name in part] if set(part) != set(PARTS) else []
    return [*chosen, *([f"--only '{only}'"] if only else []), "--out docs/benchmarks.json"]


def _machine() -> dict[str, Any]:
    known = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"processor": known[0].partition(": ")[2] if known else platform.machine()}
    return found | {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30), "gpu": False}


def _model(checkpoints: Checkpoints) -> dict[str, Any]:
    first, second = checkpoints.steps[:2]
    parameters = sum(tensor.numel() for tensor in first.values())
    count = changed(first, second)
    return {
        "parameters": parameters,
        "bytes": checkpoints.nbytes,
        "tensors": len(first),
        "density": count / parameters,
        "changed": count,
    }


def _bits(checkpoints: Checkpoints, repeats: int) -> Iterator[Row]:
    for steps in sorted({1, len(checkpoints.steps) - 1}):
        say(f"layouts, {steps} steps of AdamW")
        for row in weigh(checkpoints.steps[-1 - steps], checkpoints.steps[-1], repeats):
            yield {"part": "bits", "steps": steps, **row}


def _each(rows: Iterator[Row], deadline: Deadline) -> Iterator[Row]:
    said = None
    for row in rows:
        if (row["axis"], row["at"]) != said:
            said = row["axis"], row["at"]
            say(f"growth, {said[0]} {said[1]}")
        yield row
        if deadline.over:
            yield {"error": NO_TIME}
            return


def _guarded(part: str, work: Callable[[], list[Row]], deadline: Deadline, limit_s: float) -> list[Row]:
    """Return the rows of a part, or one with its error."""
    try:
        return [{"part": part, **row} for row in _bounded(work, deadline.within(limit_s))]
    except Exception as error:  # noqa: BLE001 - whatever fails is a row
        say(f"{part}: {error}")
        return [{"part": part, "error": _words(error)}]


def _bounded(work: Callable[[], Any], deadline: Deadline) -> Any:
    """Call in a thread, which is left behind after the deadline.

    Raises:
        TimeoutError: it took too long, or there was no time left.
    """
    if deadline.over:
        raise TimeoutError(NO_TIME)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline.left_s)
    if not found:
        raise TimeoutError(f"did not end within {deadline.timeout_s:.0f} s")
    result, error = found[0]
    if error is not None:
        raise error
    return result


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]


def _on_server(
    name: str,
    ways: list[Way],
    checkpoints: Checkpoints,
    folder: Path,
    slime: str | None,
    deadline: Deadline,
    versions: dict[str, str],
) -> list[Row]:
    """Return a row for each way; a server that answers no more after one of them is started again for the next."""
    rows: list[Row] = []
    left, expected = list(ways), None
    while left:
        try:
            if deadline.over:
                raise TimeoutError(NO_TIME)
            with ExitStack() as ends:
                say(f"starting {name}")
                limit_s = min(START_S, max(1.0, deadline.left_s))
                site = ends.enter_context(serving(name, checkpoints, folder, slime, limit_s))
                versions[site.kind] = tx.discover(site.url)[0].version
                while left:
                    way = left.pop(0)
                    say(f"{name}: {way.name}")
                    row = _row(way, site, deadline.within(WAY_S), expected)
                    expected = expected or row.pop("tokens", None)
                    row.pop("tokens", None)
                    rows.append(row)
                    if "error" in row and left and ("did not end" in row["error"] or not site.answers(10.0)):
                        say(f"{name} is started again")  # what did not end may still call it
                        break
        except Exception as error:  # noqa: BLE001 - it did not start, or did not end
            say(f"{name}: {error}")
            rows += [_head(way) | {"error": _words(error)} for way in left]
            left = []
    return rows


def _head(way: Way) -> Row:
    return {"part": "engine", "server": way.server, "name": way.name, "ours": way.ours, "note": way.note}


def _row(way: Way, site: Site, deadline: Deadline, expected: list[Any] | None) -> Row:
    try:
        return _head(way) | _bounded(lambda: _followed(way, site, expected), deadline)
    except Exception as error:  # noqa: BLE001 - whatever fails is a row
        say(f"  {_words(error)}")
        return _head(way) | {"error": _words(error)}


def _followed(way: Way, site: Site, expected: list[Any] | None) -> Row:
    """Let an engine follow all steps in one way; the first two updates, another model's and a whole one, do not count.

    Raises:
        AssertionError: the engine says something else afterwards than after our first way, which is verified.
    """
    first, *rest = site.checkpoints.steps
    target = {name: torch.empty_like(tensor) for name, tensor in first.items()}
    spent: dict[str, list[float]] = {"total_s": [], "pause_s": [], "copy_s": []}
    found: list[dict[str, Any]] = []
    with track_peak() as extra, way.open(site) as update:
        update(site.checkpoints.start)
        update(first)
        usual = site.usual_gap()
        for new in rest:
            spent["copy_s"].append(seconds(lambda new=new: _copy(new, target)))
            began = time.perf_counter()
            sent = update(new)
            ended = time.perf_counter()
            spent["total_s"].append(sent.get("total_s", ended - began))
            spent["pause_s"].append(max(0.0, site.longest_gap(began, ended) - usual))
            found.append(sent)
        with site.alone():
            tokens = site.generate(TOKENS)
    if expected is not None and tokens != expected:
        raise AssertionError(f"the engine does not serve what it was sent: {tokens[:4]}, expected {expected[:4]}")
    counts = [changed(old, new) for old, new in itertools.pairwise(site.checkpoints.steps)]
    middle = {key: statistics.median(taken) for key, taken in spent.items()}
    size = statistics.median(sent["bytes"] for sent in found)
    peak = found[-1].get("peak_bytes", extra[0] if extra else None)
    row: Row = {
        "tokens": tokens,
        "bytes": size,
        "bits_per_changed": statistics.median(8 * sent["bytes"] / n for sent, n in zip(found, counts, strict=True)),
        "encode_s": statistics.median(sent["encode_s"] for sent in found),
        **middle,
        "pause_range_s": [min(spent["pause_s"]), max(spent["pause_s"])],
        "usual_gap_s": usual,
        "memory_of_model": None if peak is None else peak / site.checkpoints.nbytes,
        "proof": found[-1].get("proof", ""),
        "encoding": found[-1].get("encoding", ""),
    }
    if "reported_pause_s" in found[-1]:
        row["reported_pause_s"] = statistics.median(sent["reported_pause_s"] for sent in found)
    return row | {f"{key}_of_copy": row[f"{key}_s"] / row["copy_s"] for key in ("encode", "pause", "total")}


def _copy(weights: Weights, target: Weights) -> None:
    for name, tensor in weights.items():
        target[name].copy_(tensor)
