"""``torchrl-ext bench transport``: full updates by every route, against the plainest way to move the same bytes.

Two processes on this machine. The reference for a collective (gloo) is one broadcast of one flat tensor with all the
bytes; for shared memory a copy of every tensor (`torchrl_ext.bench.ipc`); for a publication it is
`safetensors.torch.save_file` and an fsync.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from torchrl_ext.bench.data import SIZES, Shapes, shapes_bytes, weights_of
from torchrl_ext.bench.ipc import measure_ipc
from torchrl_ext.bench.runner import ratio, rounds, track_peak
from torchrl_ext.deadline import Deadline
from torchrl_ext.transports.base import Arrival, Update, Worker
from torchrl_ext.transports.collective.stream import BUCKET_BYTES
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.group.handoffs import GroupMailbox
from torchrl_ext.types import Info
from torchrl_ext.weights.source import MappingSource

__all__ = ["add_arguments", "measure", "tables"]

TIMEOUT_S = 120.0
SHARD_BYTES = 64 << 20
"""Bytes of a shard in the publication whose memory is measured; its speed is measured with the default, one file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="full: more than 400 M parameters")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES, help="size of a bucket")
    parser.add_argument("--dir", help="where the disk measurement writes (default: the temporary directory)")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every comparison.

    Raises:
        TransportError: the worker process failed.
    """
    shapes = SIZES[args.size]
    numbers = {
        "size": args.size,
        "repeats": args.repeats,
        "bucket_bytes": args.bucket_bytes,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    numbers |= _collective(shapes, args, say)
    say("shared memory against a plain copy")
    numbers["ipc"] = measure_ipc(args.size, "model", args.repeats)
    say(f"shared memory: {numbers['ipc']['ipc_vs_copy']['median']:.2f} of a plain copy")
    say("disk publication")
    numbers["disk"] = _disk(shapes["model"], args)
    return numbers


# collective


def _elsewhere(*_: Any) -> None:
    """Do nothing: the other process does this."""


class _End:
    """One of the two processes, which both go through the same steps; the trainer (rank 0) sends.

    Args:
        rank: 0 or 1.
        send: sends weights in buckets of a size, on rank 0.
        receive: receives into weights, on rank 1.
        info: of the connection, with the port of a store for the group that this is compared with.
    """

    def __init__(
        self,
        rank: int,
        info: Info,
        send: Callable[[Mapping[str, Tensor], int], None] = _elsewhere,
        receive: Callable[[Mapping[str, Tensor]], None] = _elsewhere,
    ) -> None:
        self.rank, self._send, self._receive = rank, send, receive
        longest = timedelta(seconds=TIMEOUT_S)
        own = dist.TCPStore(  # type: ignore[attr-defined]  # torch names its stores, and does not export them
            info["master_address"], info["plain_port"], None, False, longest, False
        )
        store = dist.PrefixStore("plain", own)  # type: ignore[attr-defined]
        self._plain: Any = dist.ProcessGroupGloo(store, rank, 2, longest)  # torch declares none of its collectives

    def compare(self, shapes: Shapes, ways: Mapping[str, int | None], repeats: int) -> dict[str, list[float]]:
        """Time each way (a bucket size, or None for one flat tensor) in each round."""
        weights = weights_of(shapes, self.rank)
        flat = torch.ones(shapes_bytes(shapes), dtype=torch.uint8)

        def timed(bucket_bytes: int | None) -> float:
            self.meet()
            began = time.perf_counter()
            if bucket_bytes is None:
                self._plain.broadcast(flat, 0).wait()
            else:
                self.move(weights, bucket_bytes)
            self.meet()
            return time.perf_counter() - began

        return rounds({name: partial(timed, bucket_bytes) for name, bucket_bytes in ways.items()}, repeats)

    def peak(self, shapes: Shapes, bucket_bytes: int) -> list[int]:
        """Measure the memory that one transfer adds here (the second one, since the first one loads the program)."""
        weights = weights_of(shapes, self.rank)
        self.move(weights, bucket_bytes)
        self.meet()
        with track_peak() as extra:
            self.move(weights, bucket_bytes)
        self.meet()
        return extra

    def move(self, weights: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """Make one update, which is received in place."""
        if self.rank == 0:
            self._send(weights, bucket_bytes)
        else:
            self._receive(weights)

    def meet(self) -> None:
        """Wait until the other end has come to this step too."""
        self._plain.barrier().wait()

    def steps(
        self, shapes: Mapping[str, Shapes], bucket_bytes: int, repeats: int
    ) -> Iterator[tuple[str, dict[str, list[float]], list[int]]]:
        """Measure part by part, and yield its name, seconds by way, and memory."""
        ways = {"flat": None, "buckets": bucket_bytes, "one_by_one": 0}
        for part, own in shapes.items():
            yield part, self.compare(own, ways, repeats), self.peak(own, bucket_bytes)


def _collective(shapes: Mapping[str, Shapes], args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    transport = VLLMCollectiveTransport(device="cpu", timeout_s=TIMEOUT_S)
    within = Deadline(TIMEOUT_S, "the worker process")
    handoff = transport.open(1, (), within)
    longest = timedelta(seconds=TIMEOUT_S)
    plain = dist.TCPStore("127.0.0.1", 0, None, True, longest, False)  # type: ignore[attr-defined]
    info = {**handoff.info, "plain_port": plain.port}
    worker = multiprocessing.get_context("spawn").Process(
        target=_work, args=(info, args.size, args.bucket_bytes, args.repeats), daemon=True
    )
    say("starting the worker process")
    worker.start()
    numbers: dict[str, Any] = {}
    try:
        handoff.transfer(within)

        def send(weights: Mapping[str, Tensor], bucket_bytes: int) -> None:
            transport.bucket_bytes, within = bucket_bytes, Deadline(TIMEOUT_S)
            update = Update(source=MappingSource(weights), version=1)
            handoff = transport.prepare(update, within)
            transport.mailbox.put(Arrival(version=1, params=update.params, info=handoff.info), within)
            handoff.transfer(within)

        end = _End(0, info, send)
        say("collective against a flat broadcast")
        for part, seconds, extra in end.steps(shapes, args.bucket_bytes, args.repeats):
            numbers[part] = _numbers(part, shapes[part], seconds, extra, args.bucket_bytes)
            say(f"{len(shapes[part]):,} tensors: {numbers[part]['buckets_vs_flat']['median']:.2f} of a flat broadcast")
        worker.join(TIMEOUT_S)
    finally:
        transport.shutdown()
        worker.terminate()
        worker.join()
    return numbers


def _work(info: Info, size: str, bucket_bytes: int, repeats: int) -> None:
    """Run the worker process: join as rank 1, and go through the same steps as the trainer."""
    worker = VLLMCollectiveTransport.join(info, Worker(rank=1), Deadline(TIMEOUT_S, "the trainer process"))
    mailbox = GroupMailbox(worker.member)

    def receive(weights: Mapping[str, Tensor]) -> None:
        within = Deadline(TIMEOUT_S, "the trainer process")
        arrival = mailbox.get(within)
        if arrival is None:
            raise within.error("the trainer sent nothing")
        for _ in worker.receive(arrival, weights, within):
            pass

    for _ in _End(1, info, receive=receive).steps(SIZES[size], bucket_bytes, repeats):
        pass
    worker.close()


def _numbers(
    part: str, shapes: Shapes, seconds: dict[str, list[float]], extra: list[int], bucket_bytes: int
) -> dict[str, Any]:
    total = shapes_bytes(shapes)
    model = part == "model"
    return {
        "tensors": len(shapes),
        "parameters": total // 2,
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "buckets_vs_flat": ratio(seconds["buckets"], seconds["flat"], 0.75 if model else None),
        "buckets_vs_one_by_one": ratio(seconds["buckets"], seconds["one_by_one"], 1.0 if model else 3.0),
        "extra_memory": _bounded(extra, 2 * bucket_bytes),
    }


# disk


def _disk(shapes: Shapes, args: argparse.Namespace) -> dict[str, Any]:
    weights = weights_of(shapes, 1)
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=args.dir) as folder:
        root = Path(folder)

        def publish(name: str, **settings: Any) -> float:
            transport = DiskTransport(root / name, **settings)
            began = time.perf_counter()
            transport.prepare(Update(source=MappingSource(weights), version=1), Deadline(TIMEOUT_S))
            taken = time.perf_counter() - began
            transport.shutdown()
            shutil.rmtree(root / name)
            return taken

        def plain() -> float:
            path = root / "plain.safetensors"
            began = time.perf_counter()
            save_file(weights, path)
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            taken = time.perf_counter() - began
            path.unlink()
            return taken

        seconds = rounds({"publish": partial(publish, "root"), "save_file": plain}, args.repeats)
        with track_peak() as extra:
            publish("shards", shard_bytes=SHARD_BYTES)
    total = shapes_bytes(shapes)
    return {
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "publish_vs_save_file": ratio(seconds["publish"], seconds["save_file"], 0.9),
        "extra_memory": _bounded(extra, 2 * SHARD_BYTES),
    }


# what is shown


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Show speeds; then everything that was promised, with what was found."""
    speeds = Table("tensors", "bytes", "way", "GB/s", title=f"{results['cores']} cores, torch {results['torch']}")
    promises = Table("measured in one run", "median", "spread", "promised", "")
    for part, what in (("model", "collective"), ("small", "collective"), ("ipc", "ipc"), ("disk", "disk")):
        found = results[part]
        for way, speed in found["gb_per_s"].items():
            count = f"{found['tensors']:,}" if "tensors" in found else ""
            speeds.add_row(count, f"{found['bytes'] / 1e6:,.0f} MB", f"{what}: {way.replace('_', ' ')}", f"{speed:.2f}")
        for name in (name for name in found if "_vs_" in name):
            one = found[name]
            promises.add_row(
                f"{what}, {part}: {name.replace('_vs_', ' / ').replace('_', ' ')}",
                f"{one['median']:.2f}",
                f"{one['low']:.2f} - {one['high']:.2f}",
                "" if one["target"] is None else f"at least {one['target']:g}",
                _mark(one["met"]),
            )
        memory = found["extra_memory"]
        promises.add_row(
            f"{what}, {part}: extra resident memory",
            "not known here" if memory["bytes"] is None else f"{memory['bytes'] / 2**20:.1f} MiB",
            "",
            f"below {memory['bound_bytes'] / 2**20:.0f} MiB",
            _mark(memory["met"]),
        )
    return [speeds, promises]


def _mark(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[red]missed[/]"


def _bounded(extra: list[int], bound: int) -> dict[str, Any]:
    found = extra[0] if extra else None
    return {"bytes": found, "bound_bytes": bound, "met": None if found is None else found < bound}
