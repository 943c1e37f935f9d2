"""`Switch` puts other weights into an engine of this process, or back what it had where they do not land."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from torchrl_ext.errors import UpdateError, WeightSyncError, why
from torchrl_ext.registry import transports
from torchrl_ext.sync.only import Only, chosen
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.sync.update_source import UpdateSource
from torchrl_ext.types import SyncReport
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.derived import Layered
from torchrl_ext.weights.source import WeightSource, as_source

if TYPE_CHECKING:
    from torchrl_ext.sync.engines.inprocess import InProcessEngine
    from torchrl_ext.sync.engines.local import LocalPort

__all__ = ["Switch"]


class Switch:
    """Switches the weights of one engine, and remembers what it holds, to fall back on.

    That is the path of a checkpoint, and a host copy of every tensor that came in a state dict since.

    Args:
        engine: takes the weights.
        port: of the same engine.
        transport: name of the transport.
    """

    def __init__(self, engine: InProcessEngine, port: LocalPort, *, transport: str) -> None:
        self._engine, self._port = engine, port
        self._sender = WeightSender(transports.make(transport), engine)
        self._sender.holds(0)
        self._turn = threading.Lock()
        self._held: WeightSource | None = None

    def to_checkpoint(self, path: str | os.PathLike[str], only: Only | None = None) -> SyncReport:
        """Serve what a checkpoint directory holds, or some of it.

        Raises:
            ManifestError: as `to_state_dict`; or ``only`` means nothing.
        """
        checkpoint = CheckpointSource(path)
        if only is not None:
            return self.to_state_dict(dict(checkpoint.pairs(chosen(only, checkpoint))))
        with self._turn:
            return self._to(checkpoint)

    def to_state_dict(
        self, tensors: Mapping[str, Tensor], mapper: Callable[[str], str] | Mapping[str, str] | None = None
    ) -> SyncReport:
        """Serve these tensors, cast to the dtypes of those held, and for every other parameter what is held.

        Raises:
            ManifestError: nothing held has a tensor's name, or its shape; or a tensor has no data.
        """
        given = UpdateSource(as_source(tensors), mapper=mapper)
        with self._turn:
            good = self._last_good()
            dtypes = {meta.name: meta.dtype for meta in good.params()}
            copies = {name: tensor.to("cpu", dtypes.get(name), copy=True) for name, tensor in given}
            return self._to(Layered(good, copies), frozenset(copies))

    def _last_good(self) -> WeightSource:
        if self._held is None:
            self._held = self._port.start_weights()
        return self._held

    def _to(self, source: WeightSource, names: frozenset[str] | None = None) -> SyncReport:
        self._port.check()
        good = self._last_good()
        try:
            report = self._sender.update_weights(source, only=names)
            self._port.check()
        except WeightSyncError as error:
            if self._engine.rows()[0].state == "serving":
                raise
            try:
                self._sender.update_weights(good)
            except WeightSyncError as second:
                raise UpdateError(
                    f"{why(error)}; and the weights before it could not be put back: {why(second)}",
                    state=second.state,
                    hint=second.hint,
                    rows=self._engine.rows(),
                ) from error
            raise UpdateError(
                f"{why(error)}; the weights that were served before were put back, and serve",
                expected=error.expected,
                rows=self._engine.rows(),
            ) from error
        self._held = source
        return report
