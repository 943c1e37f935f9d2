"""Transports without a control layer, as TorchRL's `TransportBackend`: their ends find each other by themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torchrl_ext.errors import ManifestError
from torchrl_ext.landing.loader import TensorsLoader, as_loader
from torchrl_ext.transports.base import Transport
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.source import as_source, inner_model, is_mapping

__all__ = ["StandaloneTransport"]


class StandaloneTransport(Transport):
    """A transport whose worker end hears of versions without a control layer: `send_weights` and `receive_weights`.

    A transport adds `poll` for it, and `announce` where workers cannot see a version unless they are told.

    Args:
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        received_version: the version that `receive_weights` returned last; 0 before the first.
    """

    received_version = 0

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Connect standalone ends, under TorchRL's name for it; only a collective has a group to form.

        Args:
            model_metadata: ``{name: (dtype, shape)}``.
        """
        del model_metadata

    def announce(self, info: Info) -> None:
        """Tell the workers of this transport that a handoff comes (trainer end)."""

    @property
    def drives(self) -> bool:
        """Whether `send_weights` sends, on this rank of a trainer; on others it takes part (`Transport.follow`)."""
        return True

    @abstractmethod
    def poll(self, timeout_s: float) -> Info | None:
        """Return the ``info`` of the newest version not yet received, or None after ``timeout_s`` (worker end)."""

    def decline(self, info: Info, error: BaseException) -> None:
        """Tell the trainer not to wait: a handoff from `poll` cannot land here, because of ``error`` (worker end)."""

    def send_weights(self, model_id: Any, weights: Any = None) -> None:
        """Send one version of ``weights`` (trainer end); also callable as ``send_weights(weights)``.

        Args:
            model_id: name of the model, a label only.
            weights: module, (nested) TensorDict, mapping of tensors, checkpoint directory or WeightSource.

        Raises:
            ConcurrentUpdateError: another send runs.
            TransportError, DeadlineError: the bytes could not be moved.
            WeightSyncError: the rank that drives failed, where this one takes part.
        """
        if weights is None:
            model_id, weights = "policy", model_id
        with self.exclusive("send_weights"):
            source, failure = as_source(weights), None
            if not self.drives:
                self.follow(source)
                return
            try:
                version = self._last_version = self.latest_version() + 1  # taken even where it fails: some may get it
                handoff = self.prepare(source, version)
                handoff.ahead()
                self.announce({**handoff.info, "model_id": model_id})
                handoff.transfer()
                handoff.acknowledge(None)
            except BaseException as error:
                failure = error
                raise
            finally:
                self.dismiss(source, failure)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any | None:
        """Receive the newest version (worker end).

        Args:
            timeout: seconds to wait for one; None waits as long as this transport waits for anything, `timeout_s`.
            weights: TensorDict or mapping to fill in place.
            model: module (or TensorDict) to apply the weights to.
            strategy: TorchRL `WeightStrategy` through which they are applied to ``model``.

        Returns:
            TensorDict with flat keys (``weights`` itself is only filled), or None when nothing new came.

        Raises:
            ManifestError: ``weights`` or ``model`` has other parameters; nothing was changed.
            IntegrityError, TransportError: what arrived is damaged or incomplete.
        """
        info = self.poll(self.timeout_s if timeout is None else timeout)
        if info is None:
            return None
        try:
            params = tuple(ParamMeta.from_json(row) for row in info["params"])
            target = None if weights is None else TensorsLoader(_mapping(weights))
            if target is not None:
                target.check(params)
            loader = None if model is None or strategy is not None else as_loader(model)
            if loader is not None:
                loader.check(params)
        except Exception as error:
            self.decline(info, error)
            raise
        into = {} if target is None else target.targets()
        received = dict(self.receive(info, into))
        if target is not None:
            target.load(received.items())
            into = target.targets()
            received = {name: into[name] for name in received}
        if loader is not None:
            loader.start()
            loader.load(received.items())
            loader.finish()
        from tensordict import TensorDict  # only the standalone route needs it; engines have no tensordict

        result = TensorDict(received, batch_size=[])
        if model is not None and strategy is not None:
            model = inner_model(model)
            strategy.apply_weights(model, result if _is_flat(model) else result.unflatten_keys("."))
        self.received_version = info["version"]
        return result


def _is_flat(model: Any) -> bool:
    """Return whether names in ``model`` are joined by ``.``; TorchRL's strategies view a module as a nested one."""
    from tensordict import TensorDictBase

    return isinstance(model, TensorDictBase) and any("." in key for key in model.keys())  # noqa: SIM118 - a TensorDict iterates over its batch


def _mapping(weights: Any) -> Any:
    if not is_mapping(weights):
        raise ManifestError(f"weights= is a {type(weights).__name__}", expected="a TensorDict or a mapping of tensors")
    return weights
