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
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=folder) as root:
        meeting: Info = {"ports": [free_port() for _ in range(3)], "channel": uuid.uuid4().hex, "root": root}
        meeting |= {"transports": list(transports), "device": device, "bucket_bytes": bucket_bytes, "repeats": repeats}
        worker = context.Process(target=_follow, args=(shapes, meeting, theirs), daemon=True)
        worker.start()
        theirs.close()
        trainer = _End(0, shapes, meeting, pipe)
        try:
            seconds, extra = trainer.run()
            correct, extra_there = trainer.answer()
        except EOFError:
            raise TransportError("the worker process ended; the reason is above") from None
        finally:
            trainer.close()
            worker.terminate()
            worker.join()
    if not correct:
        raise TransportError("the worker process holds other weights than were sent")
    total = shapes_bytes(shapes)
    return {
        "tensors": len(shapes),
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        **{f"{way} / {other}": ratio(seconds[way], seconds[other]) for way in transports for other in REFERENCES[way]},
        "extra_bytes": {way: max(extra[way] + extra_there[way], default=None) for way in transports},
    }


def settle(device: str) -> None:
    """Wait until a CUDA device has done its work; for the host there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class _End:
    """One end of each way. Both go through the same ways in the same order; rank 0 is the trainer.

    It sends ones to a worker that holds zeros.
    """

    def __init__(self, rank: int, shapes: Shapes, meeting: Info, pipe: Any) -> None:
        self.rank, self.device, self._pipe, self._root = rank, meeting["device"], pipe, Path(meeting["root"])
        self.weights = weights_of(shapes, 1 - rank, self.device)
        self._targets = weights_of(shapes, 0, self.device) if rank == 0 else {}
        self._flat = torch.empty(shapes_bytes(shapes), dtype=torch.uint8)
        self._measured, self._repeats, self._ports = meeting["transports"], meeting["repeats"], meeting["ports"]
        self._transports: dict[str, Any] = {"ipc": IPCTransport(meeting["channel"], timeout_s=TIMEOUT_S)}
        buckets = {"collective": meeting["bucket_bytes"], "collective one by one": 0}
        for port, (way, bucket_bytes) in zip(self._ports, buckets.items(), strict=False):
            self._transports[way] = VLLMCollectiveTransport(
                "127.0.0.1", port, rank, 2, "cpu", bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S
            )
        self._disk: DiskTransport | None = None
        every = torch.get_num_threads()
        self._of_trainer: dict[str, Callable[[], None]] = {
            "disk": self._publish,
            "save_file": self._save,
            "copy": partial(self._copy, every, every),
            "copy by one thread": partial(self._copy, 1, every),
        }

    def run(self) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Make every update; return the seconds of each way, and the memory that one more update by each adds here."""
        if "collective" in self._measured:
            longest, torch_dist = timedelta(seconds=TIMEOUT_S), dist  # type: Any, Any
            store = torch_dist.TCPStore("127.0.0.1", self._ports[-1], 2, self.rank == 0, longest)
            self._plain = torch_dist.ProcessGroupGloo(store, self.rank, 2, longest)
            for way in ("collective", "collective one by one"):
                self._transports[way].init_all_workers_group({})
        ways = [way for transport in self._measured for way in (transport, *REFERENCES[transport])]
        seconds = rounds({way: partial(self._update, way) for way in ways}, self._repeats)
        extra = {}
        for way in self._measured:
            with track_peak() as extra[way]:
                self._update(way)
        return seconds, extra

    def answer(self) -> Any:
        """Return what the other end sends."""
        if not self._pipe.poll(TIMEOUT_S):
            raise TransportError(f"the other process did not answer within {TIMEOUT_S:g} s")
        return self._pipe.recv()

    def close(self) -> None:
        for transport in (*self._transports.values(), *filter(None, [self._disk])):
            transport.shutdown()

    def _update(self, way: str) -> float:
        """Make one update, and return its seconds; the worker waits idly until the trainer begins."""
        if self._disk is not None:
            self._disk.shutdown()
            shutil.rmtree(self._root / "disk")
            self._disk = None
        began = time.perf_counter()
        if way in self._of_trainer:
            if self.rank == 0:
                self._of_trainer[way]()
        elif self.rank == 0:
            self._pipe.send(way)
            self._move(way)
            self.answer()
        else:
            self.answer()
            self._move(way)
            self._pipe.send(way)
        return time.perf_counter() - began

    def _move(self, way: str) -> None:
        if way == "broadcast":
            self._plain.broadcast(self._flat, 0).wait()
        elif self.rank == 0:
            self._transports[way].send_weights("policy", self.weights)
        elif self._transports[way].receive_weights(TIMEOUT_S, weights=self.weights) is None:
            raise TransportError(f"the trainer sent nothing within {TIMEOUT_S:g} s")
        settle(self.device)

    def _publish(self) -> None:
        self._disk = DiskTransport(self._root / "disk")
        self._disk.send_weights("policy", self.weights)

    def _copy(self, threads: int, afterwards: int) -> None:
        torch.set_num_threads(threads)
        for name, tensor in self.weights.items():
            self._targets[name].copy_(tensor)
        settle(self.device)
        torch.set_num_threads(afterwards)

    def _save(self) -> None:
        path = self._root / "plain.safetensors"
        save_file(self.weights, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _follow(shapes: Shapes, meeting: Info, pipe: Any) -> None:
    """Run the worker process."""
    end = _End(1, shapes, meeting, pipe)
    _, extra = end.run()
    pipe.send((all(bool((tensor == 1).all()) for tensor in end.weights.values()), extra))
    end.close()
