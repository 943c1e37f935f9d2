"""The names of vLLM that the plugin needs, in one table; each is looked up at its first use, and may be absent.

Most of them are no interface that vLLM keeps, so another release may lack or have moved one. That stops no server: a
worker says at its start what follows from it, and refuses to join a trainer where weights could not land.
"""

from __future__ import annotations

import functools
import logging
from pkgutil import resolve_name
from typing import Any, final

from torchrl_ext.errors import ConfigError

__all__ = ["NEEDED", "Internals", "internals"]

log = logging.getLogger("torchrl_ext")

_LANDS = "it lands no weights"
_LAYERS, _LOADING = "vllm.model_executor.layers", "vllm.model_executor.model_loader"
_RELOAD = f"{_LOADING}.reload"

NEEDED = {
    _LANDS: {
        "vllm.distributed.parallel_state": "get_tp_group get_pcp_group get_pp_group",
        "vllm.config": "set_current_vllm_config",
        f"{_LAYERS}.linear": "LinearBase",
        f"{_LAYERS}.vocab_parallel_embedding": "ParallelLMHead VocabParallelEmbedding",
        f"{_LAYERS}.attention|vllm.attention.layer": "MLAAttention",
        _RELOAD: "initialize_layerwise_reload finalize_layerwise_reload",
        f"{_RELOAD}.layerwise": "_get_original_loader _place_kernel_tensors get_layerwise_info "
        "initialize_online_processing",
        f"{_RELOAD}.meta": "SKIP_LOAD_TENSORS SKIP_TENSORS restore_layer_on_meta to_meta_tensor",
        f"{_RELOAD}.sanitize": "restore_layer_refs",
        f"{_RELOAD}.utils": "get_layer_params_buffers get_tensor_load_numel",
    },
    "an engine with --load-format dummy takes no delta as its first version": {
        f"{_LOADING}.weight_utils": "initialize_single_dummy_weight",
    },
    "it takes no LoRA adapters": {
        "vllm.lora.utils": "parse_fine_tuned_lora_name",
        "vllm.lora.peft_helper": "PEFTHelper",
        "vllm.lora.request": "LoRARequest",
        "vllm.distributed.weight_transfer.base": "WeightTransferInitRequest",
    },
    "a trainer asks in two requests how it sleeps": {"vllm.v1.metrics.prometheus": "get_prometheus_registry"},
}
"""What follows where names are absent -> module -> its names; modules of several releases are divided by ``|``."""

_HINT = "take a release that docs/compatibility.md names, or transport 'disk' without our backend"


@final
class Internals:
    """Has each name of `NEEDED` as an attribute; one that this vLLM lacks raises a ConfigError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        for follows, modules in NEEDED.items():
            for module, names in modules.items():
                if name in names.split():
                    try:
                        return _resolved(module, name)
                    except LookupError:
                        raise ConfigError(f"this vLLM lacks {module}.{name}: {follows}", hint=_HINT) from None
        raise AttributeError(name)

    def lacking(self) -> dict[str, list[str]]:
        """Return what follows from the names that this vLLM lacks, and the names; {} where it has all of them."""
        found: dict[str, list[str]] = {}
        for follows, modules in NEEDED.items():
            for module, names in modules.items():
                for name in names.split():
                    try:
                        _resolved(module, name)
                    except LookupError:
                        found.setdefault(follows, []).append(f"{module}.{name}")
        return found

    def log_missing(self) -> None:
        """Log what follows from the names that this vLLM lacks."""
        for follows, names in self.lacking().items():
            log.warning("this vLLM lacks %s: %s", ", ".join(names), follows)

    def can_load(self) -> bool:
        """Return whether this vLLM has all that weights take to land."""
        return _LANDS not in self.lacking()

    def check(self) -> None:
        """Refuse a vLLM in which weights could not land, before anything of it is changed.

        Raises:
            ConfigError: names every name that it lacks.
        """
        if not self.can_load():
            raise ConfigError(
                f"this vLLM lacks {', '.join(self.lacking()[_LANDS])}: {_LANDS}",
                state="the engine serves what it served",
                hint=_HINT,
            )


@functools.cache
def _resolved(modules: str, name: str) -> Any:
    """Return what the first of these modules that has a name has under it.

    Raises:
        LookupError: none has it.
    """
    for module in modules.split("|"):
        try:
            return resolve_name(f"{module}:{name}")
        except Exception:  # a module of another release may fail with anything when it is imported
            log.debug("%s.%s cannot be used", module, name, exc_info=True)
    raise LookupError(name)


internals = Internals()
