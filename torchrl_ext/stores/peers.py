"""Roots of SkyRL, seen as chains of slime's current format, which they are but for names and places.

    delta-00000007/manifest.json, delta-00000007/delta-rank00000-file000000.safetensors, ...

SkyRL's payloads are slime's `xor`. What slime has in its index and in the metadata of its files, SkyRL has in the
manifest, so both are made of that when they are read. Source: NovaSky-AI/SkyRL `weight_sync/delta_checkpoint.py`, of
2026.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import ClassVar, NoReturn, final

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import Draft, Store
from torchrl_ext.stores.manifest import LARGEST, MANIFEST
from torchrl_ext.stores.versions import version_name, version_number

__all__ = ["as_chain"]

_INDEX = "model.safetensors.index.json"
_DELTA = re.compile(r"delta-(\d{8,18})", re.ASCII)


def as_chain(store: Store) -> Store:
    """Return ``store``, or where another program's versions are in it, a view of it that a chain can be read from.

    Args:
        store: what is in it now decides. An empty one is taken for one of ours.
    """
    with suppress(StoreError, IntegrityError, FileNotFoundError):
        names = store.list()
        if any(version_number(name) is not None for name in names):
            return store
        if any(map(_DELTA.fullmatch, names)):
            return _SkyRL(store)
    return store


class _Seen(Store):
    """A root of another program, to be read only, with its versions under the names that they have in a chain.

    Names that begin with a dot are nobody's versions: by such a file workers find out that they see the root.
    """

    owner: ClassVar[str]

    def __init__(self, store: Store) -> None:
        self._store, self.url = store, store.url

    @abstractmethod
    def _place(self, key: str) -> str:
        """Return where a key of the chain is in the store.

        Raises:
            FileNotFoundError: there is no such key.
        """

    def stamp(self, key: str) -> str | None:
        with suppress(FileNotFoundError):
            return self._store.stamp(self._place(key))
        return None

    def local(self, folder: str, names: Iterable[str]) -> AbstractContextManager[Path]:
        return self._store.local(self._place(folder), names)

    def available(self) -> bool:
        return self._store.available()

    def put(self, key: str, data: bytes) -> None:
        if not key.startswith("."):
            self._refuse()
        self._store.put(self._place(key), data)

    def delete(self, key: str) -> None:
        if not key.startswith("."):
            self._refuse()
        self._store.delete(self._place(key))

    def own(self) -> NoReturn:
        self._refuse()

    def disown(self) -> None:
        pass

    def draft(self, folder: str, needed_bytes: int = 0) -> AbstractContextManager[Draft]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreError(
            f"{self.url} belongs to {self.owner}, whose trainer alone writes and removes versions there",
            expected="a root of this library, to write into",
            state="nothing was changed",
            hint="torchrl-ext chain convert makes one of it",
        )


@final
class _SkyRL(_Seen):
    """A root of SkyRL, each manifest shown as an index, and its checksums as the metadata of the files."""

    owner: ClassVar[str] = "SkyRL"

    def get(self, key: str, at_most: int | None = None) -> bytes:
        folder, _, name = key.partition("/")
        place = self._place(key)
        if not name:
            return self._store.get(place, at_most)
        index, metadata = self._read(folder)
        if name == _INDEX:
            return index
        data = self._store.get(place, at_most)
        if name not in metadata:
            return data
        header = min(int.from_bytes(data[:8], "little"), len(data))
        return (header + len(metadata[name]) - 1).to_bytes(8, "little") + metadata[name] + data[9:]

    def list(self, folder: str = "") -> list[str]:
        if not folder:
            matches = map(_DELTA.fullmatch, self._store.list())
            return sorted(version_name(int(match[1])) for match in matches if match)
        with suppress(FileNotFoundError):
            names = self._store.list(self._place(folder))
            return sorted(_INDEX if name == MANIFEST else name for name in names)
        return []

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            found, (index, metadata) = self._store.sizes(self._place(folder)), self._read(folder)
        except FileNotFoundError:
            return {}
        found = {name: size + len(metadata.get(name, b"{")) - 1 for name, size in found.items() if name != MANIFEST}
        return {**found, _INDEX: len(index)}

    def _place(self, key: str) -> str:
        folder, slash, name = key.partition("/")
        number = version_number(folder)
        if key.startswith("."):
            return key
        if number is None or name == MANIFEST:
            raise FileNotFoundError(f"{self.url}/{key}")
        return f"delta-{number:08d}{slash}{MANIFEST if name == _INDEX else name}"

    def _read(self, folder: str) -> tuple[bytes, dict[str, bytes]]:
        """Return the index that a manifest stands for, and what the header of each file has to begin with.

        Raises:
            FileNotFoundError: there is no manifest (yet).
            IntegrityError: it is damaged; names it.
        """
        key = self._place(f"{folder}/{_INDEX}")
        data, where, sums = self._store.get(key, at_most=LARGEST), dict[str, str](), dict[str, dict[str, str]]()
        try:
            found = json.loads(data)
            algorithms = set()
            for row in found.get("tensors", []):
                name, file = row["name"], row["payload_file"]
                checksum = row["checksum"] if "checksum" in row else row["sha256"]
                algorithms.add(row.get("checksum_algorithm", "xxh3-128" if "checksum" in row else "sha256"))
                if name in where or row.get("payload_key", name) != name:
                    raise ValueError(f"tensor {name!r} is there twice, or under another name")
                where[name] = file
                sums.setdefault(file, {})[name] = checksum
            if len(algorithms) > 1 or not all(type(found[key]) is int for key in ("version", "base_version")):
                raise ValueError("its versions are no integers, or its checksums of several kinds")
            metadata = {
                "version": f"{found['version']:06d}",
                "base_version": f"{found['base_version']:06d}",
                "delta_encoding": "xor",
                "compression_format": "zstd",
                "checksum_format": algorithms.pop() if algorithms else "xxh3-128",
            }
            index = json.dumps({"metadata": metadata, "weight_map": where}).encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                f"{self.url}/{key} is damaged: {error!r}",
                expected="a manifest of SkyRL",
                state="nothing was read",
                hint="let the trainer publish again",
            ) from None
        begun = {file: f'{{"__metadata__":{json.dumps(own)},'.encode() for file, own in sums.items()}
        return index, begun
