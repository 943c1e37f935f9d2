"""PEFT modules: their LoRA weights are sent merged, or as a separate adapter; the live module is unchanged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import model_files
from torchrl_ext.weights.shards.dtensor import require_whole
from torchrl_ext.weights.source import Row, RowSource, WeightSource, full, named_tensors, same_memory
from torchrl_ext.weights.tensorfile import TensorFile

__all__ = [
    "ADAPTER_CONFIG", "AdapterFolder", "AdapterSource", "PeftSource", "adapter_label", "adapter_rank",
    "adapter_version", "as_adapter", "is_peft",
]  # fmt: skip

_PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ move part of it into the adapter."""


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


@final
class AdapterSource(RowSource):
    """The tensors that ``PeftModel.save_pretrained`` would write, under the names that it gives them.

    Args:
        module: a ``PeftModel``, or a module that contains one.
        adapter: its adapter; None for the active one.

    Raises:
        ConfigError: the adapter does not exist, is not LoRA, or its initialisation changed the base weights.
    """

    def __init__(self, module: nn.Module, adapter: str | None = None) -> None:
        self._model = _peft_model(module)
        self._adapter = _active_adapter(self._model) if adapter is None else adapter
        if self._adapter not in self._model.peft_config:
            raise ConfigError(
                f"the module has no adapter {self._adapter!r}", expected=f"one of {', '.join(self._model.peft_config)}"
            )
        _require_plain_lora(self._config())

    def rows(self) -> Iterable[Row]:
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self._model, adapter_name=self._adapter, save_embedding_layers=False)
        return [Row(name, tensor, partial(full, tensor)) for name, tensor in found.items()]

    def files(self) -> Mapping[str, bytes]:
        config = self._config() | {"inference_mode": True}
        return {ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}

    def _config(self) -> dict[str, Any]:
        found = self._model.peft_config[self._adapter].to_dict()
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
        return json.loads(json.dumps(plain))  # what JSON cannot hold fails here, before anything is written


@final
class AdapterFolder(WeightSource):
    """An adapter that ``PeftModel.save_pretrained`` has written.

    Args:
        folder: holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigError: one of the two is missing, or the adapter is not of a kind that `AdapterSource` takes.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._tensors = Path(folder) / _TENSORS
        config = Path(folder) / ADAPTER_CONFIG
        try:
            self._files = {ADAPTER_CONFIG: config.read_bytes()}
            _require_plain_lora(json.loads(self._files[ADAPTER_CONFIG]))
            with closing(TensorFile(self._tensors)) as file:
                self._params = file.params()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{error.filename} is not there",
                expected=f"the files of an adapter that PEFT saved: {ADAPTER_CONFIG} and {_TENSORS}",
            ) from None
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{config} is not JSON: {error}") from error

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with closing(TensorFile(self._tensors)) as file:
            for meta in self._params:
                yield meta.name, file.read(meta.name)[0]

    def files(self) -> Mapping[str, bytes]:
        return self._files


def as_adapter(model: Any, adapter: str | None = None) -> WeightSource:
    """Return the source for a PEFT module, or for a directory that PEFT has written.

    Args:
        model: the module or the directory; a WeightSource is returned as it is.
        adapter: which adapter of the module; None for the active one.

    Raises:
        ConfigError: it has no adapter that can be sent.
    """
    if isinstance(model, WeightSource):
        return model
    if isinstance(model, (str, os.PathLike)):
        return AdapterFolder(model)
    if isinstance(model, nn.Module) and is_peft(model):
        require_whole(model)
        return AdapterSource(model, adapter)
    raise ConfigError(
        f"a {type(model).__name__} holds no LoRA adapter",
        expected="a PeftModel, a module around one, or a directory that PEFT has written",
        hint="wrap the model with peft.get_peft_model(model, LoraConfig(...))",
    )


def _peft_model(module: nn.Module) -> Any:
    from peft import PeftModel

    found = next((part for part in module.modules() if isinstance(part, PeftModel)), None)
    if found is None:
        raise ConfigError(
            "the module has LoRA layers and no PEFT config: it was adapted in place",
            expected="a PeftModel, whose config the engines need",
            hint="make it with peft.get_peft_model(model, LoraConfig(...))",
        )
    return found


def _active_adapter(model: Any) -> str:
    names = model.active_adapters
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} adapters are active ({', '.join(names)})",
            expected="one",
            hint="name the adapter to send: adapter=...",
        )
    return names[0]


def _require_plain_lora(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"the adapter is of PEFT's kind {config.get('peft_type')!r}", expected="'LORA'")
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_INITS:
        raise ConfigError(
            f"an adapter begun with init_lora_weights={begun!r} fits only base weights that its initialisation changed",
            expected="an adapter for the base weights that the engines serve",
            hint="send the merged weights with WeightSender, or use another init_lora_weights",
        )


def adapter_label(name: str, version: int) -> str:
    """Return an engine's label for one version of a LoRA adapter: ``"policy-lora@7"``."""
    return f"{name}@{version}"


def adapter_version(label: str) -> int | None:
    """Return the version in an adapter's label: 7 for ``"policy-lora@7"``, None for a name without a version."""
    number = label.rpartition("@")[2]
    return int(number) if "@" in label and len(number) < 19 and number.isascii() and number.isdecimal() else None


def adapter_rank(params: Iterable[ParamMeta]) -> int:
    """Return the largest rank among an adapter's layers; 0 if it has none."""
    return max(
        (meta.shape[0] for meta in params if ".lora_A." in meta.name or "lora_embedding_A" in meta.name), default=0
    )
