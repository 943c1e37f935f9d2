"""Pause and sleep of an SGLang server, as the server tells of them, and the routes that give memory back.

====================================  ====================================================================
``GET /ready``                        503 while it is paused (0.5.23)
``POST /release_memory_occupation``   ``{"tags": [...]}``; ends the server that is not idle
``POST /resume_memory_occupation``    ``{"tags": [...]}``; ends the server where one of them is awake
====================================  ====================================================================

What sleeps is told by our plugin (`torchrl_ext.plugins.sglang.worker`); no route of SGLang's says it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.messages import Reset
from torchrl_ext.rpc.engines.sglang_channel import PLUGIN, SGLangChannel
from torchrl_ext.rpc.engines.sleep import Rest, named_tags

__all__ = ["SGLangSlumber"]

_OK, _NOT_READY = 200, 503
_GRAPHS = "cuda_graph"  # sleeps and wakes with the cache


@final
class SGLangSlumber:
    """Pause and sleep of one server; remembers nothing.

    Args:
        http: the server.
        channel: its plugin.
        load_timeout_s: deadline of giving memory back and of taking it, in seconds.
    """

    def __init__(self, http: Any, channel: SGLangChannel, load_timeout_s: float) -> None:
        self._http, self._channel, self._load_timeout_s = http, channel, load_timeout_s

    def rest(self, *, native: bool) -> Rest:
        """What the server says of itself now.

        Args:
            native: it has no plugin of ours.
        """
        told = {} if native else self._channel.rest()
        paused = {_OK: False, _NOT_READY: True}.get(self._ready(), told.get("paused"))
        paused = None if paused is None else bool(paused)
        return Rest(paused=paused, asleep=named_tags(told.get("asleep")), empty=bool(told.get("empty")))

    def is_held(self) -> bool:
        """Whether the server says that it is paused."""
        return self._ready() == _NOT_READY

    def refuse_impossible(self, level: int, wanted: Collection[str], told: Any) -> None:
        """Before anything is paused.

        Args:
            told: by ``/server_info``.

        Raises:
            EngineRefusedError: the server cannot sleep so.
        """
        if not self._channel.answers():
            raise EngineRefusedError(
                f"{self._http.url} runs SGLang without our plugin, and does not say what of it sleeps", hint=PLUGIN
            )
        if level == 1 and "weights" in wanted and not told.get("enable_weights_cpu_backup"):
            raise EngineRefusedError(
                f"{self._http.url} keeps no copy of its weights on the host",
                expected="a server with --enable-weights-cpu-backup",
                hint="start it so, sleep at level 2, or sleep(tags=['kv_cache'])",
            )

    def refuse_empty(self, rest: Rest) -> None:
        """A server without weights does not serve.

        Raises:
            EngineRefusedError: it slept at level 2, and no update came since.
        """
        if rest.empty:
            raise EngineRefusedError(
                f"{self._http.url} slept at level 2 and holds no weights to serve",
                state="paused",
                hint="call update_weights: it wakes the engine in the right order",
            )

    def release(self, level: int, wanted: Collection[str], asleep: frozenset[str]) -> None:
        """Give memory back; the server is paused, and idle."""
        if level == 2 and "weights" in wanted:
            self._channel.tell(Reset(weights="gone"), self._load_timeout_s)
        tags = sorted({*wanted, _GRAPHS} - asleep)
        self._http.post("/release_memory_occupation", {"tags": tags}, timeout_s=self._load_timeout_s)

    def wake(self, wanted: Collection[str], asleep: frozenset[str]) -> bool:
        """Wake what sleeps of ``wanted``, and nothing else; returns whether nothing sleeps any more."""
        tags = asleep & {*wanted, *([_GRAPHS] if "kv_cache" in wanted else [])}
        if tags:
            self._http.post("/resume_memory_occupation", {"tags": sorted(tags)}, timeout_s=self._load_timeout_s)
        return not asleep - tags

    def _ready(self) -> int:
        return self._http.call("GET", "/ready").status  # its scheduler does not know of every pause
