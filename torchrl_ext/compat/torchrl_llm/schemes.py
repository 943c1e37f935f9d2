"""Drop-in replacements for the LLM weight-sync classes of TorchRL 0.14.1: change one import.

::

    from torchrl.weight_update.llm import VLLMWeightSyncScheme      # before
    from torchrl_ext import VLLMWeightSyncScheme                    # after

Constructors, senders and receivers take the arguments of `torchrl.weight_update.llm` 0.14.1. Differences: an engine may
be an address, a client of ours, or TorchRL's `AsyncVLLM`; an update succeeds once every engine holds the weights; the
schemes also work in a collector's ``weight_sync_schemes``, where they reach its workers over the same transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from torchrl_ext.collectors.scheme import TransportWeightSyncScheme
from torchrl_ext.errors import ConfigError, NotConnectedError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.discovery import as_engine
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.published import PublishedFollower
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.sync.telemetry import Log
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.published import PublishedRoot
from torchrl_ext.types import Info, SyncReport
from torchrl_ext.weights.source import as_source, is_torchrl

__all__ = [
    "SGLangWeightSender", "SGLangWeightSyncScheme", "VLLMCollectiveTransport", "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferWeightReceiver", "VLLMDoubleBufferWeightSender", "VLLMWeightReceiver", "VLLMWeightSender",
    "VLLMWeightSyncScheme", "get_model_metadata", "get_sglang_model_metadata",
]  # fmt: skip

Strategy = Literal["tensordict", "state_dict"]
Device = torch.device | str | int
Metadata = Mapping[str, tuple[torch.dtype, Any]]


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return ``{name: (dtype, shape)}`` of the tensors that a sender sends: LoRA merged, tied tensors once.

    Args:
        model: a module, or one of TorchRL's LLM wrappers, which stands for the model inside it.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Cannot extract state_dict from {type(model)}")
    return {meta.name: (meta.dtype, torch.Size(meta.shape)) for meta in as_source(model).params()}


get_sglang_model_metadata = get_model_metadata


class VLLMWeightSyncScheme(TransportWeightSyncScheme):
    """Replaces `torchrl.weight_update.llm.VLLMWeightSyncScheme`, over `VLLMCollectiveTransport`.

    Args:
        master_address: address at which workers reach the trainer; None for this machine only.
        master_port: port of the trainer's store; None picks a free one.
        gpus_per_replica: workers per engine, ``tp * pp * dp``.
        num_replicas: number of engines.
        strategy: how weights are read from a module.
        device: device from which tensors are sent; without CUDA the CPU.

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
        cuda = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        place = cuda if torch.cuda.is_available() else None
        super().__init__("collective", strategy=strategy, host=master_address or "127.0.0.1", device=place)
        self.master_address, self.master_port = master_address or "localhost", master_port or free_port()
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.world_size = 1 + num_replicas * gpus_per_replica
        self.group = {
            "master_address": self.master_address, "master_port": self.master_port, "world_size": self.world_size,
        }  # fmt: skip

    def create_sender(self) -> VLLMWeightSender:
        """Return a new sender for the trainer."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver | None:
        """Return a new receiver for ``vllm_engine``; see `VLLMWeightReceiver`."""
        return VLLMWeightReceiver(self, vllm_engine)

    def sender_engine(self, vllm_engine: Any) -> EngineClient | None:
        """Return a client for the engines that a sender drives."""
        return as_engine(vllm_engine)


class SGLangWeightSyncScheme(VLLMWeightSyncScheme):
    """Replaces `torchrl.weight_update.llm.SGLangWeightSyncScheme`, over `VLLMCollectiveTransport` and our client.

    Args:
        server_url: address of the SGLang server.
        master_address, master_port, strategy, device: as for `VLLMWeightSyncScheme`.
        num_gpus: workers of the server, ``tp * dp``.
        flush_cache_on_update: accepted for compatibility; every update drops the cache, or leaves the engine paused.
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
        pause_mode: Literal["abort", "retract", "in_place"] | None = None,
    ) -> None:
        if flush_cache_on_update and pause_mode not in (None, "abort"):
            raise ConfigError(
                f"flush_cache_on_update=True requires pause_mode='abort', not {pause_mode!r}",
                hint="leave flush_cache_on_update out: every update drops the cache",
            )
        super().__init__(master_address, master_port, num_gpus, 1, strategy, device)
        self.server_url, self.num_gpus = server_url.rstrip("/"), num_gpus
        self.flush_cache_on_update, self.pause_mode = flush_cache_on_update, pause_mode

    def create_receiver(self, *_: Any, **__: Any) -> None:
        """Return None, as TorchRL does: the server's workers receive weights by themselves."""

    def sender_engine(self, vllm_engine: Any) -> EngineClient | None:
        del vllm_engine
        mode = {} if self.pause_mode is None else {"pause_mode": self.pause_mode}
        return engines.make("sglang", url=self.server_url, **mode)


class VLLMDoubleBufferSyncScheme(TransportWeightSyncScheme):
    """Replaces `torchrl.weight_update.llm.VLLMDoubleBufferSyncScheme`, over `DiskTransport`.

    Each update is a separate directory that appears atomically.

    Args:
        remote_addr: directory to which the trainer writes.
        local_addr: path of that directory on the engines' side; None for the same path.
        num_threads: accepted for compatibility; one thread keeps a disk busy.
        strategy: how weights are read from a module.

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
        self.remote_addr, self.local_addr = remote_addr, local_addr if local_addr is not None else remote_addr
        super().__init__("disk", strategy=strategy, root=remote_addr, seen_at=self.local_addr)
        self.num_threads = num_threads
        self.group: dict[str, Any] = {}

    def create_sender(self) -> VLLMWeightSender:
        """Return a new sender for the trainer."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """Return a new receiver for ``vllm_engine``; see `VLLMDoubleBufferWeightReceiver`."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


class VLLMWeightSender:
    """Sends weights to engines or to the scheme's receivers; with a double buffer, publishes them for pollers.

    Args:
        scheme: one of this module's schemes.
    """

    def __init__(self, scheme: Any) -> None:
        self._scheme, self._ready = scheme, not scheme.group  # a scheme without a group has none to form
        self._sender = WeightSender(scheme.create_transport(**scheme.group))

    def register_model(self, model: Any) -> None:
        """Register the model that `update_weights` sends by default; held weakly where its type allows."""
        self._sender.register_model(model)

    def register_collector(self, collector: Any) -> None:
        """Register a collector, held weakly, whose policy version each accepted update increments."""
        self._sender.register_collector(collector)

    def log_to(self, *logs: Log) -> None:
        """Log every update from now on; see `WeightSender.log_to`."""
        self._sender.log_to(*logs)

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any | None = None) -> None:
        """Form the process group of the trainer and the engines' workers.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, from `get_model_metadata`.
            vllm_engine: the engines to drive, as `torchrl_ext.rpc.discovery.as_engine` takes them; None if receivers
                join the group by themselves at the same time, or for an SGLang scheme.

        Raises:
            DeadlineError: some ranks did not join; names them.
            EngineError: an engine did not join.
        """
        self._sender.init_all_workers_group(model_metadata, self._scheme.sender_engine(vllm_engine))
        self._ready = True

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Send ``weights``, or else the registered model's, and return once every engine serves them.

        Raises:
            NotConnectedError: there is nothing to send, or no engine to send it to.
            UpdateError: an engine does not serve them.
        """
        if not self._ready:
            raise _uninitialized()
        return self._sender.update_weights(weights)

    def flush_cache(self) -> bool:
        """Drop an SGLang server's prefix cache, as every update does; return whether the server did."""
        try:
            HTTPSession(self._scheme.server_url, timeout_s=30.0).post("/flush_cache", {})
        except WeightSyncError:
            return False
        return True

    def shutdown(self) -> None:
        """Leave the engines, which keep serving their weights."""
        self._ready = False
        self._sender.shutdown()


SGLangWeightSender = VLLMDoubleBufferWeightSender = VLLMWeightSender


class VLLMWeightReceiver:
    """Receives weights over the collective into an engine of this process.

    Args:
        scheme: a `VLLMWeightSyncScheme`.
        vllm_engine: a module, mapping or loader of this process, which joins as rank 1 and is filled by
            `poll_and_apply`; or a remote engine, which the sender drives, so that this receiver does nothing.
    """

    def __init__(self, scheme: Any, vllm_engine: Any) -> None:
        self._scheme, self._engine = scheme, vllm_engine
        elsewhere = isinstance(vllm_engine, (EngineClient, str, list, tuple)) or is_torchrl(vllm_engine, "RLvLLMEngine")
        self._local = None if elsewhere else WeightReceiver(vllm_engine)
        self._transport: Any = None

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Join the group while the sender forms it.

        Raises:
            DeadlineError: some ranks did not join; names them.
            ManifestError: the sender has other parameters.
        """
        if self._local is not None:
            self.shutdown()
            self._transport = self._scheme.create_transport(rank=1, **self._scheme.group)
            self._transport.init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Return whether weights arrived within ``timeout`` seconds and are loaded; False for a remote engine."""
        if self._local is None:
            return False
        if self._transport is None:
            raise _uninitialized()
        return self._transport.receive_weights(timeout, model=self._engine) is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load ``weights`` into an engine of this process; do nothing for a remote one, which its sender updates.

        Args:
            weights: TensorDict or mapping.
            inplace: must be True.

        Raises:
            ValueError: ``inplace`` is False.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place")
        if self._local is not None:
            self._local.apply_weights(weights)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._transport is not None:
            self._transport.shutdown()


class VLLMDoubleBufferWeightReceiver(VLLMWeightReceiver):
    """Loads the versions that the sender publishes into an engine.

    Args:
        scheme: a `VLLMDoubleBufferSyncScheme`.
        vllm_engine: an engine, as `torchrl_ext.rpc.discovery.as_engine` takes it. A remote engine reads the files
            itself, so it must see ``local_addr`` under the same path.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        super().__init__(scheme, vllm_engine)
        self._taken: Info | None = None
        engine: Any = as_engine(vllm_engine)
        self._root = PublishedRoot(scheme.local_addr, transport="disk")
        self._follower = PublishedFollower(self._root, engine)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Return whether a newer version was published within ``timeout`` seconds and is now served.

        Raises:
            ManifestError, UpdateError: an engine does not serve it, for instance because its parameters differ.
        """
        info = self._root.newest(timeout, self._taken)
        if info is None:
            return False
        self._follower.take(info)
        self._taken = info
        return True

    def shutdown(self) -> None:
        """Leave the engine, which keeps serving its weights."""
        try:
            self._follower.close()
        finally:
            self._root.close()


def _uninitialized() -> NotConnectedError:
    hint = "call init_all_workers_group first; after shutdown, create another sender"
    return NotConnectedError("the transport is not initialized", hint=hint)
