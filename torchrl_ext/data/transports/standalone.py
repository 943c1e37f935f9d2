"""Transports that work without a control layer, as TorchRL's `TransportBackend` does: their ends find each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.landing.loader import as_loader
from torchrl_ext.data.transports.base import Arrival, LandingEnd, Transport, Update, exclusive, passing, steps_of
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import inner_model

__all__ = ["StandaloneEnd", "StandaloneTransport"]


class StandaloneEnd(LandingEnd):
    """A worker's end that learns of versions by itself."""

    @abstractmethod
    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """Return the newest version other than ``received``, or None at the deadline."""

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        """Tell the trainer not to wait, as a version from `next` cannot be loaded because of ``error``."""


class StandaloneTransport(Transport):
    """A transport that needs no control layer: `send_weights` on the trainer, `receive_weights` on a worker.

    An instance is either a trainer's or a worker's; a worker's creates its `StandaloneEnd` with `attend` on the first
    receive.

    Args:
        timeout_s: deadline of every wait, in seconds.
    """

    _received: Arrival | None = None
    _end: StandaloneEnd | None = None
    _within: Deadline | None = None  # of the call that runs
    _connected = False
    _last_version = 0

    @property
    def received_version(self) -> int:
        """The version that `receive_weights` returned last; 0 before the first."""
        return 0 if self._received is None else self._received.version

    @abstractmethod
    def attend(self, within: Deadline) -> StandaloneEnd:
        """Return the worker end of this instance, which needs no invitation."""

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        """Announce a version to the workers, before ``transfer`` of its handoff."""

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Connect standalone ends, under TorchRL's name for it; only a collective transport forms a group.

        Args:
            model_metadata: ``{name: (dtype, shape)}``.
        """
        del model_metadata

    def send_weights(self, model_id: Any, weights: Any = None) -> None:
        """Send one version of ``weights`` (trainer end); also callable as ``send_weights(weights)``.

        On a trainer of several ranks, every rank calls it; rank 0 sends.

        Args:
            model_id: name of the model, used only as a label.
            weights: module, (nested) TensorDict, mapping of tensors, checkpoint directory or WeightSource.

        Raises:
            ConcurrentUpdateError: another send runs.
            TransportError, DeadlineError: the bytes could not be moved.
            WeightSyncError: another rank failed.
        """
        weights = model_id if weights is None else weights
        with exclusive(self, "send_weights"):
            if not self.ranks.drives:
                self._within = Deadline(float("inf"), "trainer rank 0")
                self.ranks.following(lambda: steps_of(self, as_source(weights)), self._within)
                return
            with self.ranks.leading() as session:
                source = as_source(weights)
                version = self._last_version = self.latest_version() + 1  # taken even where it fails: some may get it
                self._send(Update(source=source, version=version))
                session.version = version

    def _send(self, update: Update) -> None:
        within = self._within = Deadline(self.timeout_s, f"the workers of this {self.name} transport")
        with passing(self, update.source):
            handoff = self.prepare(update, within)
            try:
                handoff.ahead(within)
                self.announce(Arrival(version=update.version, params=update.params, info=handoff.info), within)
                handoff.transfer(within)
            except BaseException:
                self.close()  # workers may hold a part of the version
                raise
        self._connected = True
        handoff.served(None)

    def latest_version(self) -> int:
        return self._last_version

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any | None:
        """Receive the newest version (worker end).

        Args:
            timeout: seconds to wait for a version; None waits for `timeout_s`.
            weights: TensorDict, mapping of tensors or module to fill in place, as the bytes arrive.
            model: module (or TensorDict) to apply the weights to, once all of them have arrived.
            strategy: TorchRL `WeightStrategy` that applies them to ``model``.

        Returns:
            A TensorDict with flat keys, also if ``weights`` was filled; None if nothing new arrived.

        Raises:
            ConfigError: ``weights`` or ``model`` has the wrong type; nothing was received.
            ManifestError: the parameters differ; nothing was changed.
            IntegrityError, TransportError: the data are damaged or incomplete.
        """
        loaders = [as_loader(into) for into in (weights, model if strategy is None else None) if into is not None]
        targets = dict if weights is None else loaders[0].targets
        who, wait_s = f"the trainer of this {self.name} transport", self.timeout_s if timeout is None else timeout
        within = self._within = Deadline(wait_s, who)
        if self._end is None:
            self._end = self.attend(within)
        received = None
        while received is None:
            arrival = self._end.next(within, self._received)
            if arrival is None:
                return None
            self._connected = True
            try:
                for loader in loaders:
                    loader.check(arrival.params)
            except Exception as error:
                self._end.refuse(arrival, error)
                raise
            with suppress(FileNotFoundError):  # removed while it was read: a newer one is there
                received = dict(self._end.receive(arrival, targets(), Deadline(self.timeout_s, who, within.stop)))
        for loader in loaders:
            loader.start()
            loader.load(received.items())
            loader.finish()
        held = targets()
        received = {name: held.get(name, tensor) for name, tensor in received.items()}
        from tensordict import TensorDict, TensorDictBase  # only the standalone route needs it; engines have none

        result = TensorDict(received, batch_size=[])
        if model is not None and strategy is not None:
            model = inner_model(model)
            names = model.keys() if isinstance(model, TensorDictBase) else ()
            flat = any("." in name for name in names)  # TorchRL's strategies view a module as a nested TensorDict
            strategy.apply_weights(model, result if flat else result.unflatten_keys("."))
        self._received = arrival
        return result

    def abort(self) -> None:
        """End the wait of a `send_weights` or `receive_weights` that runs in another thread."""
        if self._within is not None:
            self._within.stop.set()

    def check_connection(self) -> bool:
        return self._connected

    def shutdown(self) -> None:
        self.abort()
        super().shutdown()
        self._connected = False
        end, self._end = self._end, None
        if end is not None:
            end.close()
