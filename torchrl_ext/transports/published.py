"""Read the versions that another process publishes under a root, for engines that its trainer did not invite."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Files
from torchrl_ext.stores import Chain, open_store, version_name, version_number
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import ChainView
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info, decoded
from torchrl_ext.versions.open_delta import needs_old
from torchrl_ext.versions.others import view_of
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["Joined", "PublishedRoot"]

log = logging.getLogger("torchrl_ext")

_UNCHANGED = "nothing was loaded"


class Joined(NamedTuple):
    """What workers joined.

    Attributes:
        root: of the versions.
        params: of a version, as `PublishedRoot.contents` returns them.
        connection: under which they joined.
    """

    root: str
    params: Sequence[Any]
    connection: str


@final
class PublishedRoot:
    """A root into which another process publishes, this library or another one (`torchrl_ext.versions.others.view_of`).

    Args:
        root: directory or URL, which engines reach under the same path.
        base: the checkpoint with which the engines were started; a directory here, or a name that only they know.
    """

    def __init__(self, root: str | os.PathLike[str], base: str | None = None) -> None:
        self.root, self._base = os.fspath(root), base
        self._store = open_store(root)
        self._shared = SharedRoot(self._store, uuid.uuid4().hex)
        self._base_here = base if base is not None and os.path.isdir(base) else None

    @classmethod
    def of_path(cls, path: str, base: str | None = None) -> tuple[PublishedRoot, int]:
        """Return the root and the version that a call names: ``ROOT/weight_v000007``, or ``ROOT`` for its newest.

        Args:
            path: of the call.
            base: the checkpoint with which this engine was started; a name that is not a directory counts as None.

        Raises:
            ConfigError: this engine may not open the path.
            StoreError: there is no version.
        """
        given = Path(admit(path))
        version = version_number(given.name)
        if version is None and not given.is_dir():
            raise StoreError(f"{path} is not a directory", state=_UNCHANGED)
        opened = given if version is None else Path(admit(str(given.parent)))
        root = cls(opened, base if base and os.path.isdir(base) else None)
        version = root._chain().latest() if version is None else version
        if not version:
            raise StoreError(f"{path} holds no version", state=_UNCHANGED)
        return root, version

    def contents(self, version: int, files: Any = None, *, parts: bool = False) -> tuple[list[Any], list[str] | None]:
        """Return the parameters of a version as JSON, and those of its files that one call brings.

        Args:
            version: the number.
            files: the names of all of its files, as a call gives them; None for a call that names none.
            parts: the call may name some of the files of a version whose format comes in several calls. The caller
                has paused the engine, and resumes it after the last one.

        Returns:
            The parameters; and the names in ``files`` where they are of such a format, else None.

        Raises:
            StoreError: there is no such version, or a file of it is missing.
            ConfigError: ``files`` is no list of names, or names only a part of the version where ``parts`` is false.
        """
        here = set(self._store.list(version_name(version)))
        names = [] if files is None else decoded(files, Files, "files")
        parted = files is not None and MANIFEST not in here and all(map(self._view().is_part, names))
        if parted and (lost := sorted({*files} - here)):
            raise self._absent(version, f", or not {lost[0]} of it")
        own = sorted(files) if parted else None
        if parts and parted and self._base_here is not None:
            # the versions before may be gone, and change no name or shape
            return [meta.to_json() for meta in CheckpointSource(self._base_here).params()], own
        try:
            params = self._chain().version(version).params
        except FileNotFoundError as error:
            raise self._absent(version) from error
        left = sorted(name for name in here - {*(files or here)} if name.endswith((".safetensors", ".bin")))
        if left and MANIFEST not in here and not (parts and parted):
            raise ConfigError(
                f"the call names only a part of version {version}: not {left[0]}",
                expected="all of its files in one call, or a pause before the first of several calls",
                state=_UNCHANGED,
            )
        return [meta.to_json() for meta in params], own

    def joined(
        self,
        before: Joined | None,
        params: Sequence[Any],
        *,
        join: Callable[[Info], Any],
        go_on: Callable[[str], Any],
        lost: type[Exception] | tuple[()] = Exception,
        sender: str = "",
    ) -> Joined:
        """Go on under the connection of ``before`` if it is of this root and these parameters, else after a new join.

        Args:
            before: what the workers joined last, if they joined anything.
            params, sender: as for `invite`.
            join: has the workers join by the info of `invite`.
            go_on: takes the next step under a connection.
            lost: errors of ``go_on`` after which the workers join anew: they may have joined another trainer since.
        """
        if before is not None and before[:2] == (self.root, params):
            try:
                go_on(before.connection)
                return before
            except lost:
                log.debug("the workers join %s again", self.root, exc_info=True)
        with closing(self):
            info = self.invite(params, sender)
            join(info)
        go_on(info["connection"])
        return Joined(self.root, params, info["connection"])

    def invite(self, params: Sequence[Any] = (), sender: str = "") -> Info:
        """Write a probe into the root, and return the info by which workers join under a connection of its own.

        Args:
            params: of a version, as `contents` returns them.
            sender: names the process that has them join, for messages.
        """
        return {
            **self._shared.invite(),
            "transport": "delta",
            "base": self._base,
            "needs_base": self._needs_base(),
            "params": params,
            "connection": uuid.uuid4().hex,
            "sender": sender or f"the client that named a version of {self.root} to the engine itself",
        }

    def close(self) -> None:
        """Remove the probe. May be called twice."""
        self._shared.clear()

    def _chain(self) -> Chain:
        return Chain(self._store, view=self._view())

    def _view(self) -> ChainView:
        return view_of(self._store, self._base_here)

    def _absent(self, version: int, more: str = "") -> StoreError:
        return StoreError(
            f"{self.root} holds no version {version}{more}",
            state=_UNCHANGED,
            hint="publish every file of a version before you ask an engine to load it",
        )

    def _needs_base(self) -> bool:
        """Return whether a delta since the last full version is decoded with all old bytes, which workers then keep."""
        chain = self._chain()
        with suppress(WeightSyncError, FileNotFoundError):  # who reads the version gets the error
            for number in reversed(chain.numbers()):
                delta = chain.version(number).delta
                if delta is None:
                    break
                if needs_old(delta):
                    return True
        return False
