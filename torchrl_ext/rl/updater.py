"""`TransportWeightUpdater`: a weight updater for TorchRL's collectors over a transport picked by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrl.collectors import WeightUpdaterBase

from torchrl_ext.base.errors import ConfigError, NotConnectedError
from torchrl_ext.base.registry import transports
from torchrl_ext.base.reports import Log, SyncReport
from torchrl_ext.base.types import dtype_from_name
from torchrl_ext.control.client import EngineClient
from torchrl_ext.control.discovery import as_engine
from torchrl_ext.control.http import normalise_urls
from torchrl_ext.data.transports.base import Transport
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.rl.scheme import checked_settings
from torchrl_ext.sync.sender import WeightSender

__all__ = ["TransportWeightUpdater"]


class TransportWeightUpdater(WeightUpdaterBase):  # type: ignore[misc]  # torchrl has no types
    """Pushes a policy's weights to engines, for ``LLMCollector(weight_updater=...)``.

    TorchRL 0.14.1 deprecates updaters, and warns when this class is imported and when a collector is given one, but
    its `LLMCollector` takes nothing else. Give other collectors a `TransportWeightSyncScheme`; code that needs no
    updater calls ``WeightSender.register_collector(collector)``.

    ``collector.update_policy_weights_()`` bumps the collector's policy version after an accepted update. After your own
    call of `push_weights`, ``updater.increment_version()`` bumps it for all registered collectors. Both updates return
    when every engine serves the weights, and raise `UpdateError` if one does not, like `WeightSender.update_weights`.

    Args:
        transport: a name in `torchrl_ext.transports`, or a transport.
        engine: anything that `torchrl_ext.control.discovery.as_engine` takes; None for the ``vllm_engine`` of a
            `VLLMCollectiveTransport`, and with other transports for workers that call ``receive_weights`` themselves.
        mapper: trainer name -> checkpoint name, as for `WeightSender`.
        dtype: dtype, or its name, to which floating-point tensors are cast.
        verify, rehearse, max_gap, probe: how an update is verified, as for `WeightSender`.
        finite: as for `WeightSender`.
        settings: settings of a transport picked by name; None selects the transport's default.

    Attributes:
        report: `SyncReport` of the last accepted update; None before the first. Collectors and ``push_weights`` return
            none, so read it here, or log every report by `log_to`.

    Raises:
        ConfigError: there is no such transport or setting, an address is invalid, or settings come with a
            transport object.
        ManifestError: torch has no dtype of this name.

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
        mapper: Callable[[str], str] | None = None,
        dtype: torch.dtype | str | None = None,
        verify: bool | str = True,
        rehearse: str = "once",
        max_gap: float | str | None = "dtype",
        probe: Any = None,
        finite: bool = True,
        **settings: Any,
    ) -> None:
        if isinstance(transport, str):
            settings = checked_settings(transport, settings)
        elif settings:
            raise ConfigError(
                f"settings {sorted(settings)} cannot apply to a transport that already exists",
                hint="pass the transport's name",
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
        """The sender, made on first use so that the updater can be pickled before.

        Raises:
            EngineError: an engine given by its address does not answer.
        """
        if self._sender is None:
            transport, engine, settings = self._parts
            made = transports.make(transport, **settings) if isinstance(transport, str) else transport
            if engine is None and isinstance(made, VLLMCollectiveTransport):
                engine = made.vllm_engine
            self._sender = WeightSender(made, as_engine(engine), **self._how)
        return self._sender

    def log_to(self, *logs: Log) -> None:
        """Log every update from now on, as `WeightSender.log_to`; makes the sender.

        Raises:
            ConfigError, EngineError: as `WeightSender.log_to` and `sender`.
        """
        self.sender.log_to(*logs)

    def register_model(self, model: Any) -> None:
        """Register the model to send when no weights are passed; the updater keeps it alive."""
        self._model = model

    def init(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]] | None = None) -> None:
        """Connect the engines, for ``collector.init_updater``; without this call the first update connects them.

        Args:
            model_metadata: ``{name: (dtype, shape)}``; the registered model's if omitted.
        """
        if model_metadata is None:
            self.sender.register_model(self._get_server_weights())
        self.sender.init_all_workers_group(model_metadata)

    def shutdown(self) -> None:
        """Disconnect from the engines, which keep serving their weights."""
        if self._sender is not None:
            self._sender.shutdown()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if worker_id is not None and (worker_id, len(self.sender.engine.each())) != (0, 1):
            raise ConfigError(
                f"worker {worker_id} cannot be updated by itself: all engines serve the same version",
                state="nothing was sent",
                hint="leave worker_ids out, or use one updater for each group of engines that should differ",
            )
        self.report = self.sender.update_weights(server_weights)

    def _get_server_weights(self) -> Any:
        if self._model is None:
            raise NotConnectedError(
                "there are no weights to push", hint="pass weights, or call updater.register_model(policy)"
            )
        return self._model

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights  # the sender takes modules, TorchRL's wrappers, mappings and checkpoint directories

    def __getstate__(self) -> dict[str, Any]:
        """Drop what only this process can use: the sender and the references to collectors."""
        return self.__dict__ | {"_sender": None, "_collector_wrs": None}
