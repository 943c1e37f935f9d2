"""Weight synchronisation for TorchRL: running engines follow a trainer's policy over a transport picked by name.

Everything here is imported on first use: an engine that only needs one worker end imports only that. Where TorchRL is
imported before a name of ours is used, its `WeightSyncScheme.from_backend` knows every transport by its name
(`torchrl_ext.collectors.backends`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for editors and type checkers; at run time `_HOME` decides
    from torchrl_ext import errors as errors
    from torchrl_ext.collectors.from_torchrl import SGLangWeightSyncScheme as SGLangWeightSyncScheme
    from torchrl_ext.collectors.from_torchrl import VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme
    from torchrl_ext.collectors.from_torchrl import VLLMWeightSyncScheme as VLLMWeightSyncScheme
    from torchrl_ext.collectors.scheme import TransportWeightSyncScheme as TransportWeightSyncScheme
    from torchrl_ext.collectors.updater import TransportWeightUpdater as TransportWeightUpdater
    from torchrl_ext.errors import WeightSyncError as WeightSyncError
    from torchrl_ext.planning.options import WeightUpdateConfig as WeightUpdateConfig
    from torchrl_ext.planning.recommend import recommend as recommend
    from torchrl_ext.rollout.client import InferenceClient as InferenceClient
    from torchrl_ext.rollout.torchrl.policy import RemoteLLMPolicy as RemoteLLMPolicy
    from torchrl_ext.rpc.client import EngineClient as EngineClient
    from torchrl_ext.rpc.discovery import connect as connect
    from torchrl_ext.rpc.discovery import discover as discover
    from torchrl_ext.sync.adapters import AdapterSender as AdapterSender
    from torchrl_ext.sync.receiver import WeightReceiver as WeightReceiver
    from torchrl_ext.sync.sender import WeightSender as WeightSender
    from torchrl_ext.transports.base import Transport
    from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport as VLLMCollectiveTransport
    from torchrl_ext.transports.delta.transport import DeltaTransport as DeltaTransport
    from torchrl_ext.transports.disk import DiskTransport as DiskTransport
    from torchrl_ext.transports.ipc.transport import IPCTransport as IPCTransport
    from torchrl_ext.transports.memory import MemoryTransport as MemoryTransport
    from torchrl_ext.transports.sharded.transport import ShardedTransport as ShardedTransport
    from torchrl_ext.types import EngineInfo as EngineInfo
    from torchrl_ext.types import SyncReport as SyncReport
    from torchrl_ext.weights.shards.megatron import MegatronSource as MegatronSource
    from torchrl_ext.weights.source import WeightSource as WeightSource
    from torchrl_ext.weights.source import as_source as as_source

_HOME = {
    "AdapterSender": "sync.adapters",
    "DeltaTransport": "transports.delta.transport",
    "DiskTransport": "transports.disk",
    "EngineClient": "rpc.client",
    "EngineInfo": "types",
    "IPCTransport": "transports.ipc.transport",
    "InferenceClient": "rollout.client",
    "MegatronSource": "weights.shards.megatron",
    "MemoryTransport": "transports.memory",
    "RemoteLLMPolicy": "rollout.torchrl.policy",
    "SGLangWeightSyncScheme": "collectors.from_torchrl",
    "ShardedTransport": "transports.sharded.transport",
    "SyncReport": "types",
    "TransportWeightSyncScheme": "collectors.scheme",
    "TransportWeightUpdater": "collectors.updater",
    "VLLMCollectiveTransport": "transports.collective.transport",
    "VLLMDoubleBufferSyncScheme": "collectors.from_torchrl",
    "VLLMWeightSyncScheme": "collectors.from_torchrl",
    "WeightReceiver": "sync.receiver",
    "WeightSender": "sync.sender",
    "WeightSource": "weights.source",
    "WeightSyncError": "errors",
    "WeightUpdateConfig": "planning.options",
    "as_source": "weights.source",
    "connect": "rpc.discovery",
    "discover": "rpc.discovery",
    "errors": "errors",
    "recommend": "planning.recommend",
}
"""Public name -> module that it is imported from on first use."""

__all__ = [*sorted(_HOME), "__version__", "engines", "make_engine", "make_transport", "transports"]


def transports() -> Mapping[str, str]:
    """Return a read-only mapping of the transport names to one line each."""
    from torchrl_ext import registry

    return registry.transports.names()


def engines() -> Mapping[str, str]:
    """Return a read-only mapping of the engine names to one line each."""
    from torchrl_ext import registry

    return registry.engines.names()


def make_transport(name: str, **settings: Any) -> Transport:
    """Build the transport called ``name``.

    Raises:
        ConfigError: no such name (the message lists them), or settings that it does not take.
    """
    from torchrl_ext import registry

    return registry.transports.make(name, **settings)


def make_engine(name: str, **settings: Any) -> EngineClient:
    """Build the engine client called ``name``.

    Raises:
        ConfigError: no such name (the message lists them), or settings that it does not take.
    """
    from torchrl_ext import registry

    return registry.engines.make(name, **settings)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _tell_torchrl()
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__


def _tell_torchrl() -> None:
    if "torchrl.weight_update.weight_sync_schemes" in sys.modules:
        importlib.import_module(f"{__name__}.collectors.backends")


_tell_torchrl()
