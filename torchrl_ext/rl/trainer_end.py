"""`CollectorTransport`, the trainer end of a scheme: it tracks the workers and owns the sender."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from torchrl_ext.base.deadline import one_at_a_time
from torchrl_ext.base.errors import (
    ConcurrentUpdateError,
    ConfigError,
    EngineUnreachableError,
    UpdateError,
    WeightSyncError,
)
from torchrl_ext.base.reports import SyncReport
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.group.store import Channel
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.rl.links import Hub, LinkPort
from torchrl_ext.rl.torchrl_private import ended_workers, model_of
from torchrl_ext.rl.worker_end import ModelLoader
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender

__all__ = ["CollectorTransport"]

log = logging.getLogger("torchrl_ext")

_GRACE_S = 5.0
"""Seconds that the trainer waits beyond a transport's deadline, so that the transport's own error arrives."""


class CollectorTransport:
    """Sends a model's weights to a collector's workers over the transport that the scheme makes.

    It is the trainer's `TransportBackend` in TorchRL's terms; the workers' is `WorkerTransport`. It has no
    ``wait_ack``: `send_weights` waits for every worker's acknowledgement.

    Args:
        scheme: a `TransportWeightSyncScheme`, which owns this object; held weakly.
        workers: number of worker processes; None for a collector that runs in this process.

    Attributes:
        address: host, port and token that workers need to connect; None without workers.
        report: report of the last update; None before the first.
    """

    def __init__(self, scheme: Any, workers: int | None) -> None:
        self._scheme: Any = weakref.proxy(scheme)
        self._model_id, self.workers = str(scheme.model_id), workers or 0
        self._engines: dict[Channel | None, Engine] = {}
        self._sender: tuple[list[Engine], WeightSender] | None = None
        self._busy = threading.Lock()
        self._hub: Hub | None = None
        self.address: tuple[str, int, str] | None = None
        self.report: SyncReport | None = None
        if workers is None:
            receiver = WeightReceiver(ModelLoader(lambda: model_of(self._scheme.context, self._model_id)))
            self._engines[None] = InProcessEngine(receiver, url=f"model {self._model_id!r} of this process")
            return
        weights = scheme.prepare_weights(None, self._model_id, scheme.strategy, scheme.context)
        source = as_source({} if weights is None else weights)
        home = next((str(tensor.device) for _, tensor in source), None)
        self._hub = Hub(scheme.host, self._model_id, workers, {"tied": dict(source.tied()), "device": home})
        self.address = self._hub.address

    def setup_connection_and_weights_on_sender(self, weights: Any = None) -> None:
        """Wait for the workers and send them their first weights; with None they keep their own.

        Raises:
            DeadlineError: some workers did not connect.
            UpdateError: some workers did not take the weights.
        """
        try:
            ended = [] if self._hub is None else self._hub.wait(self._scheme.start_timeout_s, self._ended)
            if ended:  # the collector raises the worker's own error next
                log.warning("worker %s of model %r ended before it connected", ended[0], self._model_id)
                self.shutdown()
            elif weights is not None:
                self.send_weights(weights)
            else:
                for link in [] if self._hub is None else [*self._hub.links.values()]:
                    self._port(link).keep()
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self, weights: Any, worker_ids: int | Collection[int] | None = None) -> None:
        """Update workers, and return when each holds the weights; errors are as in `TransportWeightSyncScheme.send`.

        Args:
            weights: anything that `torchrl_ext.as_source` takes.
            worker_ids: indices of the workers to update; None for all.
        """
        running = f"send was called while another send of model {self._model_id!r} runs"
        with one_at_a_time(self._busy, ConcurrentUpdateError(running, hint="send from one thread")):
            ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids or range(max(1, self.workers))
            self._deliver(weights, self._living(ids))

    def shutdown(self) -> None:
        """Disconnect from the workers, which keep their weights. May be called twice."""
        self._leave()
        if self._hub is not None:
            self._hub.close()

    def _deliver(self, weights: Any, engines: list[Engine]) -> None:
        if weights is None:
            raise ConfigError(
                f"there are no weights of model {self._model_id!r} to send",
                hint="pass weights, or let the collector hold a policy",
            )
        if self._sender is None or self._sender[0] != engines:
            self._leave()
            sender = WeightSender(self._scheme.create_transport(), Fleet(engines), verify=self._scheme.verify)
            sender.log_to(self._scheme.logs)
            self._sender = engines, sender
        try:
            self.report = self._sender[1].update_weights(weights)
        except UpdateError as error:
            parts: Any = {name: getattr(error, name) for name in ("report", "rows", "expected", "state", "hint")}
            raise UpdateError(f"model {self._model_id!r}: {error.what}", **parts) from error

    def _leave(self) -> None:
        left, self._sender = self._sender, None
        if left is not None:
            with suppress(WeightSyncError):  # workers may be gone
                left[1].shutdown()

    def _living(self, ids: Collection[int]) -> list[Engine]:
        """Return the workers' engines; a replaced worker has a new link, and therefore a new engine."""
        links: Mapping[int, Channel | None] = {0: None} if self._hub is None else {**self._hub.links}
        unknown = sorted({*ids} - links.keys())
        if unknown:
            raise ConfigError(
                f"there is no worker {unknown[0]} of model {self._model_id!r}", expected=f"{sorted(links)}"
            )
        found = [links[idx] for idx in sorted(ids)]
        gone = [link.peer for link in found if link is not None and not link.alive]
        if gone:
            raise EngineUnreachableError(
                f"{' and '.join(gone)} ended",
                state="nothing was sent",
                hint="start the collector again, or name the remaining workers in worker_ids",
            )
        for link in found:
            if link is not None and link not in self._engines:
                self._engines[link] = Engine.of(self._port(link))
        return [self._engines[link] for link in found]

    def _port(self, link: Channel) -> LinkPort:
        return LinkPort(link, timeout_s=self._scheme.timeout_s + _GRACE_S)

    def _ended(self) -> list[int]:
        return ended_workers(self._scheme.context)
