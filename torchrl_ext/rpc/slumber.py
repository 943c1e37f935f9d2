"""Sleep and wake over vLLM's routes (`vllm.entrypoints.serve.dev.sleep.api_router`, 0.32), and what they leave out.

======================================  =====================================================================
``POST /sleep?level=0|1|2&mode=``       0 pauses; 1 keeps weights on the host and drops keys and values; 2 drops both
``POST /wake_up?tags=``                 ``weights`` or ``kv_cache``; without tags, all. The wake that completes the
                                        engine resumes it, too
``POST /release_kv_cache_memory``       drops keys and values only
======================================  =====================================================================

vLLM does not say which part sleeps, and a wake of an engine that is merely paused would resume it in the middle of an
update. So the client that put an engine to sleep remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError

__all__ = ["Slumber", "TAGS"]

TAGS = frozenset({"weights", "kv_cache"})


class Slumber:
    """What one engine gave away and has to get back.

    Args:
        url: the engine's, for messages.
        post: calls a route.
        pause: pauses the engine.
        mode: what happens to running requests.
    """

    def __init__(self, url: str, post: Callable[..., Any], pause: Callable[[], None], mode: str) -> None:
        self._url, self._post, self._pause, self._mode = url, post, pause, mode
        self._asleep: set[str] = set()
        self._hollow = False

    def sleep(self, level: int, tags: Collection[str] | None) -> None:
        """See `EngineClient.sleep`."""
        wanted = TAGS if tags is None else frozenset(tags)
        if level not in (0, 1, 2) or not wanted <= TAGS:
            raise ConfigError(
                f"there is no sleep of level {level} with tags {sorted(wanted)}",
                expected=f"level 0, 1 or 2, and tags of {', '.join(sorted(TAGS))}",
            )
        if level > 0 and wanted == {"kv_cache"}:
            self._pause()
            self._post("/release_kv_cache_memory")
        elif level > 0 and wanted != TAGS:
            raise ConfigError("weights sleep only together with the cache", expected="no tags, or ['kv_cache']")
        else:
            self._post("/sleep", query={"level": level, "mode": self._mode})
        self._asleep |= wanted if level > 0 else set()
        if level == 2 and "weights" in wanted:
            self._hollow = True
            self._post("/init_weight_transfer_engine", {"init_info": {"doubt": True}})  # no delta builds on nothing

    def wake(self, tags: Collection[str] | None = None) -> bool:
        """See `EngineClient.wake_up`; returns whether the engine says that nothing sleeps any more."""
        wanted = TAGS if tags is None else frozenset(tags)
        if not wanted <= TAGS:
            raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
        if self._asleep <= wanted:
            self.refuse_hollow()
        calls = [None] if tags is None else sorted(wanted, reverse=True)  # weights first
        answers = [self._post("/wake_up", query=None if tag is None else {"tags": tag}) for tag in calls]
        awake = bool(answers) and answers[-1].get("status") == "awake"
        self._asleep = set() if awake else set(TAGS - wanted)
        return awake

    @property
    def hollow(self) -> bool:
        """Whether it has no weights: it slept at level 2, and no update came since."""
        return self._hollow

    def rouse(self) -> None:
        """Before weights are touched: wake them, and nothing else."""
        if "weights" in self._asleep:
            self.wake(["weights"])

    def filled(self) -> None:
        """An update arrived whole: wake what still sleeps."""
        self._hollow = False
        if self._asleep:
            self.wake(frozenset(self._asleep))

    def refuse_hollow(self) -> None:
        """An engine without weights does not serve.

        Raises:
            EngineRefusedError: it slept at level 2, and no update came since.
        """
        if self._hollow:
            raise EngineRefusedError(
                f"{self._url} slept at level 2 and has no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )
