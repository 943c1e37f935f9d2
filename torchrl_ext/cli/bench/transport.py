"""``torchrl-ext bench transport``: full updates of a worker process, beside the plainest ways to move the same bytes.

Two processes on this machine. The reference of the collective (gloo) is one broadcast of a flat tensor with all the
bytes; that of shared memory is ``copy_`` of every tensor within one process; that of a publication is
`safetensors.torch.save_file` and an fsync.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
from torch.multiprocessing.spawn import ProcessException, spawn

from torchrl_ext.base.errors import TransportError
from torchrl_ext.base.types import Info
from torchrl_ext.cli.bench.data import SIZES, Shapes, shapes_bytes
from torchrl_ext.cli.bench.runner import ratio, rounds
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.transports.disk import DiskTransport
from torchrl_ext.data.transports.ipc import IPCTransport

__all__ = ["REFERENCES", "measure"]

TIMEOUT_S = 120.0
REFERENCES = {"collective": "broadcast", "ipc": "copy", "disk": "save_file"}
"""Each transport, and the way that it is compared with."""


def measure(size: str, repeats: int) -> Info:
    """Compare every transport with its reference, on the shapes of a model.

    Args:
        size: of `SIZES`.
        repeats: rounds.

    Returns:
        JSON-safe: ``seconds`` and ``gb_per_s`` by way, and a ratio for each pair (above 1 the transport is faster).

    Raises:
        TransportError: a process failed, or the worker holds other weights than were sent.
    """
    shapes = SIZES[size]
    total = shapes_bytes(shapes)
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as root:
        try:
            spawn(_take_part, (shapes, repeats, (free_port(), free_port()), uuid.uuid4().hex, Path(root)), nprocs=2)
        except ProcessException as error:
            raise TransportError(f"a process of the measurement failed: {error}") from None
        taken = json.loads(Path(root, "taken.json").read_text())
    return {
        "size": size,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "tensors": len(shapes),
        "bytes": total,
        "seconds": taken,
        "gb_per_s": {way: total / median(spent) / 1e9 for way, spent in taken.items()},
        **{f"{way} / {other}": ratio(taken[way], taken[other]) for way, other in REFERENCES.items()},
    }


def _take_part(rank: int, shapes: Shapes, repeats: int, ports: tuple[int, int], channel: str, root: Path) -> None:
    """Take part in all ways: rank 0 holds ones, sends them to rank 1, which holds zeros, and writes what they take.

    Both go through the same ways in the same order. Those that need no worker are nothing on rank 1.
    """
    source, target = (
        {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in shapes.items()} for value in (1, 0)
    )
    flat, waits = torch.empty(shapes_bytes(shapes), dtype=torch.uint8), timedelta(seconds=TIMEOUT_S)
    gloo: Any = dist  # a group of its own: with a default group both processes would be ranks of one trainer
    group = gloo.ProcessGroupGloo(gloo.TCPStore("127.0.0.1", ports[0], 2, rank == 0, waits), rank, 2, waits)
    with (
        IPCTransport(channel, timeout_s=TIMEOUT_S) as ipc,
        VLLMCollectiveTransport("127.0.0.1", ports[1], rank, 2, "cpu", timeout_s=TIMEOUT_S) as collective,
    ):
        collective.init_all_workers_group({})

        def move(transport: Any) -> None:
            if rank == 0:
                transport.send_weights("policy", source)
            elif transport.receive_weights(TIMEOUT_S, weights=target) is None:
                raise TransportError(f"the trainer sent nothing within {TIMEOUT_S:g} s")

        def together(way: Callable[[], object]) -> None:  # the worker sleeps until then: waiting takes a core
            group.barrier().wait()
            way()
            group.barrier().wait()

        def copy() -> None:
            for name, tensor in source.items():
                target[name].copy_(tensor)

        def publish() -> None:
            shutil.rmtree(root / "disk", ignore_errors=True)
            with DiskTransport(root / "disk") as transport:
                transport.send_weights("policy", source)

        def save() -> None:
            save_file(source, root / "plain")
            with open(root / "plain", "rb+") as file:
                os.fsync(file.fileno())

        alone: dict[str, Callable[[], object]] = {"copy": copy, "disk": publish, "save_file": save}
        ways: dict[str, Callable[[], object]] = {
            "collective": partial(together, partial(move, collective)),
            "broadcast": partial(together, lambda: group.broadcast(flat, 0).wait()),
            "ipc": partial(together, partial(move, ipc)),
            **(alone if rank == 0 else dict.fromkeys(alone, lambda: None)),
        }
        taken = rounds(ways, repeats)
    if rank == 0:
        (root / "taken.json").write_text(json.dumps(taken))
    elif not all(bool((tensor == 1).all()) for tensor in target.values()):
        raise TransportError("the worker process holds other weights than were sent")
