"""`NativeTransport` sends full weights to engines that run nothing of ours, on the wires that they have themselves.

The control layer says `Offer` and `torchrl_ext.transports.native.worker.Load` to engines in their own words.

The port has no secret, since stock engines send none: whoever reaches it while a group is formed can take a rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, TransportError
from torchrl_ext.messages import Wire
from torchrl_ext.transports.base import Handoff, TransferStats, Update, Worker
from torchrl_ext.transports.buckets import Packer
from torchrl_ext.transports.collective.stream import send_buckets
from torchrl_ext.transports.group.backends import choose_backend
from torchrl_ext.transports.native.meeting import NAME, Group, Meeting
from torchrl_ext.transports.native.wire import MAKES, Make, layout_of
from torchrl_ext.transports.native.worker import Load, NativeWorker
from torchrl_ext.transports.standalone import Mailbox, StandaloneTransport
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.source import checked

__all__ = ["NativeTransport"]


class Offer(Wire, frozen=True):
    """Where workers of one make meet the trainer, and how large a broadcast may become, in bytes."""

    make: Make
    group: Group
    bucket_bytes: int


class NativeTransport(StandaloneTransport):
    """Broadcasts full versions from the trainer (rank 0) to workers of stock engines (ranks 1 and up), all of one make.

    Args:
        make: whose wire it is: ``"sglang"`` or ``"vllm"``.
        master_address: where workers reach the trainer.
        master_port: of the trainer's store; 0 picks a free port (with a control layer, which passes it on).
        rank: of this process; 0 is the trainer. others are workers without a control layer.
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
        self.make: Make = make
        self.master_address, self.master_port = master_address, int(master_port)
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
        self._meeting: Meeting | None = None  # of rank 0
        self._groups = 0

    # the trainer's end

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """As `Transport.open`; a new group at a new store, and the last one ends.

        Raises:
            ConfigError: the world size given at construction is another one.
            TransportError: the port is taken.
        """
        if workers == 0:
            self._met()  # by workers that called init_all_workers_group
            return Handoff()
        if self.world_size not in (None, 1 + workers):
            what = f"this transport was given world_size {self.world_size}, but the engines have {workers} workers"
            raise ConfigError(what, expected=f"world_size {1 + workers}, or None to take it from the engines")
        self._leave()
        name = NAME
        if self.make == "sglang":  # it may still hold the last group under its name
            name, self._groups = f"{NAME}-{self._groups}" if self._groups else NAME, self._groups + 1
        meeting = self._meeting = self._meet(1 + workers, name, within)
        offer = Offer(make=self.make, group=meeting.invite(within), bucket_bytes=self.bucket_bytes)
        return Handoff(info=offer.to_json(), transfer=lambda within: meeting.form(within.again()))

    def _meet(self, size: int, name: str, within: Deadline) -> Meeting:
        group = Group(
            master_address=self.master_address,
            master_port=self.master_port,
            world_size=size,
            group_name=name,
            backend=self.backend,
        )
        return Meeting(self.make, group, self.rank, device=self.device, within=within)

    def _met(self) -> Meeting:
        if self._meeting is None:
            raise NotConnectedError(f"rank {self.rank} is the trainer of no group", hint="connect first, from rank 0")
        return self._meeting

    def _leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        source, params, stats = update.source, update.source.params(), TransferStats()
        layout = layout_of(params, self.make, self.bucket_bytes)

        def transfer(within: Deadline) -> None:
            began = time.perf_counter()
            try:
                packer = Packer(params, checked(source, params))
                how: dict[str, Any] = {"bucket_bytes": self.bucket_bytes, "slice_bytes": None}
                send_buckets(self._met().broadcasts(within), layout.buckets, packer, **how)
            except BaseException as error:
                self._leave()  # frees the workers that wait for the rest
                if not isinstance(error, (TransportError, DeadlineError)):
                    raise
                raise type(error)(
                    f"version {update.version} was not sent to every engine: {error.what}",
                    state="the group is ended; engines may hold a part of this version",
                    hint="look at the engines' logs, and call update_weights again",
                ) from error
            stats.spans["transfer"] = time.perf_counter() - began

        load = Load(make=self.make, bucket_bytes=self.bucket_bytes, calls=layout.calls)
        return Handoff(info=load.to_json(), transfer=transfer, stats=stats)

    def check_connection(self) -> bool:
        if self._end is not None:
            return self._end.check_connection()
        return self._meeting is not None and self._meeting.connected

    def shutdown(self) -> None:
        super().shutdown()
        self._leave()

    # without a control layer

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
        self.shutdown()
        within = self._within = Deadline(self.timeout_s, "the ranks of a group")
        meeting = self._meet(self.world_size, NAME, within)
        if self.rank == 0:
            self._meeting = meeting
            meeting.invite(within)  # begins what has to begin before the others join
        else:
            self._end = NativeWorker(meeting, self.timeout_s)
        meeting.form(within)

    @property
    def mailbox(self) -> Mailbox:
        return self._end if isinstance(self._end, NativeWorker) else self._met()

    def attend(self, within: Deadline) -> NativeWorker:
        raise NotConnectedError(f"rank {self.rank} is a worker of no group", hint="connect first, from rank 1 on")

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> NativeWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: the trainer, or another rank, was not there in time.
        """
        offer = Offer.from_json(info, "the offer of a native transport")
        group = offer.group
        if not 0 < here.rank < group.world_size:
            raise ConfigError(f"worker rank {here.rank} does not exist in world_size {group.world_size}")
        device, _ = choose_backend(None, group.backend)
        meeting = Meeting(offer.make, group, here.rank, device=device, within=within)
        meeting.form(within.again())
        return NativeWorker(meeting, within.timeout_s)
