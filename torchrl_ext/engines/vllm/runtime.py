"""Read what a vLLM model computes with, and take the steps that vLLM's own reload leaves out.

Nothing of vLLM is patched: each repair calls a public step of the layer itself, as vLLM does when it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from torchrl_ext.engines.runtime import Reading, reachable

__all__ = ["REPAIRS", "also_packed", "readings"]

log = logging.getLogger("torchrl_ext")

_ROWS = 4


def readings(model: nn.Module, dtype: torch.dtype) -> Iterator[Reading]:
    """Yield every tensor that can be reached, and the outputs of packed and quantised linear layers for a fixed input.

    oneDNN keeps packed weights in memory of its own (vLLM on a CPU), behind a handle that does not show them.

    Args:
        model: a worker's model.
        dtype: in which the engine computes.
    """
    yield from reachable(model)
    for path, layer in model.named_modules():
        multiplies = isinstance(layer, (LinearBase, ParallelLMHead))
        quantised = multiplies and not type(layer.quant_method).__name__.startswith("Unquantized")
        if multiplies and (quantised or _multiplies_packed(layer)):
            answer = _answer(layer, dtype)
            if answer is not None:
                yield Reading(layer=path, name="answer", tensor=answer, derived=True, of="weight")


def _answer(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Return a layer's output for a fixed input; None where its kernel does not take that."""
    loaded = get_layerwise_info(layer).restore_metadata[0].get("weight")  # outputs, inputs
    per_rank: Any = getattr(layer, "input_size_per_partition", None)
    inputs = int(per_rank if per_rank is not None or loaded is None else loaded.shape[-1])
    fixed = torch.randn(_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    device = next((tensor.device for tensor in layer.parameters()), torch.device("cpu"))
    try:
        return layer.quant_method.apply(layer, fixed.to(device), None)
    except Exception as error:  # a third-party kernel may raise anything
        log.warning("a %s cannot be probed by itself", type(layer).__name__, exc_info=error)
        return None


def _multiplies_packed(layer: nn.Module) -> bool:
    """Return whether a layer computes with a packed copy of its weight.

    The function that it calls holds the copy in its closure, or nothing where nothing was packed
    (`dispatch_cpu_unquantized_gemm`). The kernel of a quantised one keeps a handle (`CPUInt8ScaledMMLinearKernel`).
    """
    kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
    if getattr(kernel, "dnnl_handler", None) is not None:
        return True
    return bool(getattr(getattr(layer, "cpu_linear", None), "__closure__", None))


def _pack_experts(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Bring experts that were loaded into the form of their kernel.

    `UnquantizedFusedMoEMethod` (0.32) does so on the first processing only: a reload copies rows as they came over what
    the kernel had packed (CPU) or rearranged.
    """
    packed = []
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
            packed.append(layer)
    return packed


def _pack_tied(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Pack again the output embeddings that share the input embedding's weight.

    A layerwise reload processes the layer that was loaded, and the other one's packed copy (CPU) would stay as it was.
    """
    inputs: list[Any] = [layer.weight for layer in model.modules() if type(layer) is VocabParallelEmbedding]
    looked_up = {weight.data_ptr() for weight in inputs if weight.numel()}
    packed = []
    for head in (layer for layer in model.modules() if isinstance(layer, ParallelLMHead)):
        if head.weight.numel() and head.weight.data_ptr() in looked_up:
            head.quant_method.process_weights_after_loading(head)
            packed.append(head)
    return packed


def _follow_convolutions(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Copy convolution weights into the views of them that state-space mixers (`MambaMixer2`) took at their start.

    A CPU packs such a weight in bfloat16 into other memory, and keeps the loaded one beside it: the view shows neither.
    """
    followed = []
    for mixer in model.modules():
        view = dict(mixer._buffers).get("conv_weights")
        loaded = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if view is not None and loaded is not None and view.shape == loaded.shape:
            view.copy_(loaded)
            followed.append(mixer)
    return followed


REPAIRS: dict[str, Callable[[nn.Module, Collection[nn.Module]], list[nn.Module]]] = {
    "experts.process_weights_after_loading": _pack_experts,
    "tied lm_head.process_weights_after_loading": _pack_tied,
    "mixer.conv_weights": _follow_convolutions,
}
"""Repairs by name: each takes the model and the layers that were loaded, and returns the layers that it finished."""


def also_packed(model: nn.Module) -> Iterator[Tensor]:
    """Yield weights of layers that compute with a packed copy of them, which a write to the weight would not reach.

    vLLM on a CPU keeps the weight of an output embedding beside the copy.
    """
    for layer in model.modules():
        looked_up = type(layer) is VocabParallelEmbedding  # it never multiplies
        if not looked_up and _multiplies_packed(layer):
            yield from (parameter for parameter in layer.parameters(recurse=False) if parameter.numel())
