"""``python -m tests.bench carriers``: bytes from one rank to another by every carrier, beside a broadcast and a copy.

Two processes on this machine. Each way moves the same bytes in flat buffers of one size, two of them in flight; a round
ends when the other process has told that it has them all.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from tests.bench.frame import say, together
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.errors import ConfigError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.transports.group.meeting import STANDALONE_GROUP, Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.sharded.nixl import load_nixl

TIMEOUT_S = 120.0
_FLYING = 2
_BROADCAST_BYTES = 8 << 20
"""Slices of a broadcast, as the collective transport makes them."""


def measure(*, repeats: int = 7, mebibytes: int = 512, bucket_mebibytes: int = 64) -> dict[str, Any]:
    """Move --mebibytes in each round, in flat buffers of --bucket-mebibytes, by every carrier that is installed."""
    backends = ["gloo"]
    try:
        load_nixl()
        backends.append("nixl")
    except ConfigError as error:
        say(f"without nixl: {error.what}")
    ports, secret = {backend: free_port() for backend in backends}, uuid.uuid4().hex
    say(f"{mebibytes} MiB by {', '.join(backends)}")
    seconds, correct = together(partial(_take_part, ports, secret, mebibytes, bucket_mebibytes, repeats), 2)
    assert correct, "the other process does not hold what was sent"
    total = mebibytes << 20
    return {
        "bytes": total,
        "bucket_bytes": bucket_mebibytes << 20,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "seconds": seconds,
        "gib_per_s": {way: total / median(taken) / 2**30 for way, taken in seconds.items()},
        **{
            f"{way}_vs_{other}": ratio(seconds[way], seconds[other])
            for way in backends
            for other in ("broadcast", "copy")
        },
    }


def _take_part(
    ports: Mapping[str, int], secret: str, mebibytes: int, bucket_mebibytes: int, repeats: int, rank: int
) -> Any:
    """Run one of the two processes: the first returns the seconds, the other whether it held what was sent."""
    members = {
        backend: Membership("127.0.0.1", port, secret, device=torch.device("cpu"), backend=backend, timeout_s=TIMEOUT_S)
        for backend, port in ports.items()
    }
    for member in members.values():
        if rank == 0:
            member.host(STANDALONE_GROUP, 2, ())
        else:
            member.enter(STANDALONE_GROUP, rank, 2, ())
    end = _End({backend: member.carrier() for backend, member in members.items()}, mebibytes, bucket_mebibytes)
    _OPEN.extend(members.values())
    if rank == 0:
        return rounds(end.ways, repeats)
    correct = True

    def checked(call: Callable[[], float]) -> float:
        end.flat.zero_()
        taken = call()
        nonlocal correct
        correct = correct and bool((end.flat == 7).all())
        return taken

    rounds({way: call if way == "copy" else partial(checked, call) for way, call in end.ways.items()}, repeats)
    return correct


_OPEN: list[Membership] = []
"""Groups whose connections stay until both processes are done."""


class _End:
    """One of the two processes, which both go through the same ways; rank 0 sends.

    Args:
        carriers: by backend.
        mebibytes: moved in each round.
        bucket_mebibytes: size of a flat buffer.

    Attributes:
        ways: what is measured: a call for each, that returns its seconds.
    """

    def __init__(self, carriers: Mapping[str, PeerGroup], mebibytes: int, bucket_mebibytes: int) -> None:
        self.gloo = cast(Group, carriers["gloo"])
        self.flat = torch.zeros(mebibytes << 20, dtype=torch.uint8)
        self._bucket_bytes = bucket_mebibytes << 20
        if self.gloo.rank == 0:
            self.flat.fill_(7)
        self._copy = torch.empty_like(self.flat)
        self.ways: dict[str, Callable[[], float]] = {
            **{backend: partial(self._timed, partial(self._move, one)) for backend, one in carriers.items()},
            "broadcast": partial(self._timed, self._broadcast),
            "copy": partial(self._timed, lambda: self._copy.copy_(self.flat)),
        }

    def _timed(self, call: Callable[[], Any]) -> float:
        self.meet()
        began = time.perf_counter()
        call()
        self.meet()
        return time.perf_counter() - began

    def meet(self) -> None:
        """Wait until the other end has come to this step too."""
        other, byte = 1 - self.gloo.rank, torch.zeros(1, dtype=torch.uint8)
        for work in (self.gloo.send(byte, other), self.gloo.receive(torch.empty_like(byte), other)):
            self.gloo.wait(work)

    def _move(self, carrier: PeerGroup) -> None:
        begin = partial(carrier.send, to=1) if carrier.rank == 0 else partial(carrier.receive, source=0)
        self._windowed(carrier, begin, self._bucket_bytes, _FLYING)

    def _broadcast(self) -> None:
        many = max(1, _FLYING * self._bucket_bytes // _BROADCAST_BYTES)
        self._windowed(self.gloo, self.gloo.broadcast, _BROADCAST_BYTES, many)

    def _windowed(self, group: PeerGroup, begin: Callable[[Tensor], Any], nbytes: int, many: int) -> None:
        flying: deque[Any] = deque()
        for part in self.flat.split(nbytes):
            if len(flying) == many:
                group.wait(flying.popleft())
            flying.append(begin(part))
        while flying:
            group.wait(flying.popleft())
