"""Weight synchronisation for TorchRL: a trainer's policy, followed by running engines over a transport picked by name.

Everything here is imported on first use: an engine that only needs one worker end imports only that. Where TorchRL is
there before a name of ours is used, its `WeightSyncScheme.from_backend` knows every transport by its name
(`torchrl_ext.collectors.backends`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AdapterSender": "sync.adapters",
    "CheckpointSource": "weights.checkpoint",
    "DeltaTransport": "transports.delta",
    "DiskTransport": "transports.disk",
    "EmbeddedEngine": "rpc.engines.embedded",
    "EngineClient": "rpc.client",
    "EngineInfo": "types",
    "EngineRow": "types",
    "Facts": "planning.facts",
    "ExternalEngines": "rollout.serving",
    "Fleet": "rpc.fleet",
    "Handoff": "types",
    "IPCTransport": "transports.ipc.transport",
    "InProcessEngine": "sync.inprocess",
    "InferenceClient": "rollout.client",
    "MaxLag": "rollout.lag",
    "MemoryTransport": "transports.memory",
    "OwnedEngines": "rollout.serving",
    "Pacer": "rollout.lag",
    "ParamMeta": "types",
    "Recommendation": "planning.recommend",
    "RemoteInferenceClient": "rollout.remote",
    "RemoteLLMPolicy": "rollout.policy",
    "Routing": "rollout.routing",
    "SGLangCollectiveTransport": "collectors.from_torchrl",
    "SGLangWeightSyncScheme": "collectors.from_torchrl",
    "SyncReport": "types",
    "Transport": "transports.base",
    "TransportWeightSyncScheme": "collectors.scheme",
    "TransportWeightUpdater": "collectors.updater",
    "VLLMCollectiveTransport": "transports.collective.transport",
    "VLLMDoubleBufferSyncScheme": "collectors.from_torchrl",
    "VLLMDoubleBufferTransport": "collectors.from_torchrl",
    "VLLMEngine": "rpc.engines.vllm",
    "VLLMWeightSyncScheme": "collectors.from_torchrl",
    "WeightLoader": "landing.loader",
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
    "regex_mapper": "weights.derived",
}

__all__ = [*sorted(_HOME), "__version__", "engines", "make_engine", "make_transport", "transports"]

if TYPE_CHECKING:
    from torchrl_ext.rpc.client import EngineClient
    from torchrl_ext.transports.base import Transport


def transports() -> Mapping[str, str]:
    """Read-only mapping of the transport names to one line each."""
    from torchrl_ext import registry

    return registry.transports.names()


def engines() -> Mapping[str, str]:
    """Read-only mapping of the engine names to one line each."""
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
