"""NCCL by its own Python package, nccl4py: nothing here ends a process whose peer has died, as torch's watchdog does.

Communicators do not block (``ncclConfig_t.blocking`` is 0): a call returns at once, and is posted when
``ncclCommGetAsyncError`` says so, which we ask by our own deadline. One that broke is aborted, and nothing is left of
it. Sources: NCCL's user guide, "Fault Tolerance" and "Creating a communicator with options"; nccl4py 0.6.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

from torch import cuda

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import TransportError
from torchrl_ext.data.group.calls import run_beside
from torchrl_ext.data.group.carrier import DEVICE, Carrier, Move, Seat, polled

__all__ = ["NcclCarrier", "as_launched", "new_unique_id", "package"]

_SUCCESS, _IN_PROGRESS = 0, 7
"""Of ``ncclResult_t``; any other value is an error."""

_OLDEST = (2, 23)
"""The first NCCL with ``ncclCommInitRankScalable``, which nccl4py calls."""
_FREED_S = 60.0


def as_launched() -> AbstractContextManager[None]:
    """Return a context in which the process has the NCCL variables with which it was started.

    vLLM pins others for its own communicators (``VLLM_BATCH_INVARIANT=1``), and forms those that it shares with other
    processes within ``vllm.utils.nccl.unpinned_nccl_env``. Where that module is not loaded, nothing is pinned.
    """
    unpinned: Any = getattr(sys.modules.get("vllm.utils.nccl"), "unpinned_nccl_env", nullcontext)
    return unpinned()


def package() -> Any:
    """Return the module of nccl4py; None where it, or an NCCL that it can drive, is missing."""
    try:
        from nccl import core

        library = core.get_version().libnccl
    except (ImportError, RuntimeError, OSError):  # also where libraries of CUDA's are missing
        return None
    return core if library is not None and library.version.release >= _OLDEST else None


def new_unique_id() -> bytes:
    """Return the 128 bytes by which the ranks of a new communicator find this process, which is rank 0.

    Raises:
        RuntimeError: NCCL finds no network.
    """
    with as_launched(), _raising():
        return bytes(package().get_unique_id())


def _shared_id(seat: Seat) -> bytes:
    """Return the unique id that rank 0 leaves in the store of a group."""
    key = "group/nccl"
    if seat.rank == 0:
        unique_id = new_unique_id()
        seat.store.set(key, unique_id.hex())
        return unique_id
    found = seat.store.find(key, seat.within)
    if found is None:
        raise seat.within.error("rank 0 left no unique id of NCCL")
    try:
        return bytes.fromhex(found)
    except (TypeError, ValueError):
        raise TransportError(f"rank 0 left {found!r:.40} as a unique id of NCCL", expected="128 bytes") from None


@contextmanager
def _raising() -> Iterator[None]:
    """Raise what nccl4py raises, in classes of its own, as users of a carrier expect it."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"NCCL failed: {error}") from error


@final
class NcclCarrier(Carrier):
    """NCCL over nccl4py, on a stream of its own.

    `begin` waits until NCCL has taken a call. It does so at once, but for the first one between two ranks, which waits
    until both are there.

    Args:
        seat: of this process; with its device.
        unique_id: of `new_unique_id` in rank 0; None leaves and finds it in the store.

    Raises:
        DeadlineError: not every rank came.
        RuntimeError: NCCL failed; a TransportError where another thread ended the wait.
    """

    library = "nccl4py"
    sizes = DEVICE

    def __init__(self, seat: Seat, unique_id: bytes | None = None) -> None:
        self._core, self._device = package(), seat.device
        self._calls = threading.Lock()  # a communicator takes one at a time
        self._ended = threading.Event()
        self._begun: deque[Move] = deque()  # which hold their memory
        with cuda.device(self._device), as_launched():
            self._stream: Any = cuda.Stream(self._device)
            self._communicator = self._core.Communicator()
            try:
                with _raising():
                    key = self._core.UniqueId.from_bytes(_shared_id(seat) if unique_id is None else unique_id)
                    config = self._core.NCCLConfig(blocking=False)
                    self._communicator.initialize(len(seat.peers), seat.rank, key, config)
                    self._posted(seat.within, "formed no communicator")
            except BaseException:
                self.abort()
                raise

    def begin(self, moves: Sequence[Move], within: Deadline) -> None:
        with self._calls, _raising(), cuda.device(self._device):
            if self._ended.is_set():
                raise RuntimeError("the communicator was aborted")
            while self._begun and self._begun[0].done.is_set():
                self._begun.popleft()
            self._begun.extend(moves)
            self._stream.wait_stream(cuda.current_stream(self._device))
            with self._core.group():
                for move in moves:
                    self._call(move)
            self._posted(within, "did not begin a transfer")
            landed = self._stream.record_event()
            for move in moves:
                move.handle = landed

    def _call(self, move: Move) -> None:
        nccl, flat, stream = self._communicator, move.flat, {"stream": self._stream.cuda_stream}
        if move.kind == "sum":
            nccl.allreduce(flat, flat, self._core.SUM, **stream)
        elif move.kind == "broadcast":
            nccl.broadcast(flat, flat, 0, **stream)
        elif move.kind == "send":
            nccl.send(flat, move.peer, **stream)
        else:
            nccl.recv(flat, move.peer, **stream)

    def _posted(self, within: Deadline, otherwise: str) -> None:
        """Wait until NCCL has taken the last call; before, it takes no other, and its stream no work of ours."""

        def posted() -> bool:
            if self._ended.is_set():
                raise RuntimeError("the communicator was aborted")
            if failure := self._failure():
                raise RuntimeError(failure)
            return bool(self._communicator.get_async_error() == _SUCCESS)

        if not polled(posted, within):
            raise within.error(f"NCCL {otherwise} with {within.who}")

    def _failure(self) -> str:
        """Return the asynchronous error of the communicator, in NCCL's words; "" without one."""
        try:
            state = self._communicator.get_async_error()
            if state in (_SUCCESS, _IN_PROGRESS):
                return ""
            words = self._communicator.get_last_error()
        except Exception as error:  # noqa: BLE001 - of classes of the package
            return f"NCCL failed: {error}"
        return f"NCCL reports {self._core.get_error_string(state)}" + (f" ({words})" if words else "")

    def arrives(self, move: Move, seconds: float) -> bool:
        event = move.handle
        if event is None:
            return move.done.wait(seconds)
        try:
            if not polled(event.query, Deadline(seconds)):
                return False
        except RuntimeError as error:  # of CUDA
            move.end(error)
            return True
        cuda.current_stream(self._device).wait_event(event)
        # what an abort, here or by NCCL, has cut short looks as if it had landed
        words = "the communicator was aborted" if self._ended.is_set() else self.error()
        move.end(RuntimeError(words) if words else None)
        return True

    def error(self) -> str:
        if self._ended.is_set() or not self._calls.acquire(blocking=False):
            return ""  # the thread that begins a transfer asks, too
        try:
            return self._failure()
        finally:
            self._calls.release()

    def abort(self) -> None:
        self._ended.set()  # before anything else: it ends the wait of whoever holds the lock
        run_beside(self._abort)

    def _abort(self) -> None:
        with self._calls:
            self._communicator.abort()
        if polled(self._stream.query, Deadline(_FREED_S)):
            self._begun.clear()
