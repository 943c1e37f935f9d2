"""`LoraPublisher` publishes LoRA adapters as PEFT directories, which engines load by routes of their own."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, final

from torch import Tensor, distributed, nn

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.files import sync
from torchrl_ext.control.client import EngineClient
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.stores.manifest import version_name
from torchrl_ext.data.weights.source import full

__all__ = ["LoraPublisher"]

_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""The settings of PEFT that every engine applies; SGLang 0.5.23 ignores other values of most without an error."""

_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ move part of it into the adapter."""


@final
class LoraPublisher:
    """Publishes versions of LoRA adapters, and has engines serve them beside the base weights.

    A version is a directory ``root/NAME/weight_v000007/`` with ``adapter_config.json`` and
    ``adapter_model.safetensors`` as PEFT writes them. It appears as a whole, and numbers are never used twice. Each
    engine then loads it by its own route, so it needs no plugin.

    Args:
        root: directory that the trainer and every engine can access under the same path. Engines read the files of an
            adapter again, so keep it as long as they serve. Each name has one trainer at a time.
        engine: client of one engine or of a fleet (`torchrl_ext.connect`).
        keep: how many versions of each name stay once every engine serves the newest; requests that still run may use
            the one before.

    Raises:
        ConfigError: ``keep`` is below 1.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> lora = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear"))
        >>> adapters = tx.LoraPublisher(root, tx.connect(address))
        >>> adapters.publish("policy-lora", lora)  # the embedded engine serves no adapters; vLLM and SGLang do
        Traceback (most recent call last):
        torchrl_ext.base.errors.ConfigError: ...
    """

    def __init__(self, root: str | os.PathLike[str], engine: EngineClient, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}", expected="1 version or more")
        self._root, self._engine, self._keep = Path(root).absolute(), engine, keep

    def publish(self, name: str, module: nn.Module, *, adapter: str | None = None) -> Path | None:
        """Write the next version of an adapter, and have every engine serve it under ``name``.

        Every rank of a sharded module calls this, because its tensors are gathered; rank 0 alone writes and asks the
        engines.

        Args:
            name: the adapter's name in requests: ``model`` of vLLM's routes, ``lora_path`` of SGLang's.
            module: a ``PeftModel``, or a module (TorchRL wrapper, DDP) around one.
            adapter: which adapter of the module; None for the active one.

        Returns:
            The version's directory; None on other ranks than 0.

        Raises:
            ConfigError: the module has no such adapter, it is not plain LoRA, or the engines serve no adapters.
            StoreError: the version could not be written, or another trainer publishes under this name.
            EngineError, DeadlineError: at least one engine does not serve the version. The error names it, and says
                which version it serves. Older versions stay until a later one is served by all.
        """
        store = LocalStore(self._folder(name))
        config, tensors = _exported(module, adapter)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
            return None
        from safetensors.torch import save_file  # a requirement of peft

        versions = Chain(store)
        store.own()
        try:
            version = version_name(versions.newest() + 1)
            with store.draft(version) as draft:
                config.save_pretrained(str(draft.path))
                save_file(tensors, str(draft.path / "adapter_model.safetensors"), metadata={"format": "pt"})
                for path in draft.path.iterdir():
                    sync(path)
            self._engine.load_adapter(name, f"{store.url}/{version}")
            versions.prune(before=versions.numbers()[-self._keep :][0])
        finally:
            store.disown()
        return store.root / version

    def unload(self, name: str) -> None:
        """Have no engine serve ``name`` any more; files stay, from which SGLang loads it again for a request to it.

        Raises:
            ConfigError, EngineError, DeadlineError: at least one engine did not; the error names it.
        """
        self._folder(name)
        self._engine.unload_adapter(name)

    def _folder(self, name: str) -> Path:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise ConfigError(f"{name!r} is not a valid name of an adapter", expected="a name that a folder can have")
        return self._root / name


def _exported(module: nn.Module, adapter: str | None) -> tuple[Any, dict[str, Tensor]]:
    """Return an adapter's config and full tensors, under the names that ``PeftModel.save_pretrained`` gives them."""
    from peft import PeftModel, get_peft_model_state_dict

    model = next((part for part in module.modules() if isinstance(part, PeftModel)), None)
    if model is None:
        raise ConfigError(
            f"a {type(module).__name__} holds no LoRA adapter",
            expected="a PeftModel, or a module around one",
            hint="wrap the model with peft.get_peft_model(model, LoraConfig(...))",
        )
    active = model.active_adapters
    if adapter is None and len(active) != 1:
        raise ConfigError(f"{len(active)} adapters are active: {', '.join(active)}", expected="one, or adapter=...")
    adapter = active[0] if adapter is None else adapter
    if adapter not in model.peft_config:
        raise ConfigError(f"the module has no adapter {adapter!r}", expected=f"one of {', '.join(model.peft_config)}")
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    _require_plain(config.to_dict())
    found = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return config, {key: full(tensor).cpu().clone().contiguous() for key, tensor in found.items()}


def _require_plain(config: dict[str, Any]) -> None:
    others = {key: config[key] for key, plain in _PLAIN.items() if config.get(key) not in (None, plain)}
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_INITS:
        others["init_lora_weights"] = begun
    if others:
        raise ConfigError(
            f"engines would not apply the adapter as trained: {others}",
            expected="plain LoRA, scaled by lora_alpha / r, for the base weights that the engines serve",
            hint="send merged weights with WeightSender, or train without these settings",
        )
