"""For editors and type checkers; at run time `torchrl_ext/__init__.py` imports each name from here on first use."""

from collections.abc import Mapping
from typing import Any

from torchrl_ext import testing as testing
from torchrl_ext.base import errors as errors
from torchrl_ext.base.errors import WeightSyncError as WeightSyncError
from torchrl_ext.base.reports import SyncReport as SyncReport
from torchrl_ext.base.types import EngineInfo as EngineInfo
from torchrl_ext.cli.planning import recommend as recommend
from torchrl_ext.compat.flags.options import WeightUpdateConfig as WeightUpdateConfig
from torchrl_ext.compat.megatron import MegatronSource as MegatronSource
from torchrl_ext.control.client import EngineClient as EngineClient
from torchrl_ext.control.discovery import connect as connect
from torchrl_ext.control.discovery import discover as discover
from torchrl_ext.control.requests.client import InferenceClient as InferenceClient
from torchrl_ext.data.sharded.transport import ShardedTransport as ShardedTransport
from torchrl_ext.data.transports.base import Transport
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport as VLLMCollectiveTransport
from torchrl_ext.data.transports.delta import DeltaTransport as DeltaTransport
from torchrl_ext.data.transports.disk import DiskTransport as DiskTransport
from torchrl_ext.data.transports.ipc import IPCTransport as IPCTransport
from torchrl_ext.data.transports.memory import MemoryTransport as MemoryTransport
from torchrl_ext.data.weights.derived import as_source as as_source
from torchrl_ext.data.weights.source import WeightSource as WeightSource
from torchrl_ext.rl.policy import RemoteLLMPolicy as RemoteLLMPolicy
from torchrl_ext.rl.scheme import TransportWeightSyncScheme as TransportWeightSyncScheme
from torchrl_ext.rl.updater import TransportWeightUpdater as TransportWeightUpdater
from torchrl_ext.sync.lora import LoraPublisher as LoraPublisher
from torchrl_ext.sync.receiver import WeightReceiver as WeightReceiver
from torchrl_ext.sync.sender import WeightSender as WeightSender

__version__: str

def transports() -> Mapping[str, str]: ...
def engines() -> Mapping[str, str]: ...
def make_transport(name: str, **settings: Any) -> Transport: ...
def make_engine(name: str, **settings: Any) -> EngineClient: ...
