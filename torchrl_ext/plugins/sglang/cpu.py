"""What SGLang (0.5.23) needs to compute on a machine without a GPU beyond what its own start does there.

Nothing here touches weights, and none of it is registered where there is a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["HOOKS"]

log = logging.getLogger("torchrl_ext")

_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ModelRunner.load_model`: latent attention is computed in its absorbed form, for fresh prompts as well.

    The backend ``torch_native`` reads keys and values from the cache alone, which holds latents. It has no entry among
    those that say how DeepSeek's attention is computed, and is taken for Triton's, which is handed full keys.
    """
    found = original(runner, *args, **kwargs)
    handlers = sys.modules.get(_HANDLERS)  # there where a model of that family was imported
    try:
        if handlers is not None and "torch_native" not in handlers.AttentionBackendRegistry._handlers:
            absorbed = handlers.AttnForwardMethod.MLA
            handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)
    except AttributeError:
        log.warning("this SGLang keeps its attention methods elsewhere: DeepSeek may not run on a CPU")
    return found


def experts(original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `moe_forward_native`: an expert of another worker (expert parallelism) is -1, which it takes for an index.

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


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": load_model,
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": experts,
}
"""Target -> what goes around it."""
