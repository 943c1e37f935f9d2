"""``python -m tests.bench gaps``: the longest gap between two tokens of a client, by how an engine takes an update.

Clients stream tokens from one engine, while it is updated in turns: not at all, live, in a pause; and at the end by its
own reload. Every gap is that between two tokens as they reach a client in another process.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor

import torchrl_ext as tx
from tests.bench.data import chain_shape, say
from tests.bench.plain.timed_commits import TIMES
from tests.processes import ROOT
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.registry import engines
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving.embedded import EmbeddedSpec
from torchrl_ext.control.serving.server import start
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.testing.tiny import make_tiny_lm

if TYPE_CHECKING:
    from typing_extensions import Self

SIZES = {"full": (768, 12, 16_000), "middle": (512, 8, 8000), "small": (256, 2, 2000)}
"""Hidden size, layers and vocabulary: 110 M, 33 M and 2.6 M parameters."""
DENSITY, TOKENS, CONTEXT = 0.01, 192, 256
REST_S, NEAR_S, ANSWER_S = 0.2, 1.0, 120.0
"""Between two updates; from a write to the steps around it, which other processes slow down as well; for an answer."""

Weights = dict[str, Tensor]
Times = list[float]


class Span(NamedTuple):
    """From one time to another, both of `time.perf_counter`."""

    began: float
    ended: float


class Turn(NamedTuple):
    """One update: the whole of it, what of it changes the engine's weights, and the times of requests in that."""

    update: Span
    commit: Span
    asked: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Streaming(EmbeddedSpec):
    """The embedded engine with a route that streams."""

    def command(self, port: int) -> list[str]:
        return [*super().command(port), "--routes", "tests.bench.gaps.inside:routes"]


def measure(
    *,
    repeats: int = 100,
    engine: Literal["embedded", "vllm", "sglang"] = "embedded",
    size: Literal["full", "middle", "small"] = "full",
    streams: int = 4,
    threads: int = 1,
) -> dict[str, Any]:
    """Measure --repeats updates of 1 % of the elements of a bfloat16 Qwen3, in each way.

    The engine computes with --threads. A gap is the longest of an update that meets its commit (of the phase, of a
    reload, of as long a time without an update), that meets the write itself in the workers, or that meets any of the
    update; the figure is that of a median update, and ``most`` is the longest of all. Ratios are to one step, the
    median gap without updates, and a bare scatter of the same values, which checks nothing: the fastest `index_copy_`
    of this process.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as name:
        folder, (hidden, layers, vocabulary) = Path(name), SIZES[size]
        say("making a model")
        model = make_tiny_lm(folder / "model", dtype=torch.bfloat16, **chain_shape(hidden, layers, vocabulary))
        own = {name: tensor.clone() for name, tensor in CheckpointSource(model)}
        noted = folder / "commits"
        noted.touch()
        say(f"starting {engine}")
        with _serving(engine, model, threads, noted) as url, _Clients(engine, url, streams) as clients:
            turns, scatters = _updates(url, clients, own, folder / "root", repeats)
            version = tx.discover(url)[0].version
            turns["reload"] = list(_reloads(engine, url, clients, own, folder, repeats))
        commits = [Span(*map(float, line.split())) for line in noted.read_text().splitlines()]
    return {
        "engine": engine,
        "size": size,
        "versions": {} if engine == "embedded" else {engine: version},
        "parameters": sum(tensor.numel() for tensor in own.values()),
        "streams": streams,
        "threads": threads,
        "updates": repeats,
        **_figures(clients.gaps(), turns, scatters, commits),
    }


@contextmanager
def _serving(kind: str, model: Path, threads: int, noted: Path) -> Iterator[str]:
    """A server of a kind with `timed_commits`, whose linear weights are unpacked if it is vLLM's."""
    settings: dict[str, Any] = settings_for(kind) | {"dtype": "bfloat16", "max_model_len": CONTEXT}
    path = os.pathsep.join([str(Path(__file__).parents[1] / "plain"), str(ROOT)][: 2 if kind == "embedded" else 1])
    environ = {TIMES: str(noted), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    environ["VLLM_PLUGINS"] = "plain_linears,timed_commits,torchrl_ext,torchrl_ext_cpu"
    spec = _Streaming if kind == "embedded" else engines.part(kind, "server")
    with start(spec(model, environ=environ, **settings)) as server:
        yield server.url


class _Clients:
    """A process of clients that stream from an engine (`tests.bench.gaps.streams`); a context manager.

    Attributes:
        times: of the tokens, by round and client.
    """

    def __init__(self, kind: str, url: str, streams: int) -> None:
        self.times: dict[tuple[int, int], Times] = {}
        self._streams, self._round = streams, 0
        command = [sys.executable, "-m", "tests.bench.gaps.streams", kind, url, str(streams), str(TOKENS)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            turn, client, at = line.split()
            self.times.setdefault((int(turn), int(client)), []).append(float(at))
            self._round = int(turn)

    def flow(self) -> None:
        """Wait until every client has had tokens since this call, and `REST_S` more.

        Raises:
            DeadlineError: the engine answers no more.
        """
        began = time.perf_counter()

        def every() -> bool:
            now = [self.times.get((self._round, client), [0.0] * 3) for client in range(self._streams)]
            return all(len(times) > 2 and times[-2] > began for times in now)

        Deadline(ANSWER_S).poll(every, "the clients get no tokens")
        time.sleep(REST_S)

    def gaps(self) -> list[Span]:
        """Return every gap within a request since all requests of its round had tokens, in order."""
        found = list[Span]()
        for turn in range(self._round + 1):
            every = [self.times.get((turn, client), []) for client in range(self._streams)]
            settled = max(times[2] if len(times) > 2 else math.inf for times in every)
            found += [Span(*pair) for times in every for pair in itertools.pairwise(times) if pair[0] >= settled]
        return sorted(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin and self._process.stdin.close()
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._reading.join(ANSWER_S)


def _change(own: Weights) -> list[tuple[Tensor, Tensor]]:
    """Change the lowest bit of 1 % of the elements; return for each tensor where, and the new bits."""
    writes = []
    for tensor in own.values():
        flat = tensor.view(torch.int16).view(-1)
        where = torch.randint(flat.numel(), (max(1, round(DENSITY * flat.numel())),)).unique()
        flat[where] ^= 1
        writes.append((where, flat[where]))
    return writes


def _updates(
    url: str, clients: _Clients, own: Weights, root: Path, repeats: int
) -> tuple[dict[str, list[Turn]], Times]:
    """Make updates in turns; return them by way, and the seconds of each bare scatter."""
    turns: dict[str, list[Turn]] = {"none": [], "live": [], "paused": []}
    target, scatters = [tensor.view(torch.int16).view(-1).clone() for tensor in own.values()], Times()
    changed: list[tuple[Tensor, Tensor]] = []
    with tx.WeightSender(tx.DeltaTransport(root, keyframe_every=0), tx.connect(url)) as sender, _asked() as asked:
        manner = sender._manner

        def update(commit: str) -> Turn:
            sender._manner = replace(manner, commit=commit)
            changed[:] = _change(own)
            began = time.perf_counter()
            report = sender.update_weights(own)
            ended = time.perf_counter()
            phase = next(phase for phase in reversed(report.timeline) if phase.name == "commit")
            commits = Span(began + phase.start_s, began + phase.end_s)
            (row,) = report.engines
            if report.density < 1:
                assert report.verified and (row.commit == "live") == (commit == "auto"), row
            return Turn(Span(began, ended), commits, tuple(at for at in asked if commits.began <= at <= commits.ended))

        update("auto")  # whole
        clients.flow()
        for turn in range(repeats + 1):  # the first one is not counted: it looks up where tensors lie
            say(f"update {turn}")
            for way in ("paused", "live"):
                found = update("auto" if way == "live" else "paused")
                turns[way] += [found] if turn else []
                clients.flow()
            began = time.perf_counter()
            time.sleep(found.update.ended - found.update.began)
            none = Span(began, time.perf_counter())
            commit = Span(*(at - found.update.ended + none.ended for at in found.commit))
            turns["none"] += [Turn(none, commit)] if turn else []
            began = time.perf_counter()
            for flat, new in zip(target, changed, strict=True):
                flat.index_copy_(0, *new)
            scatters.append(time.perf_counter() - began)
            clients.flow()
    return turns, scatters


@contextmanager
def _asked() -> Iterator[Times]:
    """The list gets the time of every request of this process to an engine, in the block."""
    asked, exchange = Times(), HTTPSession.exchange

    async def noted(*args: Any, **how: Any) -> Any:
        asked.append(time.perf_counter())
        return await exchange(*args, **how)

    HTTPSession.exchange = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        HTTPSession.exchange = exchange  # type: ignore[method-assign]


def _reloads(kind: str, url: str, clients: _Clients, own: Weights, folder: Path, repeats: int) -> Iterator[Turn]:
    """Yield an update for each reload by the engine's own routes, frozen requests going on after it."""
    files, root = folder / "files", folder / "named"
    shutil.copytree(folder / "model", files)
    with httpx.Client(base_url=url, timeout=ANSWER_S) as http, tx.DeltaTransport(root, keyframe_every=0) as trainer:

        def call(route: str, body: Any = None, **query: Any) -> None:
            http.post(route, json=body or {}, params=query).raise_for_status()

        def publish() -> None:
            if kind == "embedded":
                trainer.send_weights(own)
                return
            save_file(own, files / "new", {"format": "pt"})
            os.replace(files / "new", files / "model.safetensors")

        def vllm() -> None:
            call("/pause", mode="keep", clear_cache="false")
            call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(files)}})
            call("/reset_prefix_cache", reset_running_requests="true")
            call("/resume")

        def sglang() -> None:
            call("/pause_generation", {"mode": "in_place"})
            call("/update_weights_from_disk", {"model_path": str(files), "load_format": "auto", "flush_cache": False})
            call("/continue_generation")

        def embedded() -> None:
            call("/update_weights_from_disk", {"model_path": str(root), "load_format": "delta"})

        load: Callable[[], None] = {"vllm": vllm, "sglang": sglang, "embedded": embedded}[kind]
        for turn in range(repeats + 1):  # the first one is not counted: it is whole, where others are not
            say(f"reload {turn}")
            _change(own)
            began = time.perf_counter()
            publish()
            loads = time.perf_counter()
            load()
            ended = time.perf_counter()
            if turn:
                yield Turn(Span(began, ended), Span(loads, ended))
            clients.flow()


def _figures(gaps: list[Span], turns: dict[str, list[Turn]], scatters: Times, writes: list[Span]) -> dict[str, Any]:
    """Return what `measure` does."""

    def median(values: Iterable[float]) -> float:
        return statistics.median([*values] or [math.nan])  # an update between two requests has no gap

    def longest(span: Span) -> list[Span]:
        met = [gap for gap in gaps if gap.ended > span.began and gap.began < span.ended]
        return sorted(met, key=length)[-1:]

    def around(span: Span) -> list[Span]:
        near = [gap for gap in gaps if abs(gap.began - span.began) < NEAR_S]
        return [gap for gap in near if gap.ended < span.began or gap.began > span.ended]

    quiet = [gap for turn in turns["none"] for gap in gaps if turn.update.began < gap.began < turn.update.ended]
    step, scatter = median(map(length, quiet)), min(scatters)
    found: dict[str, Any] = {"step_ms": 1000 * step, "scatter_ms": 1000 * scatter}
    for way, taken in turns.items():
        by_update = [length(gap) for turn in taken for gap in longest(turn.update)]
        by_commit = [length(gap) for turn in taken for gap in longest(turn.commit)]
        found[way] = {
            "gap / (step + scatter)": median(by_commit) / (step + scatter),
            "gap of the update / (step + scatter)": median(by_update) / (step + scatter),
            "gap_ms": 1000 * median(by_commit),
            "gap of the update_ms": 1000 * median(by_update),
            "most_ms": 1000 * max(by_update, default=math.nan),
            "commit_ms": 1000 * median(length(turn.commit) for turn in taken),
            "update_ms": 1000 * median(length(turn.update) for turn in taken),
            "seen": len(by_commit),
        }
        asked = [turn for turn in taken if turn.asked]
        wrote = [(turn, one) for turn in asked for one in writes if turn.commit.began < one.began < turn.commit.ended]
        if parts := [(gap, one) for _, one in wrote for gap in longest(one)]:
            found[way] |= {
                "requests": median(len(turn.asked) for turn in taken),
                "requests until it is written": median(sum(at < one.began for at in turn.asked) for turn, one in wrote),
                "gap of the write / (step + scatter)": median(length(gap) for gap, _ in parts) / (step + scatter),
                "gap of the write / (steps around it + scatter)": median(
                    length(gap) / (median(map(length, around(one))) + scatter) for gap, one in parts
                ),
                "before the write_ms": 1000 * median(one.began - gap.began for gap, one in parts),
                "write_ms": 1000 * median(length(one) for _, one in parts),
                "after the write_ms": 1000 * median(gap.ended - one.ended for gap, one in parts),
            }
    for way in turns:
        found[way]["gap / none's"] = found[way]["gap_ms"] / found["none"]["gap_ms"]
    return found


def length(span: Span) -> float:
    """Return the seconds of a span."""
    return span.ended - span.began
