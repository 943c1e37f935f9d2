"""`Port`: one make of engine at one place, as nine calls; it keeps nothing of an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError, code_of
from torchrl_ext.base.messages import Message
from torchrl_ext.base.routes import merged
from torchrl_ext.base.types import EngineInfo, Info

__all__ = ["TAGS", "EngineState", "Port", "ServesAdapters", "named_tags", "restated"]

TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine that can release their memory."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's own report on its memory and weights at one moment.

    Attributes:
        asleep: tags whose memory is released: from `TAGS`, and this kind of engine's own, which belong to the cache.
        empty: whether the weights were dropped, and no update has filled them since.
        whole: False if only a part of an update landed; None if the engine cannot tell, which runs without our plugin.
    """

    asleep: frozenset[str] = frozenset()
    empty: bool = False
    whole: bool | None = None

    @classmethod
    def of(cls, answers: Sequence[Info]) -> EngineState:
        """Return the state in the answers of workers to a `State` message."""
        found = merged(answers)
        whole = found.get("whole")
        return cls(
            asleep=named_tags(found.get("asleep")),
            empty=bool(found.get("empty")),
            whole=None if whole is None else bool(whole),
        )


class Port(ABC):
    """Access to one engine, by its kind and place (HTTP, this process, Ray). Every question is asked anew.

    Every call raises `EngineUnreachableError`, `EngineRefusedError` or `DeadlineError` if it fails.

    Attributes:
        kind: the kind of engine, as in `torchrl_ext.make_engine`.
        url: the engine's address, or another readable name.
        plugin: whether the workers run ours: they compare digests, rehearse, and report `EngineState.whole`.
        live: whether the engine takes a `Commit` while it serves, and this client's settings let it.
        timeout_s: deadline of calls that wait for workers, in seconds.
    """

    kind: ClassVar[str]
    url: str
    plugin: bool = True
    live: bool = False
    timeout_s: float = 600.0

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Ask the engine for its description."""

    @abstractmethod
    def paused(self) -> bool | None:
        """Ask whether generation is stopped; None for an engine that is never paused and keeps serving."""

    @abstractmethod
    def state(self) -> EngineState:
        """Ask the workers for the state of their memory and weights."""

    @abstractmethod
    def call(self, message: Message) -> list[Info]:
        """Send every worker a message and return their answers, if they give any.

        `Start` also drops what older weights cached, unless the settings keep it; one that fails leaves nothing behind.
        `Finish`, `Commit` and `Undo` also label the weights with the version that serves from then on. For an engine
        without our plugin, the port translates `Start`, `Finish`, `Join`, `Load` and `Leave` to the engine's own
        routes.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop generation."""

    @abstractmethod
    def resume(self) -> None:
        """Let the engine generate again."""

    def sleep(self, level: int, tags: frozenset[str]) -> None:
        """Release the memory of ``tags`` in the paused engine; refuse it before anything changes."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use pause")

    def wake(self, tags: frozenset[str]) -> None:
        """Wake ``tags``, all of which sleep. The engine may serve afterwards."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use resume")

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities as `torchrl_ext.EngineClient.logprobs` does."""
        raise no_logprobs(self.url, self.kind)


@runtime_checkable
class ServesAdapters(Protocol):
    """A port of engines that serve LoRA adapters; see `torchrl_ext.EngineClient.load_adapter`."""

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in directory ``path`` under ``name``."""

    def unload_adapter(self, name: str) -> None:
        """Serve no adapter under ``name`` any more."""


def no_logprobs(url: str, kind: str) -> ConfigError:
    """Return the error of an engine that computes no log-probabilities."""
    return ConfigError(
        f"{url}: this kind of engine ({kind}) computes no log-probabilities",
        hint="leave verify='outputs' out; to ask the engines of a fleet one at a time, use fleet.each()",
    )


def no_adapters(kind: str) -> ConfigError:
    """Return the error of an engine that serves no adapters."""
    return ConfigError(
        f"{kind} engines serve no LoRA adapters",
        expected="a vLLM or an SGLang server",
        hint="send the merged weights: WeightSender merges the adapter of a PEFT model",
    )


def named_tags(value: Any) -> frozenset[str]:
    """Return the tags in an engine's answer; none if ``value`` is not a list."""
    return frozenset(tag for tag in value if isinstance(tag, str)) if isinstance(value, list) else frozenset()


def restated(
    error: WeightSyncError,
    what: str,
    state: str | None = None,
    *,
    expected: str | None = None,
    hint: str | None = None,
    reason: str = "",
    code: str = "",
    rows: tuple[Any, ...] = (),
) -> Any:
    """Return an error of the same class with the message ``what``; other arguments, if given, replace its parts."""
    more: dict[str, Any] = {
        "expected": expected or error.expected,
        "state": state or error.state,
        "hint": hint or error.hint,
        "code": code or code_of(error),
    }
    if isinstance(error, EngineError):
        more["rows"] = rows or error.rows
    if isinstance(error, EngineRefusedError):
        more["status"] = error.status
        more["reason"] = reason or (error.reason if what == error.what else "")
    return type(error)(what, **more)
