"""Read the versions that another process publishes under a root, for engines that its trainer did not invite."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, final

from torchrl_ext.codecs.base import codec_from_json, needs_base
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Files
from torchrl_ext.stores import Chain, open_store, version_name, version_number
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import read_version
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info, decoded
from torchrl_ext.versions.foreign import ForeignVersions, is_flush
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["PublishedRoot"]

_UNCHANGED = "the engine serves what it served"


@final
class PublishedRoot:
    """A root into which another process publishes, ours or one whose versions `open_store` can show.

    Engines that run our plugin join it as they join a `DeltaTransport`.

    Args:
        root: directory or URL, which engines reach under the same path.
        base: the checkpoint with which the engines were started; a directory here, or a name that only they know.
    """

    name: ClassVar[str] = "delta"
    """The transport by which engines join it."""

    def __init__(self, root: str | os.PathLike[str], base: str | None = None) -> None:
        self.root, self._base = os.fspath(root), base
        self._store = open_store(root)
        self._shared = SharedRoot(self._store, uuid.uuid4().hex)

    @classmethod
    def of_path(cls, path: str, base: str | None = None) -> tuple[PublishedRoot, int]:
        """Return the root and the version that a call names: ``ROOT/weight_v000007``, or ``ROOT`` for its newest.

        Raises:
            ConfigError: this engine may not open the path.
            StoreError: there is no version.
        """
        admit(path)
        given = Path(path).absolute()
        version = version_number(given.name)
        if version is not None:
            return cls(given.parent, base), version
        if not given.is_dir():
            raise StoreError(f"{path} is no directory", state=_UNCHANGED)
        root = cls(given, base)
        return root, root._newest()

    def newest(self) -> Info:
        """Describe the newest complete version to engines.

        Returns:
            ``{"version", "params"}``, and ``path`` where it is a full one in a directory, with a manifest of ours.

        Raises:
            StoreError: there is no version.
            ConfigError: the versions lead back to a checkpoint that is not known here.
        """
        return self.at(self._newest())

    def at(self, version: int) -> Info:
        """Describe a version to engines; the rest as for `newest`."""
        params, _ = self.contents(version)
        place = Path(self.root, version_name(version))
        full = place.is_dir() and (place / MANIFEST).is_file() and read_version(self._store, version).full is not None
        return {"version": version, "params": params, **({"path": str(place.absolute())} if full else {})}

    def contents(self, version: int, files: Any = None, *, parts: bool = False) -> tuple[list[Any], list[str] | None]:
        """Return the parameters of a version as JSON, and those of its files that one call brings.

        Args:
            version: the number.
            files: the names of all of its files, as a call gives them; None for a call that names none.
            parts: the call may name some of the files of a version in slime's first format, which comes in several
                calls. The caller has paused the engine, and resumes it after the last one.

        Returns:
            The parameters; and the names in ``files`` where they are of slime's first format, else None.

        Raises:
            StoreError: there is no such version, or a file of it is missing.
            ConfigError: ``files`` is no list of names, or names only a part of the version where ``parts`` is false.
        """
        names, own = set(self._store.list(version_name(version))), None
        if files is not None and all(map(is_flush, decoded(files, Files, "files"))) and MANIFEST not in names:
            if lost := sorted({*files} - names):
                raise self._absent(version, f", or not {lost[0]} of it")
            own = sorted(files)
        if parts and own is not None and self._local_base is not None:
            # the versions before may be gone, and change no name or shape
            return [meta.to_json() for meta in CheckpointSource(self._local_base).params()], own
        try:
            params = self._chain().version(version).params
        except FileNotFoundError as error:
            raise self._absent(version) from error
        lost = sorted(name for name in names - {*(files or names)} if name.endswith((".safetensors", ".bin")))
        if lost and MANIFEST not in names and not (parts and own is not None):
            raise ConfigError(
                f"the call names only a part of version {version}: not {lost[0]}",
                expected="one call per version, when all of its files are there; or a pause before the first call",
                state=_UNCHANGED,
            )
        return [meta.to_json() for meta in params], own

    def invite(self) -> Info:
        """Write a probe into the root, and return the info by which workers join; parameters have to be added."""
        needed = self._needs_base()
        return {"transport": "delta", "base": self._base, "needs_base": needed, **self._shared.invite()}

    @contextmanager
    def invited(self, params: list[Any], sender: str = "") -> Iterator[Info]:
        """Yield the info by which workers join under a connection of its own; the probe goes when the block ends.

        Args:
            params: of a version, as `contents` returns them.
            sender: names the process that has them join, for messages.
        """
        try:
            by = sender or f"whoever named a version of {self.root} to the engine itself"
            yield {**self.invite(), "params": params, "connection": uuid.uuid4().hex, "sender": by}
        finally:
            self.close()

    def close(self) -> None:
        """Remove the probe. May be called twice."""
        self._shared.clear()

    @property
    def _local_base(self) -> str | None:
        return self._base if self._base is not None and os.path.isdir(self._base) else None

    def _chain(self) -> Chain:
        return Chain(self._store, foreign=ForeignVersions(self._store, self._local_base))

    def _newest(self) -> int:
        version = self._chain().latest()
        if not version:
            raise StoreError(f"{self.root} holds no version", state=_UNCHANGED)
        return version

    def _absent(self, version: int, more: str = "") -> StoreError:
        return StoreError(
            f"{self.root} holds no version {version}{more}",
            state=_UNCHANGED,
            hint="publish every file of a version before an engine is asked to load it",
        )

    def _needs_base(self) -> bool:
        """Return whether a delta since the last full version is decoded with all old bytes, which workers then keep."""
        chain = self._chain()
        with suppress(WeightSyncError, FileNotFoundError):  # who reads the version gets the error
            for number in reversed(chain.numbers()):
                delta = chain.version(number).delta
                if delta is None:
                    break
                if any(needs_base(codec_from_json(codec)) for codec in delta.codecs):
                    return True
        return False
