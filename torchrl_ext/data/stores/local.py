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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchrl_ext.base.errors import StoreError, WeightSyncError
from torchrl_ext.base.files import LocalFile, OpenFile, sync
from torchrl_ext.data.stores.store import Draft, Store, checked_key, taken

__all__ = ["PROBE", "LocalStore"]

log = logging.getLogger("torchrl_ext")

_TEMPORARY = ".tmp-"  # marks names that begin with a dot: no reader lists them, and an owner removes them
PROBE = f".probe{_TEMPORARY}"
"""How the name of a file begins by which somebody finds out who sees the root; only a new owner removes these."""

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
        _write(f"{self.path}/{checked_key(name)}", data)


class LocalStore(Store):
    """A store that keeps its values as files under ``root``.

    Args:
        root: directory, which `own` makes where it is missing; readers never do.
    """

    joined = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        self._unlock: weakref.finalize[[int], LocalStore] | None = None

    # writer

    def own(self) -> None:
        """Make and lock the root, and remove what a killed writer left, or this one could not remove; as `Store.own`.

        The lock is on the directory itself, so nothing is left in it, and the kernel drops it with the process. It
        belongs to the open directory: a forked child closes its copy, and so cannot keep the lock.
        """
        self._refuse_moved()
        anew = not self.owned
        try:
            with self._doing("open"):
                if anew:
                    self.root.mkdir(parents=True, exist_ok=True)
                    self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    self._unlock = weakref.finalize(self, os.close, self._descriptor)
                    _HELD.add(self)
                    self._alone = self._lock()
                for name in os.listdir(self.root) if self._alone else ():
                    if name.startswith(".") and _TEMPORARY in name and (anew or not name.startswith(PROBE)):
                        self._remove(f"{self.url}/{name}")
        except BaseException:
            self.disown()
            raise
        self.owned = True

    def disown(self) -> None:
        """Unlock the root, so that another writer may own it."""
        self.owned = False
        if self._unlock is not None:
            self._unlock()

    def put(self, key: str, data: bytes) -> None:
        self._refuse_moved()
        path = f"{self.url}/{checked_key(key)}"
        temporary = _beside(path)
        with self._doing("write"):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write(temporary, data)
                os.replace(temporary, path)
            except BaseException:
                self._remove(temporary)
                raise
            sync(os.path.dirname(path))

    @contextmanager
    def draft(self, folder: str) -> Iterator[Draft]:
        """Open a folder for writing, as `Store.draft`.

        Files must be fsynced by the block; the folder, its rename and the root are fsynced here.
        """
        path = f"{self.url}/{checked_key(folder)}"
        temporary = _beside(path)
        if os.path.lexists(path):
            raise taken(path)
        with self._doing("write"):
            try:
                os.mkdir(temporary)
                yield _LocalDraft(Path(temporary))
                sync(temporary)
                os.rename(temporary, path)
            except BaseException:
                self._remove(temporary)
                raise
            sync(self.url)

    def join(self, place: str) -> Draft:
        folder = self.root / checked_key(place)
        if folder.parent != self.root or _TEMPORARY not in place:
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
        path = f"{self.url}/{checked_key(key)}"
        gone = _beside(path)
        with self._doing("remove"):
            try:
                os.rename(path, gone)  # no new reader finds it from here on; who has it open reads on
            except FileNotFoundError:
                return
        self._remove(gone)

    # reader

    def available(self) -> bool:
        return self.root.is_dir()

    def open(self, key: str) -> OpenFile:
        with self._doing("read", passing=FileNotFoundError):
            return LocalFile(f"{self.url}/{checked_key(key)}", within=self.url)

    def get(self, key: str, at_most: int | None = None) -> bytes:
        with self._doing("read", passing=FileNotFoundError):
            return super().get(key, at_most)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._doing("read", passing=FileNotFoundError):
            return super().ranges(key, spans)

    def list(self, folder: str = "") -> list[str]:
        with self._doing("list"):
            try:
                found = os.listdir(f"{self.url}/{checked_key(folder)}" if folder else self.url)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in found if not name.startswith("."))

    # its helpers

    def _refuse_moved(self) -> None:
        here = not self.owned
        if self.owned:
            with suppress(OSError):
                here = os.path.samestat(os.fstat(self._descriptor), os.stat(self.root))
        if not here:
            raise StoreError(
                f"{self.root} is another directory now than the one into which this trainer publishes",
                expected="a root that stays",
                state="nothing was changed in it",
                hint="shut the transport down, and send again: it takes the directory that is there now",
            )

    def _lock(self) -> bool:
        """Lock the root; return whether its filesystem has locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def _remove(self, path: str) -> None:
        """Remove a temporary; what stays goes when the store is owned for the next version."""
        try:
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s is not removed yet, and is tried again later: %s", path, error)

    @contextmanager
    def _doing(self, what: str, *, passing: type[BaseException] = WeightSyncError) -> Iterator[None]:
        """Turn an error of the operating system into a `StoreError`; errors of ``passing`` stay as they are."""
        try:
            yield
        except (WeightSyncError, passing):  # some of ours are OSErrors too
            raise
        except OSError as error:
            said = f"cannot {what} {error.filename or self.root}: {error.strerror or error}"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreError(said, hint="check that the path exists and may be written by this user") from error
            raise StoreError(
                said,
                expected="room for one more version: on the filesystem, in quotas, and below limits on file sizes",
                state="nothing was published; older versions are still in place",
                hint="free some space, or use another root, and send again",
            ) from error


def _beside(path: str) -> str:
    """Return the name of a temporary beside a path."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}{_TEMPORARY}{uuid.uuid4().hex}"


def _write(path: str, data: bytes) -> None:
    """Write a new file, durably but for its name."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _leave_to_parent() -> None:
    for store in list(_HELD):
        store.disown()


os.register_at_fork(after_in_child=_leave_to_parent)
