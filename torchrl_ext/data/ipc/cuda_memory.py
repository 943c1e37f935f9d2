"""Segments on a GPU: an allocation of torch's, shared as `torch.multiprocessing` shares CUDA tensors, but in JSON."""

from __future__ import annotations

import uuid
import weakref
from typing import final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from torchrl_ext.base.errors import ConfigError, TransportError
from torchrl_ext.base.types import Count
from torchrl_ext.data.ipc.memory import Handle, SharedSegment

__all__ = ["CudaHandle", "create_cuda", "visible"]

_OWN: weakref.WeakValueDictionary[str, SharedSegment] = weakref.WeakValueDictionary()
"""Segments of this process: the driver opens a handle only in another one."""


@final
class CudaHandle(Handle, frozen=True, kw_only=True, tag="cuda"):
    """Names memory of the GPU with UUID ``device``.

    Attributes:
        key: names it in the process that made it.
        handle, offset: of the driver's allocation, and where the memory begins in it.
        counter, counter_at: where torch counts that a process has let go of the memory; without a worker that did so
            once, it is kept when the trainer frees it.
        event, waits: what to wait for before the first use.
    """

    device: str
    key: str
    handle: bytes
    offset: Count
    counter: bytes
    counter_at: Count
    event: bytes
    waits: bool

    def attach(self) -> SharedSegment:
        own = _OWN.get(self.key)
        if own is not None:
            return SharedSegment(own.flat, self)
        storage = (torch.UntypedStorage, torch.uint8, _index(self.device), self.handle, self.bytes, self.offset)
        rest = (False, self.counter, self.counter_at, self.event, self.waits)
        try:
            flat: Tensor = rebuild_cuda_tensor(Tensor, (self.bytes,), (1,), 0, *storage, *rest)
        except RuntimeError as error:
            raise TransportError(
                f"the trainer's memory on GPU {self.device} cannot be mapped here: {error}",
                state="nothing was received",
                hint="check that trainer and engine share the GPU, in one container",
            ) from error
        return SharedSegment(flat, self)


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, the current one first."""
    here = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != here]
    return [_uuid(index) for index in (here, *others)]


def create_cuda(device: str, nbytes: int) -> SharedSegment:
    """Create a segment of this process on the GPU with UUID ``device``.

    Raises:
        ConfigError: this process does not see that GPU.
        TransportError: there is no memory, or it cannot be shared.
    """
    index = _index(device)
    try:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
        _, shared = reduce_tensor(flat)
    except RuntimeError as error:
        raise TransportError(
            f"{nbytes} bytes of GPU {device} cannot be shared: {error}", hint="give a smaller bucket_bytes"
        ) from error
    handle, _, offset, _, counter, counter_at, event, waits = shared[-8:]
    key = uuid.uuid4().hex
    named = CudaHandle(
        device=device,
        key=key,
        bytes=nbytes,
        handle=handle,
        offset=offset,
        counter=counter,
        counter_at=counter_at,
        event=event,
        waits=waits,
    )
    segment = _OWN[key] = SharedSegment(flat, named)
    return segment


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _index(device: str) -> int:
    seen = {_uuid(index): index for index in range(torch.cuda.device_count())} if torch.cuda.is_available() else {}
    if device not in seen:
        raise ConfigError(
            f"this process does not see GPU {device}",
            expected=f"one of {', '.join(seen) or 'none at all'}",
            hint="give trainer and engine the same CUDA_VISIBLE_DEVICES",
        )
    return seen[device]
