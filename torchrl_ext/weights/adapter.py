"""A LoRA adapter as weights of its own: PEFT's tensors and its config, without the base model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.peft import is_peft
from torchrl_ext.weights.shards.blocks import Shard
from torchrl_ext.weights.shards.dtensor import require_whole
from torchrl_ext.weights.source import Row, WeightSource, full
from torchrl_ext.weights.tensorfile import TensorFile

__all__ = [
    "ADAPTER_CONFIG", "AdapterFolder", "AdapterSource", "adapter_label", "adapter_rank", "adapter_version",
    "as_adapter",
]  # fmt: skip

ADAPTER_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base as it is; PiSSA, OLoRA, CorDA and LoftQ move part of it into the adapter."""


@final
class AdapterSource(WeightSource):
    """The tensors that ``PeftModel.save_pretrained`` would write, under the names that it gives them.

    Args:
        module: a ``PeftModel``, or a module that contains one.
        adapter: its adapter; None for the active one.

    Raises:
        ConfigError: there is no such adapter, it is no LoRA, or its initialisation changed the base weights.
    """

    def __init__(self, module: nn.Module, adapter: str | None = None) -> None:
        self._model = _peft_model(module)
        self._adapter = _active(self._model) if adapter is None else adapter
        if self._adapter not in self._model.peft_config:
            raise ConfigError(
                f"the module has no adapter {self._adapter!r}", expected=f"one of {', '.join(self._model.peft_config)}"
            )
        _check(self._config())

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self._tensors().items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors().items():
            yield name, full(tensor)

    def shards(self) -> Iterator[Shard]:
        for name, tensor in self._tensors().items():
            yield from Row(name, tensor, partial(full, tensor)).shards()

    def files(self) -> Mapping[str, bytes]:
        config = self._config() | {"inference_mode": True}
        return {ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}

    def _tensors(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._model, adapter_name=self._adapter, save_embedding_layers=False)

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
        self._folder = Path(folder)
        try:
            self._files = {ADAPTER_CONFIG: (self._folder / ADAPTER_CONFIG).read_bytes()}
            _check(json.loads(self._files[ADAPTER_CONFIG]))
            with_tensors = TensorFile(self._folder / _TENSORS)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{error.filename} is not there",
                expected=f"an adapter as PEFT saves it: {ADAPTER_CONFIG} and {_TENSORS}",
            ) from None
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._folder / ADAPTER_CONFIG} is no JSON: {error}") from error
        self._params = tuple(with_tensors.params())
        with_tensors.close()

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        file = TensorFile(self._folder / _TENSORS)
        try:
            for meta in self._params:
                yield meta.name, file.read(meta.name, None)[0]
        finally:
            file.close()

    def files(self) -> Mapping[str, bytes]:
        return self._files


def as_adapter(model: Any, adapter: str | None = None) -> WeightSource:
    """Return the source for a PEFT module, or for a directory that PEFT has written.

    Args:
        model: the module or the directory; a WeightSource is returned as it is.
        adapter: which adapter of the module; None for the active one.

    Raises:
        ConfigError: it holds no adapter that can be sent.
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


def _active(model: Any) -> str:
    names = model.active_adapters
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} adapters are active ({', '.join(names)})",
            expected="one",
            hint="say which one to send: adapter=...",
        )
    return names[0]


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"the adapter is of PEFT's kind {config.get('peft_type')!r}", expected="'LORA'")
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_INITS:
        raise ConfigError(
            f"an adapter begun with init_lora_weights={begun!r} goes with base weights that it has changed",
            expected="an adapter for the base weights that the engines serve",
            hint="send the merged weights with WeightSender, or begin with another init_lora_weights",
        )


def adapter_label(name: str, version: int) -> str:
    """Return what an engine calls one version of a LoRA adapter: ``"policy-lora@7"``."""
    return f"{name}@{version}"


def adapter_version(label: str) -> int | None:
    """Return the version in an adapter's label: 7 for ``"policy-lora@7"``, None for a name without a version."""
    number = label.rpartition("@")[2]
    return int(number) if "@" in label and len(number) < 19 and number.isascii() and number.isdecimal() else None


def adapter_rank(params: Iterable[ParamMeta]) -> int:
    """Return the greatest rank among an adapter's layers; 0 where it has none."""
    return max(
        (meta.shape[0] for meta in params if ".lora_A." in meta.name or "lora_embedding_A" in meta.name), default=0
    )
