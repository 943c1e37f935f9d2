"""Why an engine's worker takes no update, or not this one: errors that say what it expected instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.messages import CheckAdapter
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import VISIBLE_S, Invitation
from torchrl_ext.types import ParamMeta, cast_hint, dtype_name
from torchrl_ext.weights.peft import adapter_rank

__all__ = [
    "UNCHANGED",
    "absent",
    "check_adapter",
    "guest",
    "incomplete",
    "misshapen",
    "rebalanced",
    "rounded",
    "together",
    "unknown",
]

UNCHANGED = "nothing was changed; the engine serves what it served"
_EVERY = "every parameter of the checkpoint that the engine was started with"


def misshapen(meta: ParamMeta, expected: Sequence[int]) -> ManifestError:
    """Return the refusal of a parameter of another shape than in the start checkpoint."""
    return ManifestError(
        f"parameter {meta.name!r} arrives with shape {list(meta.shape)}",
        expected=f"{list(expected)}, as in the checkpoint that the engine was started with",
        state=UNCHANGED,
    )


def unknown(name: str) -> ManifestError:
    """Return the refusal of a name that lands nowhere."""
    return ManifestError(
        f"the engine's model has no parameter {name!r}",
        expected="the names of the checkpoint that the engine was started with",
        state=UNCHANGED,
        hint="map the trainer's names with WeightSender(..., mapper=...)",
    )


def absent(name: str) -> ManifestError:
    """Return the refusal of an update without a parameter that is needed."""
    return ManifestError(f"parameter {name!r} is missing from the update", expected=_EVERY, state=UNCHANGED)


def together(names: Sequence[str], others: Sequence[str]) -> ManifestError:
    """Return the refusal of a part without tensors that land together with some of its own.

    Args:
        names: those of the part whose layers the engine builds anew.
        others: what has to come with them.
    """
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return ManifestError(
        f"of a part with {', '.join(map(repr, names[:3]))} the engine builds layers anew, and lacks "
        f"{', '.join(map(repr, others[:3]))}{more} for them",
        state=UNCHANGED,
        hint="name them too: only= with the path of the whole layer; or leave only= out",
    )


def incomplete(param: str, written: int, numel: int, sources: Sequence[str]) -> ManifestError:
    """Return the refusal of an update that would fill a runtime parameter in part.

    Args:
        param: the runtime parameter.
        written, numel: elements that the update brings, and that it has.
        sources: names of checkpoint tensors that land in it.
    """
    return ManifestError(
        f"the update leaves parameter {param!r} of the engine's model incomplete: "
        f"{written} of {numel} elements, from {', '.join(sources) or 'no parameter of the update'}",
        expected=_EVERY,
        state=UNCHANGED,
    )


def rounded(meta: ParamMeta, own: torch.dtype) -> ManifestError:
    """Return the refusal of values that do not fit the dtype in which the engine computes."""
    return ManifestError(
        f"parameter {meta.name!r} arrives as {dtype_name(meta.dtype)}, and the engine would round it",
        expected=f"{dtype_name(own)}, in which the engine computes",
        state=UNCHANGED,
        hint=cast_hint(own),
    )


def guest() -> ConfigError:
    """Return the refusal of an engine that maps weights which another process owns (vLLM's ``vllm preload``)."""
    return ConfigError(
        "this engine maps weights that a daemon owns (--load-format ipc_cache): an update would change them for every "
        "engine that maps them",
        expected="an engine with weights of its own",
        state=UNCHANGED,
        hint="start it with another --load-format",
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
