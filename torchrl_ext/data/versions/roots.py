"""Versions under a root, looked at and unpacked one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import final

from torch import Tensor

from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import version_name
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.versions.open_route import OpenRoute
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["Reader", "Unpacked"]


class Reader:
    """Reads the versions under a root.

    Args:
        store: the root.
        base: checkpoint directory that is version 0, if there is one.
    """

    def __init__(self, store: Store, base: str | None) -> None:
        self.store, self.base = store, base and os.path.abspath(base)
        self.chain = Chain(store)

    def follower(self) -> ChainReader:
        """Return a reader that holds nothing, and keeps no copies of what it read."""
        return ChainReader(self.chain, self.base, copies=lambda name: False)

    def numbers(self) -> list[int]:
        """Return the number of every version, without those that are not wholly written."""
        found = []
        for number in self.chain.numbers():
            with suppress(FileNotFoundError):
                with suppress(WeightSyncError):  # reported when the version is read
                    self.chain.version(number)
                found.append(number)
        return found

    def route(self, version: int, follower: ChainReader) -> OpenRoute:
        """Open the route to a version.

        Raises:
            ConfigError: there is no such version, or it leads back to a checkpoint and ``base`` is None.
            IntegrityError: something on the route is damaged.
        """
        try:
            if self.base is None and self.chain.route(version, based=True).start is not None:
                raise ConfigError(
                    f"version {version} in {self.store.url} builds on a checkpoint that is not among its versions",
                    hint="name its directory with --base",
                )
            return follower.open(version)
        except FileNotFoundError:
            numbers = self.numbers()
            known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise ConfigError(f"{self.store.url} holds no version {version}", expected=f"one of {known}") from None

    def summary(self, number: int) -> Info:
        """Return kind, base, bytes, encodings, density and run of a version; JSON-safe.

        Raises:
            FileNotFoundError: there is no such version (any more).
        """
        version = self.chain.version(number)
        delta = version.delta
        total = sum(meta.numel for meta in version.params)
        return {
            "version": number,
            "kind": "delta" if version.full is None else "keyframe" if delta is None else "keyframe+delta",
            "base": delta.base_version if delta else None,
            "bytes": sum(delta.files.values()) if delta else 0,
            "keyframe_bytes": version.full_bytes,
            "encoding": sorted(delta.codecs) if delta else [],
            "density": int(delta.changed.sum()) / max(1, total) if delta else None,
            "run_id": version.run_id,
        }


@final
class Unpacked(WeightSource):
    """The tensors of one version under a root, for one pass, with the files that make them a checkpoint.

    Args:
        reader: of the root.
        version: its number; errors as of `Reader.route`.
    """

    def __init__(self, reader: Reader, version: int) -> None:
        self._store, self._follower = reader.store, reader.follower()
        self._route = reader.route(version, self._follower)

    def params(self) -> tuple[ParamMeta, ...]:
        if self._route.published is not None:
            return self._route.published.params()
        own = {meta.name for meta in self._route.params}
        base = self._route.base
        return tuple(meta for meta in base.params() if meta.name in own) if base is not None else ()

    def files(self) -> Mapping[str, bytes]:
        keyframe = self._route.keyframe
        if keyframe is None:
            return {} if self._route.base is None else self._route.base.files()
        names = (name for name in keyframe.files if not name.endswith((".safetensors", ".index.json")))
        return {name: self._store.get(f"{version_name(keyframe.version)}/{name}") for name in names}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._follower.tensors(self._route, {})

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._route.close()
