"""Whether an adapter could be loaded into a vLLM worker, found out before anything of it is."""

from __future__ import annotations

import threading
from typing import Any

from vllm.lora.utils import parse_fine_tuned_lora_name

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.messages import CheckAdapter
from torchrl_ext.stores import open_store
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import adapter_rank

__all__ = ["check_adapter"]

_VISIBLE_S = 2.0


def check_adapter(model: Any, vllm_config: Any, message: CheckAdapter) -> None:
    """Hold an adapter's parameters against what this worker has wrapped.

    vLLM itself refuses a layer by the last part of its name only, and passes over any other that it does not find:
    such an adapter would be served without a part of it.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
        message: the adapter's tensors, and where its versions will lie.

    Raises:
        ConfigError: the server was started without LoRA, or for smaller ranks.
        ManifestError: names the first layer that has no LoRA here.
        StoreError: the adapters' root cannot be seen from here.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
    params = message.params
    rank, most = adapter_rank(params), manager.lora_config.max_lora_rank
    if rank > most:
        raise ConfigError(
            f"LoRA rank {rank} is greater than max_lora_rank {most}",
            hint=f"start the server with --max-lora-rank {rank} or more",
        )
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    wrapped = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    for meta in params if vllm_config.parallel_config.pipeline_parallel_size == 1 else ():
        try:
            layer = parse_fine_tuned_lora_name(meta.name, mapper)[0]
        except ValueError as error:
            raise ManifestError(f"vLLM cannot load {meta.name}: {error}", expected="plain LoRA tensors") from None
        if layer not in wrapped and ".experts" not in layer:
            raise ManifestError(
                f"the engine has no LoRA for layer {layer!r}",
                expected=f"some of {', '.join(sorted({name.rpartition('.')[2] for name in wrapped}))}",
                hint="leave it out of target_modules, or start the server so that --lora-target-modules has it",
            )
    if message.root is not None:
        SharedRoot(open_store(message.root["root"]), "").find(message.root, _VISIBLE_S, threading.Event())
