"""Groups formed as stock engines form them: by a store of torch's at the trainer, without a note of ours.

Both makes build the keys of a backend's store as `torch.distributed` does where a group of a given name is made beside
the default one: ``NAME``, then ``NAME/``, then the kind of device. SGLang does exactly that
(`sglang.srt.utils.init_custom_process_group`), and begins with the first broadcast. vLLM takes the unique id that NCCL
leaves in the store, and adds up one number first (`vllm.distributed.device_communicators.pynccl`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, TransportError
from torchrl_ext.base.types import Wire
from torchrl_ext.data.group.backends import gloo_options, nccl_options
from torchrl_ext.data.group.calls import made_in_time, run_beside
from torchrl_ext.data.group.meeting import Member
from torchrl_ext.data.group.notes import NoteStore
from torchrl_ext.data.group.process_group import Group, Seat
from torchrl_ext.data.group.sockets import dial, listen

__all__ = ["NAME", "GroupInvitation", "Meeting"]

NAME = "torchrl_ext"
"""Of the group, where a trainer gives it no other."""

_GLOO_THREADS = 2  # as torch gives a backend with one device
_MOST_RANKS = 128
"""From one more on NCCL makes a communicator by several unique ids (NCCL_RANKS_PER_ROOT), which vLLM does not."""


class GroupInvitation(Wire, frozen=True, omit_defaults=True):
    """Where a group meets; vLLM wants an id of NCCL's in place of the address, where NCCL carries it."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    backend: str
    nccl_unique_id_b64: str | None = None


@final
class _NoNotes(NoteStore):
    """The notes of a group whose workers leave none, and of which the trainer awaits none."""

    def _ask(self, request: Any, within: Deadline | None = None) -> list[str]:
        return []

    def collect(self, beginning: str, ranks: Iterable[int], within: Deadline) -> dict[int, Any]:
        return dict.fromkeys(ranks, 0)

    def close(self) -> None:
        pass


class Meeting(Member):
    """One group at a store of its own, from its invitation to its end.

    The trainer keeps the store until the end, by which workers see that it is gone.

    Args:
        make: ``"sglang"`` or ``"vllm"``.
        where: the ranks meet; the trainer replaces port 0 by a free one.
        rank: of this process; 0 is the trainer.
        device: where tensors travel from and to.
        within: deadline of reaching the store.

    Raises:
        TransportError: there are too many ranks, the trainer's port is taken, or another thread ended the wait.
        DeadlineError: no trainer keeps a store there.
    """

    def __init__(self, make: str, where: GroupInvitation, rank: int, *, device: torch.device, within: Deadline) -> None:
        self.make, self.rank, self._where, self._device = make, rank, where, device
        super().__init__()
        self._unformed: Any = None
        self._making: Future[Any] | None = None
        self._kept: Any = None
        if make == "vllm" and where.backend == "nccl" and where.world_size > _MOST_RANKS:
            raise TransportError(
                f"a group of {where.world_size} ranks", expected=f"{_MOST_RANKS} ranks or fewer, as vLLM has it"
            )
        near, port = where.master_address, where.master_port
        if rank == 0:
            self._kept = _keep_store(near, port, within)
            near, port = self._kept.host, self._kept.port  # workers may know it by the address of a proxy
            self._where = msgspec.structs.replace(where, master_port=port)
        else:
            dial(near, port, within).close()
        self._store: Any = made_in_time(partial(_store_at, near, port, max(1.0, within.left_s)), within)
        name, kind = where.group_name, "cuda" if where.backend == "nccl" else "cpu"
        self._keys: Any = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))

    def invite(self, within: Deadline) -> GroupInvitation:
        """Return what other ranks need (trainer).

        Raises:
            TransportError, DeadlineError: NCCL gives no unique id.
        """
        if self.make == "sglang" or self._where.backend != "nccl":
            return self._where
        making = self._making = run_beside(self._nccl)  # in which NCCL leaves its id, and then waits for the others
        within.poll(lambda: self._keys.check(["0"]) or making.done(), "NCCL gave no unique id")
        if making.done():
            making.result()
        unique_id = base64.b64encode(self._keys.get("0")).decode("ascii")
        return msgspec.structs.replace(self._where, nccl_unique_id_b64=unique_id)

    def form(self, within: Deadline) -> None:
        """Wait until every rank is there; the meeting ends where one is not.

        Raises:
            DeadlineError: not every rank came in time.
            TransportError: a rank left, or another thread ended the wait.
        """
        address, port, size = self._where.master_address, self._where.master_port, self._where.world_size
        try:
            pg = made_in_time(self._maker(within), within)
            self._unformed = None
            peers = {0: "the trainer", **dict.fromkeys(range(1, size), "of an engine")}
            notes, name = _NoNotes(address, port, ""), self._where.group_name
            seat = Seat(notes, name, self.rank, peers, self._device, within)
            self._group = Group(seat, pg, self._where.backend, None)
            if self._store is None:
                raise TransportError("another thread ended the group")
        except BaseException as error:
            self.close()
            if not isinstance(error, (DeadlineError, TransportError)):
                raise
            raise type(error)(
                f"the {size} ranks of a group did not meet at {address}:{port}: {error.what}",
                expected="every worker of every engine joins at the same time",
                state="no group was formed",
                hint="read the engines' logs; they must reach this address (master_address) and port",
            ) from error

    def _maker(self, within: Deadline) -> Callable[[], Any]:
        if self._making is not None:
            return self._making.result
        if self._where.backend == "nccl":
            return self._nccl
        where = self._where.master_address, self._where.master_port
        options = gloo_options(*where, within, devices=1, threads=_GLOO_THREADS)
        return partial(dist.ProcessGroupGloo, self._keys, self.rank, self._where.world_size, options)

    def _nccl(self) -> Any:
        pg: Any = dist.ProcessGroupNCCL(self._keys, self.rank, self._where.world_size, nccl_options())
        self._unformed = pg
        if self.make == "vllm":
            with torch.cuda.device(self._device):
                pg.allreduce([torch.zeros(1, device=self._device)]).wait()
        return pg

    def close(self) -> None:
        """End the group, and every wait in it. May be called twice.

        Workers that still wait at the trainer's store see its connections closed; a thread of this process does, too.
        """
        formed, self._group = self._group, None
        unformed, self._unformed = self._unformed, None
        self._kept = self._store = self._keys = None
        if formed is not None:
            formed.sever()
        elif unformed is not None:
            run_beside(unformed.abort)


def _keep_store(host: str, port: int, within: Deadline) -> Any:
    """Return a store of torch's that this process keeps as long as the object lives."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise TransportError(
            f"this process cannot listen at {host}:{port}: {error}", hint="pick another port"
        ) from None
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("::", "0.0.0.0") else host
    return made_in_time(partial(_store_at, host, port, within.timeout_s, listener.detach()), within)


def _store_at(host: str, port: int, timeout_s: float, listener: int | None = None) -> Any:
    """Return a store of torch's that another process keeps; or this one, behind the descriptor of a listener."""
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]  # by a star there
    keeps = listener is not None
    return tcp_store(host, port, None, keeps, timedelta(seconds=timeout_s), False, False, listener)
