"""Versions that another process publishes under a root, for whoever leads an engine to them.

A trainer may hand a path to an engine's ``/update_weights_from_disk`` with ``load_format="delta"``: a version directory
``weight_v000007``, or the root that holds it; then the newest version is meant. A client leads engines by a
`PublishedRoot`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from torchrl_ext.codecs.base import codec_from_json, needs_base
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.stores import open_store
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import read_version, version_name, version_number
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info
from torchrl_ext.versions.foreign import ForeignVersions, is_flush
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["PublishedRoot", "locate", "parameters", "part"]


def locate(path: str) -> tuple[str, int]:
    """Return the root and the version that a path names.

    Raises:
        ConfigError: the engine may not open it.
        StoreError: there is no version there.
    """
    admit(path)
    given = Path(path).absolute()
    version = version_number(given.name)
    if version is not None:
        return str(given.parent), version
    if not given.is_dir():
        raise StoreError(f"{path} is no directory", state="the engine serves what it served")
    store = open_store(given)
    version = Chain(store, foreign=ForeignVersions(store, None)).latest()
    if not version:
        raise StoreError(f"{path} holds no version", state="the engine serves what it served")
    return str(given), version


def part(root: str, version: int, files: Any) -> list[str] | None:
    """Return the files that a call names, where they are of slime's first format and so may be a part of the version.

    Raises:
        ConfigError: ``files`` is no list of names.
        StoreError: one of them is not there.
    """
    if files is None:
        return None
    if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
        raise ConfigError(
            f"files is {files!r:.80}", expected="a list of names", state="the engine serves what it served"
        )
    names = set(open_store(root).list(version_name(version)))
    if not all(map(is_flush, files)) or MANIFEST in names:
        return None
    lost = min(set(files) - names, default=None)
    if lost is not None:
        raise _absent(root, version, f", or not {lost} of it")
    return sorted(files)


def parameters(root: str, version: int, base: str, files: Any = None, *, parts: bool = False) -> list[Any]:
    """Return the parameters of a version, as JSON; ``files``, where given, has to name all of its files.

    Args:
        root: where the versions lie.
        version: the number.
        base: the checkpoint that the engine was started with.
        files: names of its files, or None.
        parts: a version of slime's first format may come in parts: whoever calls has paused the engine, and lets it
            serve when the last one came.

    Raises:
        StoreError: there is no such version.
        ConfigError: ``files`` names only a part of them.
    """
    store, own = open_store(root), part(root, version, files)
    if (
        parts and own is not None and os.path.isdir(base)
    ):  # the versions before may be gone, and change no name or shape
        return [meta.to_json() for meta in CheckpointSource(base).params()]
    chain = Chain(store, foreign=ForeignVersions(store, base if os.path.isdir(base) else None))
    try:
        params = chain.version(version).params
        names = set(store.list(version_name(version)))
    except FileNotFoundError as error:
        raise _absent(root, version) from error
    lost = sorted(name for name in names - {*(files or names)} if name.endswith((".safetensors", ".bin")))
    if lost and MANIFEST not in names and not (parts and own is not None):
        raise ConfigError(
            f"the call names only a part of version {version}: not {lost[0]}",
            expected="one call per version, when all of its files are there; or a pause before the first call",
            state="the engine serves what it served",
        )
    return [meta.to_json() for meta in params]


def _absent(root: str, version: int, more: str = "") -> StoreError:
    return StoreError(
        f"{root} holds no version {version}{more}",
        state="the engine serves what it served",
        hint="publish every file of a version before the engine is told of it",
    )


@final
class PublishedRoot:
    """A root into which another process publishes, ours or one of those whose versions `open_store` can show.

    Engines that run our plugin join it as they join a `DeltaTransport`, and are then told which version to load.

    Args:
        root: directory or URL, under which engines see it too.
        base: the checkpoint with which the engines were started, where they have it in a directory.
        reader: a name for the workers that join.
    """

    def __init__(self, root: str | os.PathLike[str], base: str | None = None, *, reader: str = "reader") -> None:
        self.root, self._base = os.fspath(root), base
        self._store = open_store(root)
        self._shared = SharedRoot(self._store, reader)

    def newest(self) -> Info:
        """Return what engines are told of the newest complete version.

        Returns:
            ``{"version", "params"}``, and ``path`` where it is a full one in a directory, with a manifest of ours.

        Raises:
            StoreError: there is no version.
            ConfigError: the versions lead back to a checkpoint that is not known here.
        """
        version = self._chain().latest()
        if not version:
            raise StoreError(f"{self.root} holds no version", state="engines serve what they served")
        return self.at(version)

    def at(self, version: int) -> Info:
        """Return what engines are told of a version, as `newest`.

        Raises:
            StoreError, ConfigError: as `newest`.
        """
        params = parameters(self.root, version, self._base or "")
        place = Path(self.root, version_name(version))
        full = place.is_dir() and (place / MANIFEST).is_file() and read_version(self._store, version).full is not None
        return {"version": version, "params": params, **({"path": str(place.absolute())} if full else {})}

    def invite(self) -> Info:
        """Write a probe into the root, and return the info by which workers join; parameters have to be added."""
        return {
            "transport": "delta",
            "base": self._base,
            "needs_base": self._builds_on_all(),
            **self._shared.invite(),
        }

    def _chain(self) -> Chain:
        known = self._base if self._base is not None and os.path.isdir(self._base) else None
        return Chain(self._store, foreign=ForeignVersions(self._store, known))

    def _builds_on_all(self) -> bool:
        """Return whether a delta since the last full version is decoded with all old bytes, which workers keep then."""
        chain = self._chain()
        with suppress(WeightSyncError, FileNotFoundError):  # whoever reads the version is told
            for number in reversed(chain.numbers()):
                delta = chain.version(number).delta
                if delta is None:
                    break
                if any(needs_base(codec_from_json(told)) for told in delta.codecs):
                    return True
        return False

    def abort(self) -> None:
        """Do nothing: no call here waits for an engine."""

    def close(self) -> None:
        """Remove the probe. May be called twice."""
        self._shared.clear()
