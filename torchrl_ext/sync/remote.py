"""Senders and receivers as Ray actors: made in the actor from what can travel, since an open transport cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_ext.errors import NotConnectedError
from torchrl_ext.registry import transports
from torchrl_ext.sync.parties import as_engine
from torchrl_ext.sync.ray import as_remote
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.types import SyncReport

__all__ = ["RemoteReceiver", "RemoteSender"]


class RemoteSender:
    """A `WeightSender` that runs in a Ray actor: ``RemoteSender.as_remote({...}).remote("disk", root="/shared")``.

    Args:
        transport: name of the transport.
        engine: as for `torchrl_ext.sync.parties.as_engine`: addresses, names or handles of `EngineActor`s in a
            `RayEngine`, or None for the data layer alone.
        make_model: called in the actor; makes what is sent. Or call `register_model`.
        sender: keyword arguments of `WeightSender`.
        settings: of the transport.

    Raises:
        ConfigError: no such transport, or settings that it does not take.
    """

    def __init__(
        self,
        transport: str,
        engine: Any = None,
        *,
        make_model: Callable[[], Any] | None = None,
        sender: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.sender = WeightSender(transports.make(transport, **settings), as_engine(engine), **(sender or {}))
        self._model: Any = None  # a sender holds models and collectors weakly
        self._collectors: list[Any] = []
        if make_model is not None:
            self.register_model(make_model())

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """The Ray actor class; ``remote_config`` has the options of `ray.remote`."""
        return as_remote(cls, remote_config)

    def register_model(self, model: Any) -> None:
        """As `WeightSender.register_model`; kept alive."""
        self._model = model
        self.sender.register_model(model)

    def register_collector(self, collector: Any) -> None:
        """As `WeightSender.register_collector`; kept alive."""
        self._collectors.append(collector)
        self.sender.register_collector(collector)

    def init_all_workers_group(self, model_metadata: Mapping[str, Any] | None = None) -> None:
        """As `WeightSender.init_all_workers_group`."""
        self.sender.init_all_workers_group(model_metadata)

    def update_weights(self, weights: Any = None) -> SyncReport:
        """As `WeightSender.update_weights`."""
        return self.sender.update_weights(weights)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(model, *args)`` on the model that was registered last: a training step, say.

        Raises:
            NotConnectedError: no model was registered.
        """
        if self._model is None:
            raise NotConnectedError(
                "this sender has no model to apply anything to", hint="give make_model=, or call register_model(model)"
            )
        return function(self._model, *args)

    def check_connection(self) -> bool:
        """As `WeightSender.check_connection`."""
        return self.sender.check_connection()

    def shutdown(self) -> None:
        """As `WeightSender.shutdown`."""
        self.sender.shutdown()


class RemoteReceiver:
    """A `WeightReceiver` that runs in a Ray actor and takes what a trainer sends without a control layer.

    Args:
        transport: name of the transport.
        make_model: called in the actor; makes what takes the weights.
        settings: of the transport.

    Raises:
        ConfigError: no such transport, or settings that it does not take.
    """

    def __init__(self, transport: str, make_model: Callable[[], Any], **settings: Any) -> None:
        self.model = make_model()
        self.receiver = WeightReceiver(self.model, transports.make(transport, **settings))

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """The Ray actor class; ``remote_config`` has the options of `ray.remote`."""
        return as_remote(cls, remote_config)

    def init_all_workers_group(self, model_metadata: Mapping[str, Any]) -> None:
        """As `WeightReceiver.init_all_workers_group`."""
        self.receiver.init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """As `WeightReceiver.poll_and_apply`."""
        return self.receiver.poll_and_apply(timeout)

    def version(self) -> int:
        """The version that the model holds; 0 before the first."""
        return self.receiver.version

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(model, *args)``: a rollout, say."""
        return function(self.model, *args)

    def shutdown(self) -> None:
        """Leave the transport."""
        self.receiver.close()
