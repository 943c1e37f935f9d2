"""`TransportWeightSyncScheme`: any transport, by name, as a scheme for TorchRL's collectors."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import weakref
from typing import Any, Literal

from torchrl_ext.collectors.scheme_base import TransportSchemeBase, check_settings
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import transports
from torchrl_ext.transports.base import Transport

__all__ = ["TransportWeightSyncScheme"]


class TransportWeightSyncScheme(TransportSchemeBase):
    """Keeps the workers of a collector at the trainer's weights, over a transport picked by name.

    One scheme carries one model: ``weight_sync_schemes={"policy": TransportWeightSyncScheme("delta")}``.

    Args:
        transport: one of `torchrl_ext.transports`.
        strategy: how weights are taken from a module, ``"tensordict"`` or ``"state_dict"``.
        timeout_s: deadline of every wait during an update, in seconds.
        start_timeout_s: deadline for all workers to start and to connect, in seconds.
        host: address at which workers reach this process; of another machine's workers, one that they can reach.
        verify: workers compare a digest of each tensor with the trainer's before an update counts.
        settings: of the transport. A transport that needs a directory gets a temporary one where ``root`` is not given,
            for workers on this machine.

    Raises:
        ConfigError: no such transport, or a setting that it does not have.
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


def _remove(path: str, owner: int) -> None:
    """Remove a scheme's own directory, unless this is a fork of the process that made it."""
    if owner == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
