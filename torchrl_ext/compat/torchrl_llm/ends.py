"""Senders and receivers of `torchrl_ext.compat.torchrl_llm.schemes`, with the signatures of TorchRL's."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchrl_ext.errors import NotConnectedError, WeightSyncError
from torchrl_ext.landing.loader import as_loader
from torchrl_ext.registry import engines
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.published import PublishedFollower
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.published import PublishedRoot
from torchrl_ext.types import Info, SyncReport
from torchrl_ext.weights.source import is_torchrl

if TYPE_CHECKING:
    from torchrl_ext.compat.torchrl_llm.schemes import (
        VLLMDoubleBufferSyncScheme,
        VLLMWeightSyncScheme,
    )

__all__ = [
    "SGLangWeightSender",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "as_engine",
    "sglang_client",
]

Metadata = Mapping[str, tuple[torch.dtype, Any]]


class _Sender:
    """A sender with TorchRL's methods, which takes models and collectors before it is connected to an engine."""

    needs: ClassVar[str] = "init_all_workers_group"

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._sender: WeightSender | None = None
        self._model: Any = lambda: None
        self._collectors: list[Any] = []

    def register_model(self, model: Any) -> None:
        """Register what `update_weights` sends when no weights are passed; it is held weakly where its type allows."""
        try:
            self._model = weakref.ref(model)
        except TypeError:  # a plain dict takes no weak reference
            self._model = lambda: model
        if self._sender is not None:
            self._sender.register_model(model)

    def register_collector(self, collector: Any) -> None:
        """Register a collector whose policy version is bumped after each accepted update."""
        self._collectors.append(collector)
        if self._sender is not None:
            self._sender.register_collector(collector)

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Send the registered model's weights, or ``weights``, and return when every engine serves them.

        Raises:
            NotConnectedError: there is nothing to send, or no engine to send it to.
            UpdateError: some engine does not serve them.
        """
        if weights is None and self._model() is None:
            raise NotConnectedError(
                "No model registered and no weights given", hint="call register_model(policy) and keep it alive"
            )
        if self._sender is None:
            raise NotConnectedError("Transport not initialized", hint=f"Call {self.needs} first")
        return self._sender.update_weights(weights)

    def shutdown(self) -> None:
        """Leave the engines, which keep serving the weights they have."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown()
        self._collectors.clear()

    def _connect(self, engine: EngineClient | None) -> WeightSender:
        """Make a sender over a new transport of the scheme, in place of an earlier one."""
        if self._sender is not None:
            self._sender.shutdown()
        self._sender = sender = WeightSender(self._scheme.create_transport(), engine)
        model = self._model()
        if model is not None:
            sender.register_model(model)
        for collector in self._collectors:
            sender.register_collector(collector)
        return sender


class VLLMWeightSender(_Sender):
    """Sends weights to vLLM engines, or to each `VLLMWeightReceiver`.

    Args:
        scheme: a `VLLMWeightSyncScheme`.
    """

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any | None = None) -> None:
        """Form the process group of the trainer and the engines' workers.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, from `get_model_metadata`.
            vllm_engine: the engines to drive, anything that `as_engine` takes (addresses, clients, `AsyncVLLM`); None
                where receivers join the group themselves, at the same time.

        Raises:
            DeadlineError: names the ranks that did not come.
            EngineError: an engine does not join.
        """
        self._connect(as_engine(vllm_engine)).init_all_workers_group(model_metadata)


class SGLangWeightSender(_Sender):
    """Sends weights to one SGLang server.

    Args:
        scheme: a `SGLangWeightSyncScheme`.
    """

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Form the process group with the server's workers; raises as `VLLMWeightSender` does."""
        engine = sglang_client(self._scheme.server_url, self._scheme.pause_mode)
        self._connect(engine).init_all_workers_group(model_metadata)

    def flush_cache(self) -> bool:
        """Drop the server's prefix cache, as every update does; return False where the server did not do it."""
        server = HTTPSession(self._scheme.server_url, timeout_s=30.0)
        try:
            server.post("/flush_cache", {})
        except WeightSyncError:
            return False
        return True


class VLLMDoubleBufferWeightSender(_Sender):
    """Publishes weights in a directory, from which receivers take them when they poll.

    Args:
        scheme: a `VLLMDoubleBufferSyncScheme`.
    """

    needs: ClassVar[str] = "register_model"

    def register_model(self, model: Any) -> None:
        super().register_model(model)
        if self._sender is None:
            self._connect(None)


class _Receiver(ABC):
    """A receiver with TorchRL's methods: it lands weights in an engine of this process, or stands for one elsewhere.

    Args:
        engine: a module, mapping or loader of this process, or an engine elsewhere.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        driven = isinstance(engine, (EngineClient, str, list, tuple)) or is_torchrl(engine, "RLvLLMEngine")
        self._local = None if driven else WeightReceiver(as_loader(engine))

    @abstractmethod
    def poll_and_apply(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds at most, and return whether weights came and are in service."""

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Land ``weights`` in an engine of this process; one elsewhere has them when its sender's update returns.

        Args:
            weights: TensorDict or mapping.
            inplace: must be True.

        Raises:
            ValueError: not ``inplace``.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place")
        if self._local is not None:
            self._local.apply_weights(weights)


class VLLMWeightReceiver(_Receiver):
    """Lands weights that come over the collective in an engine of this process.

    Args:
        scheme: a `VLLMWeightSyncScheme`.
        vllm_engine: a module, mapping or loader of this process, which joins as rank 1 and is filled by
            `poll_and_apply`; or an engine elsewhere, which the sender drives: then there is nothing to do here.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        super().__init__(vllm_engine)
        self._scheme = scheme
        self._transport: VLLMCollectiveTransport | None = None

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Join the group, at the same time as the sender forms it.

        Raises:
            DeadlineError: names the ranks that did not come.
            ManifestError: the sender has other parameters.
        """
        if self._local is None:
            return
        self.shutdown()
        self._transport = self._scheme.create_transport(rank=1)
        self._transport.init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Return whether weights came within ``timeout`` seconds and are in place; False for an engine elsewhere."""
        if self._local is None:
            return False
        if self._transport is None:
            raise NotConnectedError("Transport not initialized", hint="Call init_all_workers_group first")
        return self._transport.receive_weights(timeout, model=self._engine) is not None

    def shutdown(self) -> None:
        """Leave the group."""
        if self._transport is not None:
            self._transport.shutdown()


class VLLMDoubleBufferWeightReceiver(_Receiver):
    """Takes versions that the sender published, and puts them in service.

    Args:
        scheme: a `VLLMDoubleBufferSyncScheme`.
        vllm_engine: anything that `as_engine` takes. An engine elsewhere reads the files by itself, so that it must
            see ``local_addr`` under the same path.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        super().__init__(vllm_engine)
        self._transport = DiskTransport(scheme.local_addr)
        self._taken: Info | None = None
        driven = None if self._local is not None else as_engine(vllm_engine)
        self._root = PublishedRoot(scheme.local_addr, transport="disk")
        self._follower = None if driven is None else PublishedFollower(self._root, driven)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Return whether a newer version was published within ``timeout`` seconds and is in service.

        Raises:
            ManifestError: it has other parameters than the engine; nothing was changed.
            UpdateError: an engine does not serve it.
        """
        if self._follower is None:
            return self._transport.receive_weights(timeout, model=self._engine) is not None
        info = self._root.newest(timeout, self._taken)
        if info is None:
            return False
        self._follower.take(info)
        self._taken = info
        return True

    def shutdown(self) -> None:
        """Leave the engine, which keeps serving the weights it has."""
        try:
            if self._follower is not None:
                self._follower.close()
        finally:
            self._root.close()
            self._transport.shutdown()


def sglang_client(server_url: str, pause_mode: str | None) -> EngineClient:
    """Make the client of an SGLang server, with TorchRL's ``pause_mode``; None leaves the client's own default."""
    return engines.make("sglang", url=server_url, **({} if pause_mode is None else {"pause_mode": pause_mode}))


def as_engine(engine: Any) -> EngineClient | None:
    """Return an engine client for anything that names engines.

    Args:
        engine: None (data layer only); an `EngineClient`, or several; ``"host:port"``, or several; a module, mapping,
            loader or receiver of this process; TorchRL's `AsyncVLLM`.

    Raises:
        ConfigError: it is nothing that can be driven.
        EngineError: no engine answers at an address.
    """
    if engine is None or isinstance(engine, EngineClient):
        return engine
    if isinstance(engine, str):
        return connect(engine)
    if isinstance(engine, WeightReceiver):
        return InProcessEngine(engine)
    if isinstance(engine, Sequence) and engine and all(isinstance(one, str) for one in engine):
        return connect(*engine)
    if isinstance(engine, Sequence) and engine:
        return Fleet([client for client in map(as_engine, engine) if client is not None])
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine)
    if is_torchrl(engine, "RLvLLMEngine") and "ray" in engines.names():
        return engines.make("ray", engine=engine)
    return InProcessEngine(as_loader(engine))
