"""How checkpoint tensors land in a vLLM model: through its own loader, layer by layer.

Layerwise reload (`vllm.model_executor.model_loader.reload`, 0.32) puts meta tensors in checkpoint form in place of a
layer's parameters, buffers what is loaded, and builds the runtime form (fused, packed, quantised) when the layer is
complete. That works for tensor parallelism and for linears that oneDNN packed on a CPU, which cannot be written to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from torchrl_ext.errors import NotConnectedError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.landing.patcher import Piece
from torchrl_ext.landing.placement import Landing, Placement, record
from torchrl_ext.landing.runtime import Reading
from torchrl_ext.plugins.loader import PluginLoader
from torchrl_ext.plugins.refusals import (
    incomplete,
    missing,
    rebalanced,
    refuse_other_shapes,
    refuse_rounding,
    refuse_unfinished,
    shapes_of,
    unknown,
    unreadable,
)
from torchrl_ext.plugins.vllm.patches import VLLMPatches
from torchrl_ext.plugins.vllm.runtime import REPAIRS, also_packed, kernel_of, made_up, readings
from torchrl_ext.proof.known_weights import announced
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import position_digest

__all__ = ["VLLMLoader"]


class VLLMLoader(PluginLoader):
    """Loads into one worker's model.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        super().__init__(model, alone=vllm_config.parallel_config.world_size == 1)
        self._config = vllm_config
        self._shapes = shapes_of(vllm_config.model_config.model)
        self._placement: Placement | None = None
        self._patches: VLLMPatches | None = None
        self._repaired: dict[str, str] = {}
        self._forms: Mapping[str, Tensor] = {}
        self._loading = self._whole_model = False

    def params(self) -> tuple[ParamMeta, ...]:
        return self._placement.params if self._placement is not None else ()

    @property
    def placement(self) -> Placement | None:
        """Where the parameters that were checked last land on this worker."""
        return self._placement

    def check(self, params: Iterable[ParamMeta]) -> None:
        """See `WeightLoader.check`. The model's loader runs over tensors without data; the live ones are not touched.

        Raises:
            ManifestError: names the first parameter that is unknown, missing, or of another shape or dtype.
        """
        params = tuple(params)
        if self._config.parallel_config.enable_eplb:
            raise rebalanced()
        if self._placement is not None and self._placement.params == params:
            return
        refuse_other_shapes(params, self._shapes)
        self.roll_back()
        with self._on_meta() as (targets, needed):
            placement = record(self._model.load_weights, params, targets)
        self._refuse_strangers(placement)
        self._refuse_gaps(placement, needed)
        refuse_rounding(placement)
        self._placement, self._forms = placement, targets
        self._pieces = {} if self._whole_model else self._writable(placement, targets)
        self._patches = VLLMPatches(self._model, self._config, placement, self._pieces, self._repair)
        if self._whole_model:
            self._patches.land_whole()

    def patchable(self, name: str) -> bool:
        return self._checked().patchable(name)

    def position_digests(self) -> dict[str, str]:
        """What this worker can read back of its model; else the checkpoint that the engine was started with, while
        nothing else was loaded.

        Raises:
            ConfigError: it can tell neither.
        """
        held = self._checked().held() if self._alone else {}
        if not held and self.touched:
            raise unreadable()
        start = self.start_weights()
        if not held and start is None:
            raise unreadable()
        return held or {name: position_digest(tensor).hex() for name, tensor in start or ()}

    def stage(self, changes: Changes) -> None:
        self._checked().stage(changes)

    @property
    def staged_bytes(self) -> int:
        """Memory that staged changes hold until the commit, in bytes."""
        return self._checked().staged_bytes

    def confirm(self) -> None:
        self._checked().confirm()

    def commit(self) -> None:
        self.roll_back()
        self._handed, self._repaired = {}, {}
        self.touched = self.touched or not self._rehearsing
        self._checked().commit()

    def _checked(self) -> VLLMPatches:
        if self._patches is None:
            raise NotConnectedError(
                "the trainer's parameters were not checked against this model", hint="connect first"
            )
        return self._patches

    def start(self) -> None:
        self.roll_back()
        self._handed, self._repaired = {}, {}
        initialize_layerwise_reload(self._model)
        self._loading, self.touched = True, self.touched or not self._rehearsing
        if self._patches is not None:
            self._patches.forget()

    def finish(self) -> None:
        """End the reload.

        Raises:
            IntegrityError: parameters that were announced did not come.
        """
        if not self._loading:
            return
        refuse_unfinished(self.missing())
        finalize_layerwise_reload(self._model, self._config.model_config)
        self._repair(list(self._model.modules()))
        self._loading = False

    def invalidate(self) -> None:
        self.touched, self._handed = True, {}
        if self._patches is not None:
            self._patches.forget()

    def reloaded(self) -> None:
        """See `WeightLoader.reloaded`. vLLM did so by `reload_weights`."""
        self._repair(list(self._model.modules()))

    # what a rehearsal asks

    def known_repairs(self) -> tuple[str, ...]:
        """`REPAIRS`, but for those that ``TORCHRL_EXT_LEAVE_OUT`` in its environment names, comma-separated."""
        left_out = os.environ.get("TORCHRL_EXT_LEAVE_OUT", "").split(",")
        return tuple(step for step in REPAIRS if step not in left_out)

    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        if self._config.load_config.load_format == "dummy":
            return made_up(self._placement, self._forms) if self._placement is not None else None
        model = self._config.model_config
        return announced(CheckpointSource(model.model), self.params(), model.dtype) if self._shapes else None

    def ready(self) -> None:
        if self._placement is None and self._shapes:
            self.check(CheckpointSource(self._config.model_config.model).params())

    def runtime(self) -> Iterator[Reading]:
        return readings(self._model, self._config.model_config.dtype)

    def landings(self, name: str) -> Iterable[Landing]:
        return self._placement.landings.get(name, ()) if self._placement is not None else ()

    def kernel(self, layer: str) -> str:
        return kernel_of(self._model.get_submodule(layer))

    def land_whole(self) -> None:
        self._pieces, self._whole_model = {}, True
        self._checked().land_whole()

    def repaired(self) -> dict[str, str]:
        return dict(self._repaired)

    @torch.no_grad()
    def rehearse(self) -> Info:
        return super().rehearse()

    def _repair(self, layers: Collection[nn.Module]) -> None:
        names = {id(layer): name for name, layer in self._model.named_modules()}
        for step in REPAIRS:
            if step in self.repairs:
                for layer in REPAIRS[step](self._model, layers):
                    self._repaired[names[id(layer)]] = step

    def _writable(self, placement: Placement, forms: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        """See `_in_place`; a tensor is not plain whose form is another one in the engine, or that is packed beside."""
        aside = {tensor.data_ptr() for tensor in also_packed(self._model)}

        def plain(tensor: Tensor | None, landing: Landing) -> bool:
            return (
                tensor is not None and _form(tensor) == _form(forms[landing.param]) and tensor.data_ptr() not in aside
            )

        return self._in_place(placement, self.start_weights, plain) | {name: [] for name in placement.nowhere()}

    def missing(self) -> list[str]:
        """Parameters of an unfinished reload that did not come yet."""
        if not self._loading or self._placement is None or self._rehearsing:
            return []
        return [meta.name for meta in self._placement.params if meta.name not in self._handed]

    def roll_back(self) -> None:
        """Put live tensors back into layers that an abandoned update left in checkpoint form.

        Their values are the old ones, or the new ones where a layer was complete; either way the next update covers
        all of them.
        """
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        self._loading = False

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
                recorded, recorded_buffers = get_layerwise_info(layer).restore_metadata
                layer._parameters.clear()
                layer._parameters.update(_stand_ins(layer, recorded, parameters))
                layer._buffers.clear()
                layer._buffers.update(_stand_ins(layer, recorded_buffers, buffers))
            targets: dict[str, Tensor] = dict(self._model.named_parameters())
            needed = {
                name: get_tensor_load_numel(tensor)
                for name, tensor in targets.items()
                if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS
            }
            targets.update(self._model.named_buffers())
            yield targets, needed
        finally:
            for layer, parameters, buffers, transient in live:
                layer._parameters.clear()
                layer._parameters.update(parameters)
                layer._buffers.clear()
                layer._buffers.update(buffers)
                layer._non_persistent_buffers_set.clear()
                layer._non_persistent_buffers_set.update(transient)

    def _refuse_strangers(self, placement: Placement) -> None:
        """Names that land nowhere. Where workers hold different parts of the model, the checkpoint's own names may."""
        parallel = self._config.parallel_config
        shared = parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel
        for name in placement.nowhere():
            elsewhere = shared and (name in self._shapes or not self._shapes)
            if not (elsewhere or (self._is_tied() and name.endswith("lm_head.weight"))):
                raise unknown(name)

    def _is_tied(self) -> bool:
        """Whether the output embedding is the input embedding."""
        return bool(getattr(self._config.model_config.hf_config.get_text_config(), "tie_word_embeddings", False))

    def _refuse_gaps(self, placement: Placement, needed: dict[str, int]) -> None:
        """Parameters that the update would leave as they are. Quantised models make some of theirs themselves."""
        if self._config.quant_config is not None:
            return
        for param, numel in needed.items():
            if self._is_tied() and param.endswith("lm_head.weight") and not placement.written[param]:
                continue  # the live one is the input embedding's; only its stand-in is a tensor of its own
            if placement.written[param] < numel:
                names = {meta.name for meta in placement.params}
                prefix = param.rpartition(".")[0].rpartition(".")[0]
                absent = [name for name in self._shapes if name not in names and name.startswith(prefix)]
                raise missing(absent[0]) if absent else incomplete(placement, param, numel)


def _stand_ins(layer: nn.Module, recorded: dict[str, Tensor], live: dict[str, Any]) -> dict[str, Any]:
    """Checkpoint forms on tensors of their own, as `restore_layer_on_meta` would leave the layer.

    Biases are never recorded, and keep their live form; what only processing made has no place in a checkpoint.
    """
    found: dict[str, Any] = {name: tensor for name, tensor in live.items() if tensor is None or name in SKIP_TENSORS}
    for name, tensor in {**{"bias": live.get("bias")}, **recorded}.items():
        if tensor is not None:
            found[name] = restore_layer_refs(to_meta_tensor(tensor), layer)
            loader = _get_original_loader(found[name])  # an earlier reload may have left its wrapper
            if loader is not getattr(found[name], "weight_loader", loader):
                found[name].weight_loader = loader
    return found


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
