"""What a vLLM engine computed with older weights, and how to get rid of it; every route inside the server ends here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from torchrl_ext.errors import EngineRefusedError

__all__ = ["drop_cached"]

_COPYING_S, _PAUSE_S = 10.0, 0.02


async def drop_cached(engine: Any, *, timeout_s: float = _COPYING_S) -> None:
    """Drop keys and values, here and where a connector keeps them, of running requests too; and embeddings of images.

    Args:
        engine: vLLM's `AsyncLLM`.
        timeout_s: for a connector that copies keys and values away, and holds on to them meanwhile, in seconds.

    Raises:
        EngineRefusedError: vLLM could not.
    """
    until = time.monotonic() + timeout_s
    while not await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        if time.monotonic() >= until:
            raise EngineRefusedError(
                f"vLLM could not drop cached keys and values of the old weights within {timeout_s:g} s",
                expected="reset_prefix_cache to say that it did",
            )
        await asyncio.sleep(_PAUSE_S)
    if engine.vllm_config.model_config.multimodal_config is not None:
        await engine.reset_encoder_cache()
