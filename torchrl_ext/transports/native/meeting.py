"""Groups formed as stock engines form them: by a store of torch's at the trainer, without a note of ours.

Both makes build the keys of a backend's store as `torch.distributed` does where a group of a given name is made beside
the default one: ``NAME``, then ``NAME/``, then the kind of device. SGLang does exactly that
(`sglang.srt.utils.init_custom_process_group`), and begins with the first broadcast. vLLM takes the unique id that NCCL
leaves in the store, and adds up one number first (`vllm.distributed.device_communicators.pynccl`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.deadline import pauses
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.group.backends import brief, gloo_devices, kept_store, made_in_time, reached_store
from torchrl_ext.transports.group.broadcasts import Broadcasts
from torchrl_ext.transports.group.handoffs import require
from torchrl_ext.transports.group.peers import sever_at_exit
from torchrl_ext.transports.group.sockets import at_port, dial, in_time, listen, run_beside, shut_down
from torchrl_ext.transports.native.addresses import listening_at
from torchrl_ext.types import Info

__all__ = ["Meeting", "group_of", "keep_store"]

_NAME = "group_name"  # the store's key under which ranks that were not told it find the name of the group
_LATER_S = 5.0
"""Seconds by which gloo's deadline comes after ours: ours raises the error, and gloo's only frees its threads."""
_NEVER = timedelta(days=365)
_GLOO_THREADS = 2  # as torch gives a backend with one device
_LONGEST_PAUSE_S = 0.1
_MOST_RANKS = 128
"""From one more on NCCL makes a communicator by several unique ids (NCCL_RANKS_PER_ROOT), which vLLM does not."""


def keep_store(host: str, port: int, timeout_s: float, stop: threading.Event) -> Any:
    """Return a store of torch's that this process keeps as long as the object lives (trainer).

    Args:
        host, port: where workers reach this process; port 0 picks a free one.
        timeout_s: deadline, in seconds.
        stop: set by another thread to end the wait.

    Raises:
        TransportError: the port is taken.
    """
    try:
        listener = listen(host, port)
    except OSError as error:
        raise TransportError(f"nobody can listen at {host}:{port}: {error}", hint="pick another port") from None
    return made_in_time(partial(kept_store, listener, timeout_s), time.monotonic() + timeout_s, timeout_s, stop)


def group_of(info: Info) -> Info:
    """Return what an invitation says of the group.

    Raises:
        TransportError: it says what no trainer does.
    """
    require("native", info, group=dict)
    group: Info = info["group"]
    require("native", group, master_address=str, master_port=int, world_size=int)
    return group


@final
class Meeting:
    """One group at a store, from its invitation to its end; every one has a name of its own.

    Args:
        make: ``"sglang"`` or ``"vllm"``.
        host, port: where workers find the trainer's store.
        kept: that store, in the trainer; None in a worker.
        rank: of this process; 0 is the trainer.
        size: number of ranks.
        name: of the group; None for a worker that was not told, which waits until the store has it.
        device: where tensors travel from and to.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout_s: deadline of every wait, in seconds.
        stop: set by another thread to end every wait.

    Raises:
        TransportError: there are too many ranks, or another thread aborted.
        DeadlineError: no trainer keeps a store there, or it forms no group.
    """

    def __init__(
        self,
        make: str,
        host: str,
        port: int,
        kept: Any,
        rank: int,
        size: int,
        name: str | None,
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
        stop: threading.Event,
    ) -> None:
        self.make, self.rank, self.size, self.backend = make, rank, size, backend
        self._host, self._port, self._device, self._timeout_s, self._stop = host, port, device, timeout_s, stop
        self._broadcasts: Broadcasts | None = None
        self._unformed: Any = None
        self._making: Future[Any] | None = None
        self._count = 0  # messages that were left, or taken
        if make == "vllm" and backend == "nccl" and size > _MOST_RANKS:
            raise TransportError(f"a group of {size} ranks", expected=f"{_MOST_RANKS} ranks or fewer, as vLLM has it")
        until = time.monotonic() + timeout_s
        near = host if kept is None else kept.host  # the trainer may be known to others by a proxy's address
        dial(near, port, until, stop).close()
        left_s = max(1.0, until - time.monotonic())
        self._store: Any = made_in_time(partial(reached_store, near, port, left_s), until, timeout_s, stop)
        if name is None:
            name = self._hear_name(left_s)
        elif rank == 0:
            self._store.set(_NAME, json.dumps({"name": name}))
        self.name = name
        kind = "cuda" if backend == "nccl" else "cpu"
        self._keys: Any = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))

    def _hear_name(self, timeout_s: float) -> str:
        for left_s in pauses(timeout_s, self._stop, longest_s=_LONGEST_PAUSE_S):
            told = self._asked(_NAME, left_s)
            if told is not None:
                return str(told.get("name"))
        if self._stop.is_set():
            raise TransportError("joining the trainer was aborted", state="no group was joined")
        raise DeadlineError(
            f"the trainer at {self._host}:{self._port} formed no group within {self._timeout_s:g} s",
            expected="every rank enters at the same time",
            state="no group was joined",
        )

    @property
    def broadcasts(self) -> Broadcasts:
        """Those of rank 0.

        Raises:
            NotConnectedError: the group was not formed, or ended.
        """
        found = self._broadcasts
        if found is None or not found.alive:
            raise NotConnectedError("no group is formed", hint="connect again")
        return found

    @property
    def connected(self) -> bool:
        """Whether the group is formed, and nobody has left it as far as that can be told."""
        return self._broadcasts is not None and self._broadcasts.alive and self._broadcasts.whole

    def invite(self) -> Info:
        """Return what other ranks need to know, in the words of both makes (trainer).

        Raises:
            TransportError, DeadlineError: NCCL gives no unique id.
        """
        info: Info = {"master_address": self._host, "master_port": self._port, "world_size": self.size}
        if self.make == "sglang":
            return {**info, "group_name": self.name, "backend": self.backend}
        if self.backend == "nccl":
            self._making = run_beside(self._nccl)  # in which NCCL leaves its id, and then waits for the others
            for _ in pauses(self._timeout_s, self._stop):
                if self._keys.check(["0"]):
                    return {**info, "nccl_unique_id_b64": base64.b64encode(self._keys.get("0")).decode("ascii")}
                if self._making.done():
                    self._making.result()
            raise DeadlineError(f"NCCL gave no unique id within {self._timeout_s:g} s")
        return info

    def form(self) -> None:
        """Wait until every rank is there.

        Raises:
            DeadlineError: not every rank came in time.
            TransportError: a rank left, or another thread aborted.
        """
        until = time.monotonic() + self._timeout_s
        endpoints: set[tuple[Any, ...]] = set()
        keys = self._keys  # another thread may end this meeting
        if self._making is not None:
            make: Any = self._making.result
        elif self.backend == "nccl":
            make = self._nccl
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # left out of the stub
            options._devices, endpoints = gloo_devices(self._host, self._port, self._stop, 1)
            options._threads, options._timeout = _GLOO_THREADS, timedelta(seconds=self._timeout_s + _LATER_S)
            make = partial(dist.ProcessGroupGloo, keys, self.rank, self.size, options)
        try:
            pg = made_in_time(make, until, self._timeout_s, self._stop)
        except (DeadlineError, TransportError) as error:
            raise type(error)(
                f"the {self.size} ranks of a group did not meet at {self._host}:{self._port}: {error.what}",
                expected="every worker of every engine joins at the same time",
                state="no group was formed",
                hint="look at the engines' logs; they must reach this address (master_address) and port",
            ) from error
        self._unformed = None
        formed = Broadcasts(pg, self.backend, device=self._device, timeout_s=self._timeout_s, stop=self._stop)
        if endpoints:
            formed.watch(endpoints | listening_at(keys, self.rank, self.size, endpoints))
        sever_at_exit(formed)
        self._broadcasts = formed
        if self._stop.is_set():
            self.close()
            raise TransportError("forming the group was aborted", state="no group was formed")

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # where it passes, torch ends the process; waits here have deadlines of their own
        pg: Any = dist.ProcessGroupNCCL(self._keys, self.rank, self.size, options)
        self._unformed = pg
        if self.make == "vllm":
            with torch.cuda.device(self._device):
                pg.allreduce([torch.zeros(1, device=self._device)]).wait()
        return pg

    # words of our own beside the group's, for ends without a control layer

    def tell(self, value: Info) -> None:
        """Leave the next message for the workers in the store (trainer)."""
        self._count += 1
        self._store.set(f"{self.name}/told/{self._count}", json.dumps(value))

    def hear(self, timeout_s: float) -> Info | None:
        """Return the next message, or None where none comes in ``timeout_s`` seconds (worker).

        Raises:
            NotConnectedError: the trainer ended the group, or is gone.
        """
        for left_s in pauses(timeout_s, self._stop, longest_s=_LONGEST_PAUSE_S):
            answer = self._asked(f"{self.name}/told/{self._count + 1}", left_s)
            if answer is not None:
                self._count += 1
                self._heard(self._count)
                return answer
            if not self.connected:
                raise NotConnectedError("the trainer ended the group", hint="connect again")
        return None

    def _heard(self, number: int) -> None:
        """Take a message out of the trainer's store that every worker has; a broadcast does not say who has which."""
        store, told, heard = self._store, f"{self.name}/told/{number}", f"{self.name}/heard/{number}"

        def count() -> None:
            if store.add(heard, 1) == self.size - 1:
                store.delete_key(told)
                store.delete_key(heard)

        with contextlib.suppress(RuntimeError):  # a store that is gone is seen by the next question
            in_time(count, time.monotonic() + 1.0, self._stop)

    def _asked(self, key: str, left_s: float) -> Info | None:
        store = self._store
        if store is None:
            raise NotConnectedError("the group was ended", hint="connect again")

        def ask() -> Info | None:
            return dict(json.loads(store.get(key))) if store.check([key]) else None

        try:
            found = in_time(ask, time.monotonic() + max(1.0, left_s), self._stop)
        except RuntimeError as error:
            raise NotConnectedError(
                f"the trainer's store does not answer any more: {brief(error)}", hint="connect again"
            ) from error
        return found[0] if found else None

    def close(self) -> None:
        """End the group, and every wait in it. May be called twice.

        Workers that still wait at the trainer's store see its connections closed; a thread of this process does, too.
        """
        formed, self._broadcasts = self._broadcasts, None
        unformed, self._unformed = self._unformed, None
        if formed is not None:
            formed.sever()
        elif unformed is not None:
            run_beside(unformed.abort)
        if self.rank == 0 and self._store is not None:
            self._keys, forget = None, partial(self._store.delete_key, _NAME)
            with contextlib.suppress(RuntimeError):
                in_time(forget, time.monotonic() + _LONGEST_PAUSE_S, threading.Event())
            shut_down(at_port(self._port))
        self._store = self._keys = None
