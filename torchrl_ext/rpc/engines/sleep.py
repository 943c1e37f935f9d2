"""Sleep and pause of engines: the routes, and how to read from an engine what of it sleeps.

Who put an engine to sleep does not matter: what sleeps is read from the engine, each time.

======================================  =====================================================================
vLLM 0.32                               `vllm.entrypoints.serve.dev.sleep.api_router`
``POST /sleep?level=0|1|2&mode=``       0 pauses; 1 keeps weights on the host and drops keys and values; 2 drops both
``POST /wake_up?tags=``                 ``weights`` or ``kv_cache``; without tags, all. The wake that completes the
                                        engine resumes it, too
``POST /release_kv_cache_memory``       drops keys and values only
``GET /is_sleeping``                    false for an engine that serves; the embedded engine also names ``tags``
``GET /metrics``                        ``vllm:engine_sleep_state``: how vLLM was put to sleep, until it is wholly awake
SGLang 0.5.19 to 0.5.23                 `sglang.srt.entrypoints.http_server`
``GET /ready``                          503 while it is paused (0.5.23)
``POST /release_memory_occupation``     ``{"tags": [...]}``; ends the server that is not idle
``POST /resume_memory_occupation``      ``{"tags": [...]}``; ends the server where one of them is awake
======================================  =====================================================================

vLLM does not name the parts that sleep, but a wake of a part that is awake changes nothing there, as long as something
else sleeps. With SGLang our plugin says what sleeps; no route of its own does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rpc.http import HTTPSession

__all__ = ["TAGS", "SleepState", "check_sleep", "check_wake", "named_tags", "sleep_state_of_vllm"]

TAGS = frozenset({"weights", "kv_cache"})

_GAUGE = re.compile(r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="(\w+)"[^}\n]*\}\s+([0-9.e+]+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SleepState:
    """An engine's report on its pause and its sleep.

    Attributes:
        paused: whether it generates nothing; None where it cannot say.
        asleep: parts that may have given their memory up: of `TAGS`, and of those that this engine has besides.
        empty: whether its weights were given up, and no update has filled them since; None where it does not say.
        known: whether it can say what of it sleeps.
    """

    paused: bool | None
    asleep: frozenset[str] = frozenset()
    empty: bool | None = None
    known: bool = True


def check_sleep(level: int, tags: Collection[str] | None) -> frozenset[str]:
    """Return the tags that are to sleep; none at level 0, which only pauses.

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
    """Return the tags that are to wake.

    Raises:
        ConfigError: there is no such part.
    """
    wanted = TAGS if tags is None else frozenset(tags)
    if not wanted <= TAGS:
        raise ConfigError(f"there are no tags {sorted(wanted - TAGS)}", expected=f"of {', '.join(sorted(TAGS))}")
    return wanted


def named_tags(value: Any) -> frozenset[str]:
    """Return the tags in an engine's answer; none where it is no list of them."""
    return frozenset(tag for tag in value if isinstance(tag, str)) if isinstance(value, list) else frozenset()


def sleep_state_of_vllm(http: HTTPSession) -> SleepState:
    """Ask a vLLM server, or an embedded engine, whether it is paused and what of it sleeps.

    Raises:
        EngineRefusedError: its answer does not say.
    """
    told = _told(http, "/is_sleeping", "is_sleeping")
    if told is None:
        paused = _told(http, "/is_paused", "is_paused")
        return SleepState(paused=None if paused is None else bool(paused["is_paused"]), known=False)
    if "tags" in told:
        paused, asleep = _told(http, "/is_paused", "is_paused"), named_tags(told["tags"]) & TAGS
        return SleepState(paused=bool(asleep) if paused is None else bool(paused["is_paused"]), asleep=asleep)
    if not told["is_sleeping"]:  # vLLM calls a paused engine asleep, too
        return SleepState(paused=False)
    return _gauged(http)


def _told(http: HTTPSession, route: str, field: str) -> Any:
    """Return the answer of ``GET route``, an object that has ``field``; None where the server has no such route."""
    answer = http.call("GET", route)
    if answer.status in (404, 405):
        return None
    try:
        told = answer.json() if answer.ok else None
    except ValueError:
        told = None
    if not isinstance(told, dict) or field not in told:
        raise EngineRefusedError(
            f"GET {http.url}{route} answered {answer.status}: {answer.message()}",
            expected=f"an object with {field!r}",
            status=answer.status,
        )
    return told


def _gauged(http: HTTPSession) -> SleepState:
    """Read from vLLM's gauge how it was put to sleep. Level 0 and a cache that sleeps alone look the same in it."""
    answer = http.call("GET", "/metrics")
    rows = _GAUGE.findall(answer.text) if answer.ok else []
    found = {state for state, value in rows if float(value) > 0}
    if not rows or "awake" in found:
        return SleepState(paused=True)
    if found & {"weights_offloaded", "discard_all"}:
        return SleepState(paused=True, asleep=TAGS, empty="discard_all" in found)
    return SleepState(paused=True, asleep=frozenset({"kv_cache"}))
