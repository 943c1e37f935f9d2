"""`MemoryTransport` carries weights within one process, the fastest route to an in-process engine."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import ClassVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import settle
from torchrl_ext.base.errors import IntegrityError, TransportError
from torchrl_ext.base.types import Info, ParamMeta, Wire
from torchrl_ext.data.transports.base import Arrival, Handoff, Update, Worker
from torchrl_ext.data.transports.standalone import StandaloneEnd, StandaloneTransport
from torchrl_ext.data.weights.source import checked

__all__ = ["MemoryTransport"]

_SHORTEST_S, _LONGEST_S = 0.002, 0.02  # between two looks for a version


@final
class _Channel:
    """The state that the ends of one named channel share."""

    tensors: Mapping[str, Tensor] | None = None
    version = 0
    newest: Arrival | None = None


_CHANNELS: weakref.WeakValueDictionary[str, _Channel] = weakref.WeakValueDictionary()
"""Channels by name, each as long as one of its ends exists."""


class MemoryOffer(Wire, frozen=True, kw_only=True):
    """Names the channel to a worker of the same process."""

    channel: str


class MemoryTransport(StandaloneTransport):
    """Passes copies of tensors to workers in the same process, through a dictionary.

    Args:
        channel: ends with the same channel name connect; by default an instance has a channel of its own.
        timeout_s: deadline of every wait, in seconds.

    Example:
        >>> held = torch.nn.Linear(4, 2)
        >>> sender = tx.WeightSender(tx.MemoryTransport(), tx.make_engine("inprocess", engine=held))
        >>> sender.register_model(policy)
        >>> sender.update_weights().proof, bool((held.weight == policy.weight).all())
        ('in place', True)
    """

    name: ClassVar[str] = "memory"
    _sends = False

    def __init__(self, channel: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._name = channel or f"instance-{uuid.uuid4().hex}"
        self._channel = _CHANNELS.setdefault(self._name, _Channel())

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        self._connected = True
        return Handoff(info=MemoryOffer(channel=self._name).to_json())

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        tensors = {meta.name: tensor.clone() for meta, tensor in checked(update.source)}
        settle(tensor.device for tensor in tensors.values())  # a worker reads them in a thread of its own
        self._channel.tensors, self._channel.version, self._sends = tensors, update.version, True
        return Handoff(served=self._release)

    def _release(self, oldest: int | None) -> None:
        """Drop the copies that no engine needs; receivers without a control layer may still come for them."""
        if oldest == self._channel.version:
            self._channel.tensors = None

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        self._channel.newest = arrival

    def latest_version(self) -> int:
        return max(self._last_version, self._channel.version)

    def shutdown(self) -> None:
        super().shutdown()
        if self._sends:
            self._channel.tensors = self._channel.newest = None

    def attend(self, within: Deadline) -> MemoryEnd:
        return MemoryEnd(self._name, self._channel)

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> MemoryEnd:
        name = MemoryOffer.from_json(info, "the offer of a memory transport").channel
        channel = _CHANNELS.get(name)
        if channel is None:
            raise TransportError(
                f"memory channel {name!r} does not exist in this process",
                expected="trainer and engine in one process",
                hint="use another transport, disk for example",
            )
        return MemoryEnd(name, channel)


@final
class MemoryEnd(StandaloneEnd):
    """Copies versions out of a channel."""

    def __init__(self, name: str, channel: _Channel) -> None:
        self._name, self._channel = name, channel

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        for _ in within.pauses(shortest_s=_SHORTEST_S, longest_s=_LONGEST_S):
            if self._channel.newest not in (None, received):
                return self._channel.newest
        return None

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        tensors = self._channel.tensors
        if tensors is None or self._channel.version != arrival.version:
            raise IntegrityError(
                f"version {arrival.version} is not in memory channel {self._name!r}",
                expected=f"version {self._channel.version}, before engines serve it",
            )
        for name, tensor in tensors.items():
            yield name, tensor.clone()
        settle(tensor.device for tensor in tensors.values())  # before the trainer drops them, or somebody computes

    def close(self) -> None:
        """Keep nothing: the channel is the trainer's."""
