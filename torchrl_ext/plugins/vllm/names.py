"""The names of vLLM that the plugin needs, in one table; each is looked up at its first use, and may be absent.

Most of them are no interface that vLLM keeps, so another release may lack or have moved one. That stops no server: a
worker says at its start what follows from it, and refuses to join a trainer where weights could not land.
"""

from __future__ import annotations

import functools
import logging
from pkgutil import resolve_name
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["check", "lacking", "lands", "say"]

log = logging.getLogger("torchrl_ext")

_LANDS = "it lands no weights"
_ADAPTERS = "it takes no LoRA adapters"

_GROUPS, _LAYERS = "vllm.distributed.parallel_state:", "vllm.model_executor.layers."
_RELOAD = "vllm.model_executor.model_loader.reload"

_NEEDED = {
    "get_tp_group": (f"{_GROUPS}get_tp_group", _LANDS),
    "get_pcp_group": (f"{_GROUPS}get_pcp_group", _LANDS),
    "get_pp_group": (f"{_GROUPS}get_pp_group", _LANDS),
    "set_current_vllm_config": ("vllm.config:set_current_vllm_config", _LANDS),
    "LinearBase": (f"{_LAYERS}linear:LinearBase", _LANDS),
    "ParallelLMHead": (f"{_LAYERS}vocab_parallel_embedding:ParallelLMHead", _LANDS),
    "VocabParallelEmbedding": (f"{_LAYERS}vocab_parallel_embedding:VocabParallelEmbedding", _LANDS),
    "MLAAttention": (f"{_LAYERS}attention:MLAAttention|vllm.attention.layer:MLAAttention", _LANDS),
    "initialize_layerwise_reload": (f"{_RELOAD}:initialize_layerwise_reload", _LANDS),
    "finalize_layerwise_reload": (f"{_RELOAD}:finalize_layerwise_reload", _LANDS),
    "_get_original_loader": (f"{_RELOAD}.layerwise:_get_original_loader", _LANDS),
    "_place_kernel_tensors": (f"{_RELOAD}.layerwise:_place_kernel_tensors", _LANDS),
    "get_layerwise_info": (f"{_RELOAD}.layerwise:get_layerwise_info", _LANDS),
    "initialize_online_processing": (f"{_RELOAD}.layerwise:initialize_online_processing", _LANDS),
    "SKIP_LOAD_TENSORS": (f"{_RELOAD}.meta:SKIP_LOAD_TENSORS", _LANDS),
    "SKIP_TENSORS": (f"{_RELOAD}.meta:SKIP_TENSORS", _LANDS),
    "restore_layer_on_meta": (f"{_RELOAD}.meta:restore_layer_on_meta", _LANDS),
    "to_meta_tensor": (f"{_RELOAD}.meta:to_meta_tensor", _LANDS),
    "restore_layer_refs": (f"{_RELOAD}.sanitize:restore_layer_refs", _LANDS),
    "get_layer_params_buffers": (f"{_RELOAD}.utils:get_layer_params_buffers", _LANDS),
    "get_tensor_load_numel": (f"{_RELOAD}.utils:get_tensor_load_numel", _LANDS),
    "initialize_single_dummy_weight": (
        "vllm.model_executor.model_loader.weight_utils:initialize_single_dummy_weight",
        "an engine with --load-format dummy takes no delta as its first version",
    ),
    "parse_fine_tuned_lora_name": ("vllm.lora.utils:parse_fine_tuned_lora_name", _ADAPTERS),
    "PEFTHelper": ("vllm.lora.peft_helper:PEFTHelper", _ADAPTERS),
    "LoRARequest": ("vllm.lora.request:LoRARequest", _ADAPTERS),
    "get_prometheus_registry": (
        "vllm.v1.metrics.prometheus:get_prometheus_registry",
        "a trainer asks in two requests how it sleeps",
    ),
    "WeightTransferInitRequest": ("vllm.distributed.weight_transfer.base:WeightTransferInitRequest", _ADAPTERS),
}
"""Name here -> where vLLM has it (places of several releases are divided by ``|``), and what follows without it."""


def __getattr__(name: str) -> Any:
    """Return what a name of the table stands for.

    Raises:
        ConfigError: this vLLM lacks it.
    """
    if name not in _NEEDED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    places, follows = _NEEDED[name]
    try:
        found = _resolved(places)
    except LookupError:
        raise ConfigError(f"this vLLM lacks {places}: {follows}", hint=_hint()) from None
    globals()[name] = found
    return found


@functools.cache
def lacking() -> dict[str, list[str]]:
    """Return what follows from the names that this vLLM lacks, and their places; {} where it has all of them."""
    found: dict[str, list[str]] = {}
    for places, follows in _NEEDED.values():
        try:
            _resolved(places)
        except LookupError:
            found.setdefault(follows, []).append(places)
    return found


@functools.cache
def say() -> None:
    """Log, once, what follows from the names that this vLLM lacks."""
    for follows, places in lacking().items():
        log.warning("this vLLM lacks %s: %s", ", ".join(places), follows)


def lands() -> bool:
    """Return whether this vLLM has all that weights take to land."""
    return _LANDS not in lacking()


def check() -> None:
    """Refuse a vLLM in which weights could not land, before anything of it is changed.

    Raises:
        ConfigError: names every name that it lacks.
    """
    if not lands():
        raise ConfigError(
            f"this vLLM lacks {', '.join(lacking()[_LANDS])}: {_LANDS}",
            state="the engine serves what it served",
            hint=_hint(),
        )


def _resolved(places: str) -> Any:
    """Return what the first place that there is has.

    Raises:
        LookupError: there is none.
    """
    for place in places.split("|"):
        try:
            return resolve_name(place)
        except Exception:  # a module of another release may fail with anything when it is imported
            log.debug("%s cannot be used", place, exc_info=True)
    raise LookupError(places)


def _hint() -> str:
    return "take a release that docs/compatibility.md names, or transport 'disk' without our backend"
