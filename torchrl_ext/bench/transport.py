"""``torchrl-ext bench transport``: full updates of a worker process, beside the plainest ways to move the same bytes.

Two processes on this machine. The reference of the collective (gloo) is one broadcast of a flat tensor with all the
bytes; that of shared memory is ``copy_`` of every tensor within one process, with all of torch's threads and with one;
that of a publication is `safetensors.torch.save_file` and an fsync.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from torchrl_ext.bench.data import SIZES, Shapes, shapes_bytes, weights_of
from torchrl_ext.bench.runner import ratio, rounds, track_peak
from torchrl_ext.errors import TransportError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.transports.collective.stream import BUCKET_BYTES
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.ipc.transport import IPCTransport
from torchrl_ext.types import Info

__all__ = ["compare", "measure", "settle"]

TIMEOUT_S = 120.0
REFERENCES = {
    "collective": ("broadcast", "collective one by one"),
    "ipc": ("copy", "copy by one thread"),
    "disk": ("save_file",),
}
"""Each transport, and the ways that it is compared with."""


def measure(
    say: Callable[[str], None],
    *,
    size: str = "full",
    bucket_bytes: int = BUCKET_BYTES,
    repeats: int = 7,
    folder: str | None = None,
) -> Info:
    """Compare every transport with its references, on the shapes of a model and on many small tensors.

    Args:
        say: called with each step.
        size: of `SIZES`.
        bucket_bytes: of the collective, in bytes.
        repeats: rounds.
        folder: where versions are published; default: the system's temporary directory.

    Raises:
        TransportError: the worker process failed.
    """
    found: Info = {"size": size, "bucket_bytes": bucket_bytes, "cores": os.cpu_count(), "torch": torch.__version__}
    for part, shapes in SIZES[size].items():
        say(f"{len(shapes):,} tensors, {shapes_bytes(shapes) / 1e6:,.0f} MB")
        found[part] = compare(shapes, list(REFERENCES), repeats, bucket_bytes=bucket_bytes, folder=folder)
    return found


def compare(
    shapes: Shapes,
    transports: Sequence[str],
    repeats: int,
    *,
    device: str = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
    folder: str | None = None,
) -> Info:
    """Time updates of these shapes by some of the transports and by their references, in turns.

    Args:
        shapes: of bfloat16 tensors on ``device``.
        transports: keys of `REFERENCES`.

    Returns:
        JSON-safe: ``seconds`` and ``gb_per_s`` by way, a ratio for each pair (above 1 the transport is faster), and
        ``extra_bytes``, the resident memory that one more update adds at the end where it adds more.

    Raises:
        TransportError: the worker process failed, or holds other weights than were sent.
    """
    ways = [way for transport in transports for way in (transport, *REFERENCES[transport])]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder) as root:
        meeting: Info = {"ports": [free_port() for _ in range(3)], "channel": uuid.uuid4().hex}
        meeting |= {"ways": ways, "device": device, "bucket_bytes": bucket_bytes}
        worker = context.Process(target=_follow, args=(shapes, meeting, theirs), daemon=True)
        worker.start()
        theirs.close()
        trainer = _Trainer(shapes, meeting, Path(root), pipe)
        try:
            trainer.connect()
            seconds = rounds({way: partial(trainer.update, way) for way in ways}, repeats)
            extra = {way: trainer.extra_bytes(way) for way in transports}
            if not trainer.ask(None):
                raise TransportError("the worker process holds other weights than were sent")
        except EOFError:
            raise TransportError("the worker process ended; it says why above") from None
        finally:
            trainer.close()
            worker.terminate()
            worker.join()
    total = shapes_bytes(shapes)
    return {
        "tensors": len(shapes),
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        **{f"{way} / {other}": ratio(seconds[way], seconds[other]) for way in transports for other in REFERENCES[way]},
        "extra_bytes": extra,
    }


def settle(device: str) -> None:
    """Wait until a CUDA device has done its work; for the host there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class _End:
    """One end of each way that needs two; rank 0 is the trainer, which sends ones to a worker that holds zeros."""

    def __init__(self, rank: int, shapes: Shapes, meeting: Info) -> None:
        self.rank, self.device = rank, meeting["device"]
        self.weights = weights_of(shapes, 1 - rank, self.device)
        self._flat = torch.empty(shapes_bytes(shapes), dtype=torch.uint8)
        self._ways, self._ports = meeting["ways"], meeting["ports"]
        self._transports: dict[str, Any] = {"ipc": IPCTransport(meeting["channel"], timeout_s=TIMEOUT_S)}
        buckets = {"collective": meeting["bucket_bytes"], "collective one by one": 0}
        for port, (way, bucket_bytes) in zip(self._ports, buckets.items(), strict=False):
            self._transports[way] = VLLMCollectiveTransport(
                "127.0.0.1", port, rank, 2, "cpu", bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S
            )

    def connect(self) -> None:
        """Form the groups; both ends call it at the same time."""
        if "collective" in self._ways:
            longest, torch_dist = timedelta(seconds=TIMEOUT_S), dist  # type: Any, Any
            store = torch_dist.TCPStore("127.0.0.1", self._ports[-1], 2, self.rank == 0, longest)
            self._plain = torch_dist.ProcessGroupGloo(store, self.rank, 2, longest)
            for way in ("collective", "collective one by one"):
                self._transports[way].init_all_workers_group({})

    def move(self, way: str) -> None:
        """Make one update, which the worker receives in place."""
        if way == "broadcast":
            self._plain.broadcast(self._flat, 0).wait()
        elif self.rank == 0:
            self._transports[way].send_weights("policy", self.weights)
        elif self._transports[way].receive_weights(TIMEOUT_S, weights=self.weights) is None:
            raise TransportError(f"the trainer sent nothing within {TIMEOUT_S:g} s")
        settle(self.device)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.shutdown()


class _Trainer(_End):
    """The trainer's end, with the ways that need no worker."""

    def __init__(self, shapes: Shapes, meeting: Info, root: Path, pipe: Any) -> None:
        super().__init__(0, shapes, meeting)
        self._pipe, self._root, self._threads = pipe, root, torch.get_num_threads()
        self._targets = weights_of(shapes, 0, self.device)

    def connect(self) -> None:
        self._pipe.send("connect")
        super().connect()
        self._answer()

    def ask(self, request: Any) -> Any:
        """Ask the worker, and return its answer."""
        self._pipe.send(request)
        return self._answer()

    def update(self, way: str, peak: bool = False) -> float:
        """Make one update, and return its seconds."""
        shutil.rmtree(self._root / "disk", ignore_errors=True)
        disk = DiskTransport(self._root / "disk") if way == "disk" else None
        began = time.perf_counter()
        if disk is not None:
            disk.send_weights("policy", self.weights)
        elif way == "save_file":
            self._save()
        elif way.startswith("copy"):
            self._copy(1 if way == "copy by one thread" else self._threads)
        else:
            self._pipe.send((way, peak))
            self.move(way)
            self._peak = self._answer()
        taken = time.perf_counter() - began
        if disk is not None:
            disk.shutdown()
        return taken

    def extra_bytes(self, way: str) -> int | None:
        """Return the most resident memory that an update adds at either end, in bytes; None where unknown."""
        self._peak = [0]
        with track_peak() as extra:
            self.update(way, peak=True)
        return max(*extra, *self._peak) if extra and self._peak else None

    def _copy(self, threads: int) -> None:
        torch.set_num_threads(threads)
        for name, tensor in self.weights.items():
            self._targets[name].copy_(tensor)
        settle(self.device)
        torch.set_num_threads(self._threads)

    def _save(self) -> None:
        path = self._root / "plain.safetensors"
        save_file(self.weights, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def _answer(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise TransportError(f"the worker process did not answer within {TIMEOUT_S:g} s")
        return self._pipe.recv()


def _follow(shapes: Shapes, meeting: Info, pipe: Any) -> None:
    """Run the worker process: take part in each update that the trainer announces."""
    end = _End(1, shapes, meeting)
    pipe.recv()
    end.connect()
    pipe.send(True)
    while (request := pipe.recv()) is not None:
        way, peak = request
        if peak:
            with track_peak() as extra:
                end.move(way)
            pipe.send(extra)
        else:
            end.move(way)
            pipe.send(None)
    pipe.send(all(bool((tensor == 1).all()) for tensor in end.weights.values()))
    end.close()
