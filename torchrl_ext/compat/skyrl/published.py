"""Versions that a trainer of SkyRL's publishes in a folder, for engines with our plugin, which lack ``/fetch_weights``.

SkyRL's order is: fetch while engines serve, pause, start, `update_named_weights`, finish, resume. In the first of these
steps our workers join the folder and stage the version, as SkyRL's servers do.
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
        root: the folder that they joined.
        params: what the version holds, as JSON.
        connection: the id of the connection for which they joined it.
    """

    version: int
    root: str
    params: list[Any]
    connection: str


def stage(fleet: Pool, version: int, root: str | None, base: str | None, before: Fetched | None) -> Fetched | None:
    """Have engines stage a version while they serve.

    Args:
        fleet: the engines.
        version: its number.
        root: the folder of all versions; None for the one that a trainer had the engines join.
        base: the checkpoint that everything began with; None for the one with which the first engine was started.
        before: the version that they staged last.

    Returns:
        The version that they have staged now; None without ``root``.

    Raises:
        StoreError: there is no such version.
        ConfigError: the folder's versions lead back to a checkpoint that is not known here.
        EngineError: some engine did not join or stage it.
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
        except EngineError:  # another trainer had them join something else, or one was started again
            pass
    sender = f"a client that fetches from {root}, process {os.getpid()} on {socket.gethostname()},"
    with closing(published):
        info = published.invite(params, sender)
        fleet.everywhere("join the folder", lambda engine: engine.connect(info))
    prefetch()
    return Fetched(version=version, root=root, params=params, connection=info["connection"])
