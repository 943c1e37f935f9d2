"""Helpers shared by the two plugins: registering with an engine, and the checkpoint that it was started with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["enable", "started_with"]

log = logging.getLogger("torchrl_ext")


def enable(tested: str, use: Callable[[], None]) -> None:
    """Register with an engine, and log a warning if its release lacks something: an error would end the server.

    Args:
        tested: the engine and the release that the plugin is made for.
        use: makes use of the engine's internals.
    """
    try:
        use()
    except Exception as error:
        log.warning(
            "torchrl_ext needs %s, and this release cannot follow a trainer: %s: %s",
            tested,
            type(error).__name__,
            error,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )


def started_with(owner: Any, config: Any) -> str:
    """Return the checkpoint that an SGLang was started with: its own record is of what it loaded last.

    Args:
        owner: the engine's object that lives as long as its weights; it remembers the answer to the first call.
        config: the engine's configuration of the model.
    """
    from torchrl_ext.data.weights.checkpoint import revised

    start = revised(str(config.model_path), getattr(config, "revision", None))
    return str(vars(owner).setdefault("torchrl_ext_started_with", start))
