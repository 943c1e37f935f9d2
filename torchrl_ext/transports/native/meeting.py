"""Groups formed as stock engines form them: by a store of torch's at the trainer, without a note of ours.

Both makes build the keys of a backend's store as `torch.distributed` does where a group of a given name is made beside
the default one: ``NAME``, then ``NAME/``, then the kind of device. SGLang does exactly that
(`sglang.srt.utils.init_custom_process_group`), and begins with the first broadcast. vLLM takes the unique id that NCCL
leaves in the store, and adds up one number first (`vllm.distributed.device_communicators.pynccl`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.base import Arrival
from torchrl_ext.transports.group.backends import gloo_options, kept_store, nccl_options, reached_store
from torchrl_ext.transports.group.broadcasts import Broadcasts
from torchrl_ext.transports.group.calls import brief, in_time, made_in_time, run_beside, sever_at_exit
from torchrl_ext.transports.group.sockets import dial, listen
from torchrl_ext.transports.standalone import Mailbox
from torchrl_ext.types import Wire, decoded, dtype_name

__all__ = ["NAME", "Group", "Meeting"]

NAME = "torchrl_ext"
"""Of the group, where a trainer gives it no other."""

_GLOO_THREADS = 2  # as torch gives a backend with one device
_LONGEST_PAUSE_S = 0.1
_ANSWER_S = 1.0  # for the store to answer, in a wait that is shorter
_MOST_RANKS = 128
"""From one more on NCCL makes a communicator by several unique ids (NCCL_RANKS_PER_ROOT), which vLLM does not."""


class Group(Wire, frozen=True, omit_defaults=True):
    """Where a group meets; vLLM wants an id of NCCL's in place of the address, where NCCL carries it."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    backend: str
    nccl_unique_id_b64: str | None = None


class Meeting(Mailbox):
    """One group at a store of its own, from its invitation to its end.

    The trainer keeps the store until the end, by which workers see that it is gone. Without a control layer, an
    announced version lies there, too, until the last worker has it.

    Args:
        make: ``"sglang"`` or ``"vllm"``.
        group: where the ranks meet; the trainer replaces port 0 by a free one.
        rank: of this process; 0 is the trainer.
        device: where tensors travel from and to.
        within: deadline of reaching the store.

    Raises:
        TransportError: there are too many ranks, the trainer's port is taken, or another thread ended the wait.
        DeadlineError: no trainer keeps a store there.
    """

    def __init__(self, make: str, group: Group, rank: int, *, device: torch.device, within: Deadline) -> None:
        self.make, self.rank, self.size, self.backend = make, rank, group.world_size, group.backend
        self._group, self._device, self._within = group, device, within
        self._broadcasts: Broadcasts | None = None
        self._unformed: Any = None
        self._making: Future[Any] | None = None
        self._kept: Any = None
        self._count = 0  # versions that were announced, or heard of
        if make == "vllm" and self.backend == "nccl" and self.size > _MOST_RANKS:
            raise TransportError(
                f"a group of {self.size} ranks", expected=f"{_MOST_RANKS} ranks or fewer, as vLLM has it"
            )
        near, port = group.master_address, group.master_port
        if rank == 0:
            self._kept = _keep_store(near, port, within)
            near, port = self._kept.host, self._kept.port  # workers may know it by the address of a proxy
            self._group = msgspec.structs.replace(group, master_port=port)
        else:
            dial(near, port, within).close()
        self._store: Any = made_in_time(partial(reached_store, near, port, max(1.0, within.left_s)), within)
        name, kind = group.group_name, "cuda" if self.backend == "nccl" else "cpu"
        self._keys: Any = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))

    def check_connection(self) -> bool:
        """Return whether the group is formed, and this end has not left it."""
        return self._broadcasts is not None and self._broadcasts.alive

    def broadcasts(self, within: Deadline) -> Broadcasts:
        """Return the broadcasts of rank 0, whose waits end with the flag of ``within``, too.

        Raises:
            NotConnectedError: the group was not formed, or ended.
        """
        found, self._within = self._broadcasts, within
        if found is None or not found.alive:
            raise NotConnectedError("no group is formed", hint="connect again")
        return found

    def _lost(self) -> str:
        return "the transfer was aborted" if self._within.stop.is_set() else ""

    def invite(self, within: Deadline) -> Group:
        """Return what other ranks need (trainer).

        Raises:
            TransportError, DeadlineError: NCCL gives no unique id.
        """
        if self.make == "sglang" or self.backend != "nccl":
            return self._group
        making = self._making = run_beside(self._nccl)  # in which NCCL leaves its id, and then waits for the others
        within.poll(lambda: self._keys.check(["0"]) or making.done(), "NCCL gave no unique id")
        if making.done():
            making.result()
        unique_id = base64.b64encode(self._keys.get("0")).decode("ascii")
        return msgspec.structs.replace(self._group, nccl_unique_id_b64=unique_id)

    def form(self, within: Deadline) -> None:
        """Wait until every rank is there; the meeting ends where one is not.

        Raises:
            DeadlineError: not every rank came in time.
            TransportError: a rank left, or another thread ended the wait.
        """
        where = f"{self._group.master_address}:{self._group.master_port}"
        try:
            pg = made_in_time(self._maker(within), within)
            self._unformed = None
            self._broadcasts = Broadcasts(
                pg, self.backend, device=self._device, timeout_s=within.timeout_s, stop=within.stop, lost=self._lost
            )
            sever_at_exit(self._broadcasts)
            if self._store is None:
                raise TransportError("another thread ended the group")
        except BaseException as error:
            self.close()
            if not isinstance(error, (DeadlineError, TransportError)):
                raise
            raise type(error)(
                f"the {self.size} ranks of a group did not meet at {where}: {error.what}",
                expected="every worker of every engine joins at the same time",
                state="no group was formed",
                hint="look at the engines' logs; they must reach this address (master_address) and port",
            ) from error

    def _maker(self, within: Deadline) -> Callable[[], Any]:
        if self._making is not None:
            return self._making.result
        if self.backend == "nccl":
            return self._nccl
        where = self._group.master_address, self._group.master_port
        options = gloo_options(*where, within.timeout_s, within.stop, devices=1, threads=_GLOO_THREADS)
        return partial(dist.ProcessGroupGloo, self._keys, self.rank, self.size, options)

    def _nccl(self) -> Any:
        pg: Any = dist.ProcessGroupNCCL(self._keys, self.rank, self.size, nccl_options())
        self._unformed = pg
        if self.make == "vllm":
            with torch.cuda.device(self._device):
                pg.allreduce([torch.zeros(1, device=self._device)]).wait()
        return pg

    # versions, without a control layer

    def put(self, arrival: Arrival, within: Deadline) -> None:
        self._count += 1
        self._reached().set(f"version/{self._count}", msgspec.json.encode(arrival, enc_hook=dtype_name))

    def get(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """Return the next version: each is broadcast, so none may be left out.

        Raises:
            NotConnectedError: the trainer ended the group, or is gone.
        """
        key, store = f"version/{self._count + 1}", self._reached()
        for _ in within.pauses(longest_s=_LONGEST_PAUSE_S):
            found = self._answer(lambda: store.get(key) if store.check([key]) else None, within)
            if found is not None:
                self._count += 1
                self._answer(partial(self._take_out, store, key), within)
                return decoded(msgspec.json.decode(found), Arrival, "an announced version")
        return None

    def _take_out(self, store: Any, key: str) -> None:
        """Remove a version that every worker has heard of; a broadcast does not show the trainer who has."""
        if store.add(f"{key}/had", 1) == self.size - 1:
            store.delete_key(key)
            store.delete_key(f"{key}/had")

    def _answer(self, ask: Callable[[], Any], within: Deadline) -> Any:
        try:
            found = in_time(ask, Deadline(max(_ANSWER_S, within.left_s), stop=within.stop))
        except RuntimeError as error:
            raise NotConnectedError(
                f"the trainer ended the group, or is gone: {brief(error)}", hint="connect again"
            ) from error
        return found[0] if found else None

    def _reached(self) -> Any:
        store = self._store
        if store is None:
            raise NotConnectedError("the group was ended", hint="connect again")
        return store

    def close(self) -> None:
        """End the group, and every wait in it. May be called twice.

        Workers that still wait at the trainer's store see its connections closed; a thread of this process does, too.
        """
        formed, self._broadcasts = self._broadcasts, None
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
        raise TransportError(f"nobody can listen at {host}:{port}: {error}", hint="pick another port") from None
    return made_in_time(partial(kept_store, listener, within.timeout_s), within)
