"""How checkpoint tensors land in a vLLM model: through its own loader, layer by layer.

Layerwise reload (`vllm.model_executor.model_loader.reload`, 0.32) puts meta tensors in checkpoint form in place of a
layer's parameters, buffers what is loaded, and builds the runtime form (fused, packed, quantised) when the layer is
complete. That works for tensor parallelism and for linears that oneDNN packed on a CPU, which cannot be written to.
Changes of parameters that cannot be written in place load the layers that hold them, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchrl_ext.landing.placement import Landing, Placement, record
from torchrl_ext.plugins.loader import PluginLoader
from torchrl_ext.plugins.refusals import guest, rebalanced
from torchrl_ext.plugins.vllm import names as vllm
from torchrl_ext.plugins.vllm.runtime import REPAIRS, also_packed, made_up, readings
from torchrl_ext.proof.runtime import Reading
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import revised

__all__ = ["VLLMLoader"]


class VLLMLoader(PluginLoader):
    """Loads weights into one worker's vLLM model, through layerwise reload.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        load_format = vllm_config.load_config.load_format
        super().__init__(
            model,
            revised(config.model, getattr(config, "revision", None)),
            vllm.get_tp_group().cpu_group,
            alone=parallel.world_size == 1,
            dtype=config.dtype,
            tied=bool(getattr(config.hf_config.get_text_config(), "tie_word_embeddings", False)),
            dummy=load_format == "dummy",
            unfit=rebalanced() if parallel.enable_eplb else guest() if load_format == "ipc_cache" else None,
        )
        self._config = vllm_config
        self._repaired: dict[str, str] = {}
        self._forms: Mapping[str, Tensor] = {}
        self._aside: set[int] = set()  # addresses of weights that a layer has a packed copy of

    def reloaded(self) -> None:
        """Do what vLLM leaves out when it loads the model by itself (`reload_weights`)."""
        if vllm.lands():
            self._repair(list(self._model.modules()))

    def is_open(self) -> bool:
        """Return whether a layer is in checkpoint form, in which it computes nothing."""
        return vllm.lands() and any(vllm.get_layerwise_info(layer).can_load() for layer in self._model.modules())

    def roll_back(self) -> None:
        """Put live tensors back into layers that an abandoned update left in checkpoint form.

        Their values are the old ones, or the new ones where a layer was complete; either way the next update covers
        all of them. A vLLM that lands no weights has nothing to roll back.
        """
        for layer in self._model.modules() if vllm.lands() else ():
            info = vllm.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    vllm._place_kernel_tensors(layer, info)
                info.reset()
        self._loading = False

    # what a rehearsal asks

    def known_repairs(self) -> tuple[str, ...]:
        """Return the names of `REPAIRS`, but for those that ``TORCHRL_EXT_LEAVE_OUT`` names, comma-separated."""
        left_out = os.environ.get("TORCHRL_EXT_LEAVE_OUT", "").split(",")
        return tuple(step for step in REPAIRS if step not in left_out)

    def runtime(self) -> Iterator[Reading]:
        return readings(self._model, self._dtype)

    def repaired(self) -> dict[str, str]:
        return dict(self._repaired)

    # what `PluginLoader` asks

    def _placed(self, params: tuple[ParamMeta, ...]) -> Placement:
        self.roll_back()
        with self._on_meta() as (targets, needed):
            placement = record(self._model.load_weights, params, targets)
        parallel = self._config.parallel_config
        shared = parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel
        quantised = self._config.quant_config is not None  # such models make some of their parameters themselves
        self._refuse(placement, {} if quantised else needed, shared=shared)
        self._forms, self._aside = targets, {tensor.data_ptr() for tensor in also_packed(self._model)}
        return placement

    def _is_plain(self, tensor: Tensor | None, landing: Landing) -> bool:
        """Return whether the engine keeps a tensor in its loaded form, and no packed copy beside it."""
        if tensor is None or tensor.data_ptr() in self._aside:
            return False
        form = self._forms[landing.param]
        return (tensor.shape, tensor.stride(), tensor.dtype) == (form.shape, form.stride(), form.dtype)

    def _made_up(self) -> Iterable[tuple[str, Tensor]] | None:
        placement = self._placement
        if placement is None or not all(one.exact for own in placement.landings.values() for one in own):
            return None  # what a loader computes from checkpoint tensors cannot be undone
        return made_up(placement, self._forms)

    def _open(self, names: Collection[str] | None) -> Collection[nn.Module]:
        """Begin a layerwise reload of all layers, or of some and of those that derive something from them."""
        self.roll_back()
        self._repaired = {}
        if names is None:
            vllm.initialize_layerwise_reload(self._model)
            return list(self._model.modules())
        layers, begun = self._layers(names), []
        for name, layer in self._model.named_modules():
            absorbs = isinstance(layer, vllm.MLAAttention) and f"{name.rpartition('.')[0]}.kv_b_proj" in layers
            if name in layers or absorbs:
                info = vllm.get_layerwise_info(layer)
                info.kernel_tensors = vllm.get_layer_params_buffers(layer)
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
                vllm.restore_layer_on_meta(layer, info)
                vllm.initialize_online_processing(layer)
                begun.append(layer)
        return begun

    def _stays(self, param: str) -> bool:
        return param.rpartition(".")[2] in vllm.SKIP_TENSORS

    def _close(self, layers: Collection[nn.Module]) -> None:
        vllm.finalize_layerwise_reload(self._model, self._config.model_config)
        self._repair(layers)

    def _loaded_with(self, touched: set[str]) -> Collection[str]:
        """Return these names, and those that share a layer with them: a layer is loaded as a whole."""
        if self._whole_model:
            return [meta.name for meta in self._params if touched]
        layers = self._layers(touched)
        others = (meta.name for meta in self._params if not self.patchable(meta.name))
        return [name for name in others if self._layers([name]) & layers]

    def _layers(self, names: Iterable[str]) -> set[str]:
        """Return the modules in whose parameters these checkpoint tensors land."""
        return {landing.param.rpartition(".")[0] for name in names for landing in self.landings(name)}

    def _repair(self, layers: Collection[nn.Module]) -> None:
        names = {id(layer): name for name, layer in self._model.named_modules()}
        for step in REPAIRS:
            if step in self.repairs:
                for layer in REPAIRS[step](self._model, layers):
                    self._repaired[names[id(layer)]] = step

    @contextmanager
    def _on_meta(self) -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
        """Swap every layer's tensors for their checkpoint form without data, and back.

        Yields:
            The stand-ins by runtime name, and how many elements of each parameter a checkpoint has to fill.
        """
        live = [
            (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
            for layer in self._model.modules()
        ]
        try:
            for layer, parameters, buffers, _ in live:
                recorded, recorded_buffers = vllm.get_layerwise_info(layer).restore_metadata
                _put(layer, _stand_ins(layer, recorded, parameters), _stand_ins(layer, recorded_buffers, buffers))
            targets: dict[str, Tensor] = dict(self._model.named_parameters())
            needed = {
                name: vllm.get_tensor_load_numel(tensor)
                for name, tensor in targets.items()
                if name.rpartition(".")[2] not in vllm.SKIP_LOAD_TENSORS
            }
            targets.update(self._model.named_buffers())
            yield targets, needed
        finally:
            for layer, parameters, buffers, transient in live:
                _put(layer, parameters, buffers)
                layer._non_persistent_buffers_set.clear()
                layer._non_persistent_buffers_set.update(transient)


def _put(layer: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    for own, tensors in ((layer._parameters, parameters), (layer._buffers, buffers)):
        own.clear()
        own.update(tensors)


def _stand_ins(layer: nn.Module, recorded: dict[str, Tensor], live: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's tensors in checkpoint form, without data, as `restore_layer_on_meta` would leave them.

    Biases are never recorded, and keep their live form; what only processing made has no place in a checkpoint.
    """
    kept = vllm.SKIP_TENSORS
    found: dict[str, Any] = {name: tensor for name, tensor in live.items() if tensor is None or name in kept}
    for name, tensor in {**{"bias": live.get("bias")}, **recorded}.items():
        if tensor is not None:
            found[name] = vllm.restore_layer_refs(vllm.to_meta_tensor(tensor), layer)
            loader = vllm._get_original_loader(found[name])  # an earlier reload may have left its wrapper
            if loader is not getattr(found[name], "weight_loader", loader):
                found[name].weight_loader = loader
    return found
