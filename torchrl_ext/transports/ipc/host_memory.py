"""Memory that other processes of this machine map by a handle: plain JSON, and nothing that could be left behind.

On a CPU a segment is an anonymous file in memory (memfd_create(2)): it has no name in any filesystem, and the kernel
frees it with the last process that holds it, however that one ends. Its size is sealed, so that no process that maps it
is killed because another one cuts it. The handle says which descriptor of which process it is; ``/proc`` opens that for
processes of the same user and the same pid namespace. On a GPU see `torchrl_ext.transports.ipc.cuda_memory`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import stat
import sys
import weakref
from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, IntegrityError, TransportError
from torchrl_ext.transports.links import close_in_children
from torchrl_ext.types import Info

__all__ = [
    "HostSegment",
    "Segment",
    "attach",
    "create",
    "host_handle",
    "integer",
    "local_devices",
]

HOST = "cpu"
"""The name of the host's memory among device UUIDs."""

_NAME = "torchrl_ext"  # what /proc/<pid>/maps shows
_SAME = "trainer and worker as processes of one machine, one user and one pid namespace (one container, or --pid=host)"


class Segment(ABC):
    """A piece of memory that several processes map.

    Attributes:
        flat: the bytes, as a uint8 tensor; the memory lives as long as this tensor or a view of it.
        handle: what another process needs to `attach`; JSON-safe.
    """

    flat: Tensor
    handle: Info

    def settle(self) -> None:  # noqa: B027 - on the host a copy is over when its call returns
        """Wait until copies into or out of the segment that this thread began are over."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. May be called twice."""


@final
class HostSegment(Segment):
    """A segment in host memory: a mapped file without a name.

    Args:
        descriptor: of the file. The process that made it keeps it open for others, until `close`; one that maps a file
            of another process closes it at once, for there may be one per tensor.
        nbytes: its size.
        handle: as `Segment.handle`, where another process made it.
    """

    def __init__(self, descriptor: int, nbytes: int, handle: Info | None = None) -> None:
        self.flat = torch.from_numpy(np.asarray(_Mapping(descriptor, nbytes)))
        self.handle = handle or host_handle(descriptor, os.fstat(descriptor))
        self._give_up = weakref.finalize(self, os.close, descriptor) if handle is None else None
        close_in_children(self)

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self._give_up is not None:
            self._give_up()


class _Mapping:
    """A memory mapping for numpy that keeps no descriptor (mmap.mmap keeps one), and is unmapped with its last view."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, _libc().munmap, address, nbytes).atexit = False


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, word]
    return libc


def host_handle(descriptor: int, about: os.stat_result) -> Info:
    """Return the handle of a file in memory that this process holds open."""
    return {
        "kind": "host",
        "pid": os.getpid(),
        "fd": descriptor,
        "inode": [about.st_dev, about.st_ino],
        "bytes": about.st_size,
    }


def create(device: str, nbytes: int) -> Segment:
    """Create a segment of this process.

    Args:
        device: ``"cpu"``, or the UUID of a GPU that this process sees.
        nbytes: its size.

    Raises:
        ConfigError: this system has no such memory.
        TransportError: there is not enough of it.
    """
    if device != HOST:
        from torchrl_ext.transports.ipc.cuda_memory import create_cuda

        return create_cuda(device, nbytes)
    if sys.platform != "linux":
        raise ConfigError(f"shared staging memory needs Linux, this is {sys.platform}", hint="use transport 'disk'")
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a lack of memory is an error here, and no signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return HostSegment(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise TransportError(
            f"no {nbytes} bytes of shared memory can be had: {error}",
            state="nothing was sent",
            hint="give a smaller bucket_bytes",
        ) from error


def attach(handle: Any) -> Segment:
    """Map the segment of another process (or this one).

    Args:
        handle: `Segment.handle`.

    Raises:
        TransportError: it cannot be reached from here; says why.
        IntegrityError: what is there is not what the handle says.
    """
    kind = handle.get("kind") if isinstance(handle, dict) else None
    if kind == "cuda":
        from torchrl_ext.transports.ipc.cuda_memory import attach_cuda

        return attach_cuda(handle)
    if kind != "host":
        raise IntegrityError(f"{handle!r} is no handle of a segment", expected='one of kind "host", or "cuda"')
    pid, number, nbytes = (integer(handle, field) for field in ("pid", "fd", "bytes"))
    path = f"/proc/{pid}/fd/{number}"
    try:
        found = os.stat(path)  # before it is opened: opening a pipe or a device can have effects
        if not stat.S_ISREG(found.st_mode) or [found.st_dev, found.st_ino] != handle.get("inode"):
            raise IntegrityError(f"{path} is not the memory that the trainer made", expected=_SAME)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        reason = {
            errno.ENOENT: f"no process {pid} of this pid namespace has it: the trainer is gone, or runs in another one",
            errno.EACCES: f"process {pid} belongs to another user",
            errno.EPERM: f"process {pid} belongs to another user",
        }.get(error.errno or 0, str(error))
        raise TransportError(
            f"the trainer's shared memory, {path}, cannot be opened here: {reason}",
            expected=_SAME,
            state="nothing was received",
            hint="run both so, or use transport 'collective' or 'disk'",
        ) from error
    try:
        fits = os.fstat(descriptor).st_size == nbytes > 0
        if not fits or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise IntegrityError(
                f"{path} is not the memory that its handle describes",
                expected=f"{nbytes} bytes, sealed",
            )
        return HostSegment(descriptor, nbytes, handle)
    except OSError as error:
        raise TransportError(
            f"{nbytes} bytes of shared memory cannot be mapped: {error}",
            expected="fewer mappings than vm.max_map_count allows, and address space for this one",
            state="nothing was received",
        ) from error
    finally:
        os.close(descriptor)


def local_devices() -> list[str]:
    """Return where this process can take weights from, best first: UUIDs of the GPUs that it sees, then the host."""
    if not torch.cuda.is_available():
        return [HOST]
    from torchrl_ext.transports.ipc.cuda_memory import visible

    return [*visible(), HOST]


def integer(message: Any, field: str) -> int:
    """Return a field of a message from outside, which has to be a whole number of 0 or more.

    Raises:
        IntegrityError: it is none.
    """
    value = message.get(field) if isinstance(message, dict) else message
    if type(value) is not int or value < 0 or not isinstance(message, dict):
        raise IntegrityError(f"{field} is {value!r}", expected="a whole number of 0 or more", state="nothing was read")
    return value
