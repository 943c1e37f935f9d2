"""`VLLMCollectiveTransport` broadcasts weights from the trainer to every worker, over NCCL or gloo."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.transports.base import TransferStats
from torchrl_ext.transports.buckets import Packer, Plan
from torchrl_ext.transports.collective import stream
from torchrl_ext.transports.collective.stream import BUCKET_BYTES, Incoming
from torchrl_ext.transports.group import handoffs
from torchrl_ext.transports.group.backends import choose_backend
from torchrl_ext.transports.group.meeting import STANDALONE_GROUP, Membership
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["VLLMCollectiveTransport"]


class VLLMCollectiveTransport(StandaloneTransport):
    """Broadcasts weights from the trainer (rank 0) to the workers (ranks 1 and up).

    Data layer only: who pauses an engine, and when, is the caller's business.

    Args:
        master_address: where workers reach the trainer.
        master_port: of the trainer's store; 0 picks a free port (with a control layer, which passes it on).
        rank: of this process; 0 (or None) is the trainer.
        world_size: 1 + number of workers; None takes it from `open`.
        device: where tensors travel from and to; by default the current CUDA device, or the CPU without one.
        vllm_engine: the engines at the other end. The transport carries bytes and calls none of them; a
            `TransportWeightUpdater` over it drives them, and a `WeightSender` is given them.
        backend: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on CPU.
        bucket_bytes: size of a bucket for small tensors; 0 sends one tensor at a time.
        secret: without a control layer, what every rank is given and nobody else knows; "" lets whoever finds the
            port take part. A control layer passes on one that the trainer makes.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: settings that cannot work.

    Example:
        >>> from threading import Thread
        >>> trainer, worker = (tx.VLLMCollectiveTransport("127.0.0.1", port, rank, 2) for rank in (0, 1))
        >>> shapes = {"weight": (torch.float32, (2, 4)), "bias": (torch.float32, (2,))}
        >>> beside = Thread(target=lambda: (trainer.init_all_workers_group(shapes), trainer.send_weights(policy)))
        >>> beside.start()
        >>> worker.init_all_workers_group(shapes)
        >>> received = worker.receive_weights(timeout=30.0)
        >>> beside.join()
        >>> bool((received["weight"] == policy.weight).all())
        True
    """

    name: ClassVar[str] = "collective"

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        rank: int | None = 0,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        vllm_engine: Any | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.master_address, self.master_port = master_address, int(master_port)
        self.rank, self.world_size = rank or 0, world_size
        self.device, self.backend = choose_backend(device, backend)
        self.bucket_bytes, self.vllm_engine = bucket_bytes, vllm_engine
        if bucket_bytes < 0 or not timeout_s > 0 or not 0 <= self.master_port < 1 << 16:
            raise ConfigError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}",
                expected="0 or more; more than 0; 0 to 65535",
            )
        if world_size is not None and not 0 <= self.rank < world_size:
            raise ConfigError(f"rank {self.rank} does not exist in world_size {world_size}")
        self._member = Membership(
            master_address, self.master_port, secret, device=self.device, backend=self.backend, timeout_s=timeout_s
        )
        self._agreed: dict[str, ParamMeta] = {}
        self._handoffs = 0
        self._plan = Plan()

    @classmethod
    def from_info(cls, info: Info) -> VLLMCollectiveTransport:
        info = {"rank": 1, **info}
        handoffs.require(cls.name, info, master_address=str, master_port=int, rank=int, world_size=int, room=str)
        handoffs.require(cls.name, info, backend=str, bucket_bytes=int, timeout_s=float)
        return cls(
            info["master_address"],
            info["master_port"],
            info["rank"],
            info["world_size"],
            "cpu" if info["backend"] == "gloo" else None,
            secret=str(info.get("secret", "")),
            **{name: info[name] for name in ("backend", "bucket_bytes", "timeout_s")},
        )

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every rank calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same on every rank; empty to agree on nothing.

        Raises:
            DeadlineError: names the ranks that did not arrive within `timeout_s`.
            ConfigError: ranks were given different world sizes.
            ManifestError: names the parameter on which ranks disagree.
        """
        params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        self._member.stop.clear()
        if self.rank == 0:
            self._host(STANDALONE_GROUP, self._standalone_size(), params)
        elif self.master_port == 0:
            raise ConfigError(
                f"rank {self.rank} does not know the trainer's port", hint="give the trainer and every worker one port"
            )
        else:
            self._member.enter(STANDALONE_GROUP, self.rank, self.world_size, params)

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """As `Transport.open`; 0 workers (no control layer) stands for those that call `init_all_workers_group`.

        Raises:
            ConfigError: the world size given at construction is another one.
            TransportError: this is not rank 0, or the port is taken.
        """
        if self.rank != 0:
            raise self._no_trainer("open")
        self._member.stop.clear()
        if workers == 0:
            if self.check_connection():
                return Handoff(info={"transport": self.name})
            size, room = self._standalone_size(), STANDALONE_GROUP
        else:
            size, room = 1 + workers, f"room/{uuid.uuid4().hex}"
            if self.world_size not in (None, size):
                raise ConfigError(
                    f"this transport was given world_size {self.world_size}, but the engines have {workers} workers",
                    expected=f"world_size {size} (1 + workers), or None to take it from the engines",
                )
        notes = self._member.notes(room)
        info = {
            "transport": self.name,
            "master_address": self.master_address,
            "master_port": notes.port,
            "secret": notes.secret,
            "world_size": size,
            "room": room,
            "backend": self.backend,
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
        }
        return Handoff(info=info, transfer=partial(self._host, room, size, params))

    def join(self, info: Info) -> None:
        """As `Transport.join`; ``info["rank"]`` is this worker's rank.

        Raises:
            DeadlineError: names the ranks that did not arrive.
            ConfigError: the rank does not exist in this world size.
        """
        handoffs.require(self.name, info, rank=int, world_size=int, room=str)
        self.rank = info["rank"]
        if not 0 < self.rank < info["world_size"]:
            raise ConfigError(
                f"worker rank {self.rank} does not exist in world_size {info['world_size']}",
                hint="give each engine the rank offset 1 + workers of the engines before it",
            )
        self._member.stop.clear()
        self._member.enter(info["room"], self.rank, info["world_size"], ())

    def _host(self, room: str, size: int, params: tuple[ParamMeta, ...]) -> None:
        self._member.host(room, size, params)
        self._agreed = {meta.name: meta for meta in params}

    def _standalone_size(self) -> int:
        if self.world_size is None:
            raise ConfigError(
                "the number of workers is not known",
                hint="give world_size (1 + workers), or connect through an engine client",
            )
        return self.world_size

    # an update

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        if self.rank != 0:
            raise self._no_trainer("send_weights")
        group, params = self._member.group(), source.params()
        for meta in params if self._agreed else ():
            if self._agreed.get(meta.name) != meta:
                raise ManifestError(
                    f"parameter {meta.name!r} is {meta}",
                    expected=f"what the group agreed on: {self._agreed.get(meta.name, 'no such parameter')}",
                    state="nothing was sent",
                    hint="call init_all_workers_group with the metadata of what is sent",
                )
        self._handoffs += 1
        info = {
            "transport": self.name,
            "version": version,
            "group": group.generation,
            "handoff": self._handoffs,
            "bucket_bytes": self.bucket_bytes,
            "params": self._plan.rows(params),
        }
        return Handoff(info=info, transfer=partial(self._send, group, source, info, params))

    def _send(self, group: Group, source: WeightSource, info: Info, params: tuple[ParamMeta, ...]) -> None:
        began = time.perf_counter()
        try:
            buckets = stream.buckets_of(self._plan, params, info["bucket_bytes"])
            packer = Packer(params, checked(source, params))
            stream.send_buckets(group.broadcasts, buckets, packer, bucket_bytes=info["bucket_bytes"])
            said = handoffs.await_workers(group, info)
        except BaseException as error:
            group.sever(why(error))
            if isinstance(error, (TransportError, DeadlineError)):
                raise handoffs.sending_failed(group, info, error) from error
            raise
        self.stats = TransferStats(spans={"transfer": time.perf_counter() - began})
        for words in said.values():
            if words:
                raise handoffs.refused(group, info, said)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        pairs = self._receiving(info, into)
        next(pairs)  # from here on the handoff is taken or refused, also by a loader that asks for nothing
        return pairs

    def _receiving(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        group = self._member.group()
        incoming = self._incoming(group, info, into)
        name, told = None, False
        try:
            yield None
            for name, tensor in incoming.pairs():
                yield name, tensor
            handoffs.acknowledge(group, info)  # only now has the loader taken the last one, too
            told = True
        except WeightSyncError as error:
            raise handoffs.receiving_failed(group, info, error) from error
        except (GeneratorExit, Exception) as error:
            stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
            self._drain(group, incoming, info, stopped if type(error) is GeneratorExit else why(error))
            told = True
            raise
        finally:
            if not told:
                group.sever()

    def decline(self, info: Info, error: BaseException) -> None:
        group = self._member.group()
        self._drain(group, self._incoming(group, info, {}), info, why(error))

    def _incoming(self, group: Group, info: Info, into: Mapping[str, Tensor]) -> Incoming:
        handoffs.require(self.name, info, group=str, handoff=int, version=int, bucket_bytes=int, params=list)
        if info["group"] != group.generation:
            raise NotConnectedError(
                f"the trainer sends through group {info['group']}, rank {self.rank} is in group {group.generation}",
                hint="connect again",
            )
        params = self._plan.metas(info["params"])
        buckets = stream.buckets_of(self._plan, params, info["bucket_bytes"])
        return Incoming(group.broadcasts, buckets, params, into, bucket_bytes=info["bucket_bytes"])

    def _drain(self, group: Group, incoming: Incoming, info: Info, words: str) -> None:
        """Receive and drop the rest of a handoff, so that the group stays in step, and tell the trainer why."""
        if not group.alive:  # nothing comes; the interpreter may be ending, which closes iterators left half-way
            return
        try:
            incoming.drain()
            handoffs.acknowledge(group, info, words)
        except WeightSyncError:
            group.sever()

    # without a control layer

    def announce(self, info: Info) -> None:
        self._member.announcements().put(info)

    def poll(self, timeout_s: float) -> Info | None:
        """Return the next announcement, or None after ``timeout_s`` seconds.

        Raises:
            TransportError: this is the trainer.
            NotConnectedError: no group, or the trainer ended it or is gone.
        """
        if self.rank == 0:
            raise TransportError(
                "receive_weights was called on rank 0, the trainer", expected="a worker, rank 1 to world_size - 1"
            )
        return self._member.announcements().get(timeout_s)

    # both ends

    def abort(self) -> None:
        self._member.abort()

    def check_connection(self) -> bool:
        return self._member.connected

    def shutdown(self) -> None:
        self._member.close()

    def _no_trainer(self, what: str) -> TransportError:
        return TransportError(
            f"{what} was called on rank {self.rank}",
            expected="rank 0, the trainer; other ranks receive",
            state="nothing was sent",
        )
