"""`LocalStore`: a directory on a local or shared filesystem.

Durability follows the usual order (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): write a
temporary sibling, fsync it, rename it over the name, fsync the directory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchrl_ext.errors import StoreError, WeightSyncError
from torchrl_ext.files import read_regular
from torchrl_ext.stores.base import Draft, Store, checked_key

__all__ = ["TEMPORARY", "LocalStore"]

log = logging.getLogger("torchrl_ext")

TEMPORARY = ".tmp-"
"""Within names that begin with a dot: no reader lists them, and the next owner sweeps them."""

_HELD: weakref.WeakSet[LocalStore] = weakref.WeakSet()
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass
class _LocalDraft(Draft):
    """A temporary sibling of the folder's name, until `LocalStore.draft` renames it."""

    path: Path

    def write(self, name: str, data: bytes) -> None:
        path = self.path / checked_key(name)
        path.parent.mkdir(exist_ok=True)
        _write_durably(path, data)
        if path.parent != self.path:
            _sync_folder(path.parent)


class LocalStore(Store):
    """Files under ``root``.

    Args:
        root: directory; made by `own`, the writer's call, and not by readers.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        self._unlock: weakref.finalize[[int, int], LocalStore] | None = None

    # writer

    def own(self) -> None:
        """Lock the root, make it, and sweep what a killed writer left; as `Store.own`.

        The lock is on the directory itself, so nothing is left in it, and the kernel drops it with the process. It
        belongs to the open directory: a forked child closes its copy, and so cannot keep the lock.
        """
        if self.owned:
            return
        with self._reported("open"):
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            locked = self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._unlock = weakref.finalize(self, _release, descriptor, os.getpid())
        self.owned = True
        _HELD.add(self)
        if locked:
            self._sweep()

    def disown(self) -> None:
        """Let another writer have the root."""
        self.owned = False
        if self._unlock is not None:
            self._unlock()

    def put(self, key: str, data: bytes) -> None:
        path = self.path(key)
        temporary = _temporary(path)
        with self._reported("write", needed=len(data)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_durably(temporary, data)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            _sync_folder(path.parent)

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[Draft]:
        """Write a folder, as `Store.draft`; an error says what is needed and what is free.

        Files must be fsynced by the block; the folder, its rename and the root are fsynced here.
        """
        path = self.path(folder)
        if path.exists():
            raise StoreError(f"{path} exists already", state="nothing was written", hint="pick the next version number")
        temporary = _temporary(path)
        with self._reported("write", needed=needed_bytes):
            if needed_bytes and self.free_bytes() < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            try:
                temporary.mkdir()
                yield _LocalDraft(temporary)
                _sync_folder(temporary)
                os.rename(temporary, path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            _sync_folder(self.root)

    def delete(self, key: str) -> None:
        path = self.path(key)
        gone = _temporary(path)
        with self._reported("remove"):
            try:
                os.rename(path, gone)  # at once for whoever opens it next; who has it open reads on
            except FileNotFoundError:
                return
            if gone.is_dir() and not gone.is_symlink():
                shutil.rmtree(gone)
            else:
                gone.unlink()

    def free_bytes(self) -> int:
        """Return the bytes that this process may still write on the root's filesystem."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    # reader

    def path(self, key: str) -> Path:
        """Return where the value of ``key`` lies."""
        return self.root / checked_key(key)

    @contextmanager
    def local(self, folder: str, names: Iterable[str]) -> Iterator[Path]:
        yield self.path(folder)

    def available(self) -> bool:
        return self.root.is_dir()

    def get(self, key: str, at_most: int | None = None) -> bytes:
        with self._reported("read", missing=True):
            return read_regular(self.path(key), within=self.root, at_most=at_most)

    def stamp(self, key: str) -> str | None:
        with self._reported("read"):
            try:
                found = os.stat(self.path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return f"{found.st_ino} {found.st_ctime_ns} {found.st_size}"

    def list(self, folder: str = "") -> list[str]:
        with self._reported("list"):
            try:
                names = os.listdir(self.path(folder) if folder else self.root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [name for name in sorted(names) if not name.startswith(".")]

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for name in self.list(folder):
            with suppress(FileNotFoundError), self._reported("list", missing=True):
                path = self.path(folder) / name
                if path.is_file():
                    found[name] = path.stat().st_size
        return found

    def changed_at(self, folder: str) -> float | None:
        path, found = self.path(folder), []
        with suppress(FileNotFoundError, NotADirectoryError), self._reported("list", missing=True):
            found.append(path.stat().st_mtime)
            with os.scandir(path) as entries:
                found += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(found, default=None)

    # its helpers

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another trainer publishes into {self.root}",
                expected="one trainer per root",
                state="nothing was changed",
                hint="give this trainer a root of its own, or end the other one",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s takes no locks (%s): a second trainer on it would not be noticed", self.root, error)
            return False
        return True

    def _sweep(self) -> None:
        for name in os.listdir(self.root):
            if name.startswith(".") and TEMPORARY in name:
                path = self.root / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _room(self, needed: int) -> str:
        """What there should have been, for messages; what a version takes is not known of every version beforehand."""
        try:
            free = self.free_bytes()
        except OSError:  # the root is gone
            return f"{needed:,} bytes free under {self.root}"
        if free < needed:
            return f"{needed:,} bytes free under {self.root}, found {free:,}"
        what = f"room for {needed:,} bytes" if needed else "room for one more version"
        limit = ", so that a quota or a limit on the size of files may be what stands in the way" if free else ""
        return f"{what} under {self.root}, where {free:,} bytes are free{limit}"

    @contextmanager
    def _reported(self, doing: str, needed: int | None = None, missing: bool = False) -> Iterator[None]:
        """Operating system errors as `StoreError`, with the space that is needed and free where it ran out.

        Args:
            doing: the verb for the message.
            needed: bytes that were to be written.
            missing: let `FileNotFoundError` through.
        """
        try:
            yield
        except WeightSyncError:  # some are OSErrors too
            raise
        except OSError as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            what = f"cannot {doing} {error.filename or self.root}: {error.strerror or error}"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or needed is None:
                raise StoreError(what, hint="check that the path exists and may be written by this user") from error
            raise StoreError(
                what,
                expected=self._room(needed),
                state="the temporary files were removed; older versions are still in place",
                hint="free some space, or use another root, and send again",
            ) from error


def _release(descriptor: int, pid: int) -> None:
    """Unlock and close; what was forked by no call of Python's has a copy, but not the right to unlock."""
    if os.getpid() == pid:
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _leave_to_parent() -> None:
    for store in list(_HELD):
        store.disown()


os.register_at_fork(after_in_child=_leave_to_parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY}{uuid.uuid4().hex[:12]}")


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
