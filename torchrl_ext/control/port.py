"""`Port`: the calls that each kind of engine implements. `Engine` orders them and keeps the state of an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError, code_of
from torchrl_ext.base.messages import Message
from torchrl_ext.base.types import EngineInfo, Info

__all__ = ["TAGS", "EngineState", "Port", "check_sleep", "check_wake", "named_tags", "restated"]

TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine that can release their memory."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's own report on its state at one moment.

    Attributes:
        paused: whether generation is stopped; None if the engine cannot report it.
        asleep: tags whose memory is released: from `TAGS`, and this kind of engine's own.
        empty: whether the weights were dropped and no update has filled them since; None if not reported.
        dropped: whether the engine was put to sleep without keeping its weights, and is not fully awake yet.
        whole: False if only a part of an update landed; None if not reported.
        known: whether the engine can report which parts sleep.
    """

    paused: bool | None
    asleep: frozenset[str] = frozenset()
    empty: bool | None = None
    dropped: bool = False
    whole: bool | None = None
    known: bool = True

    @property
    def serves(self) -> bool:
        """Whether the engine generates."""
        return not self.paused and not self.asleep


class Port(ABC):
    """Stateless access to one engine, by its kind and location (HTTP, this process, Ray).

    Every method raises `EngineUnreachableError`, `EngineRefusedError` or `DeadlineError` if it fails.

    Attributes:
        kind: the kind of engine, as in `torchrl_ext.make_engine`.
        url: the engine's address, or another readable name.
        pauses: whether an update pauses the engine; otherwise it keeps serving.
        proves: whether the workers run our plugin: they then compare digests, rehearse, and report `EngineState.whole`.
        drops_first: whether cached keys and values are dropped before a load instead of after it.
        timeout_s: deadline of calls that wait for workers, in seconds.
    """

    kind: ClassVar[str]
    url: str
    pauses: ClassVar[bool] = True
    proves: bool = True
    drops_first: ClassVar[bool] = False
    timeout_s: float = 600.0

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Ask the engine for its description."""

    @abstractmethod
    def state(self, *, fit: bool = False) -> EngineState:
        """Ask the engine for its state, in one request if its protocol allows that.

        Args:
            fit: ask for `EngineState.empty` and `EngineState.whole` in place of `EngineState.paused`.
        """

    @abstractmethod
    def tell(self, message: Message) -> list[Info]:
        """Send every worker a message and return their answers, if they give any.

        For an engine without our plugin, the port translates `Join`, `Start`, `Load` and `Finish` to the engine's own
        routes.
        """

    @abstractmethod
    def pause(self, before: EngineState) -> None:
        """Pause the engine, whose state until now is ``before``."""

    @abstractmethod
    def resume(self) -> None:
        """Let the engine generate again."""

    def port_for(self, info: Info) -> Port:
        """Return the port that suits the server as it is now, before it joins the transport of ``info``.

        Raises:
            ConfigError: the engine would serve wrong weights with this port's settings.
        """
        return self

    def cancel(self) -> None:  # noqa: B027 - most engines keep nothing open
        """End an update that was started but loaded nothing."""

    def drop_cached(self) -> None:  # noqa: B027 - not every engine caches
        """Drop caches that older weights computed, unless the settings keep them."""

    def make_idle(self) -> None:  # noqa: B027 - most engines can sleep while they hold requests
        """Before sleep, make the paused engine drop the caches that requests hold, whatever the settings."""

    def set_label(self, version: int) -> None:  # noqa: B027 - most label with `Finish`
        """Set the engine's version label, if `Finish` did not."""

    def refuse_sleep(self, level: int, tags: frozenset[str]) -> None:
        """Raise an error if the engine does not support this sleep."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use pause")

    def sleep(self, level: int, tags: frozenset[str] | None, state: EngineState) -> None:
        """Release the memory of ``tags`` (None: of everything); ``state`` is from before the pause."""
        raise NotImplementedError

    def wake(self, tags: frozenset[str], state: EngineState) -> None:
        """Wake the parts of ``tags`` that sleep according to ``state``. The engine may serve afterwards."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use resume")

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities as `torchrl_ext.EngineClient.logprobs` does."""
        raise no_logprobs(self.url, self.kind)

    def load_adapter(self, name: str, path: str) -> None:
        """Serve a LoRA adapter as `torchrl_ext.EngineClient.load_adapter` does."""
        raise no_adapters(self.kind)

    def unload_adapter(self, name: str) -> None:
        """Serve no adapter under ``name`` any more."""
        raise no_adapters(self.kind)

    def lacks_plugin(self, error: EngineRefusedError) -> bool:
        """Return whether the engine refused a message because it runs without our plugin."""
        return False

    def close(self, connection: str) -> None:  # noqa: B027 - most keep nothing
        """Leave the transport that the sender joined as ``connection`` ("" if it joined none)."""


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


def check_sleep(level: int, tags: Collection[str] | None) -> frozenset[str]:
    """Return the tags to put to sleep; none at level 0, which only pauses.

    Raises:
        ConfigError: unknown level or tag, or ``tags`` has the weights without the cache.
    """
    wanted = check_wake(tags)
    if level not in (0, 1, 2):
        raise ConfigError(f"there is no sleep of level {level}", expected="level 0, 1 or 2")
    if level > 0 and "kv_cache" not in wanted:
        raise ConfigError("weights sleep only together with the cache", expected="no tags, or ['kv_cache']")
    return wanted if level > 0 else frozenset()


def check_wake(tags: Collection[str] | None) -> frozenset[str]:
    """Return the tags to wake.

    Raises:
        ConfigError: unknown tag.
    """
    wanted = TAGS if tags is None else frozenset(tags)
    if not wanted <= TAGS:
        raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"tags from {', '.join(sorted(TAGS))}")
    return wanted


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
) -> Any:
    """Return an error of the same class with the message ``what``; other arguments, if given, replace its parts."""
    more: dict[str, Any] = {
        "expected": expected or error.expected,
        "state": state or error.state,
        "hint": hint or error.hint,
        "code": code or code_of(error),
    }
    if isinstance(error, EngineError):
        more["rows"] = error.rows
    if isinstance(error, EngineRefusedError):
        more["status"] = error.status
        more["reason"] = reason or (error.reason if what == error.what else "")
    return type(error)(what, **more)
