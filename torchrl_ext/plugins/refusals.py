"""Why an engine's worker takes no update, or not this one: errors that say what it expected instead."""

from __future__ import annotations

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.messages import CheckAdapter
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import VISIBLE_S, Invitation
from torchrl_ext.weights.peft import adapter_rank

__all__ = ["UNCHANGED", "check_adapter", "rebalanced", "unknown"]

UNCHANGED = "nothing was changed; the engine serves what it served"


def unknown(name: str) -> ManifestError:
    """Return the refusal of a name that lands nowhere."""
    return ManifestError(
        f"the engine's model has no parameter {name!r}",
        expected="the names of the checkpoint that the engine was started with",
        state=UNCHANGED,
        hint="map the trainer's names with WeightSender(..., mapper=...)",
    )


def rebalanced() -> ConfigError:
    """Return the refusal of an engine that moves experts between its workers (EPLB)."""
    return ConfigError(
        "this engine moves experts between its workers while it serves (EPLB)",
        expected="an engine started without --enable-eplb",
        state=UNCHANGED,
        hint="where an expert's weights lie changes from step to step, so that no update could be proved",
    )


def check_adapter(message: CheckAdapter, *, enabled: bool, max_rank: int | None) -> None:
    """Refuse a LoRA adapter that an engine of these settings cannot take.

    Raises:
        ConfigError: the server was started without LoRA, or for smaller ranks, or may not open the adapters' root.
        StoreError: the root cannot be seen from here.
    """
    if not enabled:
        raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
    rank = adapter_rank(message.params)
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"LoRA rank {rank} is greater than max_lora_rank {max_rank}",
            hint=f"start the server with --max-lora-rank {rank} or more",
        )
    if message.root is not None:
        admit(message.root.get("root"))
        offer = Invitation.from_json(message.root, "the root of an adapter")
        offer.find(open_store(offer.root), Deadline(VISIBLE_S))
