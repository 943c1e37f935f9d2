"""Segments on an accelerator: an allocation of torch's, which another process opens by what the driver says of it.

On CUDA and ROCm it is shared as `torch.multiprocessing` shares tensors, but in JSON. Of other devices a segment is the
host's memory.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from torchrl_ext.base.devices import accelerator, current_device, uuids
from torchrl_ext.base.errors import ConfigError, TransportError
from torchrl_ext.data.ipc.memory import Handle, SharedSegment

__all__ = ["SHARING", "DeviceHandle", "Sharing", "create_on", "sharable"]

_OWN: weakref.WeakValueDictionary[str, SharedSegment] = weakref.WeakValueDictionary()
"""Segments of this process: the driver opens a handle only in another one."""


class Sharing(NamedTuple):
    """How processes share memory of a type of device.

    Attributes:
        give: takes a uint8 tensor, and returns what `take` of another process needs: bytes, numbers and flags.
        take: takes the index of the device, the size in bytes and what `give` returned; returns the tensor.
    """

    give: Callable[[Tensor], list[Any]]
    take: Callable[[int, int, list[Any]], Tensor]


def _give_cuda(flat: Tensor) -> list[Any]:
    """Return the driver's handle and the offset in it; torch's counter of processes; the event to wait for.

    Without a process that opened it and let go, torch keeps the memory when its owner frees it.
    """
    handle, _, *rest = reduce_tensor(flat)[1][-8:]
    return [handle, rest[0], *rest[2:]]


def _take_cuda(index: int, nbytes: int, given: list[Any]) -> Tensor:
    handle, offset, *counted = given
    storage = torch.UntypedStorage, torch.uint8, index, handle, nbytes, offset, False
    made: Tensor = rebuild_cuda_tensor(Tensor, (nbytes,), (1,), 0, *storage, *counted)
    return made


SHARING: dict[str, Sharing] = {"cuda": Sharing(_give_cuda, _take_cuda)}
"""By type of device."""


@final
class DeviceHandle(Handle, frozen=True, kw_only=True, tag="device"):
    """Names memory of the accelerator with UUID ``device``.

    Attributes:
        key: names it in the process that made it.
        given: see `Sharing`.
    """

    device: str
    key: str
    given: list[bytes | int | bool]

    def attach(self) -> SharedSegment:
        own = _OWN.get(self.key)
        if own is not None:
            return SharedSegment(own.flat, self)
        index = _index(self.device)
        try:
            flat = SHARING[accelerator()].take(index, self.bytes, self.given)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransportError(
                f"the trainer's memory on {self.device} cannot be mapped here: {error}",
                state="nothing was received",
                hint="check that trainer and engine share the device, in one container",
            ) from error
        return SharedSegment(flat, self)


def sharable() -> list[str]:
    """Return the UUIDs of the accelerators whose memory this process can share, the current one first."""
    if accelerator() not in SHARING:
        return []
    seen = uuids()
    return [seen.pop(current_device().index), *seen]


def create_on(device: str, nbytes: int) -> SharedSegment:
    """Create a segment of this process on the accelerator with UUID ``device``.

    Raises:
        ConfigError: this process does not see it.
        TransportError: there is no memory, or it cannot be shared.
    """
    index, kind = _index(device), accelerator()
    try:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(kind, index))
        given = SHARING[kind].give(flat)
    except RuntimeError as error:
        raise TransportError(
            f"{nbytes} bytes of {device} cannot be shared: {error}", hint="give a smaller bucket_bytes"
        ) from error
    key = uuid.uuid4().hex
    segment = _OWN[key] = SharedSegment(flat, DeviceHandle(device=device, key=key, bytes=nbytes, given=given))
    return segment


def _index(device: str) -> int:
    seen = uuids() if accelerator() in SHARING else []
    if device not in seen:
        raise ConfigError(
            f"this process does not see the accelerator {device}",
            expected=f"one of {', '.join(seen) or 'none at all'}",
            hint="give trainer and engine the same devices to see",
        )
    return seen.index(device)
