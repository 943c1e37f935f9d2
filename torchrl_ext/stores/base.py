"""The contract of a store, whose values are there completely or not at all, and the simplest one, in memory."""

from __future__ import annotations

import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.files import OpenFile

__all__ = ["Draft", "MemoryStore", "Store", "checked_key", "seconds_left"]

_LEADS_OUT = re.compile(r"(^|/)\.{0,2}(/|$)|[\0\\]")


class Draft(ABC):
    """A folder that is being written, which nobody reads before the `Store.draft` block that made it ends.

    Attributes:
        appends: files are written by `append`, from the first byte to the last. Where they are not, there is a `path`.
        path: a local directory: files written into it directly, and synced, belong to the folder too.
    """

    appends: ClassVar[bool] = False

    path: Path

    @property
    def place(self) -> str:
        """Names this draft to other processes, whose `Store.add` writes files into it while the block runs; or "".

        Where it is, they all belong to the draft, and go with it when it fails.
        """
        return ""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write one file durably, after all that were written before; a ``/`` in its name makes a folder."""

    def append(self, name: str) -> AbstractContextManager[Callable[[bytes | memoryview], object]]:
        """Open a file for writing, and return what appends bytes to it; the file is complete when the block ends.

        Several files may be open at once, each in a thread of its own.

        Raises:
            StoreError: as `Store.put`.
        """
        raise StoreError(f"{name} cannot be written piece by piece", state="nothing was written")


class Store(ABC):
    """A place for named bytes, into which one trainer publishes folders and from which readers take files.

    Keys are ``/``-joined relative names (``weight_v000007/manifest.json``). A reader never sees a half-written value.
    What makes a *set* of keys appear as a whole is the writer's order: the last key put is the one that readers look
    for first (see `torchrl_ext.stores.chain`).

    Attributes:
        url: where it is, in words that a person recognises: a path or an address.
        owned: whether this object is the one writer of the store.
    """

    locked: ClassVar[bool] = True
    """Whether a second writer is kept out for as long as the first one lives. Where it is not, a writer that has
    lost the root may still replace a value late; what is only ever created stays as it is."""

    gap_bytes: ClassVar[int] = 4096
    """To read so many bytes that nobody wants, between two wanted ranges, takes less time than another request."""

    reads_removed: ClassVar[bool] = True
    """Whether a value that is open can still be read when it was removed."""

    url: str
    owned: bool = False

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a value: atomically for readers, durably when this returns.

        Raises:
            StoreError: no space, no permission, no connection.
        """

    @abstractmethod
    def get(self, key: str, at_most: int | None = None) -> bytes:
        """Return the value of a key.

        Args:
            key: its name.
            at_most: bound on the bytes of the value; a longer one is refused, and not read.

        Raises:
            FileNotFoundError: there is no such key (any more).
            IntegrityError: what is there is no value (a pipe, a device, a link out of the store), or too long.
            StoreError: it cannot be read.
        """

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a value, where possible without reading the rest.

        Args:
            key: its name.
            spans: first byte and number of bytes of each; what lies beyond the end of the value is left out.

        Raises:
            FileNotFoundError, IntegrityError, StoreError: as `get`.
        """
        data = self.get(key)
        return [data[first : first + nbytes] for first, nbytes in spans]

    def open(self, key: str) -> OpenFile:
        """Open a value, to read parts of it; the caller closes it.

        Raises:
            FileNotFoundError, IntegrityError, StoreError: as `get`.
        """
        return _InMemory(f"{self.url}/{key}", self.get(key))

    @abstractmethod
    def stamp(self, key: str) -> str | None:
        """Return a text that differs whenever the value was put anew, without reading the value where possible.

        Returns:
            None where there is no such key.

        Raises:
            StoreError: it cannot be found out.
        """

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the names directly under ``folder``, sorted, without writers' temporaries; [] where nothing is."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each value directly under ``folder``, by name; {} where nothing is."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value, or everything under a folder; readers see all of it or nothing. Missing is fine.

        Raises:
            StoreError: it cannot be removed.
        """

    @abstractmethod
    def own(self) -> None:
        """Become the one writer of the store. May be called again.

        Raises:
            StoreError: another writer has the store, or it cannot be made.
        """

    @abstractmethod
    def disown(self) -> None:
        """Give the store up, so that another writer may own it. May be called without owning it."""

    @abstractmethod
    def draft(self, folder: str, needed_bytes: int = 0) -> AbstractContextManager[Draft]:
        """Open a folder for writing, which is complete when the block ends, and leaves nothing when the block fails.

        Args:
            folder: its name in the store.
            needed_bytes: refuse at once when less than this is free, where that can be known.

        Raises:
            StoreError: no space, no permission, or the name is taken.
        """

    def add(self, place: str, name: str, data: bytes) -> None:
        """Write one file durably into a draft that another process has open, which need not own the store.

        Args:
            place: `Draft.place`.
            name: of the file; a ``/`` in it makes a folder.
            data: what it holds.

        Raises:
            StoreError: the draft is gone, or nobody else can write into it; no space, no permission, no connection.
        """
        raise StoreError(f"{self.url} takes files from one process only", state="nothing was written")

    @abstractmethod
    def available(self) -> bool:
        """Return whether the store can be reached."""


def checked_key(key: str) -> str:
    """Return ``key``, which has to be a name inside a store.

    Raises:
        StoreError: the key could lead out of the store (``..``, an absolute path) or is empty.
    """
    if _LEADS_OUT.search(key):
        raise StoreError(f"{key!r} is not a name inside a store", expected="a relative name without '..'")
    return key


def seconds_left(until: Any) -> float | None:
    """Return the seconds left until an untrusted time in seconds since 1970; None where it is no such time."""
    if isinstance(until, bool) or not isinstance(until, (int, float)) or abs(until) > 1e15 or math.isnan(until):
        return None
    return until - time.time()


class _InMemory(OpenFile):
    """A value that was read at once."""

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


class MemoryStore(Store):
    """A store in a dictionary, which is gone with the object and which no other process sees."""

    def __init__(self) -> None:
        self.url = f"the memory of process {os.getpid()}"
        self._values: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self._values[checked_key(key)] = data

    def get(self, key: str, at_most: int | None = None) -> bytes:
        try:
            data = self._values[checked_key(key)]
        except KeyError:
            raise FileNotFoundError(key) from None
        if at_most is not None and len(data) > at_most:
            raise IntegrityError(f"{self.url}/{key} has {len(data):,} bytes", expected=f"at most {at_most:,}")
        return data

    def stamp(self, key: str) -> str | None:
        data = self._values.get(checked_key(key))
        return None if data is None else xxhash.xxh3_128_hexdigest(data)

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{checked_key(folder)}/" if folder else ""
        names = {key[len(prefix) :].split("/")[0] for key in list(self._values) if key.startswith(prefix)}
        return sorted(name for name in names if not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: len(data) for name, data in self.files(folder).items() if "/" not in name}

    def files(self, folder: str) -> dict[str, bytes]:
        """Return every value under a folder by its name there, folders of its own included."""
        prefix = f"{checked_key(folder)}/"
        return {key[len(prefix) :]: data for key, data in list(self._values.items()) if key.startswith(prefix)}

    def delete(self, key: str) -> None:
        inside = f"{checked_key(key)}/"
        for known in list(self._values):
            if known == key or known.startswith(inside):
                self._values.pop(known, None)

    def own(self) -> None:
        self.owned = True

    def disown(self) -> None:
        self.owned = False

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[Draft]:
        if self.files(folder):
            raise StoreError(
                f"{folder} exists already in {self.url}",
                state="nothing was written",
                hint="pick the next version number",
            )
        draft = _MemoryDraft()
        yield draft
        for name, data in draft.files.items():
            self._values[f"{folder}/{name}"] = data

    def available(self) -> bool:
        return True
