"""`MemoryStore`: a store that lives as long as the process, for versions that travel over a wire, and for tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import xxhash

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import Draft, Store, checked_key

__all__ = ["MemoryStore"]


class _MemoryDraft(Draft):
    """Files that nobody sees yet. It has no `path`: there is no directory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        self.files[checked_key(name)] = bytes(data)


class MemoryStore(Store):
    """Keys and values in a dictionary; gone with the object, and seen by no other process."""

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

    def local(self, folder: str, names: Iterable[str]) -> NoReturn:
        raise StoreError(f"{self.url} holds {folder} in no directory", state="nothing was read")

    def available(self) -> bool:
        return True
