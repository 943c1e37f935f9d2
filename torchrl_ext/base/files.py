"""Files that others wrote: only regular ones are opened, and only where they are said to be."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from typing import ClassVar, final

from torchrl_ext.base.errors import IntegrityError

__all__ = ["LocalFile", "OpenFile", "identity", "open_regular", "sync"]

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

    def close(self) -> None:
        """Release it. May be called twice."""
        return


@final
class LocalFile(OpenFile):
    """A regular file, which stays readable when it is unlinked; arguments and errors are those of `open_regular`."""

    _descriptor = -1

    def __init__(self, path: _Path, *, within: _Path | None = None) -> None:
        self.path = os.fspath(path)
        self._descriptor, self.nbytes = open_regular(path, within=within)

    def read_into(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [view], offset)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


def open_regular(path: _Path, *, within: _Path | None = None) -> tuple[int, int]:
    """Open a regular file for reading, and never wait for a writer of it, as opening a pipe would.

    Args:
        path: the file, or a link to it.
        within: a directory that links may not lead out of; None where they may lead anywhere.

    Returns:
        The descriptor, closed on exec, and the size in bytes, for callers that limit it.

    Raises:
        IntegrityError: a pipe, a device, a directory or a socket; or a link out of ``within``.
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened.
    """
    where = os.path.realpath(path) if within is not None else os.fspath(path)
    if within is not None and os.path.commonpath((where, root := os.path.realpath(within))) != root:
        raise IntegrityError(
            f"{os.fspath(path)} is a link to {where}",
            expected=f"a file under {os.fspath(within)}",
            state="it was not read",
            hint="replace the link by the file itself",
        )
    if not stat.S_ISREG(os.stat(where).st_mode):  # opening some devices has effects of its own
        raise _special(path)
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket took its place
            raise _special(path) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _special(path)
    return descriptor, found.st_size


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


def _special(path: _Path) -> IntegrityError:
    return IntegrityError(
        f"{os.fspath(path)} is not a regular file",
        expected="a regular file, not a pipe, device, directory or socket",
        state="it was not read",
        hint="remove it, and let the trainer publish again",
    )
