"""On import, registers ``weight_sync_scheme=sglang``, which TorchRL's own hydra groups lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.common import ConfigBase

__all__ = ["SGLangWeightSyncSchemeConfig"]


@dataclass(kw_only=True)
class SGLangWeightSyncSchemeConfig(ConfigBase):  # type: ignore[misc]  # torchrl has no types
    """Configures `torchrl_ext.SGLangWeightSyncScheme`, whose constructor explains the settings."""

    _target_: str = "torchrl_ext.SGLangWeightSyncScheme"
    _partial_: bool = False
    server_url: str = MISSING
    master_address: str | None = None
    master_port: int | None = None
    num_gpus: int = 1
    strategy: str = "tensordict"
    device: Any = 0
    flush_cache_on_update: bool | None = None
    pause_mode: str | None = None

    def __post_init__(self) -> None:
        """Check nothing, because the scheme checks its settings."""


ConfigStore.instance().store(
    group="weight_sync_scheme", name="sglang", node=SGLangWeightSyncSchemeConfig, provider="torchrl_ext"
)
