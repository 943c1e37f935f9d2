"""The contract of a store: named bytes that are there completely or not at all, and stay after a crash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import xxhash

from torchrl_ext.errors import IntegrityError, StoreError

__all__ = ["Draft", "Root", "Store", "checked_key"]


class Store(ABC):
    """Keys are ``/``-joined relative names (``weight_v000007/manifest.json``).

    A reader never sees a half-written value. What makes a *set* of keys appear as a whole is the writer's order: the
    last key put is the one that readers look for first (see `torchrl_ext.stores.versions`).
    """

    locked: ClassVar[bool] = True
    """Whether a second writer is kept out for as long as the first one lives. Where not, what is replaced may be
    replaced late, by a writer that has lost the root; what is only ever created cannot."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, in words that a person recognises: a path or an address."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a value: atomically for readers, durably when this returns.

        Raises:
            StoreError: no space, no permission, no connection.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value.

        Raises:
            FileNotFoundError: there is no such key (any more).
            IntegrityError: what is there is no value (a pipe, a device, a link out of the store).
            StoreError: it cannot be read.
        """

    def get_at_most(self, key: str, limit_bytes: int) -> bytes:
        """The value of a key that holds little: no more than a bound is ever read.

        Raises:
            FileNotFoundError, StoreError: as `get`.
            IntegrityError: also where it has more bytes.
        """
        data = self.get(key)
        if len(data) > limit_bytes:
            raise IntegrityError(
                f"{self.url}/{key} has more than {limit_bytes:,} bytes", state="it was not read", hint="write it again"
            )
        return data

    def stamp(self, key: str) -> str | None:
        """What is another one whenever the value was put anew, found out without reading where that is possible.

        Returns:
            None where nothing is.

        Raises:
            StoreError: it cannot be found out.
        """
        try:
            return xxhash.xxh3_128_hexdigest(self.get(key))
        except FileNotFoundError:
            return None

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Names directly under ``folder``, sorted; temporaries of writers are left out; [] where nothing is."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each value directly under ``folder``, by name; {} where nothing is."""

    def changed_at(self, folder: str) -> float | None:
        """When anything directly under ``folder`` changed last, temporaries too; None where the store cannot tell.

        In seconds since the epoch, by the clock of whoever holds the files.

        Raises:
            StoreError: it cannot be found out.
        """
        return None

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value, or everything under a folder; readers see all of it or nothing. Missing is fine.

        Raises:
            StoreError: it cannot be removed.
        """


class Draft(ABC):
    """A folder being written. Nobody reads it before the `Root.draft` block that made it ends.

    Attributes:
        path: a local directory: files written into it directly, and synced, belong to the folder too.
    """

    path: Path

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write one file durably; a ``/`` in its name makes a folder. What was written before lies there already."""


class Root(Store):
    """A store into which one trainer publishes folders, and from which readers take local files."""

    @property
    @abstractmethod
    def owned(self) -> bool:
        """Whether this object is the root's writer."""

    @abstractmethod
    def own(self) -> None:
        """Become the root's one writer. May be called again.

        Raises:
            StoreError: another writer has the root, or it cannot be made.
        """

    @abstractmethod
    def disown(self) -> None:
        """Let another writer have the root."""

    @abstractmethod
    def draft(self, folder: str, needed_bytes: int = 0) -> AbstractContextManager[Draft]:
        """Write a folder: its last file is there when the block ends, and nothing is when it fails.

        Args:
            folder: its name under the root.
            needed_bytes: refuse at once when less than this is free, where that can be known.

        Raises:
            StoreError: no space, no permission, or the name is taken.
        """

    @abstractmethod
    def local(self, folder: str, names: Iterable[str]) -> AbstractContextManager[Path]:
        """A local directory that holds files of a folder, until the block ends.

        Raises:
            FileNotFoundError: the folder is gone, where files have to be fetched.
        """

    @abstractmethod
    def available(self) -> bool:
        """Whether the root can be reached."""


def checked_key(key: str) -> str:
    """``key`` itself.

    Raises:
        StoreError: the key could lead out of the store (``..``, an absolute path) or is empty.
    """
    parts = key.split("/")
    if not key or "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{key!r} is not a name inside a store", expected="a relative name without '..'")
    return key
