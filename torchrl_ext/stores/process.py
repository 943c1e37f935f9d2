"""`ProcessRoot`: a root in the memory of one process, for versions that travel over a wire and lie in no directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor

from torchrl_ext.errors import StoreError
from torchrl_ext.stores.base import Draft, Root, checked_key
from torchrl_ext.stores.memory import MemoryStore

__all__ = ["ProcessDraft", "ProcessRoot"]


class ProcessDraft(Draft):
    """A folder being written. It has no `path`: tensors are kept as they are.

    Attributes:
        files: content by name.
        tensors: tensors of a full version by name, not copied.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tensors: dict[str, Tensor] = {}

    def write(self, name: str, data: bytes) -> None:
        self.files[checked_key(name)] = bytes(data)


class ProcessRoot(Root):
    """Small files and tensors by folder; gone with the object, and seen by no other process."""

    def __init__(self) -> None:
        self._files = MemoryStore()
        self._tensors: dict[str, Mapping[str, Tensor]] = {}
        self._owned = False

    @property
    def url(self) -> str:
        return f"the memory of process {os.getpid()}"

    @property
    def owned(self) -> bool:
        return self._owned

    def own(self) -> None:
        self._owned = True

    def disown(self) -> None:
        self._owned = False

    def put(self, key: str, data: bytes) -> None:
        self._files.put(key, data)

    def get(self, key: str) -> bytes:
        return self._files.get(key)

    def stamp(self, key: str) -> str | None:
        return self._files.stamp(key)

    def list(self, folder: str = "") -> list[str]:
        return self._files.list(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._files.sizes(folder)

    def delete(self, key: str) -> None:
        self._files.delete(key)
        self._tensors.pop(key, None)

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[ProcessDraft]:
        if self.list(checked_key(folder)):
            raise StoreError(
                f"{folder} exists already in {self.url}",
                state="nothing was written",
                hint="pick the next version number",
            )
        draft = ProcessDraft()
        yield draft
        self._tensors[folder] = draft.tensors
        for name, data in draft.files.items():
            self._files.put(f"{folder}/{name}", data)

    def local(self, folder: str, names: Iterable[str]) -> NoReturn:
        raise StoreError(
            f"{self.url} holds {folder} in no directory",
            expected="tensors that are asked for by tensors()",
            state="nothing was read",
        )

    def available(self) -> bool:
        return True

    def files(self, folder: str) -> dict[str, bytes]:
        """Every file under a folder, by its name there, folders of its own included."""
        prefix, found = f"{checked_key(folder)}/", {}
        for name in self._files.list(folder):
            inside = self._files.list(prefix + name)
            for key in [f"{name}/{one}" for one in inside] or [name]:
                found[key] = self._files.get(prefix + key)
        return found

    def tensors(self, folder: str) -> Mapping[str, Tensor]:
        """The tensors of a folder by name; none where it is no full version, or after `drop_tensors`."""
        return self._tensors.get(folder, {})

    def drop_tensors(self) -> None:
        """Let go of all tensors; files stay."""
        self._tensors.clear()
