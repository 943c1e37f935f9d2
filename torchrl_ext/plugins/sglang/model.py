"""What an SGLang model is made of, as far as loading goes.

SGLang's loaders write into the parameters that it computes with. Where a layer's quantisation method rebuilds them
after loading (quantised models, weights packed for AMX), the model's loader alone can do the writing, between
`restore_weights_before_loading` and `postprocess_weights` (`sglang.srt.model_loader.loader`, 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor, nn

__all__ = ["can_unpack", "pack", "packs", "stand_ins", "unpack"]


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Swap every parameter and buffer for a stand-in without data, and back; yields the stand-ins by name.

    What a loader derives from them meanwhile (`post_load_weights`) goes as well.
    """
    live = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    attributes = [(module, dict(vars(module))) for module, _, _ in live]
    found: dict[int, Any] = {}  # a tied tensor keeps its identity
    try:
        for module, parameters, buffers in live:
            for own, kept in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in kept.items():
                    if tensor is not None:
                        own[name] = found.setdefault(id(tensor), _stand_in(tensor))
        yield {**dict(model.named_parameters()), **dict(model.named_buffers())}
    finally:
        for module, parameters, buffers in live:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for module, kept in attributes:
            vars(module).update(kept)


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the meta device that a loader cannot tell from ``tensor``: its class and its loader's marks."""
    found = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(found, requires_grad=False)
    found.__class__ = tensor.__class__
    found.__dict__ = dict(tensor.__dict__)
    return found


def packs(model: nn.Module) -> bool:
    """Whether layers rebuild their parameters after loading, so that the model's loader cannot write to them."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()} - {"NoneType"}
    packed = any(getattr(module, "use_intel_amx_backend", False) for module in model.modules())
    return packed or not all(method.startswith("Unquantized") for method in methods)


def unpack(model: nn.Module) -> None:
    """Bring layers into the form that the model's loader writes to, as SGLang does before its own updates."""
    DefaultModelLoader.restore_weights_before_loading(model, next(model.parameters()).device)


def pack(model: nn.Module) -> None:
    """Inverse of `unpack`."""
    DefaultModelLoader.postprocess_weights(model, next(model.parameters()).device)


def can_unpack() -> bool:
    """Whether this SGLang can load a second time into layers that rebuild their weights (0.5.21 and later)."""
    return getattr(DefaultModelLoader, "restore_weights_before_loading", None) is not None
