"""Replaces TorchRL 0.14.1's classes for LLM weight sync under their own names: change one import.

::

    from torchrl.weight_update.llm import VLLMWeightSyncScheme      # before
    from torchrl_ext import VLLMWeightSyncScheme                    # after

Constructors, senders and receivers keep the signatures of `torchrl.weight_update.llm` 0.14.1. What changes: an engine
may be an address, a client of ours, or TorchRL's `AsyncVLLM`; success is reported when every engine holds the weights;
and the schemes work in ``weight_sync_schemes`` of a collector too, whose workers they reach by the same transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import nn

from torchrl_ext.collectors.scheme import TransportSchemeBase
from torchrl_ext.compat.torchrl_llm.ends import (
    SGLangWeightSender,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    VLLMWeightReceiver,
    VLLMWeightSender,
    sglang_client,
)
from torchrl_ext.errors import ConfigError, NotConnectedError, TransportError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.sender import WeightSender
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
PauseMode = Literal["abort", "retract", "in_place"]
Device = torch.device | str | int


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return ``{name: (dtype, shape)}`` of what a sender sends of ``model``: LoRA merged, tied tensors once.

    Args:
        model: a module; TorchRL's LLM wrappers stand for the model inside.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Cannot extract state_dict from {type(model)}")
    return {meta.name: (meta.dtype, torch.Size(meta.shape)) for meta in as_source(model).params()}


get_sglang_model_metadata = get_model_metadata


class _GroupScheme(TransportSchemeBase):
    """A scheme over `VLLMCollectiveTransport`, for engines or for the workers of a collector."""

    def __init__(
        self, address: str | None, port: int | None, strategy: Strategy, device: Device, world_size: int
    ) -> None:
        super().__init__(strategy=strategy, host=address or "127.0.0.1")
        self.master_address, self.master_port = address or "localhost", port or free_port()
        self.strategy_name, self.device, self.world_size = strategy, device, world_size

    def create_transport(self, *, rank: int = 0, **settings: Any) -> VLLMCollectiveTransport:
        return _collective(self.master_address, self.master_port, rank, self.world_size, self.device, **settings)

    def worker_transport(self) -> VLLMCollectiveTransport:
        return _collective(self.master_address, 0, 0, None, self.device)


@final
class VLLMWeightSyncScheme(_GroupScheme):
    """Replaces `torchrl.weight_update.llm.VLLMWeightSyncScheme`, over `VLLMCollectiveTransport`.

    Args:
        master_address: where workers reach the trainer; None for this machine alone.
        master_port: of the trainer's store; None picks a free one.
        gpus_per_replica: workers of one engine, ``tp * pp * dp``.
        num_replicas: engines.
        strategy: how weights are taken from a module.
        device: where tensors travel from; without CUDA the CPU.

    Example:
        >>> from torchrl_ext.compat.torchrl_llm.schemes import get_model_metadata
        >>> sender = tx.VLLMWeightSyncScheme(gpus_per_replica=1, num_replicas=1).create_sender()
        >>> sender.register_model(lm)
        >>> sender.init_all_workers_group(get_model_metadata(lm), vllm_engine=address)
        >>> sender.update_weights().verified
        True
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: Device = 0,
    ) -> None:
        super().__init__(master_address, master_port, strategy, device, 1 + num_replicas * gpus_per_replica)
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas

    def create_sender(self) -> VLLMWeightSender:
        """Return a new sender, for the trainer."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """Return a new receiver for ``vllm_engine``, as `VLLMWeightReceiver` describes it."""
        return VLLMWeightReceiver(self, vllm_engine)


@final
class VLLMDoubleBufferSyncScheme(TransportSchemeBase):
    """Replaces `torchrl.weight_update.llm.VLLMDoubleBufferSyncScheme`, over `DiskTransport`.

    Each update is a directory of its own that appears whole; a reader never sees half of one.

    Args:
        remote_addr: directory that the trainer writes to.
        local_addr: where engines see it; None for the same path.
        num_threads: accepted for its name; one thread keeps a disk busy.
        strategy: how weights are taken from a module.

    Example:
        >>> scheme = tx.VLLMDoubleBufferSyncScheme(remote_addr=root)
        >>> sender = scheme.create_sender()
        >>> sender.register_model(lm)
        >>> sender.update_weights().version
        1
        >>> scheme.create_receiver(address).poll_and_apply(timeout=30.0)
        True
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
        """Return a new sender, for the trainer."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """Return a new receiver for ``vllm_engine``, as `VLLMDoubleBufferWeightReceiver` describes it."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


@final
class SGLangWeightSyncScheme(_GroupScheme):
    """Replaces `torchrl.weight_update.llm.SGLangWeightSyncScheme`, over `VLLMCollectiveTransport` and our client.

    Args:
        server_url: of the SGLang server.
        master_address: where workers reach the trainer; None for this machine alone.
        master_port: of the trainer's store; None picks a free one.
        num_gpus: workers of the server, ``tp * dp``.
        strategy: how weights are taken from a module.
        device: where tensors travel from; without CUDA the CPU.
        flush_cache_on_update: accepted for its name; every update drops the cache, or leaves the engine paused.
        pause_mode: ``"abort"``, ``"retract"`` or ``"in_place"``; None for ``"retract"``.

    Raises:
        ConfigError: ``flush_cache_on_update`` with a pause mode that leaves requests in the cache.

    Example:
        >>> scheme = tx.SGLangWeightSyncScheme("http://127.0.0.1:30000", num_gpus=2, pause_mode="retract")
        >>> scheme.create_sender().register_model(lm)  # then init_all_workers_group and update_weights, as with vLLM's
    """

    def __init__(
        self,
        server_url: str,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int = 1,
        strategy: Strategy = "tensordict",
        device: Device = 0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
    ) -> None:
        _check_flush(flush_cache_on_update, pause_mode)
        super().__init__(master_address, master_port, strategy, device, 1 + num_gpus)
        self.server_url, self.num_gpus = server_url.rstrip("/"), num_gpus
        self.flush_cache_on_update, self.pause_mode = flush_cache_on_update, pause_mode

    def create_sender(self) -> SGLangWeightSender:
        """Return a new sender, for the trainer."""
        return SGLangWeightSender(self)

    def create_receiver(self, *_: Any, **__: Any) -> None:
        """Return None, as TorchRL does: the server's workers receive by themselves."""


@final
class VLLMDoubleBufferTransport:
    """Replaces `torchrl.weight_update.llm.VLLMDoubleBufferTransport`, over `DiskTransport`: a version appears whole.

    Args:
        remote_addr: directory that the trainer writes to.
        local_addr: where readers see it; None for the same path.
        num_threads: accepted for its name; one thread keeps a disk busy.
    """

    def __init__(self, remote_addr: str, local_addr: str | None = None, num_threads: int = 1) -> None:
        self.remote_addr, self.local_addr = remote_addr, remote_addr if local_addr is None else local_addr
        self.num_threads = num_threads
        self._writer: DiskTransport | None = None

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Publish ``weights`` (a TensorDict, mapping of tensors or module) as the next version.

        Raises:
            StoreError: no space, no permission, or another trainer writes there.
        """
        if self._writer is None:
            self._writer = DiskTransport(self.remote_addr, seen_at=self.local_addr)
        self._writer.send_weights(model_id, weights)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any | None:
        """Return the newest version as a TensorDict with flat keys, also when it was read before, as TorchRL's does.

        Args:
            timeout: seconds to wait for the first version; None does not wait, and gives None where there is none.
            weights, model, strategy: as for `torchrl_ext.transports.standalone.StandaloneTransport.receive_weights`.

        Raises:
            ManifestError, IntegrityError: what was published does not fit, or is damaged.
        """
        reader = DiskTransport(self.local_addr)
        try:
            return reader.receive_weights(timeout or 0.0, weights=weights, model=model, strategy=strategy)
        finally:
            reader.shutdown()

    def check_connection(self) -> bool:
        """Return True, since a directory needs no connection."""
        return True

    def shutdown(self) -> None:
        """Release the directory, so that another trainer may write to it. May be called twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()


@final
class SGLangCollectiveTransport:
    """Replaces `torchrl.weight_update.llm.SGLangCollectiveTransport`, over `VLLMCollectiveTransport` and our client.

    Args:
        server_url: of the SGLang server, which has our plugin.
        master_address, master_port: where its workers reach the trainer's store.
        rank: 0, the trainer's; the server's workers join by themselves.
        world_size: the trainer and the server's workers.
        device: where tensors travel from; without CUDA the CPU.
        timeout: deadline of every wait, in seconds.
        flush_cache_on_update: accepted for its name; every update drops the cache, or leaves the engine paused.
        pause_mode: None for ``"retract"``.

    Raises:
        ConfigError: ``flush_cache_on_update`` with a pause mode that leaves requests in the cache.
    """

    def __init__(
        self,
        server_url: str,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        device: Device | None = None,
        timeout: float = 300.0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
    ) -> None:
        _check_flush(flush_cache_on_update, pause_mode)
        self.server_url = server_url.rstrip("/")
        self.master_address, self.master_port = master_address, master_port
        self.rank, self.world_size = rank, world_size
        self.device, self.timeout, self.pause_mode = device, timeout, pause_mode
        self.flush_cache_on_update = flush_cache_on_update
        self._sender: WeightSender | None = None

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]]) -> None:
        """Form the process group with the server's workers.

        Args:
            model_metadata: ``{name: (dtype, shape)}``.

        Raises:
            TransportError: this is not rank 0.
            DeadlineError: names the ranks that did not come.
            EngineError: the server does not join.
        """
        if self.rank != 0:
            raise TransportError(
                f"init_all_workers_group was called on rank {self.rank}",
                expected="rank 0, the trainer; SGLang's workers join by themselves",
            )
        self.shutdown()
        transport = _collective(
            self.master_address, self.master_port, 0, self.world_size, self.device, timeout_s=self.timeout
        )
        self._sender = WeightSender(transport, sglang_client(self.server_url, self.pause_mode))
        self._sender.init_all_workers_group(model_metadata)

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights (a TensorDict, mapping of tensors or module), and return when the server serves them.

        Raises:
            NotConnectedError: before `init_all_workers_group`.
            UpdateError: the server does not serve them.
        """
        del model_id
        if self._sender is None:
            raise NotConnectedError("Transport not initialized", hint="Call init_all_workers_group first")
        self._sender.update_weights(weights)

    def check_connection(self) -> bool:
        """Tell whether the group is formed."""
        return self._sender is not None and self._sender.check_connection()

    def shutdown(self) -> None:
        """Leave the server, which keeps serving the weights it has. May be called twice."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown()


def _check_flush(flush_cache_on_update: bool | None, pause_mode: PauseMode | None) -> None:
    """Refuse a flush of the cache with a pause mode that leaves requests in it, as TorchRL does.

    Raises:
        ConfigError: ``flush_cache_on_update`` with such a mode.
    """
    if flush_cache_on_update and pause_mode not in (None, "abort"):
        raise ConfigError(
            f"flush_cache_on_update=True requires pause_mode='abort', and it is {pause_mode!r}",
            hint="leave flush_cache_on_update out: the cache is dropped with every update",
        )


def _collective(
    address: str, port: int, rank: int, size: int | None, device: Device | None, **settings: Any
) -> VLLMCollectiveTransport:
    """Make the transport on ``device``, or on the CPU where there is no CUDA."""
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return VLLMCollectiveTransport(address, port, rank, size, place if torch.cuda.is_available() else None, **settings)
