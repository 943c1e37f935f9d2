"""``python -m tests.bench carriers``: bytes from one rank to another by every carrier, beside a broadcast and a copy.

Two processes on this machine. Each way moves the same bytes in flat buffers of one size, two of them in flight; a round
ends when the other process has told that it has them all.
"""

from __future__ import annotations

import argparse
import multiprocessing
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

from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.errors import ConfigError, TransportError
from torchrl_ext.transports.group.meeting import STANDALONE_GROUP, Membership
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.sharded.nixl import load_nixl

TIMEOUT_S = 120.0
_FLYING = 2
_BROADCAST_BYTES = 8 << 20
"""Slices of a broadcast, as the collective transport makes them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mebibytes", type=int, default=512, help="moved in each round")
    parser.add_argument("--bucket-mebibytes", type=int, default=64, help="size of a flat buffer")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every carrier that is installed.

    Raises:
        TransportError: the other process failed, or got other bytes.
    """
    backends, secret = ["gloo"], uuid.uuid4().hex
    try:
        load_nixl()
        backends.append("nixl")
    except ConfigError as error:
        say(f"without nixl: {error.what}")
    members = {backend: _member(0, secret, backend) for backend in backends}
    ports = {backend: member.notes(STANDALONE_GROUP).port for backend, member in members.items()}
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(ports, secret, args, tell), daemon=True)
    say("starting the other process")
    worker.start()
    try:
        for member in members.values():
            member.host(STANDALONE_GROUP, 2, ())
        end = _End({backend: member.carrier() for backend, member in members.items()}, args)
        say(f"{args.mebibytes} MiB by {', '.join(end.ways)}")
        seconds = rounds(end.ways, args.repeats)
        if not told.poll(TIMEOUT_S) or told.recv() is not True:
            raise TransportError("the other process does not hold what was sent")
        numbers = _numbers(args, seconds, end)
        end.meet()  # the other end closes its connections only now
    finally:
        for member in members.values():
            member.close()
        worker.terminate()
        worker.join()
    return numbers


def _member(port: int, secret: str, backend: str) -> Membership:
    return Membership("127.0.0.1", port, secret, device=torch.device("cpu"), backend=backend, timeout_s=TIMEOUT_S)


class _End:
    """One of the two processes, which both go through the same ways; rank 0 sends.

    Args:
        carriers: by backend.
        args: the options.

    Attributes:
        ways: what is measured: a call for each, that returns its seconds.
    """

    def __init__(self, carriers: Mapping[str, PeerGroup], args: argparse.Namespace) -> None:
        self.gloo = cast(Group, carriers["gloo"])
        self.flat = torch.zeros(args.mebibytes << 20, dtype=torch.uint8)
        self._bucket_bytes = args.bucket_mebibytes << 20
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


def _work(ports: Mapping[str, int], secret: str, args: argparse.Namespace, tell: Any) -> None:
    """Run the other process: join as rank 1, and go through the same ways."""
    members = {backend: _member(port, secret, backend) for backend, port in ports.items()}
    for member in members.values():
        member.enter(STANDALONE_GROUP, 1, 2, ())
    end = _End({backend: member.carrier() for backend, member in members.items()}, args)
    correct = True

    def checked(call: Callable[[], float]) -> float:
        end.flat.zero_()
        taken = call()
        nonlocal correct
        correct = correct and bool((end.flat == 7).all())
        return taken

    rounds({way: call if way == "copy" else partial(checked, call) for way, call in end.ways.items()}, args.repeats)
    tell.send(correct)
    end.meet()
    for member in members.values():
        member.close()


def _numbers(args: argparse.Namespace, seconds: dict[str, list[float]], end: _End) -> dict[str, Any]:
    total = args.mebibytes << 20
    return {
        "bytes": total,
        "bucket_bytes": args.bucket_mebibytes << 20,
        "repeats": args.repeats,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "seconds": seconds,
        "gib_per_s": {way: total / median(taken) / 2**30 for way, taken in seconds.items()},
        **{
            f"{way}_vs_{other}": ratio(seconds[way], seconds[other])
            for way in seconds
            for other in ("broadcast", "copy")
            if way not in ("broadcast", "copy")
        },
    }
