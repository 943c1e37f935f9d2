"""Read engines' descriptions of themselves, the answers to ``/server_info``, into `EngineInfo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.routes import BACKEND
from torchrl_ext.types import STOCK, EngineInfo

__all__ = [
    "is_guest", "is_sglang_info", "keeps_copies", "kv_connectors", "parse_server_info", "parse_sglang_info", "sees",
    "sglang_transports", "stores_keys", "transfer_backend",
]  # fmt: skip

_AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_MOST = 1 << 20  # most workers of one engine that are believed


def parse_server_info(
    url: str,
    told: Any,
    *,
    world_size: Any = None,
    weight_version: str = "",
    followed: Callable[[], Iterable[str]] = tuple,
) -> EngineInfo:
    """Return the `EngineInfo` of a vLLM server or an embedded engine, from the structured form of ``/server_info``.

    Args:
        url: the engine's base address.
        told: the route's answer: nested under ``vllm_config`` (vLLM), or flat with an ``engine`` field.
        world_size: from ``/get_world_size``; tp * pp * dp where that was not asked.
        weight_version: from ``/weight_info``.
        followed: asks a vLLM server that runs our backend which transports it can follow.

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
    axes = [f"{axis}_parallel_size" for axis in _AXES.values()]
    tp, pp, dp = (_count(url, axis, parallel.get(axis)) for axis in axes)
    workers = _count(url, "world_size", world_size, tp * pp * dp)
    role = str(_mapping(config, "kv_transfer_config").get("kv_role"))
    worker_type = str(told.get("worker_type") or _ROLES.get(role, "regular"))
    if embedded:
        transports = told.get("transports") or ()
    elif is_guest(told):
        transports = ()
    else:
        transports = followed() if transfer_backend(told) == BACKEND else _vllm_transports(told)
    return EngineInfo(
        url=url,
        kind=str(told["engine"]) if embedded else "vllm",
        version=str(told.get("version") or _mapping(told, "system_env").get("vllm_version") or ""),
        worker_type=worker_type,
        num_gpus=workers,
        tp_size=tp,
        pp_size=pp,
        dp_size=dp,
        world_size=workers,
        model=str(told.get("model") or model.get("model") or ""),
        weight_version=str(weight_version or told.get("weight_version") or ""),
        transports=tuple(transports),
        bootstrap_port=_port(_mapping(told, "vllm_env").get(_SIDE_CHANNEL)) if worker_type == "prefill" else None,
    )


def transfer_backend(told: Any) -> str | None:
    """Return the name of a vLLM server's weight-transfer backend, from the structured form of its ``/server_info``."""
    config = _mapping(told, "vllm_config") if isinstance(told, Mapping) else {}
    backend = _mapping(config, "weight_transfer_config").get("backend")
    return None if backend is None else str(backend)


def is_guest(told: Any) -> bool:
    """Return whether a vLLM server maps weights that a daemon owns, as other engines may (``--load-format ipc_cache``).

    An update in place would change them for all of these, and for every engine that is started later.
    """
    config = _mapping(told, "vllm_config") if isinstance(told, Mapping) else {}
    return _mapping(config, "load_config").get("load_format") == "ipc_cache"


def _vllm_transports(told: Any) -> tuple[str, ...]:
    """Return how a vLLM server follows that does not run our backend."""
    if _mapping(told["vllm_config"], "load_config").get("load_format") == "dummy":  # it does not load files later
        return ()
    return STOCK if transfer_backend(told) == "nccl" else STOCK[:1]


def sglang_transports(url: str, told: Any) -> tuple[str, ...]:
    """Return how an SGLang server follows that lacks our plugin, from its ``/server_info``."""
    info = parse_sglang_info(url, told)
    alone = info.pp_size == info.dp_size == 1  # it gives the workers of every stage and replica the same ranks
    return STOCK if alone and not keeps_copies(told) else STOCK[:1]


def keeps_copies(told: Any) -> bool:
    """Return whether an SGLang server keeps copies of its weights, with which it ends where it gets others."""
    return isinstance(told, Mapping) and told.get("weight_cache_mode") not in (None, "off")


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _port(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 65535 else None


def _count(url: str, name: str, value: Any, default: int = 1) -> int:
    """Return a size from an engine's answer; ``default`` where there is none.

    Raises:
        EngineRefusedError: it is no count, or above any that is possible.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise EngineRefusedError(
            f"{url} says that its {name} is {str(value)[:80]!r}",
            expected=f"a number from 1 to {_MOST:,}",
            hint="is this an engine's address?",
        )
    return value


def sees(told: Any) -> bool:
    """Return whether ``told``, the structured form of vLLM's ``/server_info``, describes a multimodal model."""
    config = _mapping(told, "vllm_config") if isinstance(told, Mapping) else {}
    return bool(_mapping(config, "model_config").get("multimodal_config"))


def kv_connectors(told: Any) -> list[str]:
    """Return the names of a vLLM server's KV connectors, from the structured form of its ``/server_info``."""
    found: list[str] = []
    rest = [_mapping(_mapping(told, "vllm_config"), "kv_transfer_config")] if isinstance(told, Mapping) else []
    while rest:
        config = rest.pop(0)
        found += [str(config["kv_connector"])] if config.get("kv_connector") else []
        inner = _mapping(config, "kv_connector_extra_config").get("connectors")  # of a MultiConnector
        rest += [row for row in inner if isinstance(row, Mapping)] if isinstance(inner, list) else []
    return found


def is_sglang_info(told: Any) -> bool:
    """Return whether ``told`` is SGLang's ``/server_info``: its settings, flat."""
    return isinstance(told, Mapping) and {"model_path", "disaggregation_mode"} <= told.keys()


def stores_keys(told: Any) -> bool:
    """Return whether an SGLang server keeps keys and values in a store outside itself, by its ``/server_info``."""
    return isinstance(told, Mapping) and bool(told.get("hicache_storage_backend") or told.get("enable_lmcache"))


def parse_sglang_info(url: str, told: Any, served: Any = None, *, transports: tuple[str, ...] = ()) -> EngineInfo:
    """Return the `EngineInfo` of an SGLang server, from ``/server_info`` (its settings) and ``/model_info``.

    The latter, in ``served``, says what the server serves now; None where it gave no answer.

    Names of settings in earlier and later releases are those that slime's engine discovery knows.

    Raises:
        EngineRefusedError: ``told`` describes no SGLang server.
    """
    if not is_sglang_info(told):
        raise EngineRefusedError(
            f"{url}/server_info describes no SGLang server",
            expected="its settings as one flat object",
            hint="give the address of the engine itself, not of a router",
        )
    model = served if isinstance(served, Mapping) else {}
    names = {f"{short}_size": f"{axis}_parallel_size" for short, axis in _AXES.items()}
    tp, pp, dp = (_count(url, name, told.get(name) or told.get(other)) for name, other in names.items())
    replicas = 1 if told.get("enable_dp_attention") else dp  # else each has workers of its own
    mode = str(told.get("disaggregation_mode"))
    return EngineInfo(
        url=url,
        kind="sglang",
        version=str(told.get("version") or ""),
        worker_type="encoder" if told.get("encoder_only") else mode if mode in ("prefill", "decode") else "regular",
        num_gpus=tp * pp * replicas,
        tp_size=tp,
        pp_size=pp,
        dp_size=dp,
        world_size=tp * pp * replicas,
        model=str(model.get("model_path") or told["model_path"]),
        weight_version=str(model.get("weight_version") or told.get("weight_version") or ""),
        transports=transports,
        bootstrap_port=_port(told.get("disaggregation_bootstrap_port")) if mode == "prefill" else None,
    )
