"""Load versions that SkyRL's trainer publishes in a folder into engines with our plugin (without ``/fetch_weights``).

SkyRL fetches while engines serve, then pauses, starts, calls `update_named_weights`, finishes and resumes. During the
fetch, our workers join the folder and stage the version, as SkyRL's servers do.
"""

from __future__ import annotations

import os
import socket

from torchrl_ext.errors import EngineError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.transports.published import Joined, PublishedRoot

__all__ = ["stage"]


def stage(fleet: Pool, version: int, root: str | None, base: str | None, before: Joined | None) -> Joined | None:
    """Make engines stage a version while they serve.

    Args:
        root: the folder of all versions; None for the folder that a trainer had the engines join.
        base: the initial checkpoint; None for the one with which the first engine started.
        before: what the engines joined for the version that they staged last.

    Returns:
        What the engines have joined for this version; None without ``root``.

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

    def go_on(connection: str) -> None:
        fleet.everywhere("go on", lambda engine: engine.speak_for(connection))
        prefetch()

    return published.joined(
        before,
        params,
        join=lambda info: fleet.everywhere("join the folder", lambda engine: engine.connect(info)),
        go_on=go_on,
        lost=EngineError,  # another trainer had the engines join another folder, or an engine restarted
        sender=f"a client that fetches from {root}, process {os.getpid()} on {socket.gethostname()},",
    )
