"""The trainer end of a scheme: it knows the workers, picks what each is sent, and owns the sender to them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrl.weight_update.utils import _resolve_model

from torchrl_ext.collectors.hub import Hub
from torchrl_ext.collectors.policy_loader import ModelLoader, other_names
from torchrl_ext.collectors.worker_end import Keep, WorkerEngine
from torchrl_ext.errors import ConcurrentUpdateError, ConfigError, EngineUnreachableError, UpdateError, WeightSyncError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.base import Transport
from torchrl_ext.types import Info, SyncReport
from torchrl_ext.weights.source import as_source

if TYPE_CHECKING:
    from torchrl_ext.collectors.scheme import TransportSchemeBase

__all__ = ["SchemeTrainerEnd"]

log = logging.getLogger("torchrl_ext")


class SchemeTrainerEnd:
    """Connects the workers of one model, and sends them its weights.

    Args:
        scheme: whose trainer end this is.
        workers: how many worker processes there are; None for a collector that runs in this process.
        devices: where each worker's policy lives.
        params_map: weights of its own for each worker.
        device_map_fn: ``(worker, weights) -> weights``: what each worker starts with.
        kept: the model, kept alive until the workers have its weights, since the scheme holds it weakly.
    """

    def __init__(
        self,
        scheme: TransportSchemeBase,
        workers: int | None,
        *,
        devices: Sequence[Any] | None = None,
        params_map: Mapping[int, Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        kept: Any = None,
    ) -> None:
        self._scheme: Any = weakref.proxy(scheme)
        self._model_id = str(scheme.model_id)
        self._devices = devices if devices is not None else getattr(scheme.context, "policy_device", None)
        self._params_map, self._device_map_fn = params_map, device_map_fn
        self._kept = kept
        self._tied: dict[str, str] = {}
        self._home: str | None = None
        self._hub: Hub | None = None
        self._engines: dict[int, EngineClient] = {}
        self._connection: tuple[tuple[int, ...], WeightSender] | None = None
        self._busy = threading.Lock()
        self.report: SyncReport | None = None
        if workers is None:
            receiver = WeightReceiver(ModelLoader(lambda: _resolve_model(self._scheme.context, self._model_id)))
            self._engines[0] = InProcessEngine(receiver, url=f"model {self._model_id!r} of this process")
        else:
            self._workers = workers
            self._describe(params_map if params_map is not None else self._taken(None))
            self._hub = Hub(scheme.host, self._model_id, workers, self._welcome)

    @property
    def address(self) -> tuple[str, int, str] | None:
        """The host, port and token that workers dial."""
        return None if self._hub is None else (*self._hub.address, self._hub.token)

    def start(self, weights: Any = None) -> None:
        """Wait for the workers, and send them their first weights.

        Raises:
            DeadlineError: some workers did not connect.
            UpdateError: some do not take the weights.
        """
        first = self._first(weights)
        try:
            if self._hub is not None:
                gone = self._hub.wait(self._scheme.start_timeout_s, self._ended)
                if gone:  # the collector has the worker's own error, and raises it next
                    log.warning("worker %s of model %r ended before it connected", gone[0], self._model_id)
                    self.close()
                    return
                self._meet()
            if first is None:
                for engine in self._engines.values():
                    if isinstance(engine, WorkerEngine):
                        engine.ask(Keep())
            else:
                self._deliver(first, None)
        except BaseException:
            self.close()
            raise
        finally:
            self._kept = None

    def send(self, weights: Any, ids: Sequence[int] | None) -> None:
        """Update all workers once, or those in ``ids``."""
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUpdateError(
                f"send was called while another send of model {self._model_id!r} runs", hint="send from one thread"
            )
        try:
            self._meet()
            unknown = [idx for idx in ids or () if idx not in self._engines]
            if unknown:
                raise ConfigError(
                    f"there is no worker {unknown[0]} of model {self._model_id!r}", expected=f"{sorted(self._engines)}"
                )
            self._require_alive(self._engines if ids is None else ids)
            if weights is None and self._params_map is not None:
                weights = self._params_map
            if _per_worker(weights):
                self._deliver({idx: w for idx, w in weights.items() if ids is None or idx in ids}, None)
            else:
                self._deliver(self._taken(weights), ids)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Leave the workers. May be called twice."""
        self._leave()
        if self._hub is not None:
            self._hub.close()

    # what is sent

    def _first(self, weights: Any) -> Any | None:
        """Return the weights to start with, maybe one set per worker; None where workers keep their own."""
        if self._params_map is not None:
            weights = self._params_map
        elif _per_worker(weights):
            pass
        else:
            weights = self._taken(weights)
            if weights is None:
                weights = self._made()
            if weights is not None and self._device_map_fn is not None:
                weights = {idx: self._device_map_fn(idx, weights) for idx in range(self._workers)}
        return weights

    def _describe(self, weights: Any) -> None:
        """Note what a worker must know of the model before any weights come."""
        one = next(iter(weights.values())) if _per_worker(weights) else weights
        if one is not None:
            self._tied = other_names(one)
            self._home = next((str(tensor.device) for _, tensor in as_source(one)), None)

    def _taken(self, weights: Any) -> Any | None:
        """Return the weights to send: those given, or the registered model's; None where there are none."""
        scheme = self._scheme
        if weights is not None:
            return scheme.prepare_weights(weights, self._model_id, scheme.strategy, scheme.context)
        if self._hub is None:
            origin = getattr(scheme.context, "_orig_policy", None) if self._model_id == "policy" else None
            if origin is not None:
                return scheme.strategy.extract_weights(origin)
        own = getattr(scheme, "_weights", None)
        if own is not None:
            return own
        if scheme._model_ref is not None and scheme._model_ref() is not None:
            return scheme.strategy.extract_weights(scheme._model_ref())
        try:
            found = None if scheme.context is None else _resolve_model(scheme.context, self._model_id)
        except (AttributeError, KeyError, IndexError):  # only the workers have this model
            found = None
        if found is None and self._model_id == "policy":
            found = getattr(scheme.context, "_fallback_policy", None)
        return None if found is None else scheme.strategy.extract_weights(found)

    def _made(self) -> Any | None:
        """Return weights from the policy factory that all workers share; None where they share none."""
        factories = getattr(self._scheme.context, "policy_factory", None) or [None]
        if self._model_id != "policy" or factories[0] is None or any(one is not factories[0] for one in factories):
            return None
        policy = factories[0]()
        return self._scheme.strategy.extract_weights(policy) if isinstance(policy, nn.Module) else None

    # how it gets there

    def _deliver(self, weights: Any, ids: Sequence[int] | None) -> None:
        if _per_worker(weights):
            for idx, own in weights.items():
                self._deliver(self._taken(own), [idx])
            return
        if weights is None:
            raise ConfigError(
                f"there are no weights of model {self._model_id!r} to send",
                hint="pass weights, or let the collector hold a policy",
            )
        sender = self._sender(tuple(sorted(self._engines if ids is None else ids)))
        try:
            self.report = sender.update_weights(weights)
        except UpdateError as error:
            self._leave()  # the next update starts from a new connection, not from half an update
            raise UpdateError(
                f"model {self._model_id!r}: {error.what}",
                report=error.report,
                rows=error.rows,
                state="workers that are named keep the version they had or hold a part of the new one",
                hint="mend the cause, and send again",
            ) from error

    def _sender(self, ids: tuple[int, ...]) -> WeightSender:
        """Return the sender to these workers; it is made anew when they are not those of the last update."""
        if self._connection is not None and self._connection[0] == ids:
            return self._connection[1]
        self._leave()
        engines = [self._engines[idx] for idx in ids]
        transport: Transport = self._scheme.worker_transport()
        sender = WeightSender(transport, Fleet(engines), verify=self._scheme.verify)
        self._connection = (ids, sender)
        return sender

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection[1].shutdown()
            except WeightSyncError as error:
                log.debug("while leaving workers of model %r: %s", self._model_id, error)

    def _meet(self) -> None:
        """Take in the workers that are connected now; one that was replaced has another link."""
        if self._hub is None:
            return
        for idx, link in sorted(self._hub.links.items()):
            known = self._engines.get(idx)
            if not isinstance(known, WorkerEngine) or known.link is not link:
                self._leave()
                self._engines[idx] = WorkerEngine(link, timeout_s=self._scheme.timeout_s)

    def _require_alive(self, ids: Iterable[int]) -> None:
        engines = [self._engines[idx] for idx in ids]
        gone = [engine.url for engine in engines if isinstance(engine, WorkerEngine) and not engine.link.alive]
        if gone:
            raise EngineUnreachableError(
                f"{' and '.join(gone)} ended",
                state="nothing was sent",
                hint="start the collector again, or name the workers that are left in worker_ids",
            )

    def _welcome(self, idx: int) -> Info:
        devices = self._devices if isinstance(self._devices, (list, tuple)) else [self._devices] * (idx + 1)
        device = devices[idx] if idx < len(devices) else None
        return {"tied": self._tied, "device": self._home if device is None else str(device)}

    def _ended(self) -> list[int]:
        processes = getattr(self._scheme.context, "procs", None) or []
        return [idx for idx, process in enumerate(processes) if process.exitcode is not None]


def _per_worker(weights: Any) -> bool:
    return isinstance(weights, dict) and bool(weights) and all(isinstance(key, int) for key in weights)
