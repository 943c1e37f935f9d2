"""Load versions that SkyRL's trainer publishes in a folder into engines with our plugin (without ``/fetch_weights``).

SkyRL fetches while engines serve, then pauses, starts, calls `update_named_weights`, finishes and resumes. During the
fetch, our workers join the folder and stage the version, as SkyRL's servers do.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torchrl_ext.errors import EngineError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.transports.published import PublishedRoot

__all__ = ["Fetched", "stage"]


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A version that engines have staged.

    Attributes:
        version: its number.
        root: the folder that the engines joined.
        params: the version's parameters, as JSON.
        connection: id of the connection for which they joined.
    """

    version: int
    root: str
    params: list[Any]
    connection: str


def stage(fleet: Pool, version: int, root: str | None, base: str | None, before: Fetched | None) -> Fetched | None:
    """Make engines stage a version while they serve.

    Args:
        root: the folder of all versions; None for the folder that a trainer had the engines join.
        base: the initial checkpoint; None for the one with which the first engine started.
        before: the version that the engines staged last.

    Returns:
        The version staged now; None without ``root``.

    Raises:
        StoreError: the version does not exist.
        ConfigError: the folder's versions build on an unknown checkpoint.
        EngineError: an engine did not join or did not stage the version.
    """

    def prefetch() -> None:
        fleet.everywhere(f"stage version {version}", lambda engine: engine.prefetch(version))

    if root is None:
        prefetch()
        return None
    published = PublishedRoot(root, fleet.infos()[0].model if base is None else base)
    params, _ = published.contents(version)
    if before is not None and (before.root, before.params) == (root, params):
        try:
            fleet.everywhere("go on", lambda engine: engine.speak_for(before.connection))
            prefetch()
            return replace(before, version=version)
        except EngineError:  # another trainer had the engines join another folder, or an engine restarted
            pass
    sender = f"a client that fetches from {root}, process {os.getpid()} on {socket.gethostname()},"
    with closing(published):
        info = published.invite(params, sender)
        fleet.everywhere("join the folder", lambda engine: engine.connect(info))
    prefetch()
    return Fetched(version=version, root=root, params=params, connection=info["connection"])
