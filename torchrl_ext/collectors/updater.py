"""Defines `TransportWeightUpdater`: a weight updater of TorchRL's collectors over a transport given by name."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torchrl.collectors import Collector, WeightUpdaterBase

from torchrl_ext.compat.torchrl_llm.ends import as_engine
from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.registry import transports
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.sync.update_source import bump
from torchrl_ext.transports.base import Transport
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport
from torchrl_ext.types import SyncReport

__all__ = ["TransportWeightUpdater"]

log = logging.getLogger("torchrl_ext")


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it is at our line, where nobody else can do anything about it

    class _Updater(WeightUpdaterBase):  # type: ignore[misc]  # torchrl has no types
        """TorchRL's base, without its warning to whoever derives from it."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super(WeightUpdaterBase, cls).__init_subclass__(**kwargs)


class TransportWeightUpdater(_Updater):
    """Pushes a policy's weights to engines, for ``LLMCollector(weight_updater=...)``.

    TorchRL calls updaters deprecated and warns when a collector is given one, but its `LLMCollector` takes nothing else
    (0.14.1). Give other collectors a `TransportWeightSyncScheme`. Without a collector's call no updater is needed:
    ``WeightSender.register_collector(collector)``, and then ``sender.update_weights()``.

    Each accepted update bumps the policy version of every registered collector once, whether it came through
    ``collector.update_policy_weights_()`` or `push_weights`; a refused one bumps none.

    Args:
        transport: a name of `torchrl_ext.transports`, or a transport.
        engine: a client, ``"host:port"`` or several of them, TorchRL's `AsyncVLLM`, or a module of this process; None
            for the ``vllm_engine`` of a `VLLMCollectiveTransport`, or else for the data layer alone, whose workers call
            ``receive_weights``.
        mapper: trainer name -> checkpoint name, as for `WeightSender`.
        dtype: cast of floating-point tensors.
        verify, rehearse, max_gap, probe: what an update has to prove, as for `WeightSender`.
        finite: what becomes of a NaN or an infinity, as for `WeightSender`.
        settings: of the transport, where it is given by name.

    Raises:
        ConfigError: settings for a transport that exists already.

    Example:
        >>> updater = tx.TransportWeightUpdater("disk", address, root=root)
        >>> updater.push_weights(lm)  # or LLMCollector(..., weight_updater=updater)
        >>> updater.report.version, updater.report.verified
        (1, True)
    """

    def __init__(
        self,
        transport: str | Transport,
        engine: EngineClient | str | Any | None = None,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        verify: bool | str = True,
        rehearse: str = "once",
        max_gap: float | str | None = "dtype",
        probe: Any = None,
        finite: str = "warn",
        **settings: Any,
    ) -> None:
        if not isinstance(transport, str) and settings:
            raise ConfigError(
                f"settings {sorted(settings)} are for a transport that exists already",
                hint="give the transport's name",
            )
        self._parts = (transport, engine, settings)
        proof = {"verify": verify, "rehearse": rehearse, "max_gap": max_gap, "probe": probe}
        self._how: dict[str, Any] = {"mapper": mapper, "dtype": dtype, "finite": finite, **proof}
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

    @property
    def version(self) -> int:
        """The version that the engines serve; 0 before the first."""
        return 0 if self._sender is None else self._sender.version

    def register_model(self, model: Any) -> None:
        """Register what is sent when no weights are passed; it is kept alive."""
        self._model = model

    def init(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]] | None = None) -> None:
        """Connect the engines before the first update, which does it otherwise.

        Args:
            model_metadata: ``{name: (dtype, shape)}``; that of the registered model if omitted.
        """
        if model_metadata is None:
            self.sender.register_model(self._get_server_weights())
        self.sender.init_all_workers_group(model_metadata)

    def maybe_init_group(self) -> None:
        """Call `init` where a model is registered and nothing is connected, for code written for TorchRL's updaters."""
        if self._model is not None and not self.sender.check_connection():
            self.init()

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Send weights, and return when every engine serves them.

        Args:
            policy_or_weights: module (TorchRL's LLM wrappers stand for the model inside), TensorDict, mapping,
                checkpoint directory or `WeightSource`; None for the registered model.
            worker_ids: None, or the number of every engine (``[0]`` of one): engines are updated together.

        Raises:
            ConfigError: ``worker_ids`` names some engines and not others, or none that exists; nothing was sent.
            UpdateError: some engine does not serve them; no policy version was bumped.
        """
        self._require_everybody(worker_ids)
        self._push_weights(policy_or_weights=policy_or_weights)
        bump(weakref.ref(known) for known in self.collectors or () if known is not None)
        self._call_post_hooks()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Do as `push_weights`, for a collector's `update_policy_weights_`, which bumps its own version afterwards."""
        self._require_everybody(worker_ids)
        self._push_weights(policy_or_weights=policy_or_weights)
        others = (known for known in self.collectors or () if known is not None and not self._calls(known))
        bump(map(weakref.ref, others))
        self._call_post_hooks()

    def shutdown(self) -> None:
        """Leave the engines; they keep serving what they have."""
        if self._sender is not None:
            self._sender.shutdown()

    def _require_everybody(self, worker_ids: Any) -> None:
        """Refuse to update some engines and not others, since all of them serve one version.

        Raises:
            ConfigError: ``worker_ids`` names something else than every engine.
        """
        if worker_ids is None:
            return
        named = set(worker_ids) if isinstance(worker_ids, Iterable) else {worker_ids}
        engines = set(range(len(self.sender.engine.rows())))  # none, where data is sent without an engine client
        if named != engines or not named:
            told = ", ".join(sorted(map(str, named)))
            raise ConfigError(
                f"worker {told} cannot be updated alone" if named else "worker_ids names no worker",
                expected="worker_ids=None" + (f", or {sorted(engines)}: engines serve one version" if engines else ""),
                state="nothing was sent",
                hint="leave worker_ids out, or give engines that shall differ an updater each",
            )

    def _calls(self, collector: Any) -> bool:
        """Return whether ``collector`` is the one that calls this updater."""
        return isinstance(collector, Collector) and collector._weight_updater is self

    def _call_post_hooks(self) -> None:
        """Call each hook once; one that raises is logged and no more, since the engines have the weights already."""
        for hook in self.post_hooks:
            try:
                hook()
            except Exception:
                log.error("a hook failed after new weights were put in service", exc_info=True)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.report = self.sender.update_weights(server_weights)

    def _get_server_weights(self) -> Any:
        if self._model is None:
            raise NotConnectedError(
                "there are no weights to push", hint="pass them, or call updater.register_model(policy)"
            )
        return self._model

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only this process has: the sender, and references to collectors."""
        return self.__dict__ | {"_sender": None, "_collector_wrs": None}
