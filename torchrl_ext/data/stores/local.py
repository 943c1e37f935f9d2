"""`LocalStore`: a directory on a local or shared filesystem.

Durability follows the usual order (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): write a
temporary sibling, fsync it, rename it over the name, fsync the directory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchrl_ext.base.errors import IntegrityError, StoreError, WeightSyncError
from torchrl_ext.base.files import LocalFile, OpenFile, open_regular, sync
from torchrl_ext.data.stores.store import Draft, Store, checked_key

__all__ = ["TEMPORARY", "LocalStore"]

log = logging.getLogger("torchrl_ext")

TEMPORARY = ".tmp-"
"""Marks names of temporaries, which begin with a dot: no reader lists them, and the next owner removes them."""
_TEMPORARY_NAME = re.compile(rf"/\.([^/]+){re.escape(TEMPORARY)}[0-9a-f]{{32}}")

_HELD: weakref.WeakSet[LocalStore] = weakref.WeakSet()
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass
class _LocalDraft(Draft):
    """A draft in a temporary sibling of the folder, which `LocalStore.draft` renames at the end."""

    path: Path

    @property
    def place(self) -> str:
        return self.path.name

    def write(self, name: str, data: bytes) -> None:
        path, inner = f"{self.path}/{checked_key(name)}", "/" in name
        if inner:  # never the draft itself, which may be gone
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if inner:
            sync(os.path.dirname(path))


class LocalStore(Store):
    """A store that keeps its values as files under ``root``.

    Args:
        root: directory, which `own` makes where it is missing; readers never do.
    """

    joined = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        self._unlock: weakref.finalize[[int, int], LocalStore] | None = None
        self._left: set[str] = set()  # temporaries that could not be removed yet

    # writer

    def own(self) -> bool:
        """Make and lock the root, and remove what a killed writer left; as `Store.own`.

        The lock is on the directory itself, so nothing is left in it, and the kernel drops it with the process. It
        belongs to the open directory: a forked child closes its copy, and so cannot keep the lock. Where the root's
        name means another directory by now (it was removed and made again, mounted anew, or is a link that was moved),
        that one is locked instead.
        """
        if self.owned:
            if self._is_here():
                self._remove()
                return False
            self.disown()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if self._lock(descriptor):
                    hidden = (name for name in os.listdir(self.root) if name.startswith(".") and TEMPORARY in name)
                    self._remove(*(f"{self.url}/{name}" for name in hidden))
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise self._failed("open", error) from error
        self._descriptor = descriptor
        self._unlock = weakref.finalize(self, _release, descriptor, os.getpid())
        self.owned = True
        _HELD.add(self)
        return True

    def disown(self) -> None:
        """Unlock the root, so that another writer may own it."""
        self.owned = False
        if self._unlock is not None:
            self._unlock()

    def put(self, key: str, data: bytes) -> None:
        self._refuse_moved()
        folder, _, name = f"{self.url}/{checked_key(key)}".rpartition("/")
        temporary = f"{folder}/.{name}{TEMPORARY}{uuid.uuid4().hex}"
        try:
            os.makedirs(folder, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, f"{folder}/{name}")
            except BaseException:
                self._remove(temporary)
                raise
            sync(folder)
        except OSError as error:
            raise self._failed("write", error, len(data)) from error

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[Draft]:
        """Open a folder for writing, as `Store.draft`; an error says what is needed and what is free.

        Files must be fsynced by the block; the folder, its rename and the root are fsynced here.
        """
        path, temporary = f"{self.url}/{checked_key(folder)}", f"{self.url}/.{folder}{TEMPORARY}{uuid.uuid4().hex}"
        if os.path.lexists(path):
            raise StoreError(f"{path} exists already", state="nothing was written", hint="pick the next version number")
        try:
            found = os.statvfs(self.root)
            if found.f_bavail * found.f_frsize < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            try:
                os.mkdir(temporary)
                yield _LocalDraft(Path(temporary))
                sync(temporary)
                os.rename(temporary, path)
            except BaseException:
                self._remove(temporary)
                raise
            sync(self.url)
        except WeightSyncError:  # what the block raised; some are OSErrors too
            raise
        except OSError as error:
            raise self._failed("write", error, needed_bytes) from error

    def join(self, place: str) -> Draft:
        folder = self.root / checked_key(place)
        if folder.parent != self.root or TEMPORARY not in place:
            raise StoreError(f"{place!r} is not a version that is being written", state="nothing was written")
        if not folder.is_dir():
            raise StoreError(
                f"{folder} is not there, or its writer abandoned this version",
                expected="the same root on every trainer rank",
                state="nothing was written",
            )
        return _LocalDraft(folder)

    def delete(self, key: str) -> None:
        self._refuse_moved()
        folder, _, name = f"{self.url}/{checked_key(key)}".rpartition("/")
        gone = f"{folder}/.{name}{TEMPORARY}{uuid.uuid4().hex}"
        try:
            try:
                os.rename(f"{folder}/{name}", gone)  # no new reader finds it from here on; who has it open reads on
            except FileNotFoundError:
                return
        except OSError as error:
            raise self._failed("remove", error) from error
        self._remove(gone)

    # reader

    def available(self) -> bool:
        return self.root.is_dir()

    def get(self, key: str, at_most: int | None = None) -> bytes:
        path = f"{self.url}/{checked_key(key)}"
        try:
            descriptor, size = open_regular(path, within=self.url)
            with open(descriptor, "rb", buffering=0) as file:
                if at_most is not None and size > at_most:
                    raise IntegrityError(
                        f"{path} has {size:,} bytes",
                        expected=f"at most {at_most:,}",
                        state="it was not read",
                        hint="write it again",
                    )
                return file.readall()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", error) from error

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        try:
            descriptor, size = open_regular(f"{self.url}/{checked_key(key)}", within=self.url)
            with open(descriptor, "rb", buffering=0) as file:
                return [_read_at(file.fileno(), first, min(nbytes, size - first)) for first, nbytes in spans]
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", error) from error

    def open(self, key: str) -> OpenFile:
        try:
            return LocalFile(f"{self.url}/{checked_key(key)}", within=self.url)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", error) from error

    def list(self, folder: str = "") -> list[str]:
        try:
            found = os.listdir(f"{self.url}/{checked_key(folder)}" if folder else self.url)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failed("list", error) from error
        return sorted(name for name in found if not name.startswith("."))

    # its helpers

    def _is_here(self) -> bool:
        """Return whether the directory that is locked is what the root's name means now."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.root))
        except OSError:
            return False

    def _refuse_moved(self) -> None:
        if self.owned and not self._is_here():
            raise StoreError(
                f"{self.root} is another directory now than the one into which this trainer publishes",
                expected="a root that stays",
                state="nothing was changed in it",
                hint="send the weights again: the trainer takes what is there now, unless another trainer has it",
            )

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another trainer publishes into {self.root}",
                expected="one trainer per root",
                state="nothing was changed",
                hint="give this trainer its own root, or end the other trainer",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s does not support locks (%s), so a second trainer on it would go unnoticed", self.root, error
            )
            return False
        return True

    def _remove(self, *temporaries: str) -> None:
        """Remove temporaries, and those that could not be removed before; what stays is tried again by a later call."""
        for path in (*self._left, *temporaries):
            try:
                if os.path.lexists(path):
                    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
                self._left.discard(path)
            except OSError as error:
                if path not in self._left:
                    log.warning("%s is not removed yet, and is tried again later: %s", path, error)
                self._left.add(path)

    def _failed(self, doing: str, error: OSError, needed: int | None = None) -> StoreError:
        """Return what to raise for an error of the operating system; where space ran out, with what is needed and free.

        Args:
            doing: the verb for the message.
            error: what happened.
            needed: bytes that were to be written; 0 where that is not known beforehand.
        """
        path = _TEMPORARY_NAME.sub(r"/\1", str(error.filename or self.root))
        what = f"cannot {doing} {path}: {error.strerror or error}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or needed is None:
            return StoreError(what, hint="check that the path exists and may be written by this user")
        expected = f"{needed:,} bytes free under {self.root}"
        with suppress(OSError):  # the root is gone
            status = os.statvfs(self.root)
            free = status.f_bavail * status.f_frsize
            if free < needed:
                expected += f", found {free:,}"
            else:  # the size of a version is not always known beforehand
                room = f"room for {needed:,} bytes" if needed else "room for one more version"
                limit = ", so a quota or a limit on file sizes may be the cause" if free else ""
                expected = f"{room} under {self.root}, where {free:,} bytes are free{limit}"
        temporary = f"{min(self._left)} could not be removed yet" if self._left else "the temporary files were removed"
        return StoreError(
            what,
            expected=expected,
            state=f"{temporary}; older versions are still in place",
            hint="free some space, or use another root, and send again",
        )


def _release(descriptor: int, pid: int) -> None:
    """Unlock and close the directory; a process that was forked outside of Python only closes its copy."""
    if os.getpid() == pid:
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _leave_to_parent() -> None:
    for store in list(_HELD):
        store.disown()


os.register_at_fork(after_in_child=_leave_to_parent)


def _read_at(descriptor: int, first: int, nbytes: int) -> bytes:
    parts, end = [], first + nbytes
    while first < end and (part := os.pread(descriptor, end - first, first)):
        parts.append(part)
        first += len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]
