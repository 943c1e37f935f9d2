"""Online switching: an engine of this process takes other weights between requests, or keeps those it has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from torchrl_ext.errors import ManifestError, UpdateError, WeightSyncError
from torchrl_ext.registry import transports
from torchrl_ext.sync.outgoing import Outgoing
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.types import ParamMeta, SyncReport
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.source import WeightSource, as_source

if TYPE_CHECKING:
    from torchrl_ext.sync.inprocess import InProcessEngine

__all__ = ["Layered", "Switch"]


class Switch:
    """Switches one engine. What it holds is remembered, to fall back on: the path of a checkpoint, and a host copy of
    every tensor that came in a state dict since.

    Args:
        engine: takes the weights.
        transport: name of the transport.
    """

    def __init__(self, engine: InProcessEngine, *, transport: str) -> None:
        self._engine = engine
        self._sender = WeightSender(transports.make(transport), engine)
        self._turn = threading.Lock()
        self._held: WeightSource | None = None

    def to_checkpoint(self, path: str | os.PathLike[str]) -> SyncReport:
        """Serve what a checkpoint directory holds."""
        with self._turn:
            return self._to(CheckpointSource(path))

    def to_state_dict(
        self, tensors: Mapping[str, Tensor], mapper: Callable[[str], str] | Mapping[str, str] | None = None
    ) -> SyncReport:
        """Serve these tensors, in the dtypes of what is held, and for the rest what is held.

        Raises:
            ManifestError: nothing held has a tensor's name, or its shape; or a tensor has no data.
        """
        given = Outgoing(as_source(tensors), mapper=mapper)
        with self._turn:
            good = self._last_good()
            dtypes = {meta.name: meta.dtype for meta in good.params()}
            copies = {name: tensor.to("cpu", dtypes.get(name), copy=True) for name, tensor in given}
            return self._to(Layered(good, copies))

    def _last_good(self) -> WeightSource:
        if self._held is None:
            self._held = self._engine.start_weights()
        return self._held

    def _to(self, source: WeightSource) -> SyncReport:
        self._engine.check()
        good = self._last_good()
        try:
            report = self._sender.update_weights(source)
            self._engine.check()
        except WeightSyncError as error:
            if self._engine.rows()[0].state == "serving":
                raise
            try:
                self._sender.update_weights(good)
            except WeightSyncError as second:
                raise UpdateError(
                    f"{error}; and the weights before it could not be put back: {second}", rows=self._engine.rows()
                ) from error
            raise UpdateError(
                f"{error}; the weights that were served before were put back, and serve", rows=self._engine.rows()
            ) from error
        self._held = source
        return report


class Layered(WeightSource):
    """Some tensors over a source that has all of them.

    Args:
        below: all tensors.
        above: those that take the place of its own.

    Raises:
        ManifestError: ``below`` has no tensor of a name, or one of another shape.
    """

    def __init__(self, below: WeightSource, above: Mapping[str, Tensor]) -> None:
        # a layer over a layer would keep tensors alive that nobody sees any more
        if isinstance(below, Layered):
            above = {**below._above, **above}
            below = below._below
        self._below: WeightSource = below
        self._above: Mapping[str, Tensor] = above
        known = {meta.name: meta for meta in below.params()}
        for name, tensor in above.items():
            if name not in known:
                raise ManifestError(
                    f"the engine's model has no parameter {name!r}",
                    expected="names of the checkpoint that the engine was started with",
                    state="nothing was changed; the engine serves what it served",
                    hint="map the names with mapper=",
                )
            if tuple(tensor.shape) != known[name].shape:
                raise ManifestError(
                    f"parameter {name!r} arrives with shape {list(tensor.shape)}",
                    expected=str(list(known[name].shape)),
                    state="nothing was changed; the engine serves what it served",
                )

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(
            ParamMeta.of(meta.name, self._above[meta.name]) if meta.name in self._above else meta
            for meta in self._below.params()
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._below:
            yield name, self._above.get(name, tensor)

    def files(self) -> Mapping[str, bytes]:
        return self._below.files()
