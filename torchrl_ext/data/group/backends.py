"""Which backend carries the tensors of a device, and the carriers over torch's own backends."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
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
from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.data.group.calls import made_in_time, run_beside
from torchrl_ext.data.group.carrier import DEVICE, HOST, Carrier, Move, Seat, polled
from torchrl_ext.data.group.nccl import NcclCarrier, as_launched, package

__all__ = ["CARRIERS", "GlooCarrier", "GroupStore", "TorchCarrier", "carrier_of", "choose_backend"]

log = logging.getLogger("torchrl_ext")

_DEVICES = 2
"""Each gloo device has one thread that moves bytes; two of them carry 1.6 times as much as one."""
_THREADS = 8
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_SLICE = timedelta(milliseconds=100)
_NEVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1 << 20


def choose_backend(device: torch.device | str | int | None, backend: str | None) -> tuple[torch.device, str]:
    """Return the device of the tensors that travel, and their backend (`torchrl_ext.base.devices.backend_of`).

    Args:
        device: by default this thread's accelerator, or the CPU without one or with gloo.
        backend: ``"gloo"`` or ``"nccl"``; by default that of the device.

    Raises:
        ConfigError: no such backend, or one that cannot move tensors of this device; or there is no such device.
    """
    if backend not in (None, "gloo", *BACKENDS.values()):
        raise ConfigError(f"there is no collective backend {backend!r}", expected="'gloo', or 'nccl' on CUDA")
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
    """Torch's own NCCL, where there is no nccl4py, and for stock SGLang.

    Torch forms communicators when they are used first, without a deadline, so that the first transfer begins in a
    thread. Its watchdog ends the whole process when it notices that a peer is gone, unless
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` was set when the process began.

    Args:
        seat: of this process.
        store: of torch's, where other ranks of the backend meet without a store of ours.

    Raises:
        TransportError, DeadlineError: the backend cannot be made.
    """

    sizes = DEVICE

    def __init__(self, seat: Seat, store: Any = None) -> None:
        _warn_of_the_watchdog()
        self._store = GroupStore(seat) if store is None else store  # C++ does not keep a store's Python methods
        made = partial(_torch_nccl, self._store, seat.rank, len(seat.peers))
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


def _torch_nccl(store: Any, rank: int, size: int) -> Any:
    kind: Any = dist.ProcessGroupNCCL  # a CPU build has none
    options = kind.Options()
    options._timeout = _NEVER  # where it passed, torch would end the process, and our waits have their own
    return kind(store, rank, size, options)


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

    gloo tells the end of a send or receive only to a thread that waits, and closes every connection at the deadline of
    a wait, so each of them has a thread that waits for as long as the group lives.

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
        self._devices, self._lock = devices, threading.Lock()
        self._begun: deque[Any] = deque()  # a backend is destroyed only when nothing runs

    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        with self._lock:
            if not self._held:
                raise RuntimeError("it was aborted")
            backend = self._held[0]
            while self._begun and self._begun[0]():
                self._begun.popleft()
            for move in moves:
                assert move.flat is not None
                if move.kind in ("send", "receive"):
                    call, works = backend.send if move.kind == "send" else backend.recv, list[tuple[Any, int]]()
                    try:
                        for number, part in enumerate(move.flat.split(self.sizes.slice_bytes or move.nbytes)):
                            works.append((call([part], move.peer, number % self._devices), part.numel()))  # by a tag
                    finally:
                        self._begun.append(run_beside(partial(_wait_for, move, works)).done)
                else:
                    sums = move.kind == "sum"
                    work = backend.allreduce([move.flat]) if sums else backend.broadcast(move.flat, 0)
                    move.handle = work
                    self._begun.append(work.is_completed)

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
        if held:
            _close_connections(held[0], self._devices)
            run_beside(partial(_destroy_later, self._begun, held, self._store))


CARRIERS: dict[str, type[Carrier]] = {"gloo": GlooCarrier}
"""By backend, where it is carried by one class in every process."""


def carrier_of(backend: str) -> type[Carrier]:
    """Return the class that carries over a backend in this process."""
    if backend == "nccl" and package() is not None:
        return NcclCarrier
    return CARRIERS.get(backend, TorchCarrier)


def _gloo_options(host: str, port: int, within: Deadline, devices: int, threads: int) -> Any:
    """Return options of gloo, whose devices are bound to the interface that reaches the trainer.

    GLOO_SOCKET_IFNAME may name other interfaces, as in torch.

    Args:
        host, port: where the trainer is.
        within: every wait of ours has as many seconds.
        devices, threads: how many of each.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        options._devices = [make(interface=names[index % len(names)]) for index in range(devices)]
    else:
        own = _own_address(host, port)
        options._devices = [make(hostname=own) for _ in range(devices)]
    options._threads, options._timeout = threads, timedelta(seconds=within.timeout_s + _LATER_S)
    return options


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to the trainer."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]


def _wait_for(move: Move, works: Sequence[tuple[Any, int]]) -> None:
    """Wait for the slices of a transfer: their works, and their bytes."""
    failure: RuntimeError | None = None
    for work, nbytes in works:
        try:
            work.wait(_NEVER if failure is None else _SLICE)  # other slices may still use the memory
            move.landed += nbytes
        except RuntimeError as error:
            failure = move.failure = failure or error  # which ends the waits for it
    move.end(failure)


def _close_connections(backend: Any, devices: int) -> None:
    """Close every connection of a gloo backend, by which waits of all threads end, and peers see it.

    gloo has no call for it, but it closes the connections of a device when a `recv` on it is not answered in time.
    """
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + devices):  # a tag picks the device
        for peer in range(backend.size()):
            if peer != backend.rank():
                with suppress(RuntimeError):
                    backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(_AT_ONCE)


def _destroy_later(begun: deque[Callable[[], bool]], held: list[Any], store: Any) -> None:
    """Destroy a backend of gloo's once everything that was ``begun`` is over; ``store`` lives until then.

    gloo leaves a send that was half-way when its connection broke to its timeout. Destroying the backend earlier
    would block in a destructor, which takes the process down when the interpreter ends meanwhile.
    """
    pause = threading.Event()
    while begun:
        while not begun[0]():
            pause.wait(0.01)
        begun.popleft()
    held.clear()
