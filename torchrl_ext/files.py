"""Opening files that others wrote: only regular files, and only where they are said to be."""

from __future__ import annotations

import errno
import os
import stat

from torchrl_ext.errors import IntegrityError

__all__ = ["open_regular"]

_Path = str | os.PathLike[str]


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
            hint="put the file itself there",
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


def _special(path: _Path) -> IntegrityError:
    return IntegrityError(
        f"{os.fspath(path)} is no regular file",
        expected="a file, and no pipe, device, directory or socket",
        state="it was not read",
        hint="remove it, and let whoever wrote the rest write again",
    )
