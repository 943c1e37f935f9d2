"""Segments on a GPU: an allocation of its own, exported and opened through the CUDA driver.

The driver's own calls (CUDA Driver API, "Memory Management") are used in place of torch's sharing of storages: that
keeps a reference count in a named file, which a killed process leaves behind, and it shares blocks of torch's
allocator, in which other tensors live. What is allocated here is freed by the driver when its process ends, however
that happens.
"""

from __future__ import annotations

import ctypes
import os
import uuid
import weakref
from typing import Annotated, Any, final

import msgspec
import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, TransportError
from torchrl_ext.transports.ipc.memory import Handle, Segment

__all__ = ["CudaHandle", "create_cuda", "visible"]

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Exported(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


_OWN: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()
"""Segments of this process: the driver opens a handle only in another one."""


@final
class CudaHandle(Handle, frozen=True, kw_only=True, tag="cuda"):
    """Names memory of the GPU with UUID ``device``: the driver's handle, and a key for the process that made it."""

    device: str
    key: str
    handle: Annotated[str, msgspec.Meta(pattern=rf"^([0-9a-f]{{2}}){{{_HANDLE_BYTES}}}\Z")]

    def attach(self) -> Segment:
        own = _OWN.get(self.key)
        if own is not None:
            return Segment(own.flat, self)
        index, pointer = _index(self.device), ctypes.c_uint64()
        with torch.cuda.device(index):
            _context(index)
            opened, flags = _Exported.from_buffer_copy(bytes.fromhex(self.handle)), ctypes.c_uint(_LAZY_PEER_ACCESS)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, flags)
        return Segment(_flat(pointer, self.bytes, index, "cuIpcCloseMemHandle"), self)


class _Memory:
    """Device memory as torch takes it (``__cuda_array_interface__``, version 3), freed with its tensors."""

    def __init__(self, pointer: int, nbytes: int, device: int, free: str) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        weakref.finalize(self, _release, free, pointer, device, os.getpid())


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, the current one first."""
    here = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != here]
    return [_uuid(index) for index in (here, *others)]


def create_cuda(device: str, nbytes: int) -> Segment:
    """Create a segment of this process on the GPU with UUID ``device``.

    Raises:
        ConfigError: this process does not see that GPU.
        TransportError: the driver refuses, most likely for want of memory; torch's cache was emptied then.
    """
    index, pointer, exported = _index(device), ctypes.c_uint64(), _Exported()
    with torch.cuda.device(index):
        _context(index)
        try:
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        except TransportError:  # what torch has cached beside its tensors may be enough
            torch.cuda.empty_cache()
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(exported), pointer)
        except TransportError:
            _call("cuMemFree_v2", pointer)
            raise
    handle = CudaHandle(device=device, key=uuid.uuid4().hex, handle=bytes(exported.reserved).hex(), bytes=nbytes)
    segment = _OWN[handle.key] = Segment(_flat(pointer, nbytes, index, "cuMemFree_v2"), handle)
    return segment


def _flat(pointer: ctypes.c_uint64, nbytes: int, index: int, free: str) -> Tensor:
    """Return device memory as a uint8 tensor, which the driver call ``free`` gives up with its last view."""
    memory = _Memory(int(pointer.value or 0), nbytes, index, free)
    return torch.as_tensor(memory, device=torch.device("cuda", index))


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


def _context(index: int) -> None:
    """Make the device's primary context, which torch uses too, this thread's current one."""
    torch.empty(1, device=torch.device("cuda", index))
    torch.cuda.synchronize(index)


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, name)(*arguments)
    if status != 0:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(words))
        reason = words.value.decode() if words.value else "unknown error"
        raise TransportError(f"{name} failed: {reason} ({status})", hint="check that trainer and engine share the GPU")


def _release(free: str, pointer: int, device: int, pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has no CUDA context
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            _call(free, ctypes.c_uint64(pointer))
    except (RuntimeError, AssertionError):
        return  # at the end of the process the driver frees everything
