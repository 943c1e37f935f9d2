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
from typing import Any, final

import torch

from torchrl_ext.errors import ConfigError, IntegrityError, TransportError
from torchrl_ext.transports.ipc.host_memory import Segment, integer
from torchrl_ext.types import Info

__all__ = ["CudaSegment", "attach_cuda", "create_cuda", "visible"]

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


_OWN: weakref.WeakValueDictionary[str, CudaSegment] = weakref.WeakValueDictionary()
"""Segments of this process: the driver opens a handle only in another one."""


class _Memory:
    """Device memory as torch takes it (``__cuda_array_interface__``, version 3), freed with its tensors."""

    def __init__(self, pointer: int, nbytes: int, device: int, free: str) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        weakref.finalize(self, _release, free, pointer, device, os.getpid())


@final
class CudaSegment(Segment):
    """A segment on a GPU.

    Args:
        pointer: where it begins.
        nbytes: its size.
        device: index of the GPU as this process counts.
        free: the driver call that gives it up.
        handle: as `Segment.handle`.
    """

    def __init__(self, pointer: int, nbytes: int, device: int, free: str, handle: Info) -> None:
        self._device = torch.device("cuda", device)
        self.flat = torch.as_tensor(_Memory(pointer, nbytes, device, free), device=self._device)
        self.handle = handle

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, the current one first."""
    here = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != here]
    return [_uuid(index) for index in (here, *others)]


def create_cuda(device: str, nbytes: int) -> CudaSegment:
    """Create a segment of this process on the GPU with UUID ``device``.

    Raises:
        ConfigError: this process does not see that GPU.
        TransportError: the driver refuses, most likely for want of memory; torch's cache was emptied then.
    """
    index, pointer, exported = _index(device), ctypes.c_uint64(), _Handle()
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
    key = uuid.uuid4().hex
    handle = {"kind": "cuda", "device": device, "key": key, "handle": bytes(exported.reserved).hex(), "bytes": nbytes}
    segment = CudaSegment(int(pointer.value or 0), nbytes, index, "cuMemFree_v2", handle)
    _OWN[key] = segment
    return segment


def attach_cuda(handle: Info) -> Segment:
    """Open a segment of another process, or find one of this process.

    Raises:
        IntegrityError: the handle is malformed.
        ConfigError: this process does not see the GPU.
        TransportError: the driver refuses.
    """
    own = _OWN.get(str(handle.get("key")))
    if own is not None:
        return _Borrowed(own)
    nbytes, opened, pointer = integer(handle, "bytes"), _Handle(), ctypes.c_uint64()
    try:
        raw = bytes.fromhex(handle["handle"])
    except (KeyError, TypeError, ValueError):
        raw = b""
    if len(raw) != _HANDLE_BYTES:
        raise IntegrityError("the handle of a CUDA segment is malformed", expected=f"{_HANDLE_BYTES} bytes in hex")
    ctypes.memmove(ctypes.byref(opened), raw, _HANDLE_BYTES)
    index = _index(str(handle.get("device")))
    with torch.cuda.device(index):
        _context(index)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return CudaSegment(int(pointer.value or 0), nbytes, index, "cuIpcCloseMemHandle", handle)


@final
class _Borrowed(Segment):
    """A segment of this process, as a worker end in the same process attaches it."""

    def __init__(self, own: CudaSegment) -> None:
        self._own, self.flat, self.handle = own, own.flat, own.handle

    def settle(self) -> None:
        self._own.settle()

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)


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
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status != 0:
        words = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorString(ctypes.c_int(status), ctypes.byref(words))
        told = words.value.decode() if words.value else "unknown error"
        raise TransportError(f"{name} failed: {told} ({status})", hint="check that trainer and engine share the GPU")


def _release(free: str, pointer: int, device: int, pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has no CUDA context
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            _call(free, ctypes.c_uint64(pointer))
    except (RuntimeError, AssertionError):
        return  # at the end of the process the driver frees everything
