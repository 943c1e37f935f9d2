"""What both plugins find in the engine that they meet: internals of its release, and the checkpoint of its start."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["enable", "started_with"]

log = logging.getLogger("torchrl_ext")


def enable(engine: str, module: str, tested: str, needed: Mapping[str, Callable[[], None]]) -> None:
    """Make use of an engine's internals; log the release that was found, and what is not as it was in the tested one.

    Another release may lack a name, or give it other arguments: whatever goes wrong is caught, and logged.

    Args:
        engine: its name for people.
        module: of the engine, which has ``__version__``.
        tested: the release that the plugin was tested with.
        needed: what follows where a step fails, in words -> the step, which makes use of internals or raises.
    """
    missing = {}
    for follows, use in needed.items():
        try:
            use()
        except Exception as error:
            log.debug("a plugin cannot use this release", exc_info=True)
            missing[follows] = f"{type(error).__name__}: {error}"
    try:
        found = str(getattr(importlib.import_module(module), "__version__", "of an unknown release"))
    except Exception as error:
        log.debug("%s cannot be imported", module, exc_info=True)
        found = f"that cannot be imported ({error})"
    releases = f"torchrl_ext found {engine} {found}, tested with {tested}"
    if missing:
        log.warning("%s: %s", releases, "; ".join(f"{follows} ({why})" for follows, why in missing.items()))
    else:
        log.info("%s", releases)


def started_with(owner: Any, config: Any) -> str:
    """Return the checkpoint that an engine was started with: an engine's own record is of what it loaded last.

    Args:
        owner: the engine's object that lives as long as its weights; it remembers the answer to the first call.
        config: the engine's configuration of the model.
    """
    from torchrl_ext.weights.checkpoint import revised

    path = getattr(config, "model", None) or config.model_path  # vLLM's name, and SGLang's
    start = revised(str(path), getattr(config, "revision", None))
    return str(vars(owner).setdefault("torchrl_ext_started_with", start))
