"""`ServerInfo`: a parsed answer to ``/server_info``.

vLLM answers with nested settings under ``vllm_config``, the embedded engine with flat settings and a field ``engine``,
SGLang with flat settings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchrl_ext.base.errors import EngineRefusedError, why
from torchrl_ext.base.routes import CALL
from torchrl_ext.base.types import STOCK, EngineInfo
from torchrl_ext.control.http import HTTPSession

__all__ = ["ServerInfo", "known_info", "read_server_info", "server_info"]

_AXES = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size", "dp_size": "data_parallel_size"}
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
_LOADS_NO_FILES = ("ipc_cache", "dummy")  # the former maps a daemon's weights, the latter keeps its random weights
_MOST = 1 << 20  # a larger size is refused as implausible


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """An engine's description of itself at ``/server_info``.

    Attributes:
        info: the engine; ``transports`` are the ones that work without our plugin.
        dtype: the model's dtype, as the engine names it; "" if unknown.
        has_plugin: whether a vLLM server, or the embedded engine, has our plugin, whose workers report their
            transports.
        engines: data-parallel replicas that answer at the address.
        transfer_backend: a vLLM server's weight-transfer backend.
        is_multimodal: whether a vLLM server's model takes more than text.
        kv_connector: name of a vLLM server's KV connector; "" without one.
        stores_keys: whether an SGLang server keeps keys and values in an external store.
        has_backup: whether an SGLang server keeps its weights on the host during sleep.
    """

    info: EngineInfo
    dtype: str = ""
    has_plugin: bool = False
    engines: int = 1
    transfer_backend: str | None = None
    is_multimodal: bool = False
    kv_connector: str = ""
    stores_keys: bool = False
    has_backup: bool = False

    def serving(self, *, world_size: Any = None, weight_version: Any = None, model: Any = None) -> EngineInfo:
        """Return `info` with current values from other routes; None keeps the value of `info`.

        Raises:
            EngineRefusedError: ``world_size`` is not a plausible count.
        """
        size = _count(self.info.url, "world_size", world_size, self.info.world_size)
        return replace(
            self.info,
            num_gpus=size,
            world_size=size,
            weight_version=str(weight_version or self.info.weight_version),
            model=str(model or self.info.model),
        )


def server_info(session: HTTPSession, kinds: Collection[str] = ()) -> ServerInfo:
    """Query ``/server_info?config_format=json``, or ``/get_server_info``, its earlier name.

    Args:
        kinds: the expected kinds of engine; empty for any.

    Raises:
        EngineUnreachableError, DeadlineError: nothing answers at the address.
        EngineRefusedError: the server describes no engine (the message has the answers of both routes), or an engine
            of another kind.
    """
    refused: list[EngineRefusedError] = []
    for route, query in (("/server_info", {"config_format": "json"}), ("/get_server_info", None)):
        try:
            found = read_server_info(session.url, session.get(route, query=query))
        except EngineRefusedError as error:
            refused.append(error)
        else:
            if kinds and found.info.kind not in kinds:
                raise EngineRefusedError(
                    f"{session.url}{route} describes an engine of kind {found.info.kind}", expected=" or ".join(kinds)
                )
            return found
    statuses = {error.status for error in refused}
    if statuses & {401, 403}:
        what, hint = "requires an API key", "give a key that it accepts as api_key"
    elif 501 in statuses:
        what = "has no route that describes an engine"
        hint = "give the engine's own address; another server, or a proxy without these routes, may answer here"
    else:
        what = "does not describe an engine"
        hint = "give the engine's own address, not a router's; vLLM answers only with VLLM_SERVER_DEV_MODE=1"
    raise EngineRefusedError(
        f"{'; '.join(map(why, refused))}; {session.url} {what}",
        expected="an answer to GET /server_info or GET /get_server_info",
        hint=hint,
        status=statuses.pop() if len(statuses) == 1 else None,
    )


def known_info(session: HTTPSession, kind: str) -> ServerInfo:
    """Return `server_info` of a server of this kind; a bare one if it has no such route, as vLLM by default."""
    try:
        return server_info(session, (kind,))
    except EngineRefusedError as error:
        if error.status not in (404, 405, 501):
            raise
        return ServerInfo(info=EngineInfo(url=session.url, kind=kind, transports=STOCK[:1]))


def read_server_info(url: str, answer: Any) -> ServerInfo:
    """Parse an answer to ``/server_info``.

    Args:
        url: the engine's base address.
        answer: the decoded JSON.

    Raises:
        EngineRefusedError: the answer describes no engine.
    """
    if isinstance(answer, Mapping):
        if isinstance(answer.get("vllm_config"), Mapping):
            return _vllm(url, answer)
        if "engine" in answer:
            return _embedded(url, answer)
        if {"model_path", "disaggregation_mode"} <= answer.keys():
            return _sglang(url, answer)
    raise EngineRefusedError(
        f"{url}/server_info describes no engine that torchrl_ext knows",
        expected="the structured form of vLLM's (?config_format=json), SGLang's settings, or the embedded engine's",
        hint="give the address of the engine itself, not of a router",
    )


def _vllm(url: str, answer: Mapping[str, Any]) -> ServerInfo:
    config, system = answer["vllm_config"], _mapping(answer, "system_env")
    transfer, model = _mapping(config, "kv_transfer_config"), _mapping(config, "model_config")
    load = _mapping(config, "load_config").get("load_format")
    backend, parallel = _mapping(config, "weight_transfer_config").get("backend"), _mapping(config, "parallel_config")
    apart = any(parallel.get(f"data_parallel_{how}_lb") is True for how in ("external", "hybrid"))
    local = 1 if parallel.get("data_parallel_external_lb") is True else parallel.get("data_parallel_size_local")
    names = STOCK if backend == "nccl" else STOCK[:1]
    info = _engine(
        url,
        "vllm",
        {"version": system.get("vllm_version"), "model": model.get("model"), **answer},
        parallel,
        role=answer.get("worker_type") or _ROLES.get(str(transfer.get("kv_role"))),
        transports=() if load in _LOADS_NO_FILES else names,
    )
    return ServerInfo(
        info=info,
        dtype=_dtype(model),
        has_plugin=CALL in _mapping(config, "additional_config"),
        engines=_count(url, "data_parallel_size_local", local if apart else info.dp_size),
        transfer_backend=None if backend is None else str(backend),
        is_multimodal=bool(model.get("multimodal_config")),
        kv_connector=str(transfer.get("kv_connector") or ""),
    )


def _embedded(url: str, answer: Mapping[str, Any]) -> ServerInfo:
    sizes, named = _mapping(answer, "parallel_config"), answer.get("transports")
    transports = tuple(map(str, named)) if isinstance(named, list) else ()
    role = answer.get("worker_type")
    info = _engine(url, str(answer["engine"]), answer, sizes, role=role, transports=transports)
    return ServerInfo(info=info, dtype=_dtype(answer), has_plugin=True)


def _sglang(url: str, answer: Mapping[str, Any]) -> ServerInfo:
    mode = str(answer.get("disaggregation_mode"))
    info = _engine(
        url,
        "sglang",
        {**answer, "model": answer["model_path"]},
        answer,
        role=mode if mode in ("prefill", "decode") else None,
        port=answer.get("disaggregation_bootstrap_port"),
        replicas=answer.get("enable_dp_attention") is not True,
    )
    # SGLang gives every stage and replica the same ranks, and exits when cached copies of its weights become stale
    takes_broadcasts = info.pp_size == info.dp_size == 1 and answer.get("weight_cache_mode") in (None, "", "off")
    return ServerInfo(
        info=replace(info, transports=STOCK if takes_broadcasts else STOCK[:1]),
        dtype=_dtype(answer),
        stores_keys=bool(answer.get("hicache_storage_backend")) or answer.get("enable_lmcache") is True,
        has_backup=answer.get("enable_weights_cpu_backup") is True,
    )


def _engine(
    url: str,
    kind: str,
    facts: Mapping[str, Any],
    sizes: Mapping[str, Any],
    *,
    role: Any,
    transports: tuple[str, ...] = (),
    port: Any = None,
    replicas: bool = True,
) -> EngineInfo:
    """Build the engine's description.

    Args:
        sizes: sizes of the parallel axes, by short or long names.
        role: the worker type; None for a regular one.
        replicas: whether each data-parallel rank has its own workers.
    """
    given = ((name, sizes.get(name), sizes.get(longer)) for name, longer in _AXES.items())
    tp, pp, dp = (_count(url, name, size if size is not None else other) for name, size, other in given)
    workers = tp * pp * (dp if replicas else 1)
    return EngineInfo(
        url=url,
        kind=kind,
        worker_type=str(role or "regular"),
        num_gpus=workers,
        tp_size=tp,
        pp_size=pp,
        dp_size=dp,
        world_size=workers,
        transports=transports,
        bootstrap_port=port if role == "prefill" and isinstance(port, int) else None,
        **{name: str(facts.get(name) or "") for name in ("version", "model", "weight_version")},
    )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _dtype(model: Mapping[str, Any]) -> str:
    return str(model.get("dtype") or "").removeprefix("torch.")


def _count(url: str, name: str, value: Any, default: int = 1) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise EngineRefusedError(
            f"{url} reports that its {name} is {str(value)[:80]!r}",
            expected=f"a number from 1 to {_MOST:,}",
            hint="check that this is an engine's address",
        )
    return value
