"""Versions that somebody else published in a directory, put in service as they lie there."""

from __future__ import annotations

from pathlib import Path

from torchrl_ext.errors import UpdateError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.types import Info
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import tensor_digest

__all__ = ["HandedOn"]


class HandedOn:
    """Drives an engine through versions that it reads from the directory in which they were published.

    A `WeightSender` would write them once more, under numbers of its own.

    Args:
        transport: reader of the directory, which the engine reaches under the same path.
        engine: a client, or a fleet.
    """

    def __init__(self, transport: DiskTransport, engine: EngineClient) -> None:
        self._transport, self._engine = transport, engine
        self._connected_to: object = None

    def take(self, info: Info) -> None:
        """Put one version in service.

        Args:
            info: what `DiskTransport.poll` gave.

        Raises:
            UpdateError: an engine does not serve it; the same version can be taken again.
        """
        version = info["version"]
        try:
            self._connect(info)
            self._engine.prefetch(version)
            source = CheckpointSource(Path(info["path"]))
            digests = {name: tensor_digest(tensor) for name, tensor in source} if self._engine.verifies else {}
            with self._engine.updating(version):
                self._engine.load(info)
                self._engine.verify(digests)
        except Exception as error:
            self._connected_to = None  # a half-made update is not built upon
            raise UpdateError(
                f"weights version {version} of {self._transport.root} did not reach every engine: {error}",
                rows=self._engine.rows(),
            ) from error

    def close(self) -> None:
        """Leave the engine, which goes on with what it has."""
        self._engine.close()

    def _connect(self, info: Info) -> None:
        wanted = (self._engine.members(), info["params"])
        if self._connected_to == wanted:
            return
        invitation = {**self._transport.invite(), "params": info["params"], "unproved": False}
        self._engine.connect({**invitation, "world_size": 1 + self._engine.info().world_size})
        self._engine.rehearse()
        self._connected_to = wanted
