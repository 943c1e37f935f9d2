"""`NativeTransport` sends full weights to engines without our plugin, by their own broadcasts.

The control layer translates `NativeOffer` and `NativeLoad` to the engines' own routes. In a mixed fleet, an engine with
our plugin receives with our worker end. Without a control layer both ends are ours, and the collective transport
connects them.

Both protocols concatenate the bytes of tensors without padding, and the engine reads each tensor as a view of its
dtype. So a tensor must begin at a multiple of its element size.

* SGLang (``load_format="flattened_bucket"`` of ``/update_weights_from_distributed``, `sglang.srt.weight_sync`): one
  call, one broadcast. We end a bucket before the tensor that does not fit, or would not be aligned.
* vLLM (backend ``nccl`` with ``packed``, `vllm.distributed.weight_transfer.packed_tensor`): a call has any number of
  broadcasts, each of which ends with the tensor that makes it larger than the size agreed on. We also end a call before
  a tensor that would not be aligned, since every call begins a new broadcast.

Groups are formed as stock engines form them, by a store of torch's at the trainer, without a note of ours. The keys of
a backend's store are those of `torch.distributed` where a group of a given name is made beside the default one:
``NAME``, then ``NAME/``, then the kind of device. SGLang makes its group so
(`sglang.srt.utils.init_custom_process_group`), and begins with the first broadcast; its end is a process group of
torch's, and over NCCL ours is one, too, watchdog included. vLLM takes a unique id of NCCL's, and adds up one number
first (`vllm.distributed.device_communicators.pynccl`): our end carries by nccl4py.

The port has no secret, because stock engines send none: anyone who reaches it while a group forms can take a rank.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, final, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by a star there

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, TransportError
from torchrl_ext.base.types import Info, ParamMeta, Wire
from torchrl_ext.data.group.backends import GlooCarrier, TorchCarrier, choose_backend
from torchrl_ext.data.group.buckets import Bucket, Span
from torchrl_ext.data.group.calls import made_in_time
from torchrl_ext.data.group.carrier import Carrier, Seat
from torchrl_ext.data.group.group import Group, GroupLoad, GroupWorker, Member
from torchrl_ext.data.group.nccl import NcclCarrier, new_unique_id, package
from torchrl_ext.data.group.store import KeyStore, dial, listen
from torchrl_ext.data.transports.base import Arrival, Handoff, Update, Worker
from torchrl_ext.data.transports.collective import (
    Incoming,
    VLLMCollectiveTransport,
    handoff_of,
    send_buckets,
)

__all__ = ["NAME", "GroupInvitation", "Meeting", "NativeTransport"]

NAME = "torchrl_ext"
"""Of the group, where a trainer gives it no other."""

_GLOO = {"devices": 1, "threads": 2}  # as torch makes it
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
class Meeting(KeyStore):
    """A store of torch's, at which stock engines meet their trainer: ranks leave no word of ours in it.

    The trainer keeps it until the end of the group, by which workers see that the trainer is gone.

    Args:
        make: ``"sglang"`` or ``"vllm"``.
        where: the ranks meet; the trainer replaces port 0 by a free one.
        rank: of this process; 0 is the trainer.
        device: where tensors travel from and to.
        within: deadline of reaching the store.

    Attributes:
        where: what other ranks need.

    Raises:
        ConfigError: NCCL is to carry to vLLM, without nccl4py.
        TransportError: there are too many ranks, the trainer's port is taken, or another thread ended the wait.
        DeadlineError: no trainer keeps a store there.
    """

    def __init__(self, make: str, where: GroupInvitation, rank: int, *, device: torch.device, within: Deadline) -> None:
        super().__init__(where.master_address, where.master_port, "")
        self._rank, self._device, self._within = rank, device, within
        self._first = make == "vllm" and where.backend == "nccl"  # which sums up one number before anything else
        self._group: Group | None = None
        if self._first and package() is None:
            raise ConfigError(
                "this process cannot speak vLLM's own protocol: it has no nccl4py",
                state="no group was formed",
                hint="pip install 'torchrl_ext[nccl]', or install our plugin in the engines",
            )
        if self._first and where.world_size > _MOST_RANKS:
            raise TransportError(
                f"a group of {where.world_size} ranks", expected=f"{_MOST_RANKS} ranks or fewer, as vLLM has it"
            )
        near, port = where.master_address, where.master_port
        kept = None
        if rank == 0:
            kept = _keep_store(near, port, within)
            near, port = kept.host, kept.port  # workers may know it by the address of a proxy
            where = msgspec.structs.replace(where, master_port=port)
        else:
            dial(near, port, within).close()
        store: Any = made_in_time(partial(_store_at, near, port, max(1.0, within.left_s)), within)
        name, kind = where.group_name, "cuda" if where.backend == "nccl" else "cpu"
        self._keys: Any = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._open: Any = [kept, store, self._keys]
        self.where = where
        if rank == 0 and self._first:
            unique_id = base64.b64encode(made_in_time(new_unique_id, within)).decode("ascii")
            self.where = msgspec.structs.replace(where, nccl_unique_id_b64=unique_id)

    def form(self, within: Deadline) -> Group:
        """Wait until every rank is there, and return their group; the store closes where one is not.

        Raises:
            DeadlineError: not every rank came in time.
            TransportError: a rank left, or another thread ended the wait.
        """
        where = self.where
        try:
            group: Group = made_in_time(partial(self._made, within), within)
            if not self._open:
                raise TransportError("another thread ended the group")
            return group
        except BaseException as error:
            self.close()
            if not isinstance(error, (DeadlineError, TransportError)):
                raise
            raise type(error)(
                f"the {where.world_size} ranks of a group did not meet at {where.master_address}:{where.master_port}: "
                f"{error.what}",
                expected="every worker of every engine joins at the same time",
                state="no group was formed",
                hint="read the engines' logs; they must reach this address (master_address) and port",
            ) from error

    def _made(self, within: Deadline) -> Group:
        where = self.where
        peers = {0: "the trainer", **dict.fromkeys(range(1, where.world_size), "of an engine")}
        seat = Seat(self, self._rank, peers, self._device, where.backend, within)
        carrier: Carrier
        if where.backend != "nccl":
            carrier = GlooCarrier(seat, self._keys, **_GLOO)
        elif self._first:
            carrier = NcclCarrier(seat, base64.b64decode(where.nccl_unique_id_b64 or ""))
        else:
            carrier = TorchCarrier(seat, self._keys)
        group = self._group = Group(seat, carrier)
        if self._first:
            group.total(0.0)
        return group

    def find(self, key: str, within: Deadline | None = None) -> Any:
        return None

    def collect(self, beginning: str, ranks: Iterable[int], within: Deadline) -> dict[int, Any]:
        """Return 0 for each rank: the trainer awaits no word of a worker."""
        return dict.fromkeys(ranks, 0)

    def lost(self, within: Deadline | None = None) -> str:
        return ""

    def close(self, reason: str = "") -> None:
        """Let go of torch's store, and end a group of it that is not formed yet."""
        self._open = self._keys = None
        group, self._group = self._group, None
        if group is not None:
            group.sever()

    def _do(self, request: Any) -> None:
        pass


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


Make = Literal["sglang", "vllm"]
MAKES: tuple[Make, ...] = get_args(Make)
"""Makes of engines whose broadcasts this transport knows."""


class NativeOffer(Wire, frozen=True):
    """Where workers of one make meet the trainer, and the largest size of a broadcast in bytes."""

    make: Make
    group: GroupInvitation
    bucket_bytes: int


class NativeLoad(GroupLoad, frozen=True, kw_only=True):
    """How the parameters of a version travel: the arguments of `layout_of`, and the calls that it returns."""

    make: Make
    bucket_bytes: int
    calls: list[tuple[int, int]]


def layout_of(
    params: Sequence[ParamMeta], make: str, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], list[tuple[int, int]]]:
    """Return the layout of ``params`` in broadcasts, from the arguments only, so that two processes agree.

    Args:
        params: the parameters, in the order of sending. A parameter without elements has no bytes and appears in no
            call.
        make: ``"sglang"`` or ``"vllm"``.
        bucket_bytes: size of a broadcast; a larger tensor travels alone to SGLang, and ends a broadcast to vLLM.

    Returns:
        The buckets, one broadcast each, except buckets without bytes; and the parameters that each call names, as
        ``(first, stop)``: ``first <= index < stop``.
    """
    buckets: list[Bucket] = []
    calls: list[tuple[int, int]] = []
    spans: list[Span] = []
    filled = 0

    def close(stop: int, *, call: bool) -> None:
        nonlocal spans, filled
        if spans:
            alone = spans[0].stop - spans[0].first == 1 == len(spans)
            buckets.append(Bucket(tuple(spans), filled, direct=alone and filled > 0))
        spans, filled = [], 0
        first = calls[-1][1] if calls else 0
        if call and first < stop:
            calls.append((first, stop))

    for index, meta in enumerate(params):
        askew = bool(filled % meta.dtype.itemsize)
        if askew or (make == "sglang" and filled and filled + meta.nbytes > bucket_bytes):
            close(index, call=True)
        before = spans[-1] if spans else None
        if before and params[before.first].dtype is meta.dtype:
            spans[-1] = replace(before, stop=index + 1, end=before.end + meta.nbytes)
        else:
            spans.append(Span(index, index + 1, 0, meta.nbytes, filled))
        filled += meta.nbytes
        if make == "vllm" and filled > bucket_bytes:
            close(index + 1, call=False)
    close(len(params), call=True)
    return tuple(buckets), calls


class NativeTransport(VLLMCollectiveTransport):
    """Broadcasts full versions from the trainer (rank 0) to workers of stock engines (ranks 1 and up), all of one make.

    Without a control layer both ends are ours.

    Args:
        make: make of the engines: ``"sglang"`` or ``"vllm"``.
        master_address: the trainer's address, as workers reach it.
        master_port: port of the trainer's store; 0 picks a free one, which a control layer passes on.
        rank: rank of this process; 0 is the trainer, other ranks are workers without a control layer.
        world_size: 1 + number of workers; None takes it from `open`.
        device: device of the tensors that are sent and received; by default this thread's accelerator, or the CPU
            without one.
        backend: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on CPU. Stock vLLM supports only NCCL.
        bucket_bytes: size of a broadcast; an engine holds one or two at a time.
        timeout_s: deadline of every wait, in seconds. Engines have their own deadlines, up to half an hour.

    Raises:
        ConfigError: the settings are invalid.
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
        if make not in MAKES:
            raise ConfigError(
                f"engines of make {make!r} have no broadcast of their own that this library knows",
                expected=" or ".join(map(repr, MAKES)),
                hint="for an engine with torchrl_ext use transport 'collective'",
            )
        where = (master_address, master_port, rank, world_size, device)
        super().__init__(*where, backend=backend, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self.make: Make = make
        if make == "vllm" and backend is None and self.backend != "nccl":
            raise ConfigError(
                "stock vLLM takes broadcasts only by NCCL, and this process uses no CUDA device",
                expected="a CUDA device, for a trainer that stock vLLM follows",
                hint="use transport 'disk', or install our plugin in the engines; backend='gloo' is for tests",
            )
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}", expected="1 or more")
        self._groups = 0
        self._stock = False

    def _open(self, size: int, params: tuple[ParamMeta, ...], *, private: bool) -> Handoff:
        self._stock = private  # a control layer drives engines
        if not private:
            return super()._open(size, params, private=False)
        self.close()
        self._groups += 1
        where = GroupInvitation(
            master_address=self.master_address,
            master_port=self.master_port,
            world_size=size,
            # SGLang may still hold the last one by its name
            group_name=f"{NAME}-{self._groups}" if self.make == "sglang" else NAME,
            backend=self.backend,
        )
        within = Deadline(self.timeout_s)
        meeting = self.member.keep(Meeting(self.make, where, self.rank, device=self.device, within=within))
        offer = NativeOffer(make=self.make, group=meeting.where, bucket_bytes=self.bucket_bytes)
        return Handoff(info=offer.to_json(), transfer=lambda within: self.member.take(meeting.form(within.again())))

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        if not self._stock:
            return super().prepare(update, within)
        group, size = self.member.group(within), self.bucket_bytes
        buckets, calls = layout_of(update.params, self.make, size)
        self._handoffs += 1
        load = NativeLoad(handoff=self._handoffs, make=self.make, bucket_bytes=size, calls=calls)
        send = partial(send_buckets, group, buckets, bucket_bytes=size, sliced=False)
        return handoff_of(group, load, update, send)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> NativeWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: the trainer or another rank did not arrive in time.
        """
        offer = NativeOffer.from_json(info, "the offer of a native transport")
        group = offer.group
        if not 0 < here.rank < group.world_size:
            raise ConfigError(f"worker rank {here.rank} does not exist in world_size {group.world_size}")
        device, backend = choose_backend(None, group.backend)
        where = (group.master_address, group.master_port, "")
        member = Member(*where, device=device, backend=backend, timeout_s=within.timeout_s)
        meeting = member.keep(Meeting(offer.make, group, here.rank, device=device, within=within))
        member.take(meeting.form(within.again()))
        return NativeWorker(member, here)


@final
class NativeWorker(GroupWorker):
    """Receives the broadcasts of a group that was formed."""

    load: ClassVar[type[NativeLoad]] = NativeLoad

    def incoming(self, group: Group, load: NativeLoad, arrival: Arrival, into: Mapping[str, Tensor]) -> Incoming:
        buckets, _ = layout_of(arrival.params, load.make, load.bucket_bytes)
        return Incoming(group, buckets, arrival.params, into, bucket_bytes=load.bucket_bytes, sliced=False)
