"""Defines `CollectorTransport`, the trainer end of a scheme: it knows the workers, and owns the sender to them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_ext.collectors.hub import Hub
from torchrl_ext.collectors.policy_loader import ModelLoader
from torchrl_ext.collectors.torchrl_private import ended_workers, model_of
from torchrl_ext.collectors.worker_end import Keep, LinkPort
from torchrl_ext.errors import ConcurrentUpdateError, ConfigError, EngineUnreachableError, UpdateError, WeightSyncError
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.types import Info, SyncReport
from torchrl_ext.weights.source import as_source

if TYPE_CHECKING:
    from torchrl_ext.collectors.scheme import TransportWeightSyncScheme

__all__ = ["CollectorTransport", "is_per_worker"]

log = logging.getLogger("torchrl_ext")


class CollectorTransport:
    """Carries a model's weights to the workers of a collector, by the transport that the scheme makes.

    It is the scheme's shared transport, TorchRL's `TransportBackend`; in the workers, `WorkerTransport` is. It has no
    ``wait_ack``, as `send_weights` returns with every worker's acknowledgement.

    Args:
        scheme: whose transport this is; held weakly.
        workers: how many worker processes there are; None for a collector that runs in this process.
        devices: where each worker's policy lives, or all of them; None for where the weights are.

    Attributes:
        address: host, port and token that workers dial; None without workers.
        report: of the last update; None before the first.
    """

    def __init__(self, scheme: TransportWeightSyncScheme, workers: int | None, devices: Any = None) -> None:
        self._scheme: Any = weakref.proxy(scheme)
        self._model_id, self._devices, self.workers = str(scheme.model_id), devices, workers or 0
        self._hub: Hub | None = None
        self._engines: dict[int, Engine] = {}
        self._connection: tuple[tuple[int, ...], WeightSender] | None = None
        self._busy = threading.Lock()
        self.address: tuple[str, int, str] | None = None
        self.report: SyncReport | None = None
        if workers is None:
            receiver = WeightReceiver(ModelLoader(lambda: model_of(self._scheme.context, self._model_id)))
            self._engines[0] = InProcessEngine(receiver, url=f"model {self._model_id!r} of this process")
            return
        weights: Any = scheme.prepare_weights(None, self._model_id, scheme.strategy, scheme.context)
        one = next(iter(weights.values())) if is_per_worker(weights) else weights
        source = as_source({} if one is None else one)
        self._tied, self._home = dict(source.tied()), next((str(tensor.device) for _, tensor in source), None)
        self._hub = Hub(scheme.host, self._model_id, workers, self._welcome)
        self.address = (*self._hub.address, self._hub.token)

    def setup_connection_and_weights_on_sender(self, weights: Any = None) -> None:
        """Wait for the workers, and send them their first weights; with None they keep what they have.

        Raises:
            DeadlineError: some workers did not connect.
            UpdateError: some do not take the weights.
        """
        try:
            if self._hub is not None:
                gone = self._hub.wait(self._scheme.start_timeout_s, lambda: ended_workers(self._scheme.context))
                if gone:  # the collector has the worker's own error, and raises it next
                    log.warning("worker %s of model %r ended before it connected", gone[0], self._model_id)
                    self.shutdown()
                    return
            if weights is not None:
                self.send_weights(weights)
                return
            self._meet()
            for engine in self._engines.values():
                if isinstance(engine.port, LinkPort):
                    engine.port.tell(Keep())
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self, weights: Any, worker_ids: int | Sequence[int] | None = None) -> None:
        """Update the workers, all at once or those in ``worker_ids``, and return when each holds the weights.

        Args:
            weights: what `torchrl_ext.as_source` takes, or one of these per worker (``{0: ..., 1: ...}``).
            worker_ids: indices of workers; None for all that ``weights`` are for.

        Raises:
            ConcurrentUpdateError: another thread is sending.
            ConfigError: there are no weights, or there is no worker of an index.
            EngineUnreachableError: a worker ended earlier; nothing was sent.
            UpdateError: some worker does not hold them.
        """
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUpdateError(
                f"send was called while another send of model {self._model_id!r} runs", hint="send from one thread"
            )
        try:
            self._meet()
            own: Mapping[int, Any] = weights if is_per_worker(weights) else {}
            ids = [worker_ids] if isinstance(worker_ids, int) else [*(worker_ids or own or self._engines)]
            self._require_alive(ids)
            if not own:
                self._deliver(weights, tuple(sorted(ids)))
            for idx in own:
                if idx in ids:
                    self._deliver(own[idx], (idx,))
        finally:
            self._busy.release()

    def check_connection(self) -> bool:
        """Return whether every worker is connected."""
        self._meet()
        links = [one.port.link for one in self._engines.values() if isinstance(one.port, LinkPort)]
        return len(links) == self.workers and all(link.alive for link in links)

    def shutdown(self) -> None:
        """Leave the workers, which keep their weights. May be called twice."""
        self._leave()
        if self._hub is not None:
            self._hub.close()

    def _deliver(self, weights: Any, ids: tuple[int, ...]) -> None:
        if weights is None:
            raise ConfigError(
                f"there are no weights of model {self._model_id!r} to send",
                hint="pass weights, or let the collector hold a policy",
            )
        if self._connection is None or self._connection[0] != ids:
            self._leave()
            fleet = Pool([self._engines[idx] for idx in ids])
            self._connection = ids, WeightSender(self._scheme.create_transport(), fleet, verify=self._scheme.verify)
        try:
            self.report = self._connection[1].update_weights(weights)
        except UpdateError as error:
            self._leave()  # the next update starts from a new connection, not from half an update
            raise UpdateError(
                f"model {self._model_id!r}: {error.what}",
                report=error.report,
                rows=error.rows,
                state="workers that are named keep the version they had or hold a part of the new one",
                hint="mend the cause, and send again",
            ) from error

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection[1].shutdown()
            except WeightSyncError as error:
                log.debug("while leaving workers of model %r: %s", self._model_id, error)

    def _meet(self) -> None:
        """Take in the workers that are connected now; one that was replaced has another link."""
        for idx, link in sorted(self._hub.links.items()) if self._hub is not None else ():
            known = self._engines.get(idx)
            if known is None or not isinstance(known.port, LinkPort) or known.port.link is not link:
                self._leave()
                self._engines[idx] = Engine(LinkPort(link, timeout_s=self._scheme.timeout_s))

    def _require_alive(self, ids: Sequence[int]) -> None:
        for idx in ids:
            if idx not in self._engines:
                raise ConfigError(
                    f"there is no worker {idx} of model {self._model_id!r}", expected=f"{sorted(self._engines)}"
                )
        engines = [self._engines[idx] for idx in ids]
        gone = [one.url for one in engines if isinstance(one.port, LinkPort) and not one.port.link.alive]
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


def is_per_worker(weights: Any) -> bool:
    """Return whether ``weights`` are one set per worker, by the workers' indices."""
    return isinstance(weights, dict) and bool(weights) and all(isinstance(key, int) for key in weights)
