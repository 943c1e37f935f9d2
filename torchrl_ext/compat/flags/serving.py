"""Connect to or start the engines that options describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import engines

if TYPE_CHECKING:
    from torchrl_ext.serving.served import Serving
    from torchrl_ext.serving.topology import Topology

__all__ = ["make_serving"]


def make_serving(
    config: WeightUpdateConfig, *, hf_checkpoint: str | Path | None = None, kind: str = "vllm", **settings: Any
) -> Serving:
    """Connect to or start the engines that options describe, behind a router.

    The options give addresses (`rollout_external_engine_addrs`), a YAML (`vllm_config` or `sglang_config`), or a number
    of devices (`rollout_num_gpus`) for engines of one model called ``default``, in two pools with
    `prefill_num_servers`.

    Args:
        config: the options. ``vllm_router_ip`` and ``vllm_router_port`` give the address of a running router, for
            external engines or for the only model that the job owns.
        hf_checkpoint: the checkpoint that the trainer starts from; for owned engines.
        kind: kind of owned engines without a YAML; one of `torchrl_ext.engines` that has a server.
        settings: arguments of `ExternalEngines` or `OwnedEngines`.

    Raises:
        ConfigError: the options describe no engine, the YAML is invalid or of another kind, or one router would serve
            several models.
        EngineError, DeadlineError: an engine or a router does not answer, or does not start.
    """
    from torchrl_ext.serving.processes import reachable
    from torchrl_ext.serving.served import ExternalEngines, OwnedEngines

    router: dict[str, Any] = {}
    if config.vllm_router_ip is not None:
        router["router"] = f"{reachable(config.vllm_router_ip)}:{config.vllm_router_port}"
    if config.rollout_external_engine_addrs:
        return ExternalEngines(*config.rollout_external_engine_addrs, **router, **settings)
    if router:
        settings["router"] = {**(settings.get("router") or {}), **router}
    return OwnedEngines(_owned(config, hf_checkpoint, kind), **settings)


def _owned(config: WeightUpdateConfig, hf_checkpoint: str | Path | None, kind: str) -> Topology:
    """Return the plans of the engines that the job starts."""
    from torchrl_ext.serving.topology import Topology

    gpus, each, prefill = config.rollout_num_gpus, config.rollout_num_gpus_per_engine, config.prefill_num_servers
    sizes: dict[str, Any] = {
        "hf_checkpoint": hf_checkpoint, "rollout_num_gpus": gpus, "num_gpus_per_engine": each,
    }  # fmt: skip
    paths = {make: getattr(config, f"{make}_config", None) for make in engines.having("server")}
    named = {make: path for make, path in paths.items() if path is not None}
    if len(named) == 1:
        ((make, path),) = named.items()
        topology = Topology.load(path, **sizes)
        if topology.kind != make:
            raise ConfigError(f"{make}_config {path} describes engines of kind {topology.kind!r}")
        return topology
    if named or gpus is None:
        raise ConfigError(
            f"the options name engines of both kinds, {' and '.join(named)}" if named else "the options name no engine",
            expected="one of rollout_external_engine_addrs, vllm_config, sglang_config, rollout_num_gpus",
        )
    counts = {"regular": gpus} if prefill is None else {"prefill": prefill * each, "decode": gpus - prefill * each}
    groups = [{"worker_type": name, "num_gpus": count} for name, count in counts.items()]
    return Topology.parse({kind: [{"name": "default", "server_groups": groups}]}, **sizes)
