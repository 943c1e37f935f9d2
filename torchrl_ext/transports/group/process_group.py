"""Process groups without a default group and without environment variables.

Every `Group` is a generation of its own, so that a failed one leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import TransportError
from torchrl_ext.transports.group.backends import GLOO_DEVICES, GroupStore, gloo_devices, made_in_time
from torchrl_ext.transports.group.broadcasts import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, SLICE, Broadcasts
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.peers import Carrier, Move, must_return, sever_at_exit
from torchrl_ext.transports.group.sockets import carried, run_beside

__all__ = ["Group"]

_GLOO_THREADS = 8
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_NEVER = timedelta(days=365)
_SLICE_BYTES = 8 << 20
"""Size of the slices of a transfer; several in flight keep every connection to a peer busy."""


class Group(Carrier):
    """A process group of one generation of ranks: rank 0 broadcasts to all others, or one rank sends to another.

    Args:
        notes, generation, rank, peers, device, timeout_s: as for `Carrier`.
        backend: ``"gloo"`` or ``"nccl"``.

    Attributes:
        broadcasts: those of rank 0.
    """

    def __init__(
        self,
        notes: NoteStore,
        generation: str,
        rank: int,
        peers: dict[int, str],
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
    ) -> None:
        super().__init__(notes, generation, rank, peers, device=device, timeout_s=timeout_s)
        self.backend = backend
        self._calls: dict[tuple[int, bool], futures.Future[Any]] = {}
        self._second: Any = None
        self._listeners: set[tuple[Any, ...]] = set()
        until = time.monotonic() + timeout_s
        # held here, since C++ does not keep its Python methods
        self._store: Any = GroupStore(notes, f"group/{generation}/", timeout_s)
        make = self._nccl() if backend == "nccl" else self._gloo()
        pg = made_in_time(make, until, timeout_s, notes.stop)
        self.broadcasts = Broadcasts(pg, backend, device=device, timeout_s=timeout_s, stop=notes.stop)
        sever_at_exit(self)
        try:
            try:
                for peer in range(self.world_size if backend == "gloo" else 0):
                    self._listeners |= _endpoints(notes.get(f"listeners/{generation}/{peer}"))
            finally:  # also those of some
                self.broadcasts.watch(self._listeners)
            self._exchange(until)
        except BaseException:
            self.sever()
            raise

    def _gloo(self) -> Callable[[], Any]:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
        options._devices, self._listeners = gloo_devices(self.notes.host, self.notes.port, self.notes.stop)
        options._threads, options._timeout = _GLOO_THREADS, timedelta(seconds=self.timeout_s + _LATER_S)
        self.notes.put(f"listeners/{self.generation}/{self.rank}", sorted(self._listeners))
        return partial(dist.ProcessGroupGloo, self._store, self.rank, self.world_size, options)

    def _nccl(self) -> Callable[[], Any]:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # where it passes, torch ends the process; waits here have deadlines of their own
        self._nccl_options = options
        return partial(dist.ProcessGroupNCCL, self._store, self.rank, self.world_size, options)

    def _downwards(self) -> Any:
        """Return the group on whose communicators higher ranks send to lower ones; made when it is first used."""
        with self._lock:
            if self._second is None and self.alive:
                store = PrefixStore("downwards", self._store)
                self._second = dist.ProcessGroupNCCL(store, self.rank, self.world_size, self._nccl_options)
        return self._second

    def _exchange(self, until: float) -> None:
        """Add up a number over all ranks, so that a group that is formed is one that works.

        NCCL makes its communicator only when it is used first, in the thread that does so, and without a deadline.
        """
        total = torch.full((1,), float(self.rank + 1), device=self.device)
        work = made_in_time(partial(self.broadcasts.pg.allreduce, [total]), until, self.timeout_s, self.notes.stop)
        self.broadcasts.keep(work)
        self.broadcasts.wait(work)
        expected = self.world_size * (self.world_size + 1) / 2
        if total.item() != expected:
            raise TransportError(f"a first sum over all ranks is {total.item():g}", expected=f"{expected:g}")
        if self.rank == 0:  # every rank is past them, since it took part
            self.notes.sweep(*(f"{kind}/{self.generation}/" for kind in ("group", "listeners", "ready")))

    def moved(self) -> tuple[int, int]:
        """Return the bytes that all ranks of this process sent and received by this group, as the kernel counts them.

        Over gloo, on Linux; without the bytes of connections that are closed. A byte is sent once its receipt is known.
        """
        return carried(self._listeners)

    def under(self, stop: threading.Event) -> None:
        super().under(stop)
        self.broadcasts.stop = stop

    def send(self, flat: Tensor, to: int) -> Any:
        return self._move(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Any:
        return self._move(flat, source, sends=False)

    def _move(self, flat: Tensor, peer: int, *, sends: bool) -> _Parts:
        pg = self.broadcasts.pg
        move = _Parts(flat, peer, sends, self.timeout_s + _LATER_S)
        with self._lock:  # the parts of two transfers must not mix
            try:
                if self.backend == "nccl":
                    self._begin_nccl(pg, move, flat)
                else:
                    call = pg.send if sends else pg.recv
                    for number, part in enumerate(flat.split(_SLICE_BYTES)):  # a tag picks the device
                        work = call([part], peer, number % GLOO_DEVICES)
                        move.parts.append((partial(_wait_gloo, work), part.numel()))
            except RuntimeError as error:
                raise self._broken(move, error) from error
            finally:
                self.broadcasts.keep(move)  # also one that was begun in part
        return move

    def _begin_nccl(self, pg: Any, move: _Parts, flat: Tensor) -> None:
        """Begin a transfer on the device, in a thread where it is the first of its kind with this peer.

        NCCL then makes a communicator of the two, which blocks until the peer does so too; ranks that meet their peers
        in different orders would wait for each other. Each direction has communicators of its own, since what is begun
        on one runs in order: two ranks that both send first would both wait for a receiver.
        """
        line, sends = (move.peer, move.sends), move.sends
        before = self._calls.get(line)
        upwards = sends == (self.rank < move.peer)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))

        def begin() -> Any:
            if before is not None:
                before.result()
            one = pg if upwards else self._downwards()
            torch.cuda.current_stream(self.device).wait_event(ready)
            return (one.send if sends else one.recv)([flat], move.peer, 0)

        if before is not None and before.done():
            begun: futures.Future[Any] = futures.Future()
            begun.set_result(begin())
        else:
            begun = run_beside(begin)
        self._calls[line] = begun

        def finish(longest_s: float) -> None:
            work = begun.result()
            for _ in pauses(longest_s, self.notes.stop, shortest_s=SHORTEST_PAUSE_S, longest_s=LONGEST_PAUSE_S):
                if work.is_completed():  # its wait only orders streams, so completion is asked for
                    work.wait()
                    return
            raise RuntimeError("it was given up")

        move.parts.append((finish, flat.numel()))

    def wait(self, work: Any) -> None:
        work.finish()
        super().wait(work)

    def _lost(self) -> str:
        return "" if self.broadcasts.whole else "a peer"

    def sever(self) -> None:
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        if self.backend == "nccl":
            self.notes.sweep(f"group/{self.generation}/")  # ids of communicators of two ranks
        if self._second is not None:
            run_beside(self._second.abort)
        self.broadcasts.sever()


class _Parts(Move):
    """A transfer in parts that land one after the other.

    gloo's own wait closes every connection at its deadline, and NCCL's only orders streams: a thread waits there.

    Args:
        flat, peer, sends: as for `Move`.
        longest_s: deadline of each part, in seconds.

    Attributes:
        parts: a call that waits for each part, in seconds, and its bytes.
    """

    def __init__(self, flat: Tensor, peer: int, sends: bool, longest_s: float) -> None:
        super().__init__(flat, peer, sends)
        self.parts: list[tuple[Callable[[float], Any], int]] = []
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._call: futures.Future[None] | None = None

    def finish(self) -> None:
        """Have a thread wait for the parts."""
        with self._lock:
            self._call = self._call or run_beside(self._run)

    def _run(self) -> None:
        with self._lock:
            call = self._call
        for wait, nbytes in self.parts:
            seconds = self._longest_s if self.failure is None else SLICE.total_seconds()
            if call is not None:
                must_return(call, time.monotonic() + seconds)
            try:
                wait(seconds)
                self.landed += nbytes
            except BaseException as error:  # noqa: BLE001 - raised by who waits; other parts may still use the memory
                self.failure = self.failure or error
        self.parts.clear()
        self.end()


def _wait_gloo(work: Any, seconds: float) -> None:
    work.wait(timedelta(seconds=seconds))


def _endpoints(said: Any) -> set[tuple[Any, ...]]:
    """Return the addresses at which a rank says that it listens."""
    if type(said) is not list or not all(
        type(one) is list and len(one) == 2 and (type(one[0]), type(one[1])) == (str, int) for one in said
    ):
        raise TransportError(f"a rank says that it listens at {str(said)[:200]!r}", expected="a list of [host, port]")
    return {(host, port) for host, port in said}
