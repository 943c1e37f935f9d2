"""A carrier of the lagging device, on streams of its own: every transfer begins late, ends late, and out of step.

gloo carries the bytes between processes. To the device it is as NCCL is: what the caller's stream has queued is read
only when that stream has come to it, what arrives is written on another stream, and nobody's memory is held for longer
than the carrier's contract says.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, final

import pytest
import torch

from torchrl_ext.base import devices
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.group import backends
from torchrl_ext.data.group.backends import GlooCarrier
from torchrl_ext.data.group.calls import run_beside
from torchrl_ext.data.group.carrier import Carrier, Move, Seat, Sizes, polled

__all__ = ["LagCarrier", "carried"]

_LATEST_S = 0.003
_LOOK_S = 0.05


@final
class LagCarrier(Carrier):
    """Calls run in order, one after the other, in a thread; the transfers of a call beside each other."""

    sizes = Sizes(bucket_bytes=1 << 16, direct_bytes=1 << 14, slice_bytes=None)

    def __init__(self, seat: Seat) -> None:
        self._gloo = GlooCarrier(replace(seat, device=torch.device("cpu"), backend="gloo"))
        self._late, self._ended = random.Random(seat.rank), threading.Event()
        self._calls: SimpleQueue[Any] = SimpleQueue()
        run_beside(self._run)

    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        if self._ended.is_set():
            raise RuntimeError("it was aborted")
        device = moves[0].flat.device
        before = torch.accelerator.current_stream(device).record_event()
        for move in moves:
            move.handle = _Landing()
        self._calls.put((device, before, [(move, move.handle) for move in moves], within))

    def _run(self) -> None:
        """Take the calls as they come; each one waits until the caller's stream has come to it."""
        while (call := self._calls.get()) is not None:
            device, before, moves, within = call
            self._pause()
            try:
                self._carry(torch.Stream(device), before, moves, within)
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                for _, landing in moves:
                    landing.fail(error)
            del call, moves, before

    def _carry(self, stream: torch.Stream, before: torch.Event, moves: Any, within: Deadline) -> None:
        stream.wait_event(before)
        hosts = []
        with stream:
            for move, _ in moves:
                host = torch.empty(move.flat.shape, dtype=move.flat.dtype, pin_memory=True)
                hosts.append(Move(move.kind, host.copy_(move.flat, non_blocking=True), move.peer))
        flats = [host.flat for host in hosts]
        stream.synchronize()
        self._gloo.begin(hosts, within)
        waiting = list(zip(moves, hosts, flats, strict=True))
        self._late.shuffle(waiting)
        for (move, landing), host, flat in waiting:
            while not self._gloo.arrives(host, _LOOK_S):
                if self._ended.is_set():
                    raise RuntimeError("it was aborted")
            self._pause()
            if host.failure is not None:
                landing.fail(host.failure)
                continue
            with stream:
                if move.kind != "send":
                    move.flat.copy_(flat, non_blocking=True)
                landing.came(stream.record_event())

    def _pause(self) -> None:
        threading.Event().wait(self._late.uniform(0, _LATEST_S))

    def arrives(self, move: Move, seconds: float) -> bool:
        landing = move.handle
        if landing is None:
            return move.done.wait(seconds)
        within = Deadline(seconds)
        if not landing.set.wait(seconds) or not polled(landing.query, within):
            return False
        if landing.event is not None and move.flat is not None:
            torch.accelerator.current_stream(move.flat.device).wait_event(landing.event)
        aborted = RuntimeError("it was aborted") if self._ended.is_set() else None
        move.end(landing.failure or aborted)
        return True

    def abort(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._gloo.abort()
            self._calls.put(None)


class _Landing:
    """What becomes of a transfer: an event of the stream that brought it, or an error."""

    def __init__(self) -> None:
        self.set, self.event, self.failure = threading.Event(), None, None

    def came(self, event: torch.Event) -> None:
        self.event = event
        self.set.set()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.set.set()

    def query(self) -> bool:
        return self.event is None or self.event.query()


@contextmanager
def carried() -> Iterator[None]:
    """Have tensors on the device carried by this carrier in the block, where nothing else is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.BACKENDS, "lag", "lag")
        patch.setitem(backends.CARRIERS, "lag", LagCarrier)
        yield
