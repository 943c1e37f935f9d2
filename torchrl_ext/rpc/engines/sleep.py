"""Sleep and wake over vLLM's routes (`vllm.entrypoints.serve.dev.sleep.api_router`, 0.32), and what they leave out.

======================================  =====================================================================
``POST /sleep?level=0|1|2&mode=``       0 pauses; 1 keeps weights on the host and drops keys and values; 2 drops both
``POST /wake_up?tags=``                 ``weights`` or ``kv_cache``; without tags, all. The wake that completes the
                                        engine resumes it, too
``POST /release_kv_cache_memory``       drops keys and values only
``GET /is_sleeping``                    false for an engine that serves; the embedded engine also names ``tags``
``GET /metrics``                        ``vllm:engine_sleep_state``: how vLLM was put to sleep, until it is wholly awake
======================================  =====================================================================

Who put an engine to sleep does not matter: what sleeps is read from the engine, each time. vLLM does not name the
parts, but a wake of a part that is awake changes nothing there, as long as something else sleeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.messages import Message, Reset, State
from torchrl_ext.types import Info

__all__ = ["TAGS", "Rest", "Slumber", "check_sleep", "check_wake", "named_tags"]

TAGS = frozenset({"weights", "kv_cache"})

_STATE = re.compile(r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="(\w+)"[^}\n]*\}\s+([0-9.e+]+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What an engine says of its pause and its sleep.

    Attributes:
        paused: whether it generates nothing; None where it has no way to say.
        asleep: of `TAGS`, what may have given its memory up.
        empty: its weights were given up, and no update has filled them since; None where it does not say.
    """

    paused: bool | None
    asleep: frozenset[str] = frozenset()
    empty: bool | None = None


def check_sleep(level: int, tags: Collection[str] | None) -> frozenset[str]:
    """What is to sleep.

    Raises:
        ConfigError: there is no such sleep.
    """
    wanted = TAGS if tags is None else frozenset(tags)
    if level not in (0, 1, 2) or not wanted <= TAGS:
        raise ConfigError(
            f"there is no sleep of level {level} with tags {sorted(wanted)}",
            expected=f"level 0, 1 or 2, and tags of {', '.join(sorted(TAGS))}",
        )
    if level > 0 and wanted not in (TAGS, {"kv_cache"}):
        raise ConfigError("weights sleep only together with the cache", expected="no tags, or ['kv_cache']")
    return wanted if level > 0 else frozenset()


def check_wake(tags: Collection[str] | None) -> frozenset[str]:
    """What is to wake.

    Raises:
        ConfigError: there is no such part.
    """
    wanted = TAGS if tags is None else frozenset(tags)
    if not wanted <= TAGS:
        raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
    return wanted


def named_tags(value: Any) -> frozenset[str]:
    """The tags in an engine's answer; none where it is no list of them."""
    return frozenset(tag for tag in value if isinstance(tag, str)) if isinstance(value, list) else frozenset()


class Slumber:
    """Sleep and wake of one engine behind vLLM's routes; remembers nothing.

    Args:
        url: the engine's, for messages.
        call: calls a route, whatever it answers (`HTTPSession.call`).
        post: calls a route that has to succeed.
        tell: sends a message to the workers, and returns their answers.
        pause: pauses the engine.
        mode: what happens to running requests.
    """

    def __init__(
        self,
        url: str,
        call: Callable[..., Any],
        post: Callable[..., Any],
        tell: Callable[[Message], list[Info]],
        pause: Callable[[], Any],
        mode: str,
    ) -> None:
        self._url, self._call, self._post, self._tell = url, call, post, tell
        self._pause, self._mode = pause, mode

    def rest(self) -> Rest:
        """What the engine says of itself now.

        Raises:
            EngineRefusedError: it gives an answer that says nothing.
        """
        told = self._told("/is_sleeping", "is_sleeping")
        if told is None:
            paused = self._told("/is_paused", "is_paused")
            return Rest(paused=None if paused is None else bool(paused["is_paused"]))
        if "tags" in told:
            paused = self._told("/is_paused", "is_paused")
            asleep = named_tags(told["tags"]) & TAGS
            return Rest(paused=bool(asleep) if paused is None else bool(paused["is_paused"]), asleep=asleep)
        if not told["is_sleeping"]:  # vLLM calls a paused engine asleep, too
            return Rest(paused=False)
        return self._gauged()

    def sleep(self, level: int, tags: Collection[str] | None) -> None:
        """See `EngineClient.sleep`."""
        wanted = check_sleep(level, tags)
        if wanted == {"kv_cache"}:
            self._pause()
            self._post("/release_kv_cache_memory")
        else:
            self._post("/sleep", query={"level": level, "mode": self._mode})
        if level == 2 and "weights" in wanted:
            self._tell_hollow()

    def wake(self, tags: Collection[str] | None = None) -> bool:
        """See `EngineClient.wake_up`; returns whether the engine says that nothing sleeps any more."""
        wanted, asleep = check_wake(tags), self.rest().asleep
        if asleep and "kv_cache" in wanted:  # the weights come first, so this wake may be the last one
            self.refuse_hollow()
        answers = [self._wake(tag) for tag in sorted(asleep & wanted, reverse=True)]
        return answers[-1] if answers else not asleep

    def rouse(self, rest: Rest) -> None:
        """Before weights are touched: wake them, and nothing else.

        Args:
            rest: as it was before the pause. Where the cache is awake already, vLLM generates as soon as the weights
                are awake too, and is paused again.
        """
        if rest.empty:
            self._tell_hollow()  # whoever put it to sleep may not have
        if "weights" in rest.asleep and self._wake("weights"):
            self._pause()

    def filled(self, rest: Rest) -> None:
        """An update arrived whole: wake the cache, if it slept before."""
        if rest.asleep:
            self._wake("kv_cache")

    def refuse_hollow(self) -> None:
        """An engine without weights does not serve.

        Raises:
            EngineRefusedError: its workers say that it has none.
        """
        try:
            answers = self._tell(State())
        except EngineRefusedError:
            return  # other backends know no such question
        if any(answer.get("empty") for answer in answers):
            raise EngineRefusedError(
                f"{self._url} slept at level 2 and holds no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )

    def _tell_hollow(self) -> None:
        self._tell(Reset(weights="gone"))

    def _wake(self, tag: str) -> bool:
        return self._post("/wake_up", query={"tags": tag}).get("status") == "awake"

    def _told(self, route: str, field: str) -> Any:
        """The answer of a route; None where there is none."""
        answer = self._call("GET", route)
        if answer.status in (404, 405):
            return None
        try:
            told = answer.json() if answer.ok else None
        except ValueError:
            told = None
        if not isinstance(told, dict) or field not in told:
            raise EngineRefusedError(
                f"GET {self._url}{route} answered {answer.status}: {answer.message()}",
                expected=f"an object with {field!r}",
                status=answer.status,
            )
        return told

    def _gauged(self) -> Rest:
        """vLLM's gauge: how it was put to sleep. Level 0 and a cache that sleeps alone look the same in it."""
        answer = self._call("GET", "/metrics")
        found = {state for state, value in _STATE.findall(answer.text) if float(value) > 0} if answer.ok else set()
        told = bool(answer.ok and _STATE.search(answer.text))
        if not told or "awake" in found:
            return Rest(paused=True)
        if found & {"weights_offloaded", "discard_all"}:
            return Rest(paused=True, asleep=TAGS, empty="discard_all" in found)
        return Rest(paused=True, asleep=frozenset({"kv_cache"}))
