"""Plugin of vLLM and SGLang in the environments of `torchrl_ext.testing.environments`: what engines need on a CPU.

It is copied there as the module ``torchrl_ext_cpu``, which needs nothing of this package. A machine with a GPU needs
none of it. Functions that a release lacks are passed over.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["register", "register_sglang"]

log = logging.getLogger("torchrl_ext")

_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def register() -> None:
    """Ask the kernel for AMX tiles, which it grants only on request: without them bfloat16 ends in SIGILL."""
    if not torch.accelerator.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def register_sglang() -> None:
    """Let SGLang (0.5.23) compute on a machine without a GPU, beyond what its own start does there.

    Its LoRA layers ask for pinned memory, which needs a GPU.
    """
    register()
    if torch.accelerator.is_available() or "torchrl_ext_pinned" in vars(torch):
        return
    torch.torchrl_ext_pinned = torch.tensor  # type: ignore[attr-defined]
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    try:
        registry = pkgutil.resolve_name("sglang.srt.plugins.hook_registry:HookRegistry")
        around = pkgutil.resolve_name("sglang.srt.plugins.hook_registry:HookType").AROUND
        registry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load_model, around)
        registry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", experts, around)
    except Exception as error:  # noqa: BLE001 - the server starts all the same
        log.warning("this SGLang may not compute every model on a CPU: %r", error)


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, pin_memory=False, **settings: make(*args, **settings)


def load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `ModelRunner.load_model`, so that latent attention is computed in its absorbed form for new prompts as well.

    The backend ``torch_native`` reads keys and values from the cache alone, which holds latents. SGLang's table of how
    backends compute DeepSeek's attention has no entry for it, so that it is taken for Triton's, which gets full keys.
    """
    found = original(runner, *args, **kwargs)
    handlers = sys.modules.get(_HANDLERS)  # present where a model of that family was imported
    with suppress(AttributeError):
        if handlers is not None and "torch_native" not in handlers.AttentionBackendRegistry._handlers:
            absorbed = handlers.AttnForwardMethod.MLA
            handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)
    return found


def experts(original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `moe_forward_native`, which takes the -1 of another worker's expert (expert parallelism) for an index.

    Such a token goes to the first expert of this worker, with weight zero. As the function counts a token once per
    expert, each of a token's choices is computed in a call of its own.
    """
    if getattr(layer, "moe_ep_size", 1) == 1:
        return original(layer, x, topk_output, *args, **kwargs)
    elsewhere = topk_output.topk_ids < 0
    ids = topk_output.topk_ids.masked_fill(elsewhere, 0).split(1, dim=1)
    weights = topk_output.topk_weights.masked_fill(elsewhere, 0).split(1, dim=1)
    parts = [
        original(layer, x, topk_output._replace(topk_ids=own, topk_weights=weight), *args, **kwargs)
        for own, weight in zip(ids, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])
