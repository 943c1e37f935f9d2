"""What an engine's ``/server_info`` says, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.registry import transports
from torchrl_ext.types import BACKEND, EngineInfo

__all__ = ["parse_server_info"]


def parse_server_info(url: str, told: Any, *, world_size: int | None = None, weight_version: str = "") -> EngineInfo:
    """`EngineInfo` from the structured form of ``/server_info``, of vLLM or of the embedded engine.

    Args:
        url: the engine's base address.
        told: the route's answer: nested under ``vllm_config`` (vLLM), or flat with an ``engine`` field.
        world_size: from ``/get_world_size``; tp * pp * dp where that was not asked.
        weight_version: from ``/weight_info``.

    Raises:
        EngineRefusedError: ``told`` describes no engine.
    """
    if not isinstance(told, Mapping) or not (isinstance(told.get("vllm_config"), Mapping) or "engine" in told):
        raise EngineRefusedError(
            f"{url}/server_info describes no engine that torchrl_ext knows",
            expected="the structured form of vLLM's (?config_format=json) or of the embedded engine's",
            hint="give the address of the engine itself, not of a router",
        )
    embedded = "engine" in told
    config = told if embedded else told["vllm_config"]
    parallel, model = _mapping(config, "parallel_config"), _mapping(config, "model_config")
    tp, pp, dp = (int(parallel.get(f"{axis}_parallel_size") or 1) for axis in ("tensor", "pipeline", "data"))
    workers = world_size or tp * pp * dp
    backend = _mapping(config, "weight_transfer_config").get("backend")
    follows = [name for name in transports.names() if name != "memory"] if backend == BACKEND else []
    return EngineInfo(
        url=url,
        kind=str(told["engine"]) if embedded else "vllm",
        version=str(told.get("version") or _mapping(told, "system_env").get("vllm_version") or ""),
        worker_type=str(told.get("worker_type") or _role(_mapping(config, "kv_transfer_config"))),
        num_gpus=workers,
        tp_size=tp,
        pp_size=pp,
        dp_size=dp,
        world_size=workers,
        model=str(told.get("model") or model.get("model") or ""),
        weight_version=str(weight_version or told.get("weight_version") or ""),
        transports=tuple(told.get("transports") or follows),
    )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _role(kv_transfer: Mapping[str, Any]) -> str:
    """A producer of keys and values prefills; their consumer decodes."""
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kv_transfer.get("kv_role")), "regular")
