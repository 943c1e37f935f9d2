"""PEFT modules: their LoRA weights are sent merged; the live module is unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.data.weights.source import Row, RowSource, full, model_files, named_tensors, same_memory

__all__ = ["PeftSource", "is_peft"]

_PREFIX = "base_model.model."


def is_peft(module: nn.Module) -> bool:
    """Return whether ``module`` is, or contains, a module that PEFT has adapted; never imports peft."""
    if "peft" not in sys.modules:  # then nobody can have made one
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, (PeftModel, BaseTunerLayer)) for part in module.modules())


class PeftSource(RowSource):
    """The merged weights of a LoRA module under the names of its base checkpoint.

    A weight with active adapters is sent as ``W + sum_i scaling_i B_i A_i`` (Hu et al. 2021, equation 3; each term by
    PEFT's own ``get_delta_weight``), computed out of place for one tensor at a time. Layers in ``modules_to_save``
    are sent as trained. Adapters that are disabled, inactive or already merged into the base are not added.

    Args:
        module: a ``PeftModel``, or a module that contains one.

    Raises:
        ConfigError: a layer, which the message names, has an adapter other than plain LoRA of a linear, embedding, 2-d
            or 3-d convolution layer (DoRA, prompt tuning, ...).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wrappers()

    def rows(self) -> Iterable[Row]:
        for name, tensor, layer in self._layers():
            made = "" if layer is None else "adapters are merged into it"
            yield Row(name, tensor, partial(_merged, tensor, layer), made)

    def files(self) -> Mapping[str, bytes]:
        return model_files(self._module)

    def _layers(self) -> Iterator[tuple[str, Tensor, Any]]:
        """Yield checkpoint name, live tensor, and the LoRA layer that adds to it; tied tensors once."""
        layers, saved = self._wrappers()
        seen: set[Any] = set()
        names: set[str] = set()
        for name, tensor in named_tensors(self._module):
            path = _kept(name, layers, saved)
            if path is None:
                continue
            layer = layers.get(path.removesuffix(".base_layer.weight"))
            layer = layer if layer is not None and _active(layer) else None
            checkpoint_name = path.replace(_PREFIX, "").replace(".base_layer.", ".")
            if checkpoint_name in names:
                raise ManifestError(f"two tensors of the adapted module are called {checkpoint_name!r}")
            names.add(checkpoint_name)
            key = (same_memory(tensor), id(layer))
            if key not in seen:
                seen.add(key)
                yield checkpoint_name, tensor, layer

    def _wrappers(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return LoRA layers by path; and for each ``modules_to_save`` wrapper the child in use, by path."""
        from peft import PeftModel
        from peft.tuners.lora import Conv2d, Conv3d, Embedding, Linear, LoraModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        layers, saved = {}, {}
        for path, part in self._module.named_modules(remove_duplicate=False):
            if isinstance(part, PeftModel) and not isinstance(part.base_model, LoraModel):
                raise _refused(path, type(part.base_model).__name__)
            if isinstance(part, ModulesToSaveWrapper):
                off = part.disable_adapters or not part.active_adapters
                saved[path] = "original_module" if off else f"modules_to_save.{part.active_adapters[0]}"
            elif isinstance(part, AuxiliaryTrainingWrapper):
                raise _refused(path, type(part).__name__)
            elif isinstance(part, BaseTunerLayer):
                if not isinstance(part, (Linear, Embedding, Conv2d, Conv3d)):
                    raise _refused(path, type(part).__name__)
                for adapter in _active(part):
                    if part.lora_bias.get(adapter):
                        raise _refused(path, "LoRA with a bias")
                    if adapter in part.lora_variant:
                        raise _refused(path, type(part.lora_variant[adapter]).__name__)
                layers[path] = part
        return layers, saved


@torch.no_grad()
def _merged(tensor: Tensor, layer: Any) -> Tensor:
    """Return a full weight, with what the active adapters of its layer, if it has any, add to it."""
    if layer is not None:
        tensor = tensor.detach().clone()
        for adapter in _active(layer):
            tensor += layer.get_delta_weight(adapter)  # a wider adapter is rounded once, after the addition
    return full(tensor)


def _active(layer: Any) -> list[str]:
    """Return the adapters of a LoRA layer that its output contains and its base weight does not."""
    if layer.disable_adapters:
        return []
    present = {*layer.lora_A.keys(), *layer.lora_embedding_A.keys()}
    return [name for name in layer.active_adapters if name in present and name not in layer.merged_adapters]


def _kept(name: str, layers: Mapping[str, Any], saved: Mapping[str, str]) -> str | None:
    """Return the path of a parameter without its `modules_to_save` part; None for parameters of adapters."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        rest = ".".join(parts[end:])
        if path in layers and not rest.startswith("base_layer."):
            return None
        if path in saved:
            return f"{path}.{rest.removeprefix(saved[path] + '.')}" if rest.startswith(saved[path] + ".") else None
    return name


def _refused(path: str, kind: str) -> ConfigError:
    return ConfigError(
        f"the adapter {kind} at {path or 'the root'!r} cannot be merged on the way out",
        expected="plain LoRA of linear, embedding and (2-d, 3-d) convolution layers, and modules_to_save",
        hint="call merge_and_unload() on a copy and send the copy, or pass your own WeightSource",
    )
