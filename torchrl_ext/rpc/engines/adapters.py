"""Clients that keep an engine at the newest version of one LoRA adapter, beside base weights that stay.

To a `WeightSender` they are engines like others. What differs is the pause: there is none. A new version is loaded
under a label of its own (``policy-lora@7``) while the engine serves, and once every engine of a fleet has it, the name
is pointed at it. Requests that began before end with the version that they began with.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.messages import Message
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.engines.base import HTTPEngine
from torchrl_ext.rpc.engines.sleep import Rest
from torchrl_ext.types import EngineInfo, Info, adapter_label

__all__ = ["AdapterClient"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AdapterClient(HTTPEngine):
    """One adapter of one engine behind HTTP routes.

    Args:
        engine: the client of the engine itself.
        name: what requests call the adapter.
        settings: of the connection, as for `HTTPEngine`.

    Raises:
        ConfigError: a name that cannot be a folder and a model's name.
    """

    def __init__(self, engine: EngineClient, name: str, **settings: Any) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"an adapter cannot be called {name!r}", expected="letters, digits, '.', '_' and '-', at most 128"
            )
        super().__init__(engine.url, **settings)
        self._engine, self.name = engine, name
        self._before: int | None = None  # the version before the one in service

    def info(self) -> EngineInfo:
        """As the engine says of itself; ``weight_version`` is the adapter's, "" while there is none."""
        version = self._serving()
        self._version = version
        return replace(
            self._engine.info(), weight_version="" if version is None else str(version), transports=("disk",)
        )

    @property
    def verifies(self) -> bool:
        return False

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`; nothing is loaded.

        Raises:
            EngineRefusedError: the engine serves no adapters, none of this rank, or none with these layers; or it does
                not see the root. It goes on with what it serves.
            EngineUnreachableError, DeadlineError: as they say.
        """
        with self._step(f"make ready for adapter {self.name!r}", state=self._goes_on()):
            self._check(info)

    def rehearse(self, how: str = "once") -> None:
        """An adapter is loaded beside the weights, into a place of its own, and what becomes of it is not read back."""

    def _tell(self, message: Message) -> list[Info]:
        return []

    def prefetch(self, version: int) -> None:
        return None

    def begin(self, version: int) -> None:
        """The engine serves all along."""

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """Load a version; nobody is served with it before `commit`."""
        if "path" not in info:
            raise ConfigError(f"adapters travel as files, not by {info.get('transport')!r}", expected="DiskTransport")
        with self._step(f"load {adapter_label(self.name, info['version'])}", state=self._goes_on()):
            self._stage(info["version"], info["path"])

    def commit(self, version: int) -> None:
        """Point the name at ``version``, and make sure that it is."""
        label = adapter_label(self.name, version)
        with self._step(f"serve {label}", state=self._goes_on()):
            self._serve(version)
            found = self._serving()
            if found != version:
                raise EngineRefusedError(
                    f"{self.url} serves version {found} of {self.name!r}",
                    expected=label,
                    hint="does another trainer load adapters under this name?",
                )
        self._before, self._version, self._error = self._version, version, None
        self._state = "serving"

    def unload(self) -> None:
        """Take the adapter out of service: requests by its name are refused from now on.

        Raises:
            EngineRefusedError: none of this name is loaded.
            EngineUnreachableError, DeadlineError: as they say.
        """
        with self._step(f"unload adapter {self.name!r}", state=self._goes_on()):
            self._drop()
        self._version = self._before = None

    def adapter(self, name: str) -> EngineClient:
        return self._engine.adapter(name)

    @abstractmethod
    def _serving(self) -> int | None:
        """The version that the engine serves under the name; None where it serves none of ours."""

    @abstractmethod
    def _check(self, info: Info) -> None:
        """Find out whether the engine could load such an adapter."""

    @abstractmethod
    def _stage(self, version: int, path: str) -> None:
        """Load a version under its label."""

    @abstractmethod
    def _serve(self, version: int) -> None:
        """Point the name at a version that was staged."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget the name."""

    def _hold(self) -> None:
        self._engine.pause()

    def _release(self) -> None:
        self._engine.resume()

    def rest(self) -> Rest:
        return Rest(paused=None)  # the engine's own client asks

    def _goes_on(self) -> str:
        served = "no version" if self._version is None else f"version {self._version}"
        return f"{self.url} goes on serving, with {served} of {self.name!r}"
