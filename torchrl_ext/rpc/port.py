"""`Port`: the questions that a make of engine answers. It keeps no state and no order; `Engine` has these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError
from torchrl_ext.messages import Message
from torchrl_ext.types import EngineInfo, Info

__all__ = ["TAGS", "EngineState", "Port", "check_sleep", "check_wake", "named_tags", "restated"]

TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine that give their memory up."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's report on itself. It is asked for, and never remembered.

    Attributes:
        paused: whether it generates nothing; None where it cannot say.
        asleep: tags whose memory was released: of `TAGS`, and of the make's own.
        empty: whether the weights were given up, and no update has filled them since; None where it does not say.
        dropped: whether the weights were given up when it was put to sleep, and it is not wholly awake since.
        whole: False where a part of an update landed and the rest did not; None where it does not say.
        known: whether it can say what of it sleeps.
    """

    paused: bool | None
    asleep: frozenset[str] = frozenset()
    empty: bool | None = None
    dropped: bool = False
    whole: bool | None = None
    known: bool = True

    @property
    def serves(self) -> bool:
        """Whether it generates."""
        return not self.paused and not self.asleep


class Port(ABC):
    """One engine as its make and its place let it be reached.

    Every method raises `EngineUnreachableError`, `EngineRefusedError` or `DeadlineError` where it fails.

    Attributes:
        kind: the make, as `torchrl_ext.make_engine` names it.
        url: address, or another name that a person recognises.
        pauses: whether an update pauses the engine; one that does not serves in the meantime.
        proves: whether its workers run our plugin: they compare digests, rehearse, and say whether they are whole.
        drops_first: whether cached keys and values are dropped before a load, in place of after it.
        timeout_s: deadline of what waits for workers, in seconds.
    """

    kind: ClassVar[str]
    url: str
    pauses: ClassVar[bool] = True
    proves: bool = True
    drops_first: ClassVar[bool] = False
    timeout_s: float = 600.0

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Return what the engine says of itself."""

    def count_workers(self) -> int:
        """Return how many workers receive weights."""
        return self.describe().world_size

    @abstractmethod
    def state(self, *, fit: bool = False) -> EngineState:
        """Ask the engine how it is, in one request where its make allows it.

        Args:
            fit: whether `EngineState.empty` and `EngineState.whole` are wanted, in place of `EngineState.paused`.
        """

    @abstractmethod
    def tell(self, message: Message) -> list[Info]:
        """Give every worker a message, and return the answers of the workers that give one.

        A port of an engine that runs nothing of ours translates `Join`, `Start`, `Load` and `Finish`.
        """

    @abstractmethod
    def hold(self, before: EngineState) -> None:
        """Pause the engine, which was so until now."""

    @abstractmethod
    def release(self) -> None:
        """Let the engine generate."""

    def suited(self, info: Info) -> Port:
        """Return the port for the engine as it is now, before it joins the transport of ``info``.

        Raises:
            ConfigError: the engine would serve wrong weights with this port's settings.
        """
        return self

    def abandon(self) -> None:  # noqa: B027 - most have nothing that stays open
        """End an update that was started and brought nothing."""

    def drop_cached(self) -> None:  # noqa: B027 - not every engine caches
        """Drop what was computed with older weights, unless the settings keep it."""

    def make_idle(self) -> None:  # noqa: B027 - most need not be
        """Make the paused engine drop what requests hold, whatever the settings, before it sleeps."""

    def label_as(self, version: int) -> None:  # noqa: B027 - most label with `Finish`
        """Name the weights in service, where `Finish` did not."""

    def refuse_sleep(self, level: int, tags: frozenset[str]) -> None:
        """Raise an error where the engine cannot sleep so."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use pause")

    def sleep(self, level: int, tags: frozenset[str] | None, state: EngineState) -> None:
        """Give up the memory of ``tags`` (None: all of it) of the paused engine; ``state`` is the one before."""
        raise NotImplementedError

    def wake(self, tags: frozenset[str], state: EngineState) -> None:
        """Take back the memory of ``tags``, of which ``state`` says what sleeps. It may make the engine serve."""
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use resume")

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `torchrl_ext.EngineClient.logprobs`."""
        raise ConfigError(
            f"{self.url}: this kind of engine ({self.kind}) computes no log-probabilities",
            hint="leave verify='outputs' away; of a fleet ask the engines one by one: fleet.each()",
        )

    def adapter(self, name: str) -> Port:
        """Return the port of the LoRA adapter called ``name``."""
        raise ConfigError(
            f"{self.kind} engines serve no LoRA adapters",
            expected="a vLLM or an SGLang server",
            hint="send the merged weights: WeightSender does so with a PEFT model",
        )

    def unload(self) -> None:
        """Take out of service what updates brought; only an adapter can be taken out."""
        raise ConfigError(f"{self.url} cannot serve without weights", hint="unload adapters only")

    def oldest(self, version: int) -> int:
        """Return the oldest version that the engine may still read while ``version`` is in service."""
        return version

    def lacks_plugin(self, error: EngineRefusedError) -> bool:
        """Return whether the engine refused a message since it runs without our plugin."""
        return False

    def close(self, connection: str) -> None:  # noqa: B027 - most keep nothing
        """Leave what the sender joined as ``connection``; "" where it joined nothing."""


def check_sleep(level: int, tags: Collection[str] | None) -> frozenset[str]:
    """Return the tags that are to sleep; none at level 0, which only pauses.

    Raises:
        ConfigError: there is no such level or tag, or weights would sleep without the cache.
    """
    wanted = check_wake(tags)
    if level not in (0, 1, 2):
        raise ConfigError(f"there is no sleep of level {level}", expected="level 0, 1 or 2")
    if level > 0 and "kv_cache" not in wanted:
        raise ConfigError("weights sleep only together with the cache", expected="no tags, or ['kv_cache']")
    return wanted if level > 0 else frozenset()


def check_wake(tags: Collection[str] | None) -> frozenset[str]:
    """Return the tags that are to wake.

    Raises:
        ConfigError: there is no such tag.
    """
    wanted = TAGS if tags is None else frozenset(tags)
    if not wanted <= TAGS:
        raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
    return wanted


def named_tags(value: Any) -> frozenset[str]:
    """Return the tags in an engine's answer; none where it is no list of them."""
    return frozenset(tag for tag in value if isinstance(tag, str)) if isinstance(value, list) else frozenset()


def restated(
    error: WeightSyncError,
    what: str,
    state: str | None = None,
    *,
    expected: str | None = None,
    hint: str | None = None,
    reason: str = "",
) -> Any:
    """Return an error of the same class with ``what`` as its message, its other parts replaced where they are given."""
    more: dict[str, Any] = {
        "expected": expected or error.expected,
        "state": state or error.state,
        "hint": hint or error.hint,
    }
    if isinstance(error, EngineError):
        more["rows"] = error.rows
    if isinstance(error, EngineRefusedError):
        more["status"] = error.status
        more["reason"] = reason or (error.reason if what == error.what else "")
    return type(error)(what, **more)
