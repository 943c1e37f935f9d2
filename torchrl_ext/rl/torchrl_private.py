"""All reads of TorchRL's private names in this package, as of TorchRL 0.14.1.

`TransportWeightSyncScheme` and `TransportWeightUpdater` also override underscored hooks of their base classes, as
TorchRL's own subclasses do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_attr

__all__ = ["ended_workers", "is_leaf", "model_of", "receivers_of", "source_of"]


def model_of(context: Any, model_id: str) -> Any | None:
    """Return a collector's model by id, such as ``"policy.module[2]"``; None if only its workers have it."""
    try:
        model = _resolve_attr(context, model_id)
    except (AttributeError, IndexError, KeyError, TypeError):
        model = None
    return getattr(context, "_fallback_policy", None) if model is None and model_id == "policy" else model


def source_of(context: Any, model_id: str) -> Any | None:
    """Return the model to send: the policy that a `Collector` was given, not the copy that it runs; else `model_of`."""
    given = getattr(context, "_orig_policy", None) if isinstance(context, Collector) and model_id == "policy" else None
    return model_of(context, model_id) if given is None else given


def ended_workers(context: Any) -> list[int]:
    """Return the indices of a collector's worker processes that have ended."""
    processes = getattr(context, "procs", None) or []
    return [idx for idx, process in enumerate(processes) if process.exitcode is not None]


def is_leaf(context: Any) -> bool:
    """Return whether a collector runs its policy itself and has no collectors below it."""
    return isinstance(context, Collector) and not context._weight_sync_schemes and context.weight_updater is None


def receivers_of(context: Any) -> Mapping[str, WeightSyncScheme]:
    """Return the schemes by which a collector's own models follow a trainer, by model id."""
    return getattr(context, "_receiver_schemes", None) or {}
