"""Files that others wrote: only regular ones are opened, and only where they are said to be."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from typing import ClassVar, final

from torchrl_ext.base.errors import IntegrityError

__all__ = ["LocalFile", "OpenFile", "identity", "sync"]

_Path = str | os.PathLike[str]


class OpenFile(ABC):
    """A file, or a value of a remote store, that is open for reading at any position.

    Attributes:
        path: where it is, for messages.
        nbytes: its size.
        chunk_bytes: how many bytes are best read at once.
    """

    chunk_bytes: ClassVar[int] = 1 << 20

    path: str
    nbytes: int

    @abstractmethod
    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view``, or the beginning of it, from byte ``offset`` on; return how many bytes; 0 at the end.

        Raises:
            OSError, StoreError: it cannot be read.
        """

    def read(self, first: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from byte ``first`` on, or as many as there are; errors as of `read_into`."""
        data, at = bytearray(max(0, min(nbytes, self.nbytes - first))), 0
        with memoryview(data) as view:
            while at < len(data) and (count := self.read_into(view[at:], first + at)):
                at += count
        return bytes(data[:at])

    def at_most(self, nbytes: int | None) -> int:
        """Return the size; raise IntegrityError where it is more than ``nbytes``."""
        if nbytes is not None and self.nbytes > nbytes:
            raise IntegrityError(
                f"{self.path} has {self.nbytes:,} bytes",
                expected=f"at most {nbytes:,}",
                state="it was not read",
                hint="write it again",
            )
        return self.nbytes

    def close(self) -> None:
        """Release it. May be called twice."""
        return


@final
class LocalFile(OpenFile):
    """A regular file, which stays readable when it is unlinked; opening it never waits for a writer, as a pipe would.

    Args:
        path: the file, or a link to it.
        within: a directory that links may not lead out of; None where they may lead anywhere.

    Raises:
        IntegrityError: a pipe, a device, a directory or a socket; or a link out of ``within``.
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened.
    """

    _descriptor = -1

    def __init__(self, path: _Path, *, within: _Path | None = None) -> None:
        self.path = os.fspath(path)
        where = os.path.realpath(path) if within is not None else self.path
        if within is not None and os.path.commonpath((where, root := os.path.realpath(within))) != root:
            raise IntegrityError(
                f"{self.path} is a link to {where}",
                expected=f"a file under {os.fspath(within)}",
                state="it was not read",
                hint="replace the link by the file itself",
            )
        if not stat.S_ISREG(os.stat(where).st_mode):  # opening some devices has effects of its own
            raise self._special()
        try:
            self._descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket took its place
                raise self._special() from error
            raise
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise self._special()
        self.nbytes = found.st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [view], offset)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def _special(self) -> IntegrityError:
        return IntegrityError(
            f"{self.path} is not a regular file",
            expected="a regular file, not a pipe, device, directory or socket",
            state="it was not read",
            hint="remove it, and let the trainer publish again",
        )


def identity(path: _Path) -> tuple[int, int, int, int]:
    """Return what changes when a file gets another content: its device, inode, size in bytes and last write in ns.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def sync(path: _Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk.

    Raises:
        OSError: it cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
