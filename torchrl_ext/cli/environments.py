"""The commands' half of the engines' environments: what they print while one is made."""

from __future__ import annotations

from typing import Any

from torchrl_ext.cli.frame import note, progress
from torchrl_ext.testing import environments

__all__ = ["settings_for"]


def settings_for(engine: str) -> dict[str, Any]:
    """Return what `torchrl_ext.testing.environments.settings_for` does; progress goes to standard error."""
    return environments.settings_for(engine, note, progress)
