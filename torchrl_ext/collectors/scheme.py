"""Defines `TransportWeightSyncScheme`: a weight sync scheme of TorchRL's collectors over a transport given by name.

`TransportSchemeBase` implements `torchrl.weight_update.WeightSyncScheme` for whichever transport a subclass makes.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model

from torchrl_ext.collectors.hub import dial
from torchrl_ext.collectors.policy_loader import ModelLoader
from torchrl_ext.collectors.trainer_end import SchemeTrainerEnd
from torchrl_ext.collectors.worker_end import SchemeWorkerEnd
from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.registry import transports
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.base import Transport

__all__ = ["TransportSchemeBase", "TransportWeightSyncScheme", "check_settings"]


class TransportSchemeBase(WeightSyncScheme):  # type: ignore[misc]  # torchrl has no types
    """A weight sync scheme for one model: the trainer end in the trainer and, pickled into a worker, the worker end.

    Its settings are those that `TransportWeightSyncScheme` describes.
    """

    def __init__(
        self,
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        verify: bool = False,
    ) -> None:
        super().__init__(strategy)
        self.host, self.timeout_s, self.start_timeout_s, self.verify = host, timeout_s, start_timeout_s, verify
        self._trainer_end: SchemeTrainerEnd | None = None
        self._worker_end: SchemeWorkerEnd | None = None
        self._dial: tuple[str, int, str] | None = None
        self._seen = 0

    @abstractmethod
    def create_transport(self, **settings: Any) -> Transport:
        """Make a new transport of the trainer; ``settings`` come on top of the scheme's own."""

    def worker_transport(self) -> Transport:
        """Make the transport to a collector's workers, whose number is known only when they are connected."""
        return self.create_transport()

    # trainer end

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Any = None,
        model: nn.Module | None = None,
        params_map: dict[int, TensorDictBase] | None = None,
        devices: list[Any] | None = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
        remote_collectors: list[Any] | None = None,
        ctx: Any = None,
    ) -> None:
        del ctx  # workers dial in by TCP, however they were started
        self._model_id = model_id or "policy"
        if params_map is not None:
            if model is not None or weights is not None or context is not None:
                raise ConfigError("params_map stands alone", expected="no model, weights or context beside it")
            num_workers = len(params_map)
        for counted in (devices, remote_collectors):
            if num_workers is None and counted is not None:
                num_workers = len(counted)
        if context is not None:
            self.context = context
            if num_workers is None and not isinstance(context, Collector):
                num_workers = getattr(context, "num_workers", None)
        if model is not None:
            self.model = model
        if weights is not None:
            self.weights = weights
        if context is None and model is None and weights is None and params_map is None:
            raise ConfigError(
                f"there is nothing to send for model {self._model_id!r}",
                expected="init_on_sender(context=collector, model_id=...), or model=, weights= or params_map=",
            )
        if context is None and num_workers is None:
            raise ConfigError(
                f"the number of workers of model {self._model_id!r} is not known", hint="give num_workers or devices"
            )
        self._trainer_end = SchemeTrainerEnd(
            self, num_workers, devices=devices, params_map=params_map, device_map_fn=device_map_fn, kept=model
        )
        self._dial = self._trainer_end.address

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self._require_trainer_end("connect").start(weights)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Send weights, and return when every worker holds them.

        Args:
            weights: module, TensorDict, mapping of tensors, or one of these per worker (``{0: ..., 1: ...}``); None
                for those of the registered model.
            worker_ids: the workers that get them; None for all.

        Raises:
            NotConnectedError: before `init_on_sender` and `connect`, or after `shutdown`.
            EngineUnreachableError: a worker ended earlier; nothing was sent.
            UpdateError: some worker does not hold them; names worker, model and, where one is at fault, the key.
            ConfigError: there is no worker of this index.
        """
        if not self.initialized_on_sender:
            raise NotConnectedError(
                f"Must be initialized on sender before sending weights (model {self._model_id!r})",
                hint="call init_on_sender and connect, or hand the scheme to a collector",
            )
        if not self.synchronized_on_sender:
            raise NotConnectedError(
                f"Must be synchronized on sender before sending weights (model {self._model_id!r})",
                hint="call connect() when the workers are up",
            )
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        self._require_trainer_end("send").send(weights, ids)

    # worker end

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        self._model_id = model_id
        if context is not None:
            self.context = context
            found = getattr(context, "worker_idx", None)
            worker_idx = found if found is not None else worker_idx
            model = model if model is not None else _resolve_model(context, model_id)
        if model is not None:
            self.model = model
        self._worker_idx = worker_idx

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        idx = worker_idx if worker_idx is not None else self._worker_idx
        if self._dial is None:
            raise NotConnectedError(
                f"the scheme of model {self._model_id!r} knows no trainer",
                hint="call init_on_sender before the scheme is handed to its workers",
            )
        host, port, token = self._dial
        link, welcome = dial((host, port), str(self._model_id), idx or 0, token, self.start_timeout_s)
        loader = ModelLoader(lambda: self.model, device=welcome["device"], tied=welcome["tied"])
        self._worker_end = SchemeWorkerEnd(link, WeightReceiver(loader), self._landed)
        try:
            self._worker_end.until_first(self.start_timeout_s)
        except BaseException:
            self._worker_end.stop()
            raise
        self._seen = self._worker_end.version
        self._worker_end.start()

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Wait for weights newer than those that the last call returned; a thread of the worker lands them.

        Args:
            timeout: seconds to wait; None for `timeout_s`.

        Returns:
            What the model holds now, or None when nothing new came.

        Raises:
            NotConnectedError: before `init_on_receiver` and `connect`, or after `shutdown`.
        """
        if not self.initialized_on_receiver:
            raise NotConnectedError(f"Must be initialized on receiver before receiving weights ({self._model_id!r})")
        if not self.synchronized_on_receiver or self._worker_end is None:
            raise NotConnectedError(f"Must be synchronized on receiver before receiving weights ({self._model_id!r})")
        if not self._worker_end.wait_for(self._seen, self.timeout_s if timeout is None else timeout):
            return None
        self._seen = self._worker_end.version
        return self._strategy.extract_weights(self.model)

    def _landed(self, version: int) -> None:
        """Bump the worker's policy version after weights landed, or pass them on to the collectors below it."""
        context, end = self.context, self._worker_end
        if context is None or not self.synchronized_on_receiver or end is None or not end.running:
            return
        if isinstance(context, Collector) and not context._weight_sync_schemes and context._weight_updater is None:
            if self._model_id == "policy":  # the policy was written in place; only its version is left to bump
                context.increment_version()
            return
        update = getattr(context, "update_policy_weights_", None)
        if update is not None:
            update(model_id=self._model_id, policy_or_weights=self._strategy.extract_weights(self.model))

    # both ends

    def _require_trainer_end(self, what: str) -> SchemeTrainerEnd:
        if self._trainer_end is None:
            raise NotConnectedError(f"{what} was called on the scheme of model {self._model_id!r} after shutdown")
        return self._trainer_end

    def shutdown(self) -> None:
        """Leave the other end and release everything. Workers keep their weights. May be called twice."""
        trainer_end, self._trainer_end = self._trainer_end, None
        worker_end, self._worker_end = self._worker_end, None
        if trainer_end is not None:
            trainer_end.close()
        if worker_end is not None:
            worker_end.stop()
        self.synchronized_on_sender = self.synchronized_on_receiver = False
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: settings and the trainer's address."""
        return super().__getstate__() | {"_trainer_end": None, "_worker_end": None, "_weights": None, "_seen": 0}


class TransportWeightSyncScheme(TransportSchemeBase):
    """Keeps the workers of a collector at the trainer's weights, over a transport picked by name.

    One scheme carries one model: ``weight_sync_schemes={"policy": TransportWeightSyncScheme("delta")}``.

    Args:
        transport: one of `torchrl_ext.transports`.
        strategy: how weights are taken from a module, ``"tensordict"`` or ``"state_dict"``.
        timeout_s: deadline of every wait during an update, in seconds.
        start_timeout_s: deadline for all workers to start and to connect, in seconds.
        host: address at which workers reach this process; for workers on other machines, one that they can reach.
        verify: workers compare a digest of each tensor with the trainer's before an update counts.
        settings: of the transport. A transport that needs a directory gets a temporary one where ``root`` is not given,
            for workers on this machine.

    Raises:
        ConfigError: no such transport, or a setting that it does not have.

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
        verify: bool = False,
        **settings: Any,
    ) -> None:
        check_settings(transport, settings)
        if timeout_s <= 0 or start_timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s}, start_timeout_s={start_timeout_s}", expected="more than 0")
        super().__init__(
            strategy=strategy, host=host, timeout_s=timeout_s, start_timeout_s=start_timeout_s, verify=verify
        )
        self.transport, self.settings = transport, settings
        self._scratch: str | None = None

    def create_transport(self, **settings: Any) -> Transport:
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

    def shutdown(self) -> None:
        super().shutdown()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            _remove(scratch, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_scratch": None}


def check_settings(transport: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that the transport does not take, before anything is opened.

    Raises:
        ConfigError: no such transport, or a setting that it does not have.
    """
    known = inspect.signature(transports.load(transport)).parameters
    strange = sorted(set(settings) - set(known))
    if strange:
        raise ConfigError(
            f"transport {transport!r} has no setting {strange[0]!r}", expected=f"some of {', '.join(sorted(known))}"
        )


def _remove(path: str, owner: int) -> None:
    """Remove a scheme's own directory, except in a fork of the process that made it."""
    if owner == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
