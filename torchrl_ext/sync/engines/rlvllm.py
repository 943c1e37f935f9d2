"""TorchRL's own vLLM engines (`RLvLLMEngine`) as engines of ours.

Of `AsyncVLLM`, its Ray workers and its local ones we drive the vLLM inside, whose workers take the weights themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.engines.ray import RayEngine
from torchrl_ext.weights.source import is_torchrl

__all__ = ["connect_torchrls"]

_TIMEOUT_S = 600.0
_LIMITS = {"timeout_s", "load_timeout_s", "start_timeout_s"}


def connect_torchrls(
    engine: Any, *, pause_mode: str | None = None, keep_cache: bool = False, **limits: float
) -> EngineClient:
    """Return the client for an `RLvLLMEngine` of TorchRL's.

    Args:
        engine: a launched `AsyncVLLM`, a `RayLLMWorker` or a `LocalLLMWrapper`.
        pause_mode: as for `InProcessEngine`, None for ``"keep"``.
        keep_cache: as for `InProcessEngine`.
        limits: deadlines as for `RayEngine`. Where Ray is not between, ``load_timeout_s``, else ``timeout_s``, is that
            of each call.

    Raises:
        ConfigError: another implementation of the interface, which cannot say whether an update reached it whole; an
            `AsyncVLLM` without replicas; or a setting that the engine does not take.
    """
    unknown = sorted(limits.keys() - _LIMITS)
    if unknown:
        raise ConfigError(
            f"TorchRL's engines take no {', '.join(unknown)}",
            expected=f"of {', '.join(sorted(_LIMITS | {'keep_cache', 'pause_mode'}))}",
        )
    timeout_s = limits.get("load_timeout_s", limits.get("timeout_s", _TIMEOUT_S))
    vllms: dict[str, Any] = {"pause_mode": pause_mode or "keep", "keep_cache": keep_cache, "timeout_s": timeout_s}
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=f"{type(engine).__name__}-{id(engine):x}", **vllms)
    if is_torchrl(engine, "RayLLMWorker"):
        return RayEngine(engine.ray_actor, pick=partial(InProcessEngine, **vllms), **limits)
    if is_torchrl(engine, "AsyncVLLM"):
        if not engine.actors:
            raise ConfigError("this AsyncVLLM has no replicas", hint="make it by AsyncVLLM.launch or from_pretrained")
        pick = partial(_async_llm, **vllms)
        return Fleet([RayEngine(actor, pick=pick, **limits) for actor in engine.actors])
    raise ConfigError(
        f"{type(engine).__name__} implements RLvLLMEngine, whose update_weights cannot tell an update that ends early "
        "from a whole one",
        expected="TorchRL's AsyncVLLM, RayLLMWorker or LocalLLMWrapper",
        hint="give make_engine('inprocess', engine=...) the vLLM, the module or the tensors inside",
    )


def _async_llm(replica: Any, **settings: Any) -> InProcessEngine:
    """Return the client of the `AsyncLLM` in a replica of `AsyncVLLM`; it is called in the replica's actor."""
    return InProcessEngine(replica.engine, **settings)
