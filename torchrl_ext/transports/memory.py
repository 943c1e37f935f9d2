"""`MemoryTransport` carries weights within one process, the fastest route to an in-process engine."""

from __future__ import annotations

import queue
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from torchrl_ext.errors import IntegrityError, TransportError
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["MemoryTransport"]


class _Channel:
    """The state that the ends of one named channel share."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.announced: queue.Queue[Info] = queue.Queue()
        self.newest = 0


_CHANNELS: weakref.WeakValueDictionary[str, _Channel] = weakref.WeakValueDictionary()
"""Channels by name, each as long as one of its ends exists."""


class MemoryTransport(StandaloneTransport):
    """Hands copies of tensors over through a dictionary of this process.

    Args:
        channel: ends with the same channel name meet; by default each instance is both ends of its own.
        timeout_s: deadline of every wait, in seconds.

    Example:
        >>> held = torch.nn.Linear(4, 2)
        >>> sender = tx.WeightSender(tx.MemoryTransport(), tx.make_engine("inprocess", engine=held))
        >>> sender.register_model(policy)
        >>> sender.update_weights().proof, bool((held.weight == policy.weight).all())
        ('in place', True)
    """

    name: ClassVar[str] = "memory"

    def __init__(self, channel: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._name = channel or f"instance-{uuid.uuid4().hex}"
        self._channel = _CHANNELS.setdefault(self._name, _Channel())
        self._connected = False

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        self._connected = True
        return Handoff(info={"transport": self.name, "channel": self._name})

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        tensors, params = {}, []
        for meta, tensor in checked(source):
            tensors[meta.name] = tensor.clone()
            params.append(meta.to_json())
        self._channel.versions = {version: tensors}
        self._channel.newest = max(self._channel.newest, version)
        self._connected = True
        info = {"transport": self.name, "version": version, "params": params}
        return Handoff(info=info, acknowledge=self._release)

    def _release(self, oldest: int | None) -> None:
        """Drop the copies that no engine needs; receivers without a control layer may still come for them."""
        if oldest in self._channel.versions:  # the only one
            self._channel.versions = {}

    def latest_version(self) -> int:
        return self._channel.newest

    def join(self, info: Info) -> None:
        channel = _CHANNELS.get(info["channel"])
        if channel is None:
            raise TransportError(
                f"memory channel {info['channel']!r} does not exist in this process",
                expected="trainer and engine in one process",
                hint="use another transport, disk for example",
            )
        self._name, self._channel = info["channel"], channel
        self._connected = True

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        tensors = self._channel.versions.get(info["version"])
        if tensors is None:
            raise IntegrityError(
                f"version {info['version']} is not in memory channel {self._name!r}",
                expected=f"one of {sorted(self._channel.versions)}",
            )
        for name, tensor in tensors.items():
            yield name, tensor.clone()

    def announce(self, info: Info) -> None:
        self._channel.announced.put(info)

    def poll(self, timeout_s: float) -> Info | None:
        try:
            info = self._channel.announced.get(timeout=timeout_s)
            while True:  # only the newest counts
                try:
                    info = self._channel.announced.get_nowait()
                except queue.Empty:
                    break
        except queue.Empty:
            return None
        self._connected = True
        return info

    def check_connection(self) -> bool:
        return self._connected

    def shutdown(self) -> None:
        self._connected = False
