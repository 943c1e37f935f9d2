"""The model of a vLLM worker, which is loaded layer by layer.

Layerwise reload (`vllm.model_executor.model_loader.reload`, 0.32) puts meta tensors in checkpoint form in place of a
layer's parameters, buffers what is loaded, and builds the runtime form (fused, packed, quantised) when the layer is
complete. That works for tensor parallelism and for linears that oneDNN packed on a CPU, which cannot be written to.
Changes of parameters that cannot be written in place load the layers that hold them, and no others.

Most names of vLLM here are no interface that it keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_TENSORS,
    restore_layer_on_meta,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.data.weights.checkpoint import revised
from torchrl_ext.engines.loader import UNCHANGED, StandIns, rebalanced, swapped
from torchrl_ext.engines.runtime import Reading
from torchrl_ext.engines.slices import layer_of
from torchrl_ext.engines.vllm.runtime import REPAIRS, also_packed, readings

__all__ = ["VLLMModel"]


class VLLMModel:
    """An `EngineModel` of one vLLM worker.

    Args:
        module: the worker's model.
        vllm_config: the worker's configuration.
    """

    by_layer, asleep = True, False

    def __init__(self, module: nn.Module, vllm_config: Any) -> None:
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._config, self._quantised = config, vllm_config.quant_config is not None
        self.module = module
        self.checkpoint = revised(config.model, getattr(config, "revision", None))
        self.group = get_tp_group().cpu_group
        self.alone = parallel.world_size == 1
        self.shared = parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel
        self.dtype: torch.dtype = config.dtype
        self.tied = bool(getattr(config.hf_config.get_text_config(), "tie_word_embeddings", False))
        dummy = vllm_config.load_config.load_format == "dummy"
        self.dummy = initialize_single_dummy_weight if dummy else None
        self.rejection: ConfigError | None = None
        if parallel.enable_eplb:
            self.rejection = rebalanced()
        elif vllm_config.load_config.load_format == "ipc_cache":  # vLLM's ``vllm preload``
            self.rejection = ConfigError(
                "this engine maps weights that a daemon owns (--load-format ipc_cache): an update would change them "
                "for every engine that maps them",
                expected="an engine with weights of its own",
                state=UNCHANGED,
                hint="start it with another --load-format",
            )

    @property
    def kept(self) -> Collection[str]:
        return frozenset(SKIP_TENSORS)

    @property
    def repairs(self) -> Mapping[str, Any]:
        return REPAIRS

    def readings(self) -> Iterator[Reading]:
        yield from readings(self.module, self.dtype)

    def is_open(self) -> bool:
        """Return whether a layer is in checkpoint form, in which it computes nothing."""
        return any(get_layerwise_info(layer).can_load() for layer in self.module.modules())

    def roll_back(self) -> None:
        """Put live tensors back into layers that an abandoned update left in checkpoint form.

        Their values are the old ones, or the new ones where a layer was complete; either way the next update covers
        all of them.
        """
        for layer in self.module.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()

    @contextmanager
    def stand_ins(self) -> Iterator[StandIns]:
        self.roll_back()
        copied = {tensor.data_ptr() for tensor in also_packed(self.module)}
        with swapped(self.module, _on_meta) as tensors:
            needed = {}
            if not self._quantised:  # such models make some of their parameters themselves
                for name, parameter in self.module.named_parameters():
                    if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
                        needed[name] = get_tensor_load_numel(parameter)
            yield StandIns(tensors, needed, copied)

    def open(self, layers: Collection[str] | None) -> Collection[nn.Module]:
        """Begin a layerwise reload of all layers, or of some and of those that derive something from them."""
        self.roll_back()
        if layers is None:
            initialize_layerwise_reload(self.module)
            return list(self.module.modules())
        begun = []
        for path, layer in self.module.named_modules():
            absorbs = isinstance(layer, MLAAttention) and f"{layer_of(path)}.kv_b_proj" in layers
            if path in layers or absorbs:
                info = get_layerwise_info(layer)
                info.kernel_tensors = get_layer_params_buffers(layer)
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
                restore_layer_on_meta(layer, info)
                initialize_online_processing(layer)
                begun.append(layer)
        return begun

    def close(self, layers: Collection[nn.Module]) -> None:
        finalize_layerwise_reload(self.module, self._config)


def _on_meta(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's tensors in checkpoint form, without data, as `restore_layer_on_meta` would leave them.

    Biases are never recorded, and keep their live form; what only processing made has no place in a checkpoint.
    """
    found: list[dict[str, Any]] = []
    recorded: Any = get_layerwise_info(layer).restore_metadata
    for live, metadata in ((layer._parameters, recorded[0]), (layer._buffers, recorded[1])):
        kept = SKIP_TENSORS
        own = {name: tensor for name, tensor in live.items() if tensor is None or name in kept}
        for name, tensor in {"bias": live.get("bias"), **metadata}.items():
            if tensor is not None:
                own[name] = form = restore_layer_refs(to_meta_tensor(tensor), layer)
                loader = _get_original_loader(form)  # an earlier reload may have left its wrapper
                if loader is not getattr(form, "weight_loader", loader):
                    form.weight_loader = loader
        found.append(own)
    return found[0], found[1]
