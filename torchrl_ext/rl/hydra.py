"""Hydra config groups by transport name, beside TorchRL's own.

In the script that has ``@hydra.main``, `register` adds them, and then the command line names them::

    trainer.py weight_sync_scheme=delta weight_sync_scheme.root=/shared/updates
    trainer.py weight_updater=transport weight_updater.transport=disk weight_updater.engine=[host1:8000]

Settings that do not fit each other are refused when the object is made; a config opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import transports

try:
    import torchrl.trainers.algorithms.configs  # noqa: F401 - TorchRL's own groups, which it adds itself
    from hydra.core.config_store import ConfigStore
    from torchrl.trainers.algorithms.configs.common import ConfigBase
except ImportError as error:
    raise ConfigError(
        f"hydra groups need hydra-core: {error}", hint="pip install 'torchrl_ext[hydra]', or hydra-core and omegaconf"
    ) from error

__all__ = ["TransportSettings", "TransportWeightSyncSchemeConfig", "TransportWeightUpdaterConfig", "register"]


@dataclass(kw_only=True)
class TransportSettings(ConfigBase):  # type: ignore[misc]  # torchrl has no types
    """The settings of all transports, documented by their constructors; null keeps a transport's own default.

    Instantiation refuses settings that the chosen transport does not have.
    """

    _convert_: str = "all"
    root: str | None = None
    carrier: str | None = None
    encoding: str | None = None
    keyframe_every: int | None = None
    base: str | None = None
    keep_files: bool | None = None
    shard_bytes: int | None = None
    files: Any = None
    channel: str | None = None
    make: str | None = None
    master_port: int | None = None
    worker: int | None = None
    workers: int | None = None
    device: Any = None
    backend: str | None = None
    bucket_bytes: int | None = None
    secret: str | None = None

    def __post_init__(self) -> None:
        """Check nothing: the instantiated object checks its settings."""


@dataclass(kw_only=True)
class TransportWeightSyncSchemeConfig(TransportSettings):
    """Configuration of `torchrl_ext.TransportWeightSyncScheme`; its group has one entry per transport."""

    _target_: str = "torchrl_ext.TransportWeightSyncScheme"
    _partial_: bool = False
    transport: str = "disk"
    strategy: str = "tensordict"
    timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    host: str = "127.0.0.1"
    verify: bool = True


@dataclass(kw_only=True)
class TransportWeightUpdaterConfig(TransportSettings):
    """Configuration of `torchrl_ext.TransportWeightUpdater`; gives the factory that TorchRL's collectors call."""

    _target_: str = "torchrl_ext.TransportWeightUpdater"
    _partial_: bool = True
    transport: str = "disk"
    engine: Any = None
    sender: Any = None
    timeout_s: float | None = None
    master_address: str | None = None
    rank: int | None = None
    world_size: int | None = None
    vllm_engine: Any = None


def register() -> None:
    """Add the groups to hydra's ConfigStore. Call it again after registering another transport.

    For settings that none of our transports has, store a subclass of `TransportWeightSyncSchemeConfig`.
    """
    store = ConfigStore.instance()
    for name in transports.names():
        node = TransportWeightSyncSchemeConfig(transport=name)
        store.store(group="weight_sync_scheme", name=name, node=node, provider="torchrl_ext")
    updater = TransportWeightUpdaterConfig
    store.store(group="weight_updater", name="transport", node=updater, provider="torchrl_ext")
