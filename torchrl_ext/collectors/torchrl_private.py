"""What this package reads of TorchRL 0.14.1 for which it has no public name; no other file of ours does so.

`TransportWeightSyncScheme` and `TransportWeightUpdater` also fill in the underscored hooks of the base classes, as each
subclass in TorchRL does.
"""

from __future__ import annotations

from typing import Any, get_args

from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes
from torchrl.weight_update.utils import _resolve_attr

__all__ = ["backend_of", "ended_workers", "is_leaf", "model_of", "original_policy"]


def backend_of(name: str) -> type[WeightSyncScheme] | None:
    """Return the class behind a name of `WeightSyncScheme.from_backend`; None where the name is free."""
    name = weight_sync_schemes._WEIGHT_SYNC_BACKEND_ALIASES.get(name, name)
    taken = WeightSyncScheme if name in get_args(weight_sync_schemes.WeightSyncBackend) else None
    return weight_sync_schemes._WEIGHT_SYNC_SCHEMES.get(name, taken)


def model_of(context: Any, model_id: str) -> Any | None:
    """Return a collector's model of this id, such as ``"policy.module[2]"``; None where only its workers have one."""
    try:
        model = _resolve_attr(context, model_id)
    except (AttributeError, IndexError, KeyError, TypeError):
        model = None
    return getattr(context, "_fallback_policy", None) if model is None and model_id == "policy" else model


def original_policy(context: Any) -> Any | None:
    """Return the policy that a collector of this process was given, which may differ from the one that it runs."""
    return getattr(context, "_orig_policy", None)


def ended_workers(context: Any) -> list[int]:
    """Return the indices of a collector's worker processes that have ended."""
    processes = getattr(context, "procs", None) or []
    return [idx for idx, process in enumerate(processes) if process.exitcode is not None]


def is_leaf(context: Any) -> bool:
    """Return whether a collector runs its policy by itself, and has no collectors below it."""
    return isinstance(context, Collector) and not context._weight_sync_schemes and context.weight_updater is None
