"""Defines `TransportWeightUpdater`: a weight updater of TorchRL's collectors over a transport given by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrl.collectors import WeightUpdaterBase

from torchrl_ext.collectors.scheme import checked_settings
from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.registry import transports
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.discovery import as_engine
from torchrl_ext.rpc.http import normalise_urls
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.base import Transport
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.types import SyncReport, dtype_from_name

__all__ = ["TransportWeightUpdater"]


class TransportWeightUpdater(WeightUpdaterBase):  # type: ignore[misc]  # torchrl has no types
    """Pushes a policy's weights to engines, for ``LLMCollector(weight_updater=...)``.

    TorchRL calls updaters deprecated, and warns when this class is imported and when a collector is given one, but its
    `LLMCollector` takes nothing else (0.14.1). Give other collectors a `TransportWeightSyncScheme`, and code that needs
    no updater ``WeightSender.register_collector(collector)``.

    ``collector.update_policy_weights_()`` bumps the collector's policy version after an accepted update; after a
    `push_weights` of your own, ``updater.increment_version()`` does so for all registered collectors. Both return when
    every engine serves the weights, and raise `UpdateError` where one does not, as `WeightSender.update_weights`.

    Args:
        transport: a name of `torchrl_ext.transports`, or a transport.
        engine: anything that `torchrl_ext.rpc.discovery.as_engine` takes; None for the ``vllm_engine`` of a
            `VLLMCollectiveTransport`, or else for the data layer alone, whose workers call ``receive_weights``.
        mapper: trainer name -> checkpoint name, as for `WeightSender`.
        dtype: cast of floating-point tensors; a dtype or its name.
        verify, rehearse, max_gap, probe: what an update has to prove, as for `WeightSender`.
        finite: what becomes of a NaN or an infinity, as for `WeightSender`.
        settings: of the transport, where it is given by name; None stands for its own default.

    Attributes:
        report: of the last update; None before the first.

    Raises:
        ConfigError: no such transport, settings that it does not take or that are for one that exists already, or
            addresses or a dtype that are none.

    Example:
        >>> updater = tx.TransportWeightUpdater("disk", address, root=root)
        >>> updater.push_weights(lm)  # or LLMCollector(..., weight_updater=updater)
        >>> updater.report.version, updater.report.verified
        (1, True)
    """

    def __init__(
        self,
        transport: str | Transport = "disk",
        engine: EngineClient | str | Any | None = None,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | str | None = None,
        verify: bool | str = True,
        rehearse: str = "once",
        max_gap: float | str | None = "dtype",
        probe: Any = None,
        finite: str = "warn",
        **settings: Any,
    ) -> None:
        if isinstance(transport, str):
            settings = checked_settings(transport, settings)
        elif settings:
            raise ConfigError(
                f"settings {sorted(settings)} are for a transport that exists already",
                hint="give the transport's name",
            )
        addresses = [engine] if isinstance(engine, str) else engine
        if isinstance(addresses, Sequence) and all(isinstance(one, str) for one in addresses):
            engine = normalise_urls(addresses)
        self._parts = transport, engine, settings
        cast = dtype_from_name(dtype) if isinstance(dtype, str) else dtype
        proof = {"verify": verify, "rehearse": rehearse, "max_gap": max_gap, "probe": probe}
        self._how: dict[str, Any] = {"mapper": mapper, "dtype": cast, "finite": finite, **proof}
        self._sender: WeightSender | None = None
        self._model: Any = None
        self.report: SyncReport | None = None

    @property
    def sender(self) -> WeightSender:
        """The sender, which is made on first use, so that an updater can be pickled before.

        Raises:
            EngineError: an engine that was given by its address does not answer.
        """
        if self._sender is None:
            transport, engine, settings = self._parts
            made = transports.make(transport, **settings) if isinstance(transport, str) else transport
            if engine is None and isinstance(made, VLLMCollectiveTransport):
                engine = made.vllm_engine
            self._sender = WeightSender(made, as_engine(engine), **self._how)
        return self._sender

    def register_model(self, model: Any) -> None:
        """Register what is sent when no weights are passed; it is kept alive."""
        self._model = model

    def init(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]] | None = None) -> None:
        """Connect the engines before the first update, which does it otherwise, for ``collector.init_updater``.

        Args:
            model_metadata: ``{name: (dtype, shape)}``; that of the registered model if omitted.
        """
        if model_metadata is None:
            self.sender.register_model(self._get_server_weights())
        self.sender.init_all_workers_group(model_metadata)

    def shutdown(self) -> None:
        """Leave the engines; they keep serving what they have."""
        if self._sender is not None:
            self._sender.shutdown()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if worker_id is not None and (worker_id, len(self.sender.engine.rows())) != (0, 1):
            raise ConfigError(
                f"worker {worker_id} cannot be updated alone: all engines serve one version",
                state="nothing was sent",
                hint="leave worker_ids out, or give engines that shall differ an updater each",
            )
        self.report = self.sender.update_weights(server_weights)

    def _get_server_weights(self) -> Any:
        if self._model is None:
            raise NotConnectedError(
                "there are no weights to push", hint="pass them, or call updater.register_model(policy)"
            )
        return self._model

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights  # the sender takes modules, TorchRL's wrappers, mappings and checkpoint directories

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only this process has: the sender, and references to collectors."""
        return self.__dict__ | {"_sender": None, "_collector_wrs": None}
