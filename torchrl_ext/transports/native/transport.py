"""`NativeTransport` sends full weights to engines that run nothing of ours, on the wires that they have themselves.

What a trainer gives to the control layer, which says it to engines in their own words:

* to join: ``{"transport", "make", "group": {"master_address", "master_port", "world_size", ...}, "bucket_bytes",
  "timeout_s"}``. For SGLang the group has a ``group_name`` and a ``backend``; for vLLM a ``nccl_unique_id_b64``, where
  NCCL carries it.
* to load: ``{"transport", "make", "version", "bucket_bytes", "params", "calls"}``; the calls are those of
  `torchrl_ext.transports.native.wire.Wire`.

The port has no secret, since stock engines send none: whoever reaches it while a group is formed can take a rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.transports.base import TransferStats
from torchrl_ext.transports.buckets import Packer, Plan
from torchrl_ext.transports.collective.stream import Incoming, send_buckets
from torchrl_ext.transports.group.backends import choose_backend
from torchrl_ext.transports.group.handoffs import require
from torchrl_ext.transports.native.meeting import Meeting, group_of, keep_store
from torchrl_ext.transports.native.wire import MAKES, wire_of
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["NativeTransport"]

_NAME = "torchrl_ext"  # of a first group; one that is formed after a failure gets a number, too


class NativeTransport(StandaloneTransport):
    """Broadcasts full versions from the trainer (rank 0) to workers of stock engines (ranks 1 and up), all of one make.

    Args:
        make: whose wire it is: ``"sglang"`` or ``"vllm"``.
        master_address: where workers reach the trainer.
        master_port: of the trainer's store; 0 picks a free port (with a control layer, which passes it on).
        rank: of this process; 0 is the trainer. Other ranks are ends of ours, for a fleet in which some engines have
            our plugin.
        world_size: 1 + number of workers; None takes it from `open`.
        device: where tensors travel from and to; by default the current CUDA device, or the CPU without one.
        backend: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on CPU. Stock vLLM speaks NCCL alone.
        bucket_bytes: size of a broadcast; an engine holds one or two at a time.
        timeout_s: deadline of every wait, in seconds. Engines have deadlines of their own, up to half an hour.

    Raises:
        ConfigError: settings that cannot work.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self,
        make: str = "sglang",
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int = 0,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if make not in MAKES:
            raise ConfigError(f"no wire of {make!r} is known", expected=" or ".join(map(repr, MAKES)))
        self.make, self.master_address, self.master_port = make, master_address, int(master_port)
        self.rank, self.world_size, self.bucket_bytes = rank, world_size, bucket_bytes
        self.device, self.backend = choose_backend(device, backend)
        if make == "vllm" and backend is None and self.backend != "nccl":
            raise ConfigError(
                "stock vLLM takes broadcasts by NCCL alone, and this process uses no CUDA device",
                expected="a CUDA device, for a trainer that stock vLLM follows",
                hint="use transport 'disk', or install our plugin in the engines; backend='gloo' is for tests",
            )
        if bucket_bytes < 1 or not timeout_s > 0 or not 0 <= self.master_port < 1 << 16:
            given = f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}"
            raise ConfigError(given, expected="1 or more; more than 0; 0 to 65535")
        if world_size is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist in world_size {world_size}")
        self._meeting: Meeting | None = None
        self._kept: Any = None  # the store, of rank 0
        self._generation = 0
        self._stop = threading.Event()
        self._plan = Plan()

    @classmethod
    def from_info(cls, info: Info) -> NativeTransport:
        group = group_of(info)
        require("native", info, make=str, bucket_bytes=int, timeout_s=float)
        backend = group.get("backend", "nccl" if "nccl_unique_id_b64" in group else "gloo")
        how = {"backend": backend, "bucket_bytes": info["bucket_bytes"], "timeout_s": info["timeout_s"]}
        return cls(info["make"], group["master_address"], group["master_port"], 1, group["world_size"], **how)

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every rank calls this at the same time.

        Args:
            model_metadata: not used: ranks agree on nothing but who they are.

        Raises:
            DeadlineError: not every rank arrived within `timeout_s`.
        """
        if self.world_size is None or self.master_port == 0:
            what = "without a control layer every rank needs to know the trainer's port and the number of ranks"
            raise ConfigError(what, expected="master_port and world_size")
        self._stop.clear()
        meeting = self._meet(self.world_size)
        if self.rank == 0:
            meeting.invite()  # begins what has to begin before the others join
        meeting.form()

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """As `Transport.open`; a new group at a new store, and the last one ends.

        Raises:
            ConfigError: the world size given at construction is another one.
            TransportError: this is not rank 0, or the port is taken.
        """
        self._refuse_worker("open")
        if workers == 0:
            _ = self._met().broadcasts  # those that called init_all_workers_group
            return Handoff(info={"transport": self.name})
        if self.world_size not in (None, 1 + workers):
            what = f"this transport was given world_size {self.world_size}, but the engines have {workers} workers"
            raise ConfigError(what, expected=f"world_size {1 + workers}, or None to take it from the engines")
        self._stop.clear()
        meeting = self._meet(1 + workers)
        how = {"bucket_bytes": self.bucket_bytes, "timeout_s": self.timeout_s}
        info = {"transport": self.name, "make": self.make, "group": meeting.invite(), **how}
        return Handoff(info=info, transfer=self._formed)

    def _formed(self) -> None:
        try:
            self._met().form()
        except BaseException:
            self._leave()
            raise

    def join(self, info: Info) -> None:
        """As `Transport.join`; ``info["rank"]`` is this worker's rank.

        Raises:
            DeadlineError: the trainer, or another rank, was not there in time.
        """
        require("native", info, rank=int)
        self.rank, self.world_size = info["rank"], group_of(info)["world_size"]
        if not 0 < self.rank < self.world_size:
            raise ConfigError(f"worker rank {self.rank} does not exist in world_size {self.world_size}")
        self._stop.clear()
        self._meet(self.world_size, group_of(info).get("group_name"))
        self._formed()

    def _meet(self, size: int, name: str | None = None) -> Meeting:
        self._leave()
        port = self.master_port
        if self.rank == 0:
            if self._kept is None:
                self._kept = keep_store(self.master_address, port, self.timeout_s, self._stop)
            port, name = self._kept.port, f"{_NAME}-{self._generation}" if self._generation else _NAME
            self._generation += 1
        how: dict[str, Any] = {"device": self.device, "backend": self.backend, "timeout_s": self.timeout_s}
        where = self.master_address, port, self._kept
        self._meeting = Meeting(self.make, *where, self.rank, size, name, **how, stop=self._stop)
        return self._meeting

    def _met(self) -> Meeting:
        if self._meeting is None:
            raise NotConnectedError(f"rank {self.rank} is in no group", hint="connect first")
        return self._meeting

    def _leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    # an update

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        self._refuse_worker("send_weights")
        params = source.params()
        wire = wire_of(params, self.make, self.bucket_bytes)
        info = {"transport": self.name, "make": self.make, "version": version, "bucket_bytes": self.bucket_bytes}
        info |= {"params": self._plan.rows(params), "calls": wire.calls}

        def transfer() -> None:
            began = time.perf_counter()
            try:
                packer = Packer(params, checked(source, params))
                how: dict[str, Any] = {"bucket_bytes": self.bucket_bytes, "slice_bytes": None}
                send_buckets(self._met().broadcasts, wire.buckets, packer, **how)
            except (TransportError, DeadlineError) as error:
                self._leave()  # frees the workers that wait for the rest
                raise type(error)(
                    f"version {version} was not sent to every engine: {error.what}",
                    state="the group is ended; engines may hold a part of this version",
                    hint="look at the engines' logs, and call update_weights again",
                ) from error
            self.stats = TransferStats(spans={"transfer": time.perf_counter() - began})

        return Handoff(info=info, transfer=transfer)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        pairs = self._receiving(info, into)
        next(pairs)  # from here on the handoff is taken or drained, also by a loader that asks for nothing
        return pairs

    def _receiving(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        incoming, whole = self._incoming(info, into), False
        try:
            yield None
            yield from incoming.pairs()
            whole = True
        except WeightSyncError as error:
            self._leave()
            raise type(error)(
                f"version {info['version']} did not arrive: {error.what}",
                state="a part of it may be in the model",
                hint="connect again, and send the next version",
            ) from error
        finally:
            if not whole and self._meeting is not None:
                self._drain(incoming)

    def decline(self, info: Info, error: BaseException) -> None:
        self._drain(self._incoming(info, {}))

    def _incoming(self, info: Info, into: Mapping[str, Tensor]) -> Incoming:
        require("native", info, make=str, version=int, bucket_bytes=int, params=list)
        if info["make"] != self.make:
            raise TransportError(f"the trainer speaks to {info['make']}, and this end joined a group for {self.make}")
        params = self._plan.metas(info["params"])
        size = info["bucket_bytes"]
        buckets = wire_of(params, self.make, size).buckets
        return Incoming(self._met().broadcasts, buckets, params, into, bucket_bytes=size, slice_bytes=None)

    def _drain(self, incoming: Incoming) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step."""
        try:
            incoming.drain()
        except WeightSyncError:
            self._leave()

    # without a control layer

    def announce(self, info: Info) -> None:
        self._met().tell(info)

    def poll(self, timeout_s: float) -> Info | None:
        """Return the next announcement, or None after ``timeout_s`` seconds.

        Raises:
            TransportError: this is the trainer.
            NotConnectedError: no group, or the trainer ended it or is gone.
        """
        if self.rank == 0:
            raise TransportError("receive_weights was called on rank 0, the trainer", expected="a worker, from 1 on")
        return self._met().hear(timeout_s)

    def abort(self) -> None:
        self._stop.set()
        self._leave()

    def dismiss(self, source: WeightSource | None, error: BaseException | None = None) -> None:
        super().dismiss(source, error)
        if error is not None and source is not None:
            self._leave()  # workers may wait for the rest of what a source could not give

    def check_connection(self) -> bool:
        return self._meeting is not None and self._meeting.connected

    def shutdown(self) -> None:
        self.abort()
        self._kept = None

    def _refuse_worker(self, what: str) -> None:
        if self.rank != 0:
            raise TransportError(f"{what} was called on rank {self.rank}", expected="rank 0; other ranks receive")
