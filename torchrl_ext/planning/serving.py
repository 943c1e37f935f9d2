"""Reach or start the engines that options name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.options import WeightUpdateConfig

if TYPE_CHECKING:
    from torchrl_ext.rollout.serving import Serving

__all__ = ["make_serving"]


def make_serving(config: WeightUpdateConfig, *, hf_checkpoint: str | Path | None = None, **settings: Any) -> Serving:
    """Reach or start the engines of `rollout_external_engine_addrs`, `vllm_config` or `sglang_config`, behind a router.

    Args:
        config: the options. ``vllm_router_ip`` and ``vllm_router_port`` name a router for external engines.
        hf_checkpoint: what the trainer starts from; for owned engines.
        settings: of `ExternalEngines` or `OwnedEngines`.

    Raises:
        ConfigError: the options name no engine, a YAML that cannot work or is of the other kind, or a router for
            engines that the job owns.
        EngineError, DeadlineError: an engine or a router does not answer, or does not start.
    """
    from torchrl_ext.launch.processes import reachable
    from torchrl_ext.launch.topology import Topology
    from torchrl_ext.rollout.serving import ExternalEngines, OwnedEngines

    router = None
    if config.vllm_router_ip is not None:
        router = f"{reachable(config.vllm_router_ip)}:{config.vllm_router_port}"
    if config.rollout_external_engine_addrs:
        return ExternalEngines(*config.rollout_external_engine_addrs, router=router, **settings)
    given = {kind: path for kind, path in (("vllm", config.vllm_config), ("sglang", config.sglang_config)) if path}
    if len(given) != 1:
        raise ConfigError(
            "the options name both kinds of engines" if given else "the options name no engine",
            expected="one of rollout_external_engine_addrs, vllm_config, sglang_config",
        )
    if router is not None:
        raise ConfigError("engines that the job owns get a router per model", hint="leave vllm_router_ip out")
    ((kind, path),) = given.items()
    topology = Topology.load(path, hf_checkpoint=hf_checkpoint)
    if topology.kind != kind:
        raise ConfigError(f"{kind}_config {path} describes engines of kind {topology.kind!r}")
    return OwnedEngines(topology, **settings)
