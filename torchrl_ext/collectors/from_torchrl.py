"""TorchRL 0.14.1's names for LLM weight sync, over our transports and engine clients: change one import.

::

    from torchrl.weight_update.llm import VLLMWeightSyncScheme      # before
    from torchrl_ext import VLLMWeightSyncScheme                    # after

Constructors, senders and receivers keep the signatures of `torchrl.weight_update.llm` 0.14.1. What changes: an engine
may be an address, a client of ours, or TorchRL's `AsyncVLLM`; success is reported when every engine holds the weights;
and the schemes work in ``weight_sync_schemes`` of a collector too, whose workers they reach by the same transport.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import torch
from torch import nn

from torchrl_ext.collectors.from_torchrl_ends import (
    SGLangWeightSender,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    VLLMWeightReceiver,
    VLLMWeightSender,
)
from torchrl_ext.collectors.from_torchrl_transports import (
    SGLangCollectiveTransport,
    VLLMDoubleBufferTransport,
    check_flush,
    collective,
)
from torchrl_ext.collectors.scheme_base import TransportSchemeBase
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.weights.source import as_source

__all__ = [
    "SGLangCollectiveTransport",
    "SGLangWeightSender",
    "SGLangWeightSyncScheme",
    "VLLMCollectiveTransport",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
    "get_sglang_model_metadata",
]

Strategy = Literal["tensordict", "state_dict"]


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """``{name: (dtype, shape)}`` of what a sender sends of ``model``: LoRA merged, tied tensors under one name.

    Args:
        model: a module; TorchRL's LLM wrappers stand for the model inside.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Cannot extract state_dict from {type(model)}")
    return {meta.name: (meta.dtype, torch.Size(meta.shape)) for meta in as_source(model).params()}


get_sglang_model_metadata = get_model_metadata


class VLLMWeightSyncScheme(TransportSchemeBase):
    """`torchrl.weight_update.llm.VLLMWeightSyncScheme` over `VLLMCollectiveTransport`.

    Args:
        master_address: where workers reach the trainer; None for this machine alone.
        master_port: of the trainer's store; None picks a free one.
        gpus_per_replica: workers of one engine, ``tp * pp * dp``.
        num_replicas: engines.
        strategy: how weights are taken from a module.
        device: where tensors travel from; without CUDA the CPU.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
    ) -> None:
        super().__init__(strategy=strategy, host=master_address or "127.0.0.1")
        self.master_address, self.master_port = master_address or "localhost", master_port or _free_port()
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.strategy_name, self.device = strategy, device

    @property
    def world_size(self) -> int:
        """The trainer and the workers of every engine."""
        return 1 + self.num_replicas * self.gpus_per_replica

    def create_transport(self, **settings: Any) -> VLLMCollectiveTransport:
        return collective(self.master_address, self.master_port, 0, self.world_size, self.device, **settings)

    def worker_transport(self) -> VLLMCollectiveTransport:
        return collective(self.master_address, 0, 0, None, self.device)

    def create_sender(self) -> VLLMWeightSender:
        """The trainer's end."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """The engine's end.

        Args:
            vllm_engine: as for `VLLMWeightReceiver`.
        """
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMDoubleBufferSyncScheme(TransportSchemeBase):
    """`torchrl.weight_update.llm.VLLMDoubleBufferSyncScheme` over `DiskTransport`.

    Each update is a directory of its own that appears whole; a reader never sees half of one.

    Args:
        remote_addr: directory that the trainer writes to.
        local_addr: where engines see it; None for the same path.
        num_threads: accepted for its name; files are written by one thread that keeps a disk busy.
        strategy: how weights are taken from a module.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
    ) -> None:
        super().__init__(strategy=strategy)
        self.remote_addr, self.local_addr = remote_addr, local_addr if local_addr is not None else remote_addr
        self.num_threads, self.strategy_name = num_threads, strategy

    def create_transport(self, **settings: Any) -> DiskTransport:
        return DiskTransport(self.remote_addr, seen_at=self.local_addr, **settings)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """The trainer's end."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """The engine's end.

        Args:
            vllm_engine: as for `VLLMDoubleBufferWeightReceiver`.
        """
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


class SGLangWeightSyncScheme(TransportSchemeBase):
    """`torchrl.weight_update.llm.SGLangWeightSyncScheme` over `VLLMCollectiveTransport` and our SGLang client.

    Args:
        server_url: of the SGLang server.
        master_address: where workers reach the trainer; None for this machine alone.
        master_port: of the trainer's store; None picks a free one.
        num_gpus: workers of the server, ``tp * dp``.
        strategy: how weights are taken from a module.
        device: where tensors travel from; without CUDA the CPU.
        flush_cache_on_update: accepted for its name; the cache is dropped with every update, and the engine stays
            paused where it cannot be.
        pause_mode: ``"abort"``, ``"retract"`` or ``"in_place"``; None for ``"retract"``.

    Raises:
        ConfigError: ``flush_cache_on_update`` with a pause mode that leaves requests in the cache.
    """

    def __init__(
        self,
        server_url: str,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
        flush_cache_on_update: bool | None = None,
        pause_mode: Literal["abort", "retract", "in_place"] | None = None,
    ) -> None:
        check_flush(flush_cache_on_update, pause_mode)
        super().__init__(strategy=strategy, host=master_address or "127.0.0.1")
        self.server_url, self.num_gpus = server_url.rstrip("/"), num_gpus
        self.master_address, self.master_port = master_address or "localhost", master_port or _free_port()
        self.strategy_name, self.device = strategy, device
        self.flush_cache_on_update, self.pause_mode = flush_cache_on_update, pause_mode

    @property
    def world_size(self) -> int:
        """The trainer and the server's workers."""
        return 1 + self.num_gpus

    def create_transport(self, **settings: Any) -> VLLMCollectiveTransport:
        return collective(self.master_address, self.master_port, 0, self.world_size, self.device, **settings)

    def worker_transport(self) -> VLLMCollectiveTransport:
        return collective(self.master_address, 0, 0, None, self.device)

    def create_sender(self) -> SGLangWeightSender:
        """The trainer's end."""
        return SGLangWeightSender(self)

    def create_receiver(self, *_: Any, **__: Any) -> None:
        """None, as in TorchRL: the server has its receivers."""


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
