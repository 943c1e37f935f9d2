"""``torchrl-ext bench transport``: full updates of a worker process, beside the plainest ways to move the same bytes.

Two processes on this machine. The reference of the collective (gloo) is one broadcast of a flat tensor with all the
bytes; that of shared memory is ``copy_`` of every tensor within one process; that of a publication is
`safetensors.torch.save_file` and an fsync.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from torchrl_ext.bench.data import SIZES, Shapes, shapes_bytes, weights_of
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.errors import TransportError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.transports.collective.stream import BUCKET_BYTES
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.ipc.transport import IPCTransport
from torchrl_ext.types import Info

__all__ = ["REFERENCES", "measure"]

TIMEOUT_S = 120.0
REFERENCES = {"collective": "broadcast", "ipc": "copy", "disk": "save_file"}
"""Each transport, and the way that it is compared with."""


def measure(
    say: Callable[[str], None],
    *,
    size: str = "full",
    bucket_bytes: int = BUCKET_BYTES,
    repeats: int = 7,
    folder: str | None = None,
) -> Info:
    """Compare every transport with its reference, on the shapes of a model and on many small tensors.

    Args:
        say: called with each step.
        size: of `SIZES`.
        bucket_bytes: of the collective, in bytes.
        repeats: rounds.
        folder: where versions are published; default: the system's temporary directory.

    Returns:
        JSON-safe: ``seconds`` and ``gb_per_s`` by way, and a ratio for each pair (above 1 the transport is faster).

    Raises:
        TransportError: the worker process failed, or holds other weights than were sent.
    """
    found: Info = {"size": size, "bucket_bytes": bucket_bytes, "cores": os.cpu_count(), "torch": torch.__version__}
    for part, shapes in SIZES[size].items():
        say(f"{len(shapes):,} tensors, {shapes_bytes(shapes) / 1e6:,.0f} MB")
        with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder) as root:
            meeting = {"ports": [free_port(), free_port()], "channel": uuid.uuid4().hex, "bucket_bytes": bucket_bytes}
            seconds = _with_worker(shapes, meeting, Path(root), repeats)
        total = shapes_bytes(shapes)
        found[part] = {
            "tensors": len(shapes),
            "bytes": total,
            "seconds": seconds,
            "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
            **{f"{way} / {other}": ratio(seconds[way], seconds[other]) for way, other in REFERENCES.items()},
        }
    return found


def _with_worker(shapes: Shapes, meeting: Info, root: Path, repeats: int) -> dict[str, list[float]]:
    """Time every way into a worker process, in turns."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    worker = context.Process(target=_follow, args=(shapes, meeting, theirs), daemon=True)
    worker.start()
    theirs.close()
    ways: dict[str, Callable[[], None]] = {}
    try:
        with _End(0, shapes, meeting) as trainer:
            target, plain = weights_of(shapes, 0), root / "plain.safetensors"

            def together(way: str) -> None:
                pipe.send(way)
                trainer.move(way)
                _answer(pipe)

            def copy() -> None:
                for name, tensor in trainer.weights.items():
                    target[name].copy_(tensor)

            def save() -> None:
                save_file(trainer.weights, plain)
                with open(plain, "rb+") as file:
                    os.fsync(file.fileno())

            def publish() -> None:
                shutil.rmtree(root / "disk", ignore_errors=True)
                transport = DiskTransport(root / "disk")
                transport.send_weights("policy", trainer.weights)
                transport.shutdown()

            ways = {way: partial(together, way) for way in ("collective", "broadcast", "ipc")}
            ways |= {"copy": copy, "disk": publish, "save_file": save}
            seconds = rounds({name: partial(_seconds, way) for name, way in ways.items()}, repeats)
            pipe.send("")
            if not _answer(pipe):
                raise TransportError("the worker process holds other weights than were sent")
    except EOFError:
        raise TransportError("the worker process ended; the reason is above") from None
    finally:
        worker.terminate()
        worker.join()
    return seconds


class _End:
    """One end of the ways between processes: rank 0 holds ones and sends them to rank 1, which holds zeros."""

    def __init__(self, rank: int, shapes: Shapes, meeting: Info) -> None:
        self.rank, self.weights = rank, weights_of(shapes, 1 - rank)
        self._flat = torch.empty(shapes_bytes(shapes), dtype=torch.uint8)
        port, other = meeting["ports"]
        self._transports: dict[str, Any] = {
            "ipc": IPCTransport(meeting["channel"], timeout_s=TIMEOUT_S),
            "collective": VLLMCollectiveTransport(
                "127.0.0.1", port, rank, 2, "cpu", bucket_bytes=meeting["bucket_bytes"], timeout_s=TIMEOUT_S
            ),
        }
        longest, torch_dist = timedelta(seconds=TIMEOUT_S), dist  # type: Any, Any
        store = torch_dist.TCPStore("127.0.0.1", other, 2, rank == 0, longest)
        self._plain = torch_dist.ProcessGroupGloo(store, rank, 2, longest)
        self._transports["collective"].init_all_workers_group({})

    def move(self, way: str) -> None:
        """Send the weights, or receive them on the worker."""
        if way == "broadcast":
            self._plain.broadcast(self._flat, 0).wait()
        elif self.rank == 0:
            self._transports[way].send_weights("policy", self.weights)
        elif self._transports[way].receive_weights(TIMEOUT_S, weights=self.weights) is None:
            raise TransportError(f"the trainer sent nothing within {TIMEOUT_S:g} s")

    def __enter__(self) -> _End:
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self._transports.values():
            transport.shutdown()


def _follow(shapes: Shapes, meeting: Info, pipe: Any) -> None:
    """Run the worker process: take part in each way that the trainer names, and say at the end what arrived."""
    with _End(1, shapes, meeting) as end:
        while way := _answer(pipe):
            end.move(way)
            pipe.send(True)
        pipe.send(all(bool((tensor == 1).all()) for tensor in end.weights.values()))


def _answer(pipe: Any) -> Any:
    """Return what the other process sends."""
    if not pipe.poll(TIMEOUT_S):
        raise TransportError(f"the other process did not answer within {TIMEOUT_S:g} s")
    return pipe.recv()


def _seconds(way: Callable[[], None]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began
