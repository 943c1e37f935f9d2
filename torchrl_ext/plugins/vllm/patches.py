"""Changes landing in a vLLM model: element by element where the live bytes are the checkpoint's, else by their layer.

Parameters whose runtime form differs from the loaded one (packed, shuffled, quantised) cannot be written to. Their
checkpoint tensors are kept on the host by the transport, patched there, and loaded again: the layers that hold them,
and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from torchrl_ext.landing.loader import Changes
from torchrl_ext.landing.patcher import Coverage, Patcher, Piece, compare
from torchrl_ext.landing.placement import Placement
from torchrl_ext.plugins.workers import combine
from torchrl_ext.weights.digests import PositionDigest, position_digest

__all__ = ["VLLMPatches"]


class VLLMPatches:
    """The changes of one worker, from staging to commit.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
        placement: where checkpoint tensors land on this worker.
        pieces: for each checkpoint tensor that can be written in place the copies that the loader makes of it.
        repair: finishes what the engine's own reload leaves out, given the layers that were loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        placement: Placement,
        pieces: Mapping[str, Sequence[Piece]],
        repair: Callable[[Collection[nn.Module]], None],
    ) -> None:
        self._model: Any = model  # every model of vLLM has `load_weights`
        self._config, self._placement, self._repair = vllm_config, placement, repair
        self._patcher = Patcher(pieces)
        self._whole_model = False
        self._whole: list[tuple[str, Tensor]] = []
        self._found: dict[str, Coverage] = {}
        self._expected: Mapping[str, str] = {}

    def patchable(self, name: str) -> bool:
        """Whether changes of this checkpoint tensor can be written element by element."""
        return name in self._patcher.pieces

    def land_whole(self) -> None:
        """Write nothing in place: whatever changes, the whole model is loaded."""
        self._patcher, self._whole_model = Patcher({}), True

    def forget(self) -> None:
        """The model was loaded in another way."""
        self._patcher.forget()
        self._whole.clear()

    def held(self) -> dict[str, str]:
        """Position digest of every tensor, where all of them can be read back on this worker alone; else nothing."""
        if any(not self.patchable(meta.name) for meta in self._placement.params):
            return {}
        return {name: digest.hex() for name, digest in self._together(self._patcher.held()).items()}

    def stage(self, changes: Changes) -> None:
        """Translate what can be patched; bring what cannot to its new value on the host."""
        self._whole.clear()
        self._found, self._expected = self._patcher.stage(changes), changes.digests
        touched = self._patcher.others
        self._whole = list(changes.whole(self._with_neighbours(touched))) if touched else []
        compare({name: position_digest(tensor) for name, tensor in self._whole}, self._expected)

    @property
    def staged_bytes(self) -> int:
        """Memory that waits for the commit."""
        return self._patcher.staged_bytes + sum(tensor.nbytes for _, tensor in self._whole)

    def confirm(self) -> None:
        """Hold what all workers of the engine staged against the trainer's digests."""
        compare(self._together(self._found), self._expected)

    @torch.no_grad()
    def commit(self) -> None:
        """Write. Only here the model has to be idle."""
        self._patcher.commit()
        whole, self._whole = self._whole, []
        if whole:
            layers = self._begin(frozenset(self._layers(name for name, _ in whole)))
            self._model.load_weights(iter(whole))
            finalize_layerwise_reload(self._model, self._config.model_config)
            self._repair(layers)

    def _layers(self, names: Iterable[str]) -> set[str]:
        """Modules whose parameters these checkpoint tensors land in."""
        return {
            landing.param.rpartition(".")[0] for name in names for landing in self._placement.landings.get(name, ())
        }

    def _with_neighbours(self, names: set[str]) -> set[str]:
        """These names, and those that share a layer with them: a layer is loaded as a whole."""
        if self._whole_model:
            return {meta.name for meta in self._placement.params}
        layers = self._layers(names)
        return {
            meta.name
            for meta in self._placement.params
            if not self.patchable(meta.name) and self._layers([meta.name]) & layers
        }

    def _begin(self, layers: frozenset[str]) -> list[nn.Module]:
        """`initialize_layerwise_reload`, of some layers, and of those that derive something from them."""
        if self._whole_model:
            initialize_layerwise_reload(self._model)
            return list(self._model.modules())
        begun = []
        for name, layer in self._model.named_modules():
            absorbs = isinstance(layer, MLAAttention) and f"{name.rpartition('.')[0]}.kv_b_proj" in layers
            if name in layers or absorbs:
                info = get_layerwise_info(layer)
                info.kernel_tensors = get_layer_params_buffers(layer)
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
                restore_layer_on_meta(layer, info)
                initialize_online_processing(layer)
                begun.append(layer)
        return begun

    def _together(self, own: Mapping[str, Coverage]) -> dict[str, PositionDigest]:
        """Digests of the tensors that the workers hold together; those that overlap in part are left out."""
        return combine(own, self._patcher.pieces, self._placement.params, get_tp_group().cpu_group)
