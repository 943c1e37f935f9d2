"""Memory that other processes of this machine map by a handle: plain JSON, and nothing that could be left behind.

On a CPU a segment is an anonymous file in memory (memfd_create(2)): it has no name in any filesystem, and the kernel
frees it with the last process that holds it, however that one ends. Its size is sealed, so that no process that maps it
is killed because another one cuts it. The handle says which descriptor of which process it is; ``/proc`` opens that for
processes of the same user and the same pid namespace. On an accelerator see `torchrl_ext.data.ipc.device_memory`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable
from typing import Annotated, Any, final

import msgspec
import torch
from torch import Tensor

from torchrl_ext.base.devices import settle
from torchrl_ext.base.errors import ConfigError, IntegrityError, TransportError
from torchrl_ext.base.types import Count, Wire
from torchrl_ext.data.group.links import close_in_children

__all__ = ["HOST", "SEGMENT_BYTES", "SLOTS", "Handle", "HostHandle", "SharedSegment", "create"]

HOST = "cpu"
"""The name of the host's memory among device UUIDs."""

SLOTS = 2
"""Halves of a segment: while workers copy out of one, the trainer fills the other."""

SEGMENT_BYTES = SLOTS * 64
"""The size of a segment is a multiple of it, so that a tensor of any dtype may begin where a half does."""

_NAME = "torchrl_ext"  # what /proc/<pid>/maps shows
_SAME = "trainer and worker as processes of one machine, one user and one pid namespace (one container, or --pid=host)"


class Handle(Wire, frozen=True, kw_only=True, tag_field="kind"):
    """Names a segment to other processes.

    Attributes:
        bytes: its size.
    """

    bytes: Annotated[int, msgspec.Meta(gt=0, multiple_of=SEGMENT_BYTES)]

    def attach(self) -> SharedSegment:
        """Map the segment here.

        Raises:
            TransportError: it cannot be reached from here; says why.
            IntegrityError: other memory is there than the handle says.
        """
        raise NotImplementedError


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

    def __init__(self, flat: Tensor, handle: Any, release: Callable[[], None] | None = None) -> None:
        self.flat, self.handle, self.capacity = flat, handle, flat.numel() // SLOTS
        self._release = None if release is None else weakref.finalize(self, release)

    def half(self, number: int) -> Tensor:
        """Return the half in which bucket ``number`` lies."""
        return self.flat.split(self.capacity)[number % SLOTS]

    def settle(self) -> None:
        """Wait until copies into or out of the segment that this thread began are over."""
        settle([self.flat.device])

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self._release is not None:
            self._release()


@final
class HostHandle(Handle, frozen=True, kw_only=True, tag="host"):
    """Names memory of a process: its descriptor ``fd``, and the device and inode number of the file behind it."""

    pid: Count
    fd: Count
    inode: tuple[int, int]

    def attach(self) -> SharedSegment:
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # which has no effects, whatever lies there
            try:
                about = os.fstat(found)
                sound = stat.S_ISREG(about.st_mode) and (about.st_dev, about.st_ino) == self.inode
                if not sound or about.st_size != self.bytes:
                    raise IntegrityError(f"{path} is not the memory that the trainer made", expected=_SAME)
                descriptor = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.close(found)
            try:
                if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise IntegrityError(f"{path} can be cut while it is mapped", expected="memory of a sealed size")
                segment = SharedSegment(_mapped(descriptor, self.bytes), self)
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = {
                errno.ENOENT: f"no process {self.pid} of this pid namespace has it: the trainer is gone, or elsewhere",
                errno.EACCES: f"process {self.pid} belongs to another user",
                errno.EPERM: f"process {self.pid} belongs to another user",
            }.get(error.errno or 0, str(error))
            raise TransportError(
                f"the trainer's shared memory, {path}, cannot be mapped here: {reason}",
                expected=_SAME,
                state="nothing was received",
                hint="run both that way, or use transport 'collective' or 'disk'",
            ) from error
        close_in_children(segment)
        return segment


def create(nbytes: int) -> SharedSegment:
    """Create a segment of the host's memory, in this process.

    Args:
        nbytes: its size, a multiple of `SEGMENT_BYTES`.

    Raises:
        ConfigError: this system has no such memory.
        TransportError: there is not enough of it.
    """
    if sys.platform != "linux":
        raise ConfigError(f"shared staging memory needs Linux, this is {sys.platform}", hint="use transport 'disk'")
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a lack of memory is an error here, and no signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        flat, about = _mapped(descriptor, nbytes), os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise TransportError(
            f"{nbytes} bytes of shared memory cannot be allocated: {error}",
            state="nothing was sent",
            hint="give a smaller bucket_bytes",
        ) from error
    handle = HostHandle(pid=os.getpid(), fd=descriptor, inode=(about.st_dev, about.st_ino), bytes=nbytes)
    segment = SharedSegment(flat, handle, lambda: os.close(descriptor))
    close_in_children(segment)
    return segment


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Map a file for as long as the tensor, or a view of it, lives; the mapping has a descriptor of its own."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
