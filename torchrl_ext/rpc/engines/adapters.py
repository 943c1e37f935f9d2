"""The client that keeps an engine at the newest version of one LoRA adapter, beside base weights that stay.

To a `WeightSender` it is an engine like others, but it is never paused. A new version is loaded under a label of its
own (``policy-lora@7``) while the engine serves, and once every engine of a fleet has it, the name is pointed at it.
Requests that began before end with the version that they began with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.messages import CheckAdapter, Message, ServeAdapter, StageAdapter, UnloadAdapter
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.engines.base import is_absent, restated
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part
from torchrl_ext.weights.adapter import adapter_label

__all__ = ["AdapterClient"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@final
class AdapterClient(EngineClient):
    """Drives the updates of one LoRA adapter of one engine.

    Args:
        engine: the client of the engine itself.
        name: the adapter's name in requests.
        served: asks the engine which version each name stands for: ``{name: {"version": 7}}``.
        tell: sends the engine a message about adapters; returns its answer.
        plugin, lora: hints of errors, where the engine lacks our plugin, and where it was started without adapters.

    Raises:
        ConfigError: a name that cannot be both a folder's and a model's.
    """

    def __init__(
        self,
        engine: EngineClient,
        name: str,
        served: Callable[[], Info],
        tell: Callable[[Message], Info],
        *,
        plugin: str,
        lora: str,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"an adapter cannot be called {name!r}", expected="letters, digits, '.', '_' and '-', at most 128"
            )
        self._engine, self.name, self._served, self._tell = engine, name, served, tell
        self._plugin, self._lora = plugin, lora
        self.kind = engine.kind  # type: ignore[misc]
        self._state = "serving"
        self._error: str | None = None
        self._version: int | None = None
        self._before: int | None = None  # the version before the one in service
        self._in_use: list[int] | None = None  # versions whose files requests may still read, where the engine says so

    @property
    def url(self) -> str:
        return self._engine.url

    def info(self) -> EngineInfo:
        """See `EngineClient.info`; ``weight_version`` is the adapter's, "" while there is none."""
        with self._explained():
            version = self._version = self._serving()
        return replace(
            self._engine.info(), weight_version="" if version is None else str(version), transports=("disk",)
        )

    @property
    def verifies(self) -> bool:
        return False

    def oldest(self, version: int) -> int:
        """See `EngineClient.oldest`. Requests read their version's files again where vLLM had to drop it meanwhile."""
        if self._in_use is None:
            return version
        return min([version, version if self._before is None else self._before, *self._in_use])

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`; nothing is loaded.

        Raises:
            EngineRefusedError: the engine serves no adapters, none of this rank, or none with these layers; or it does
                not see the root. It goes on with what it serves.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        with self._step(f"make ready for adapter {self.name!r}"):
            self._tell(CheckAdapter.of(info))

    def prefetch(self, version: int, part: Part | None = None) -> None:
        return None

    def begin(self, version: int) -> None:
        """Do nothing: the engine serves during the whole update."""

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """Load a version; no request uses it before `commit`."""
        if "path" not in info:
            raise ConfigError(f"adapters travel as files, not by {info.get('transport')!r}", expected="DiskTransport")
        with self._step(f"load {adapter_label(self.name, info['version'])}"):
            self._tell(StageAdapter(name=self.name, version=info["version"], path=info["path"]))

    def commit(self, version: int) -> None:
        """Point the name at ``version``, and check that it is."""
        label = adapter_label(self.name, version)
        with self._step(f"serve {label}"):
            self._in_use = self._tell(ServeAdapter(name=self.name, version=version)).get("in_use")
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
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        with self._step(f"unload adapter {self.name!r}"):
            self._tell(UnloadAdapter(name=self.name))
        self._version = self._before = None

    def adapter(self, name: str) -> EngineClient:
        return self._engine.adapter(name)

    def pause(self) -> bool:
        return self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self._engine.sleep(level, tags)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._engine.wake_up(tags)

    def rows(self) -> tuple[EngineRow, ...]:
        row = EngineRow(
            engine=self.url, kind=self.kind, state=self._state, version=self._version, error=self._error, proof="sent"
        )
        return (row,)

    def close(self) -> None:
        """Do nothing: whoever made the engine's own client closes it."""

    def _serving(self) -> int | None:
        """Return the version that the engine serves under the name; None where it serves none of ours."""
        return self._served().get(self.name, {}).get("version")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add a hint to errors of the body where the engine can serve no adapters at all."""
        try:
            yield
        except EngineRefusedError as error:
            if "LoRA is not enabled" in error.what:
                raise restated(error, error.what, hint=self._lora) from error
            if is_absent(error) and "is loaded; there are" not in error.what:
                raise restated(error, error.what, expected="our plugin", hint=self._plugin) from error
            raise

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Name the step in an error of the body, and keep the error for the report; the engine serves in any case."""
        try:
            with self._explained():
                yield
        except (EngineError, DeadlineError) as error:
            if isinstance(error, EngineUnreachableError):
                self._state = "unreachable"
            served = "no version" if self._version is None else f"version {self._version}"
            goes_on = f"{self.url} goes on serving, with {served} of {self.name!r}"
            found = restated(error, f"{self.url} did not {what}: {error.what}", goes_on)
            self._error = str(found)
            raise found from error
