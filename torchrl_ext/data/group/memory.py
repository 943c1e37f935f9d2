"""Memory that other processes of this machine map by a handle: plain JSON, and nothing that could be left behind.

On a CPU a segment is an anonymous file in memory (memfd_create(2)): it has no name in any filesystem, and the kernel
frees it with the last process that holds it, however that one ends. Its size is sealed, so that no process that maps it
is killed because another one cuts it. The handle says which descriptor of which process it is; ``/proc`` opens that for
processes of the same user and the same pid namespace.

On an accelerator a segment is an allocation of torch's, which another process opens by what the driver says of it: on
CUDA and ROCm it is shared as `torch.multiprocessing` shares tensors, but in JSON.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, final

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from torchrl_ext.base.devices import accelerator, current_device, settle, uuids
from torchrl_ext.base.errors import ConfigError, IntegrityError, TransportError
from torchrl_ext.base.types import Count, Wire
from torchrl_ext.data.group.store import close_in_children

__all__ = [
    "HOST", "SEGMENT_BYTES", "SHARING", "SLOTS", "DeviceHandle", "Handle", "HostHandle", "SharedSegment", "Sharing",
    "create", "local_devices",
]  # fmt: skip

HOST = "cpu"
"""The name of the host's memory among device UUIDs."""

SLOTS = 2
"""Halves of a segment: while workers copy out of one, the trainer fills the other."""

SEGMENT_BYTES = SLOTS * 64
"""The size of a segment is a multiple of it, so that a tensor of any dtype may begin where a half does."""

_Size = Annotated[int, msgspec.Meta(gt=0, multiple_of=SEGMENT_BYTES)]
_NAME = "torchrl_ext"  # what /proc/<pid>/maps shows
_SAME = "trainer and worker as processes of one machine, one user and one pid namespace (one container, or --pid=host)"


@final
class SharedSegment:
    """A piece of memory that several processes map, in halves that take turns.

    Args:
        flat: its bytes.
        handle: the `Handle` by which other processes attach it.
        release: called once, by `close` or with the last reference to this segment.

    Attributes:
        flat: the bytes, as a uint8 tensor; the memory lives as long as this tensor or a view of it.
        capacity: bytes of a half.
    """

    def __init__(self, flat: Tensor, handle: Handle, release: Callable[[], None] = lambda: None) -> None:
        self.flat, self.handle, self.capacity = flat, handle, flat.numel() // SLOTS
        self._release = weakref.finalize(self, release)
        if flat.is_cpu:  # a driver's memory has to be left to the parent
            close_in_children(self)

    def half(self, number: int) -> Tensor:
        """Return the half in which bucket ``number`` lies."""
        return self.flat.split(self.capacity)[number % SLOTS]

    def settle(self) -> None:
        """Wait until copies into or out of the segment that this thread began are over."""
        settle([self.flat.device])

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        self._release()


@final
class HostHandle(Wire, frozen=True, kw_only=True, tag_field="kind", tag="host"):
    """Names memory: a process, its descriptor ``fd``, and device and inode number of the file behind that."""

    pid: Count
    fd: Count
    inode: tuple[int, int]
    nbytes: _Size

    def attach(self) -> SharedSegment:
        """Map the segment here.

        Raises:
            TransportError: it cannot be reached from here; says why.
            IntegrityError: other memory is there than the handle says.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            reason = f"{error}"
            if isinstance(error, FileNotFoundError):
                reason = f"no process {self.pid} of this pid namespace has it: the trainer is gone, or elsewhere"
            elif isinstance(error, PermissionError):
                reason = f"process {self.pid} belongs to another user"
            raise TransportError(
                f"the trainer's shared memory, {path}, cannot be mapped here: {reason}",
                expected=_SAME,
                state="nothing was received",
                hint="run both that way, or use transport 'collective' or 'disk'",
            ) from error
        try:
            about, seals = os.fstat(descriptor), 0
            with suppress(OSError):  # it is no memory
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if ((about.st_dev, about.st_ino), about.st_size) != (self.inode, self.nbytes):
                raise IntegrityError(f"{path} is not what the trainer made", expected=_SAME)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise IntegrityError(f"{path} is not sealed", expected="memory that nobody can cut")
            return SharedSegment(_mapped(descriptor, self.nbytes), self)
        finally:
            os.close(descriptor)


@final
class DeviceHandle(Wire, frozen=True, kw_only=True, tag_field="kind", tag="device"):
    """Names memory of the accelerator with UUID ``device``.

    Attributes:
        key: names it in the process that made it.
        given: see `Sharing`.
    """

    nbytes: _Size
    device: str
    key: str
    given: list[bytes | int | bool]

    def attach(self) -> SharedSegment:
        """Map the segment here.

        Raises:
            TransportError: it cannot be reached from here; says why.
        """
        own = _OWN.get(self.key)
        if own is not None:
            return SharedSegment(own.flat, self)
        try:
            flat = SHARING[accelerator()].take(uuids().index(self.device), self.nbytes, self.given)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise TransportError(
                f"the trainer's memory on {self.device} cannot be mapped here: {error}",
                state="nothing was received",
                hint="check that trainer and engine share the device, in one container",
            ) from error
        return SharedSegment(flat, self)


Handle = HostHandle | DeviceHandle

_OWN: weakref.WeakValueDictionary[str, SharedSegment] = weakref.WeakValueDictionary()
"""Segments of this process on a device: the driver opens a handle only in another one."""


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
"""By type of device; of other types a segment is the host's memory."""


def local_devices() -> list[str]:
    """Return where this process can share memory, best first: UUIDs of accelerators, the current one first; `HOST`."""
    if accelerator() not in SHARING:
        return [HOST]
    seen = uuids()
    return [seen.pop(current_device().index), *seen, HOST]


def create(device: str, nbytes: int) -> SharedSegment:
    """Create a segment of this process.

    Args:
        device: where, one of `local_devices`.
        nbytes: its size, a multiple of `SEGMENT_BYTES`.

    Raises:
        ConfigError: this system has no such memory.
        TransportError: there is not enough of it, or it cannot be shared.
    """
    if device == HOST and sys.platform != "linux":
        raise ConfigError(f"shared staging memory needs Linux, this is {sys.platform}", hint="use transport 'disk'")
    try:
        return _on_host(nbytes) if device == HOST else _on_device(device, nbytes)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"{nbytes} bytes of shared memory ({device}) cannot be allocated: {error}",
            state="nothing was sent",
            hint="give a smaller bucket_bytes",
        ) from error


def _on_host(nbytes: int) -> SharedSegment:
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a lack of memory is an error here, and no signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        flat, about = _mapped(descriptor, nbytes), os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    handle = HostHandle(pid=os.getpid(), fd=descriptor, inode=(about.st_dev, about.st_ino), nbytes=nbytes)
    return SharedSegment(flat, handle, lambda: os.close(descriptor))


def _on_device(device: str, nbytes: int) -> SharedSegment:
    kind, key = accelerator(), uuid.uuid4().hex
    flat = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(kind, uuids().index(device)))
    handle = DeviceHandle(device=device, key=key, nbytes=nbytes, given=SHARING[kind].give(flat))
    segment = _OWN[key] = SharedSegment(flat, handle)
    return segment


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Map a file for as long as the tensor, or a view of it, lives; the mapping has a descriptor of its own."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
