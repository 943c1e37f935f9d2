"""Leases: readers that are under way say which versions they still need."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchrl_ext.errors import StoreError, WeightSyncError
from torchrl_ext.stores.base import Store

__all__ = ["Leases", "seconds_left"]

log = logging.getLogger("torchrl_ext")

_FOLDER = "readers"
_LARGEST = 4096  # bytes


class Leases:
    """One small file for each reader: ``readers/<id>``, with ``{"first": version, "until": seconds since 1970}``.

    Args:
        store: where the versions are.
        lease_s: how long a lease holds, in seconds; so its reader may die.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store, self._lease_s = store, lease_s
        self._told: set[str] = set()

    @contextmanager
    def held(self, first: int) -> Iterator[None]:
        """Keep version ``first`` and those after it while the block runs.

        A store that this process may not write to gives no lease: the reader starts over when something is gone.
        """
        key = f"{_FOLDER}/{uuid.uuid4().hex}"
        with suppress(StoreError):
            self._store.put(key, json.dumps({"first": first, "until": time.time() + self._lease_s}).encode())
        try:
            yield
        finally:
            with suppress(StoreError):
                self._store.delete(key)

    def firsts(self) -> list[int]:
        """Return the oldest version that each reader needs.

        What has run out is removed; what is no lease holds nothing.

        A lease is a word of somebody else's. One that would hold for longer than any reader of ours asks for, or that
        names no version, is passed over with a warning: its reader starts over when something is gone.
        """
        found = []
        for name in self._store.list(_FOLDER):
            key = f"{_FOLDER}/{name}"
            try:
                lease = json.loads(self._store.get(key, at_most=_LARGEST))
                first, left_s = lease["first"], seconds_left(lease["until"])
                if type(first) is not int or first < 0 or left_s is None or left_s > 2 * self._lease_s:
                    raise ValueError(f"it holds version {first!r} until {lease['until']!r}")
            except FileNotFoundError:
                continue
            except (WeightSyncError, ValueError, TypeError, KeyError, RecursionError) as error:
                if name not in self._told:
                    self._told.add(name)
                    log.warning("%s/%s is no lease, and holds nothing: %s", self._store.url, key, error)
                continue
            if left_s > 0:
                found.append(first)
            else:  # its reader died, or takes longer than it said
                with suppress(StoreError):
                    self._store.delete(key)
        return found


def seconds_left(until: Any) -> float | None:
    """Return how long it is to a moment that somebody else wrote down, in seconds since 1970; None where it is none."""
    if isinstance(until, bool) or not isinstance(until, (int, float)) or abs(until) > 1e15 or math.isnan(until):
        return None
    return until - time.time()
