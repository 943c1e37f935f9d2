"""`AdapterPort`: updates of one LoRA adapter of an engine, while the base weights stay.

An update never pauses the engine. Each new version is loaded under its own label (``policy-lora@7``) while the engine
serves; once every engine of a fleet has it, the adapter's name is switched to it. Running requests finish with the
version that they started with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, final

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.messages import (
    CheckAdapter,
    Finish,
    Join,
    Load,
    Message,
    ServeAdapter,
    StageAdapter,
    UnloadAdapter,
)
from torchrl_ext.routes import ListAdapters
from torchrl_ext.rpc.makes.http import is_absent
from torchrl_ext.rpc.port import EngineState, Port, restated
from torchrl_ext.types import EngineInfo, Info
from torchrl_ext.weights.peft import adapter_label

__all__ = ["AdapterPort"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@final
class AdapterPort(Port):
    """One LoRA adapter of an engine.

    Args:
        engine: the port of the engine itself.
        name: the adapter's name in requests.
        say: sends the engine a message about adapters and returns its answer; `ListAdapters` is answered by
            ``{"adapters": {name: {"version": 7}}}``.
        plugin, lora: error hints for an engine without our plugin, and for an engine started without LoRA.

    Raises:
        ConfigError: ``name`` is not valid as both a folder's and a model's name.
    """

    pauses: ClassVar[bool] = False
    proves: bool = False

    def __init__(
        self,
        engine: Port,
        name: str,
        say: Callable[[Message], Info],
        *,
        plugin: str,
        lora: str,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a valid name of an adapter", expected="letters, digits, '.', '_' and '-', at most 128"
            )
        self._engine, self.name, self._say = engine, name, say
        self._plugin, self._lora = plugin, lora
        self.kind, self.url = engine.kind, engine.url  # type: ignore[misc]
        self._versions: list[int] = []  # the newest two that this port put in service
        self._in_use: list[int] | None = None  # versions whose files requests may still read; None if not reported

    def describe(self) -> EngineInfo:
        """See `Port.describe`; ``weight_version`` is the adapter's, or "" if none is served."""
        with self._explained():
            version = self._serving()
        return replace(
            self._engine.describe(), weight_version="" if version is None else str(version), transports=("disk",)
        )

    def state(self, *, fit: bool = False) -> EngineState:
        return self._engine.state(fit=fit)

    def tell(self, message: Message) -> list[Info]:
        with self._explained():
            match message:
                case Join():
                    self._ask(CheckAdapter(params=message.params, root=message.offer))
                case Load():
                    path = message.handoff.get("path")
                    if path is None:
                        raise ConfigError("adapters travel as files", expected="DiskTransport")
                    self._ask(StageAdapter(name=self.name, version=message.version, path=path))
                case Finish():
                    self._serve(message.version)
        return []

    def _serve(self, version: int) -> None:
        """Switch the name to ``version`` and check that the engine did."""
        in_use = self._ask(ServeAdapter(name=self.name, version=version)).get("in_use")
        self._in_use = [one for one in in_use if isinstance(one, int)] if isinstance(in_use, list) else None
        found = self._serving()
        if found != version:
            raise EngineRefusedError(
                f"{self.url} serves version {found} of {self.name!r}",
                expected=adapter_label(self.name, version),
                hint="check whether another trainer loads adapters under this name",
            )
        self._versions = [*self._versions[-1:], version]

    def oldest(self, version: int) -> int:
        """See `Port.oldest`. If vLLM evicts a version, requests that use it read its files again."""
        return version if self._in_use is None else min([version, *self._versions, *self._in_use])

    def unload(self) -> None:
        """Take the adapter out of service; the engine then refuses requests by its name."""
        with self._explained():
            self._ask(UnloadAdapter(name=self.name))
        self._versions = []

    def hold(self, before: EngineState) -> None:
        """Pause nothing: the engine serves while a version is loaded."""

    def release(self) -> None:
        """Do nothing: `hold` does not pause."""

    def _serving(self) -> int | None:
        """Return the version that the engine serves under the name; None if it serves none of ours."""
        adapters = self._ask(ListAdapters()).get("adapters")
        row = adapters.get(self.name) if isinstance(adapters, dict) else None
        version = row.get("version") if isinstance(row, dict) else None
        return version if isinstance(version, int) else None

    def _ask(self, message: Message) -> Info:
        answer = self._say(message)
        if not isinstance(answer, dict):
            raise EngineRefusedError(f"{self.url} answered {answer!r:.200} to {message.kind!r}", expected="an object")
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add a hint to errors of the body if the engine cannot serve adapters at all."""
        try:
            yield
        except EngineRefusedError as error:
            if "LoRA is not enabled" in error.what:
                raise restated(error, error.what, hint=self._lora) from error
            if is_absent(error) and "is loaded; there are" not in error.what:
                raise restated(error, error.what, expected="our plugin", hint=self._plugin) from error
            raise
