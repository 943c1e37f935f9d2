"""The contract of a store, whose values appear completely or not at all; and the simplest store, in memory."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import ClassVar, final

from torchrl_ext.base.errors import StoreError
from torchrl_ext.base.files import OpenFile

__all__ = ["Draft", "MemoryStore", "Store", "checked_key"]

_LEADS_OUT = re.compile(r"(^|/)\.{0,2}(/|$)|[\0\\]")


class Draft(ABC):
    """A folder that is being written; readers see it only when its `Store.draft` block ends.

    Attributes:
        path: a local directory: files written into it directly, and synced, belong to the folder too.
    """

    path: Path

    @property
    def place(self) -> str:
        """The draft's name for other processes, which may `Store.join` it while the block runs; or "".

        Their files belong to the draft, and are removed with it if it fails.
        """
        return ""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write one file durably, after all earlier files."""


class Store(ABC):
    """Named bytes: one trainer publishes folders, and readers read files.

    Keys are ``/``-joined relative names (``weight_v000007/manifest.json``). A reader never sees a half-written value.
    A *set* of keys appears as a whole because the writer puts the key last that readers look for first (see
    `torchrl_ext.data.stores.chain`).

    Attributes:
        url: the location for people: a path or an address.
        owned: whether this object is the store's only writer.
    """

    joined: ClassVar[bool] = False
    """Whether other processes may `join` its drafts."""

    locked: ClassVar[bool] = True
    """Whether the store keeps a second writer out while the first one lives. If not, one that has lost the root may
    still replace a value late, but none that belongs to a version."""

    url: str
    owned: bool = False

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a value: atomically for readers, durably when this returns.

        Raises:
            StoreError: no space, no permission, no connection.
        """

    @abstractmethod
    def open(self, key: str) -> OpenFile:
        """Open a value, to read parts of it; the caller closes it.

        Raises:
            FileNotFoundError: the key does not exist, or no longer exists.
            IntegrityError: the key is not a value (a pipe, a device, a link out of the store).
            StoreError: it cannot be read.
        """

    def get(self, key: str, at_most: int | None = None) -> bytes:
        """Return the value of a key.

        Args:
            key: its name.
            at_most: largest accepted size of the value, in bytes; a longer value is not read.

        Raises:
            FileNotFoundError, IntegrityError, StoreError: as `open`; IntegrityError also where it is too long.
        """
        with closing(self.open(key)) as file:
            return file.read(0, file.at_most(at_most))

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a value, without reading the rest.

        Args:
            key: its name.
            spans: first byte and number of bytes of each; a span that exceeds the value is cut.

        Raises:
            FileNotFoundError, IntegrityError, StoreError: as `open`.
        """
        with closing(self.open(key)) as file:
            return [file.read(first, nbytes) for first, nbytes in spans]

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names directly under ``folder``, without temporary files; [] if there are none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value, or everything under a folder, atomically for readers; a missing key is no error.

        Raises:
            StoreError: it cannot be removed.
        """

    def own(self) -> None:
        """Become the store's only writer, or make sure of it; called before each version.

        Raises:
            StoreError: another writer owns the store, it cannot be created, or it is another one now.
        """
        self.owned = True

    def disown(self) -> None:
        """Release the store for another writer; allowed without owning it."""
        self.owned = False

    @abstractmethod
    def draft(self, folder: str) -> AbstractContextManager[Draft]:
        """Open a folder for writing; it is complete when the block ends, and is removed if the block fails.

        Args:
            folder: its name in the store.

        Raises:
            StoreError: no space, no permission, or the name is taken.
        """

    def join(self, place: str) -> Draft:
        """Return a draft that another process has open, for files of this one, which need not own the store.

        Args:
            place: `Draft.place`.

        Raises:
            StoreError: the draft is gone, or does not accept files of other processes.
        """
        raise StoreError(f"{self.url} takes files from one process only", state="nothing was written")

    def available(self) -> bool:
        """Return whether the store can be reached."""
        try:
            self.list()
        except StoreError:
            return False
        return True


def checked_key(key: str) -> str:
    """Return ``key`` if it is a valid name inside a store.

    Raises:
        StoreError: the key could lead out of the store (``..``, an absolute path) or is empty.
    """
    if _LEADS_OUT.search(key):
        raise StoreError(f"{key!r} is not a name inside a store", expected="a relative name without '..'")
    return key


def taken(folder: str) -> StoreError:
    """Return the error for a draft of a folder that is there."""
    return StoreError(f"{folder} exists already", state="nothing was written", hint="pick the next version number")


class _InMemory(OpenFile):
    """A value of a `MemoryStore`."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.nbytes, self._data = path, len(data), data

    def read_into(self, view: memoryview, offset: int) -> int:
        data = self._data[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)


class _MemoryDraft(Draft):
    """A draft that keeps its files in a dictionary; it has no `path`, as there is no directory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        self.files[checked_key(name)] = bytes(data)


@final
class MemoryStore(Store):
    """A store in a dictionary; it ends with the object, and other processes cannot see it."""

    def __init__(self) -> None:
        self.url = f"the memory of process {os.getpid()}"
        self._values: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self._values[checked_key(key)] = data

    def open(self, key: str) -> OpenFile:
        try:
            return _InMemory(f"{self.url}/{key}", self._values[checked_key(key)])
        except KeyError:
            raise FileNotFoundError(key) from None

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{checked_key(folder)}/" if folder else ""
        names = {key[len(prefix) :].split("/")[0] for key in list(self._values) if key.startswith(prefix)}
        return sorted(name for name in names if not name.startswith("."))

    def delete(self, key: str) -> None:
        inside = f"{checked_key(key)}/"
        for known in list(self._values):
            if known == key or known.startswith(inside):
                self._values.pop(known, None)

    @contextmanager
    def draft(self, folder: str) -> Iterator[Draft]:
        if self.list(folder):
            raise taken(f"{folder} in {self.url}")
        draft = _MemoryDraft()
        yield draft
        for name, data in draft.files.items():
            self._values[f"{folder}/{name}"] = data
