"""Measures shared memory against a plain copy, for ``torchrl-ext bench transport`` and ``torchrl-ext bench gpu``.

End to end: a trainer process sends, a worker process copies into its parameters. The reference is ``copy_`` of every
tensor into another one within one process: with all of torch's threads, and beside it with one, as either end of the
transport copies with one.
"""

from __future__ import annotations

import multiprocessing
import time
import uuid
from functools import partial
from statistics import median
from typing import Any

import torch

from torchrl_ext.bench.data import SIZES, Shapes, shapes_bytes, weights_of
from torchrl_ext.bench.runner import ratio, rounds, track_peak
from torchrl_ext.errors import TransportError
from torchrl_ext.transports.ipc.transport import IPCTransport

__all__ = ["measure_ipc", "settle"]

TIMEOUT_S = 120.0
TARGET = 0.8


def measure_ipc(size: str, part: str, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Measure speeds and host memory for one set of shapes on ``device``.

    Raises:
        TransportError: the worker process failed, or got other bytes.
    """
    shapes = SIZES[size][part]
    channel = f"bench-{uuid.uuid4().hex}"
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    count = repeats + 3  # one to start, a round that is not counted, one at the end
    worker = context.Process(target=_work, args=(channel, size, part, count, tell, device), daemon=True)
    worker.start()
    trainer = IPCTransport(channel, timeout_s=TIMEOUT_S)
    try:
        numbers = _compare(trainer, shapes, repeats, device)
        if not told.poll(TIMEOUT_S):
            raise TransportError("the worker process did not answer")
        correct, extra = told.recv()
        if not correct:
            raise TransportError("the worker process holds other weights than were sent")
    finally:
        trainer.shutdown()
        worker.terminate()
        worker.join()
    mine = numbers.pop("extra")
    found = None if mine is None or extra is None else max(mine, extra)
    bound = numbers["staging_bytes"]
    numbers["extra_memory"] = {"bytes": found, "bound_bytes": bound, "met": None if found is None else found <= bound}
    return numbers


def _compare(trainer: IPCTransport, shapes: Shapes, repeats: int, device: str) -> dict[str, Any]:
    weights, targets = weights_of(shapes, 1, device), weights_of(shapes, 0, device)

    def ipc() -> float:
        began = time.perf_counter()
        trainer.send_weights(weights)
        return time.perf_counter() - began

    def copies(threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        for name, tensor in weights.items():
            targets[name].copy_(tensor)
        settle(device)
        taken = time.perf_counter() - began
        torch.set_num_threads(most)
        return taken

    most = torch.get_num_threads()
    ipc()  # starts the worker's program
    seconds = rounds({"ipc": ipc, "copy": partial(copies, most), "one_thread": partial(copies, 1)}, repeats)
    with track_peak() as extra:
        ipc()
    total = shapes_bytes(shapes)
    return {
        "tensors": len(shapes),
        "bytes": total,
        "staging_bytes": trainer.staging_bytes,
        "seconds": seconds,
        "gb_per_s": {way: total / median(taken) / 1e9 for way, taken in seconds.items()},
        "ipc_vs_copy": ratio(seconds["ipc"], seconds["copy"], TARGET),
        "ipc_vs_one_thread": ratio(seconds["ipc"], seconds["one_thread"]),
        "extra": extra[0] if extra else None,
    }


def settle(device: str) -> None:
    """Wait until a CUDA device has done its work; for the host there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _work(channel: str, size: str, part: str, count: int, tell: Any, device: str) -> None:
    """Run the worker process: receive ``count`` updates, and track the memory of the last one."""
    weights = weights_of(SIZES[size][part], 0, device)
    worker = IPCTransport(channel, timeout_s=TIMEOUT_S)

    def receive() -> None:
        if worker.receive_weights(TIMEOUT_S, weights=weights) is None:
            raise TransportError(f"the trainer sent nothing within {TIMEOUT_S:g} s")

    for _ in range(count - 1):
        receive()
    with track_peak() as extra:
        receive()
    correct = all(bool((tensor == 1).all()) for tensor in weights.values())
    tell.send((correct, extra[0] if extra else None))
    worker.shutdown()
