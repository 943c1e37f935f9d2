"""`MemoryStore`: a store that lives as long as the process. For versions that came over a wire, and for tests."""

from __future__ import annotations

from torchrl_ext.stores.base import Store, checked_key

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Keys and values in a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return "memory"

    def put(self, key: str, data: bytes) -> None:
        self._values[checked_key(key)] = data

    def get(self, key: str) -> bytes:
        try:
            return self._values[checked_key(key)]
        except KeyError:
            raise FileNotFoundError(key) from None

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{checked_key(folder)}/" if folder else ""
        names = {key[len(prefix) :].split("/")[0] for key in list(self._values) if key.startswith(prefix)}
        return sorted(name for name in names if not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        keys = {name: f"{folder}/{name}" for name in self.list(folder)}
        return {name: len(self._values[key]) for name, key in keys.items() if key in self._values}

    def delete(self, key: str) -> None:
        inside = f"{checked_key(key)}/"
        for known in list(self._values):
            if known == key or known.startswith(inside):
                self._values.pop(known, None)
