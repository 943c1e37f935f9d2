"""The contract of a store: named bytes that are there completely or not at all, and stay after a crash."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torchrl_ext.errors import StoreError

__all__ = ["Store", "checked_key"]


class Store(ABC):
    """Keys are ``/``-joined relative names (``weight_v000007/manifest.json``).

    A reader never sees a half-written value. What makes a *set* of keys appear as a whole is the writer's order: the
    last key put is the one that readers look for first (see `torchrl_ext.stores.versions`).
    """

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
            StoreError: it cannot be read.
        """

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Names directly under ``folder``, sorted; temporaries of writers are left out; [] where nothing is."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value, or everything under a folder; readers see all of it or nothing. Missing is fine.

        Raises:
            StoreError: it cannot be removed.
        """


def checked_key(key: str) -> str:
    """``key`` itself.

    Raises:
        StoreError: the key could lead out of the store (``..``, an absolute path) or is empty.
    """
    parts = key.split("/")
    if not key or "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{key!r} is not a name inside a store", expected="a relative name without '..'")
    return key
