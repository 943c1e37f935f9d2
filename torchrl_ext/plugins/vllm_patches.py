"""Changes landing in a vLLM model: element by element where a parameter is stored as it was loaded, else by its layer.

Parameters whose runtime form differs from the loaded one (packed by oneDNN, quantised) cannot be written to. Their
checkpoint tensors are kept on the host by the transport, patched there, and loaded again: the layers that hold them,
and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from torchrl_ext.plugins.workers import combine
from torchrl_ext.weights.landing import Coverage, Patcher, Piece, compare
from torchrl_ext.weights.loader import Staging
from torchrl_ext.weights.placement import Placement
from torchrl_ext.weights.position_digest import PositionDigest, position_digest

__all__ = ["VLLMPatches", "pack_tied"]


class VLLMPatches:
    """The changes of one worker, from staging to commit.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
        placement: where checkpoint tensors land on this worker.
        forms: runtime parameters as they were loaded, on the meta device, by name.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, placement: Placement, forms: Mapping[str, Tensor]) -> None:
        self._model, self._config, self._placement = model, vllm_config, placement
        self._patcher = Patcher(self._pieces(forms))
        self._whole: list[tuple[str, Tensor]] = []
        self._found: dict[str, Coverage] = {}
        self._expected: Mapping[str, str] = {}

    def patchable(self, name: str) -> bool:
        """Whether changes of this checkpoint tensor can be written element by element."""
        return name in self._patcher.pieces

    def forget(self) -> None:
        """The model was loaded in another way."""
        self._patcher.forget()
        self._whole.clear()

    def held(self) -> dict[str, str]:
        """Position digest of every tensor, where all of them can be read back on this worker alone; else nothing."""
        if any(not self.patchable(meta.name) for meta in self._placement.params):
            return {}
        return {name: digest.hex() for name, digest in self._together(self._patcher.held()).items()}

    def stage(self, changes: Staging) -> None:
        """Translate what can be patched; bring what cannot to its new value on the host."""
        self._whole.clear()
        self._found, self._expected = self._patcher.stage(changes), changes.digests
        touched = {patch.meta.name for patch in changes.patches() if not self.patchable(patch.meta.name)}
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
            self._begin(frozenset(self._layers(name for name, _ in whole)))
            self._model.load_weights(iter(whole))
            finalize_layerwise_reload(self._model, self._config.model_config)
            pack_tied(self._model)

    def _pieces(self, forms: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        if self._config.quant_config is not None or any(isinstance(m, MLAAttention) for m in self._model.modules()):
            return {}  # what is derived from these parameters would not follow
        live: dict[str, Tensor] = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        copied = {tensor.data_ptr() for tensor in _also_packed(self._model)}
        found = {}
        for meta in self._placement.params:
            landings = self._placement.landings[meta.name]
            plain = all(
                landing.exact
                and landing.dtype == meta.dtype
                and landing.param in live
                and _form(live[landing.param]) == _form(forms[landing.param])
                and live[landing.param].data_ptr() not in copied
                for landing in landings
            )
            if plain and not meta.dtype.is_complex:
                found[meta.name] = [Piece.of(live[landing.param], landing) for landing in landings]
        return found

    def _layers(self, names: Iterable[str]) -> set[str]:
        """Modules whose parameters these checkpoint tensors land in."""
        return {
            landing.param.rpartition(".")[0] for name in names for landing in self._placement.landings.get(name, ())
        }

    def _with_neighbours(self, names: set[str]) -> set[str]:
        """These names, and those that share a layer with them: a layer is loaded as a whole."""
        layers = self._layers(names)
        return {
            meta.name
            for meta in self._placement.params
            if not self.patchable(meta.name) and self._layers([meta.name]) & layers
        }

    def _begin(self, layers: frozenset[str]) -> None:
        """`initialize_layerwise_reload`, of some layers."""
        for name, layer in self._model.named_modules():
            if name in layers:
                info = get_layerwise_info(layer)
                info.kernel_tensors = get_layer_params_buffers(layer)
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
                restore_layer_on_meta(layer, info)
                initialize_online_processing(layer)

    def _together(self, own: Mapping[str, Coverage]) -> dict[str, PositionDigest]:
        """Digests of the tensors that the workers hold together; those that overlap in part are left out."""
        return combine(own, self._patcher.pieces, self._placement.params, get_tp_group().cpu_group)


def pack_tied(model: nn.Module) -> None:
    """Let output embeddings that share the input embedding's weight follow it.

    A layerwise reload processes the layer that was loaded, and the other one's packed copy (CPU) would stay as it was.
    """
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    inputs = [layer for layer in model.modules() if type(layer) is VocabParallelEmbedding]
    for head in heads:
        if any(_same_weight(head, layer) for layer in inputs):
            head.quant_method.process_weights_after_loading(head)


def _same_weight(one: nn.Module, other: nn.Module) -> bool:
    return one.weight.numel() > 0 and one.weight.data_ptr() == other.weight.data_ptr()


def _also_packed(model: nn.Module) -> Iterator[Tensor]:
    """Weights of layers that compute with a packed copy of them, which a write to the weight would not reach.

    vLLM on a CPU (`dispatch_cpu_unquantized_gemm`) keeps the weight of an output embedding beside the copy. What it
    calls holds the copy in its closure; where nothing was packed, it holds nothing.
    """
    for layer in model.modules():
        looked_up = type(layer) is VocabParallelEmbedding  # it never multiplies
        if not looked_up and getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
            yield from (parameter for parameter in layer.parameters(recurse=False) if parameter.numel())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
