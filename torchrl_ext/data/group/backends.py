"""Which backend carries the tensors of a device, and the carriers over torch's own backends."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import (
    BACKENDS,
    Recorded,
    backend_of,
    current_device,
    known_device,
    recorded,
    usable_device,
    wait_for,
)
from torchrl_ext.base.errors import ConfigError, TransportError, WeightSyncError
from torchrl_ext.data.group.calls import in_time, made_in_time, run_beside, wait_for_at_exit
from torchrl_ext.data.group.carrier import DEVICE, HOST, Carrier, Move, Seat, polled
from torchrl_ext.data.group.nccl import NcclCarrier, as_launched, package

__all__ = ["CARRIERS", "GlooCarrier", "GroupStore", "TorchCarrier", "carrier_of", "choose_backend"]

log = logging.getLogger("torchrl_ext")

_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times as much as one."""
_THREADS = 8
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_SLICE_S = 0.1
_NEVER = timedelta(days=365)
_LOOK_UP_S = 10.0
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1 << 20


def choose_backend(device: torch.device | str | int | None, backend: str | None) -> tuple[torch.device, str]:
    """Return the device of the tensors that travel, and their backend (`torchrl_ext.base.devices.backend_of`).

    Args:
        device: by default this thread's accelerator, or the CPU without one or with gloo.
        backend: ``"gloo"``, ``"nccl"``, ``"xccl"`` or ``"hccl"``; by default that of the device.

    Raises:
        ConfigError: no such backend, or one that cannot move tensors of this device; or there is no such device.
    """
    if backend not in (None, "gloo", *BACKENDS.values()):
        raise ConfigError(
            f"there is no collective backend {backend!r}", expected="'gloo', or that of the device: 'nccl' on CUDA"
        )
    if device is None:
        chosen = torch.device("cpu") if backend == "gloo" else current_device()
    else:
        chosen = known_device(device) if backend == "gloo" else usable_device(device)
    own = backend_of(chosen)
    if backend not in (None, "gloo", own):
        raise ConfigError(
            f"{backend} cannot move tensors on {chosen}", expected=f"{own}, or a device of {backend}'s, or 'gloo'"
        )
    if "gloo" in (backend, own):
        return torch.device("cpu"), "gloo"  # which moves host memory; other tensors are copied to it and from it
    return torch.device(chosen.type, current_device().index) if chosen.index is None else chosen, own


class GroupStore(Store):
    """A torch store that keeps its values in a `KeyStore`, behind its secret.

    gloo needs it while it is constructed. torch's NCCL leaves the id of its communicator there, and its monitor looks
    for signals of other ranks for as long as the process lives.

    Args:
        seat: whose store holds the values; a backend waits as long for a value as for the group.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self._own, self._within = seat.store, seat.within

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value under ``key``."""
        self._own.set(f"group/{key}", value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return the value under ``key``, as soon as it is there.

        Raises:
            DeadlineError: it did not come in time.
            TransportError: another thread aborted.
        """
        within = self._within.again()
        found = self._own.find(f"group/{key}", within)
        if found is None:
            raise within.error(f"another rank left nothing under {key!r}")
        return str(found).encode("latin-1", errors="replace")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until values are there; errors as `get`."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are there, as far as the trainer answers."""
        try:
            return all(self._own.find(f"group/{key}") is not None for key in keys)
        except WeightSyncError:  # the monitor of NCCL asks in a thread of its own, and must not end the process
            return False


@final
class TorchCarrier(Carrier):
    """Any backend of torch's for device memory: nccl without nccl4py, xccl, hccl and others that are registered.

    Torch forms communicators when they are used first, without a deadline, so that the first transfer begins in a
    thread. What an abort does to its work differs by backend. With nccl, torch's watchdog ends the whole process when
    it notices that a peer is gone, unless ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` was set when the process began.

    Args:
        seat: of this process.
        store: of torch's, where other ranks of the backend meet without a store of ours.

    Raises:
        TransportError, DeadlineError: the backend cannot be made.
    """

    sizes = DEVICE

    def __init__(self, seat: Seat, store: Any = None) -> None:
        if seat.backend == "nccl":
            _warn_of_the_watchdog()
        self._store = GroupStore(seat) if store is None else store  # C++ does not keep a store's Python methods
        made = partial(_torch_backend, seat.backend, self._store, seat.rank, len(seat.peers))
        self._backend: Any = made_in_time(made, seat.within)
        self._first, self._ended = True, False
        self._begun: deque[Move] = deque()  # which hold their memory

    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        post = partial(self._post, moves, recorded([move.flat.device for move in moves if move.flat is not None]))
        while self._begun and self._begun[0].done.is_set():
            self._begun.popleft()
        self._begun.extend(moves)
        work = made_in_time(post, within) if self._first else post()
        self._first = False
        for move in moves:
            move.handle = work

    def _post(self, moves: Sequence[Move], before: Recorded) -> Any:
        """Begin transfers; in a thread of its own they are read behind what the caller's thread queued ``before``."""
        wait_for(before)
        backend, first = self._backend, moves[0]
        if first.kind in ("sum", "broadcast"):
            with as_launched():  # which may form the communicator
                return backend.allreduce([first.flat]) if first.kind == "sum" else backend.broadcast(first.flat, 0)
        backend._start_coalescing()  # by itself a send would form a communicator of two
        try:
            for move in moves:
                (backend.send if move.kind == "send" else backend.recv)([move.flat], move.peer, 0)
        finally:
            work = backend._end_coalescing()
        return work

    def arrives(self, move: Move, seconds: float) -> bool:
        work = move.handle
        if work is None:
            return move.done.wait(seconds)
        if not polled(work.is_completed, Deadline(seconds)):
            return False
        _settle(move, work, self._ended)
        return True

    def abort(self) -> None:
        self._ended = True
        run_beside(self._abort)

    def _abort(self) -> None:
        self._backend.abort()
        self._begun.clear()


def _settle(move: Move, work: Any, ended: bool = False) -> None:
    """End a transfer whose work of torch's is completed."""
    failure = RuntimeError("it was aborted") if ended else None
    try:
        work.wait()  # on a device it orders the current stream behind the work
    except RuntimeError as error:
        failure = error
    move.end(failure)


def _torch_backend(name: str, store: Any, rank: int, size: int) -> Any:
    """Return torch's backend object of that name: one that torch has built in, or one that a vendor registered."""
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        kind: Any = getattr(dist, f"ProcessGroup{name.upper()}", None)
        if kind is None:
            raise TransportError(
                f"this build of torch has no backend {name!r}",
                expected="the torch of the device's vendor, with its collectives",
                hint="give backend='gloo' on every rank, which copies through the host",
            )
        options = kind.Options()
        options._timeout = _NEVER  # where it passed, torch would end the process, and our waits have their own
        return kind(store, rank, size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, _NEVER)
    from torch._C._distributed_c10d import _DistributedBackendOptions

    where = _DistributedBackendOptions()
    where.store, where.group_rank, where.group_size, where.timeout = store, rank, size, _NEVER
    where.group_id, where.global_ranks_in_group = "torchrl_ext", list(range(size))
    return plugin.creator_fn(where, None)


@cache
def _warn_of_the_watchdog() -> None:
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
        log.warning(
            "torch carries NCCL, as nccl4py is not installed: when a peer dies, its watchdog ends this process, too; "
            "pip install 'torchrl_ext[nccl]' at both ends, or start both with TORCH_NCCL_ASYNC_ERROR_HANDLING=0"
        )


@final
class GlooCarrier(Carrier):
    """gloo, for host memory: connections that both ends see closed when one dies.

    Args:
        seat: of this process.
        store: of torch's, where other ranks of gloo meet without a store of ours.
        devices, threads: of gloo.

    Raises:
        TransportError, DeadlineError: not every rank takes part.
    """

    sizes = HOST

    def __init__(self, seat: Seat, store: Any = None, *, devices: int = _DEVICES, threads: int = _THREADS) -> None:
        self._store = GroupStore(seat) if store is None else store  # C++ does not keep a store's Python methods
        options = _gloo_options(seat.store.host, seat.store.port, seat.within, devices, threads)
        make = partial(dist.ProcessGroupGloo, self._store, seat.rank, len(seat.peers), options)
        self._held: list[Any] = [made_in_time(make, seat.within)]
        self._devices, self._patience_s = devices, seat.within.timeout_s + _LATER_S
        self._lock = threading.Lock()
        self._begun: deque[Any] = deque()  # works: a backend is destroyed only when nothing runs
        self._lines: dict[tuple[str, int | None], tuple[SimpleQueue[Any], Future[Any]]] = {}

    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        for move in moves:
            if move.kind == "sum":
                self._follow(move, self._backend.allreduce([move.flat]))
            elif move.kind == "broadcast":
                self._follow(move, self._backend.broadcast(move.flat, 0))
            else:
                self._line_up(move)

    @property
    def _backend(self) -> Any:
        for backend in [*self._held]:
            return backend
        raise RuntimeError("it was aborted")

    def _follow(self, move: Move, work: Any) -> None:
        move.handle = work
        with self._lock:
            while self._begun and self._begun[0].is_completed():
                self._begun.popleft()
            self._begun.append(work)

    def _line_up(self, move: Move) -> None:
        """Begin the slices of a transfer, and have a thread wait for them."""
        assert move.flat is not None
        works: list[tuple[Any, int]] = []
        with self._lock:
            backend = self._backend
            call = backend.send if move.kind == "send" else backend.recv
            try:
                for number, part in enumerate(move.flat.split(self.sizes.slice_bytes or move.nbytes)):
                    works.append((call([part], move.peer, number % self._devices), part.numel()))  # a tag picks one
            finally:
                way = move.kind, move.peer
                if way not in self._lines:
                    queue: SimpleQueue[Any] = SimpleQueue()
                    self._lines[way] = queue, run_beside(partial(_wait_in_turn, queue, self._patience_s))
                queue, beside = self._lines[way]
                queue.put((beside, move, works))

    def arrives(self, move: Move, seconds: float) -> bool:
        work = move.handle
        if work is None:
            return move.done.wait(seconds)
        if not work.is_completed():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=seconds))
        if not work.is_completed():
            return False
        _settle(move, work)
        return True

    def abort(self) -> None:
        with self._lock:
            held, self._held = self._held, []
            lines, self._lines = list(self._lines.values()), {}
        if held:
            _close_connections(held[0], self._devices)
            for queue, _ in lines:
                queue.put(None)
            run_beside(partial(_destroy_later, [beside for _, beside in lines], self._begun, held, self._store))


CARRIERS: dict[str, type[Carrier]] = {"gloo": GlooCarrier}
"""By backend, where it is carried by one class in every process."""


def carrier_of(backend: str) -> type[Carrier]:
    """Return the class that carries over a backend in this process."""
    if backend == "nccl" and package() is not None:
        return NcclCarrier
    return CARRIERS.get(backend, TorchCarrier)


def _gloo_options(host: str, port: int | None, within: Deadline, devices: int, threads: int) -> Any:
    """Return options of gloo, whose devices are bound to the interface that reaches the trainer.

    GLOO_SOCKET_IFNAME may name other interfaces, as in torch.

    Args:
        host, port: where the trainer is.
        within: every wait of ours has as many seconds; its flag ends a look-up.
        devices, threads: how many of each.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        options._devices = [make(interface=names[index % len(names)]) for index in range(devices)]
    else:
        own = _own_address(host, port, within.stop)
        options._devices = [make(hostname=own) for _ in range(devices)]
    options._threads, options._timeout = threads, timedelta(seconds=within.timeout_s + _LATER_S)
    return options


def _own_address(host: str, port: int | None, stop: threading.Event) -> str:
    """Return this machine's address on the route to the trainer."""
    within = Deadline(_LOOK_UP_S, stop=stop)
    places = in_time(partial(socket.getaddrinfo, host, port, type=socket.SOCK_DGRAM), within)
    if not places:
        raise within.error(f"no name server knew {host}")
    family, _, _, _, target = places[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]


def _wait_in_turn(queue: SimpleQueue[Any], longest_s: float) -> None:
    """Wait for the transfers over gloo to one peer, or from it, one after the other, until None comes.

    gloo tells the end of a transfer only to a thread that waits, and closes every connection at the deadline of a wait.

    Args:
        queue: of transfers: the call in which this runs, the transfer, and the works of its slices with their bytes.
        longest_s: deadline of each slice, in seconds.
    """
    while (item := queue.get()) is not None:
        call: Future[Any] = item[0]
        move: Move = item[1]
        failure: RuntimeError | None = None
        for work, nbytes in item[2]:
            seconds = longest_s if failure is None else _SLICE_S  # other slices may still use the memory
            wait_for_at_exit(call, time.monotonic() + seconds)
            try:
                work.wait(timedelta(seconds=seconds))
                move.landed += nbytes
            except RuntimeError as error:
                failure = move.failure = failure or error  # which ends the waits for it
            del work
        move.end(failure)
        del item, move, failure  # nothing is held while the next one is waited for


def _close_connections(backend: Any, devices: int) -> None:
    """Close every connection of a gloo backend, by which waits of all threads end, and peers see it.

    gloo has no call for it, but it closes the connections of a device when a `recv` on it is not answered in time.
    """
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + devices):  # a tag picks the device
        for peer in range(backend.size()):
            if peer != backend.rank():
                with suppress(RuntimeError):
                    backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(_AT_ONCE)


def _destroy_later(busy: list[Future[Any]], begun: deque[Any], held: list[Any], store: Any) -> None:
    """Destroy a backend of gloo's once nothing runs on it; ``store`` lives until then.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    wait(busy)
    pause = threading.Event()
    while begun:
        while not begun[0].is_completed():
            pause.wait(0.01)
        begun.popleft()
    held.clear()
