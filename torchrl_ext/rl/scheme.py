"""`TransportWeightSyncScheme`: a weight sync scheme for TorchRL's collectors over a transport picked by name."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme

from torchrl_ext.base.errors import ConfigError, NotConnectedError
from torchrl_ext.base.registry import transports
from torchrl_ext.base.reports import Log, Logs, SyncReport
from torchrl_ext.data.transports.base import Transport
from torchrl_ext.rl.torchrl_private import is_leaf, receivers_of, source_of
from torchrl_ext.rl.trainer_end import CollectorTransport
from torchrl_ext.rl.worker_end import WorkerTransport

__all__ = ["TransportWeightSyncScheme", "checked_settings"]


class TransportWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl has no types
    """Keeps a collector's workers up to date with the trainer's weights, over a transport picked by name.

    One scheme carries one model: ``weight_sync_schemes={"policy": TransportWeightSyncScheme("delta")}``.

    Args:
        transport: a name in `torchrl_ext.transports`.
        strategy: how weights are extracted from a module, ``"tensordict"`` or ``"state_dict"``.
        timeout_s: deadline of every wait during an update, in seconds.
        start_timeout_s: deadline for all workers to start and connect, in seconds.
        host: address of this process, which every worker must be able to reach.
        verify: whether workers compare a digest of each tensor with the trainer's before an update counts.
        settings: the transport's settings; None selects the transport's default. Without ``root``, a transport that
            needs a directory gets a temporary one, which only workers on this machine can use.

    Raises:
        ConfigError: there is no such transport or setting, or a timeout is not positive.

    Example:
        >>> scheme = tx.TransportWeightSyncScheme("delta", root=root)
        >>> # MultiSyncCollector(..., weight_sync_schemes={"policy": scheme}), then collector.update_policy_weights_()
        >>> scheme.create_transport().name
        'delta'
    """

    def __init__(
        self,
        transport: str = "disk",
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        host: str = "127.0.0.1",
        verify: bool = True,
        **settings: Any,
    ) -> None:
        self.transport, self.settings = transport, checked_settings(transport, settings)
        if timeout_s <= 0 or start_timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s}, start_timeout_s={start_timeout_s}", expected="more than 0")
        super().__init__(strategy)
        self.host, self.timeout_s, self.start_timeout_s, self.verify = host, timeout_s, start_timeout_s, verify
        self._address: tuple[str, int, str] | None = None
        self._weights: Any = None
        self._scratch: str | None = None
        self.logs = Logs()  # the trainer's end hands each report on

    @property
    def report(self) -> SyncReport | None:
        """The `SyncReport` of the last accepted update, in the trainer's process; None before the first."""
        return None if self._shared_transport is None else self._shared_transport.report

    def log_to(self, *logs: Log) -> None:
        """Log every update of the workers from now on, as `WeightSender.log_to`; call it in the trainer's process.

        Raises:
            ConfigError: as `WeightSender.log_to`.
        """
        self.logs.add(*logs)

    def create_transport(self, **settings: Any) -> Transport:
        """Make a transport from the trainer to the workers; ``settings`` override the scheme's own."""
        known = inspect.signature(transports.load(self.transport)).parameters
        settings = {**self.settings, **settings, "timeout_s": self.timeout_s}
        if "master_address" in known:
            settings.setdefault("master_address", self.host)
        if "root" in known and settings.get("root") is None and settings.get("carrier", "disk") == "disk":
            if self._scratch is None:
                self._scratch = tempfile.mkdtemp(prefix="torchrl-ext-scheme-")
                weakref.finalize(self, _remove, self._scratch, os.getpid())
            settings["root"] = self._scratch
        return transports.make(self.transport, **settings)

    # trainer end

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Any = None,
        model: nn.Module | None = None,
        num_workers: int | None = None,
        remote_collectors: list[Any] | None = None,
        ctx: Any = None,  # for TorchRL's pipes; our workers connect over TCP
    ) -> None:
        model_id = model_id or "policy"
        if weights is None and model is None and context is None:
            raise ConfigError(
                f"there is nothing to send for model {model_id!r}",
                expected="init_on_sender(context=collector, model_id=...), or model= or weights=",
            )
        if num_workers is None and remote_collectors is not None:
            num_workers = len(remote_collectors)
        if num_workers is None and context is None:
            raise ConfigError(f"the number of workers of model {model_id!r} is not known", hint="pass num_workers")
        if num_workers is None and not isinstance(context, Collector):  # a `Collector` runs in this process
            num_workers = getattr(context, "num_workers", None)
        self.model_id, self.context, self.model = model_id, context, model
        self.weights = model if weights is None else weights
        self.shared_transport = CollectorTransport(self, num_workers)
        self._address = self.shared_transport.address

    def prepare_weights(self, weights: Any, model_id: str, strategy: Any, context: Any = None) -> Any | None:
        """Return ``weights``, or else those of `init_on_sender`, or else the collector's; None if there are none."""
        if weights is None:
            weights = source_of(context, model_id) if self._weights is None else self._weights
        return None if weights is None else super().prepare_weights(weights, model_id, strategy, context)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        first = self.prepare_weights(weights, self.model_id, self.strategy, self.context)
        self.shared_transport.setup_connection_and_weights_on_sender(first)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Send weights, and return when every worker holds them.

        Args:
            weights: module, TensorDict or mapping of tensors; None sends the registered model's weights.
            worker_ids: the workers to update; None for all.

        Raises:
            NotConnectedError: the call came before `init_on_sender` and `connect`, or after `shutdown`.
            ConcurrentUpdateError: another thread is sending.
            EngineUnreachableError: a worker had already ended; nothing was sent.
            UpdateError: a worker does not hold the weights; names the worker, the model and any key at fault.
            ConfigError: there is no worker with this index, or there are no weights.
        """
        self._require_ready("sender")
        prepared = self.prepare_weights(weights, self.model_id, self.strategy, self.context)
        self.shared_transport.send_weights(prepared, worker_ids)  # one update for all requested workers

    # worker end

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, *, model: Any = None, worker_idx: int | None = None, **_: Any
    ) -> None:
        self.model_id, self.context, self.model = model_id, context, model  # the base class looks up a missing model
        found = getattr(context, "worker_idx", None)
        self.worker_idx = worker_idx if found is None else found
        device = getattr(context, "policy_device", None)
        transport = WorkerTransport(self._address, model_id, lambda: self.model, self.start_timeout_s, device)
        self._register_transport_receiver(transport)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        self._start_background_receiver()

    def _background_receive_loop(self) -> None:
        self.receiver_transport.serve(self._landed)

    def _landed(self) -> None:
        """Pass landed weights on to the collectors below, or bump the policy version of a leaf collector.

        A leaf's `update_policy_weights_` would copy its policy onto itself, and it cannot update other models.
        """
        context = self.context
        for name, other in receivers_of(context).items():
            if other is not self and (
                f"{name}.".startswith(f"{self.model_id}.") or f"{self.model_id}.".startswith(f"{name}.")
            ):
                other.receiver_transport.send_ack()
        if is_leaf(context):
            if self.model_id == "policy":
                context.increment_version()
        elif (update := getattr(context, "update_policy_weights_", None)) is not None:
            update(model_id=self.model_id, policy_or_weights=self.strategy.extract_weights(self.model))

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Wait for weights newer than those of the last call; a background thread loads them.

        Args:
            timeout: seconds to wait; None waits as long as the trainer is connected.

        Returns:
            The weights that the model holds now; None if nothing new came.

        Raises:
            NotConnectedError: the call came before `init_on_receiver` and `connect`, or after `shutdown`.
        """
        self._require_ready("receiver")
        return self.receiver_transport.receive_weights(timeout, model=self.model, strategy=self.strategy)

    # both ends

    def _require_ready(self, end: str) -> None:
        for step, call in (("initialized", f"init_on_{end}"), ("synchronized", "connect")):
            if not getattr(self, f"{step}_on_{end}"):
                raise NotConnectedError(
                    f"the scheme of model {self.model_id!r} is not {step} on {end}",
                    hint=f"call {call}, or hand the scheme to a collector",
                )

    def shutdown(self) -> None:
        """Disconnect and release everything; workers keep their weights. May be called twice."""
        transport, self._shared_transport, self._receiver_transport = self.receiver_transport, None, None
        self.synchronized_on_sender = self.synchronized_on_receiver = False
        if transport is not None:
            transport.shutdown()
        super().shutdown()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            _remove(scratch, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: settings and the trainer's address."""
        here = ("_shared_transport", "_receiver_transport", "_weights", "_scratch")
        return super().__getstate__() | dict.fromkeys(here) | {"logs": Logs()}


def checked_settings(transport: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None, after checking that the transport takes them; opens nothing.

    Raises:
        ConfigError: there is no such transport, or it has no such setting.
    """
    known = inspect.signature(transports.load(transport)).parameters
    given = {name: value for name, value in settings.items() if value is not None}
    strange = sorted(set(given) - set(known))
    if strange:
        raise ConfigError(
            f"transport {transport!r} has no setting {strange[0]!r}", expected=f"some of {', '.join(sorted(known))}"
        )
    return given


def _remove(path: str, owner: int) -> None:
    """Remove a scheme's own directory, unless this process is a fork of the owner."""
    if owner == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
