"""Leases: readers that are under way say which versions they still need."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchrl_ext.errors import StoreError
from torchrl_ext.stores.base import Store

__all__ = ["Leases"]

_FOLDER = "readers"


class Leases:
    """One small file for each reader: ``readers/<id>``, with ``{"first": version, "until": seconds since 1970}``.

    Args:
        store: where the versions are.
        lease_s: how long a lease holds, in seconds; so its reader may die.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store, self._lease_s = store, lease_s

    @contextmanager
    def held(self, first: int) -> Iterator[None]:
        """Keep version ``first`` and those after it while the block runs, where this process may write to the store."""
        key = f"{_FOLDER}/{uuid.uuid4().hex}"
        with suppress(StoreError):
            self._store.put(key, json.dumps({"first": first, "until": time.time() + self._lease_s}).encode())
        try:
            yield
        finally:
            with suppress(StoreError):
                self._store.delete(key)

    def firsts(self) -> list[int]:
        """The oldest version that each reader needs. What has run out, or is no lease, is removed or passed over."""
        found = []
        for name in self._store.list(_FOLDER):
            with suppress(FileNotFoundError, StoreError, ValueError, TypeError, KeyError):
                lease = json.loads(self._store.get(f"{_FOLDER}/{name}"))
                if float(lease["until"]) > time.time():
                    found.append(int(lease["first"]))
                else:  # its reader died, or takes longer than it said
                    self._store.delete(f"{_FOLDER}/{name}")
        return found
