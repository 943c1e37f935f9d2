"""Connect to or start the engines that options describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.compat.flags.options import WeightUpdateConfig

if TYPE_CHECKING:
    from torchrl_ext.control.serving.topology import ModelPlan, Serving

__all__ = ["make_serving"]


def make_serving(config: WeightUpdateConfig, *, hf_checkpoint: str | Path | None = None, **settings: Any) -> Serving:
    """Connect to or start the engines that options describe, behind a router.

    The options give addresses (`rollout_external_engine_addrs`) or a YAML (`vllm_config` or `sglang_config`).

    Args:
        config: the options. ``vllm_router_ip`` and ``vllm_router_port`` give the address of a running router, for
            external engines or for the only model that the job owns.
        hf_checkpoint: the checkpoint that the trainer starts from; for owned engines.
        settings: of `Routing.over` or `OwnedEngines`.

    Raises:
        ConfigError: the options describe no engine, the YAML is invalid or of another kind, or one router would serve
            several models.
        EngineError, DeadlineError: an engine or a router does not answer, or does not start.
    """
    from torchrl_ext.control.serving.processes import reachable
    from torchrl_ext.control.serving.routing import Routing
    from torchrl_ext.control.serving.topology import OwnedEngines, Serving

    router: dict[str, Any] = {}
    if config.vllm_router_ip is not None:
        router["router"] = f"{reachable(config.vllm_router_ip)}:{config.vllm_router_port}"
    if config.rollout_external_engine_addrs:
        return Serving(default=Routing.over(*config.rollout_external_engine_addrs, **router, **settings))
    if router:
        settings["router"] = {**(settings.get("router") or {}), **router}
    return OwnedEngines(_owned(config, hf_checkpoint), **settings)


def _owned(config: WeightUpdateConfig, hf_checkpoint: str | Path | None) -> tuple[ModelPlan, ...]:
    """Return the plans of the engines that the job starts."""
    from torchrl_ext.control.serving.topology import read_plans

    paths = {"vllm": config.vllm_config, "sglang": config.sglang_config}
    named = {make: path for make, path in paths.items() if path is not None}
    if len(named) != 1:
        raise ConfigError(
            "the options name engines of both kinds" if named else "the options name no engine",
            expected="one of rollout_external_engine_addrs, vllm_config, sglang_config",
        )
    ((make, path),) = named.items()
    models = read_plans(path, hf_checkpoint=hf_checkpoint)
    if models[0].kind != make:
        raise ConfigError(f"{make}_config {path} describes engines of kind {models[0].kind!r}")
    return models
