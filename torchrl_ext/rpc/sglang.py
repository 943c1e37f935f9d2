"""SGLang's routes, driven over HTTP.

The protocol, as far as routes and bodies go, is SGLang's (`sglang.srt.entrypoints.http_server`, 0.5.19 to 0.5.23).
Where the server has our plugin, messages of ours travel as the ``action`` of ``/weights_checker``
(`torchrl_ext.plugins.sglang_worker` lists them); a server without it follows by full files, through its own loader:

===================================  =========================================================================
``GET /server_info``                 what the server was started with; ``GET /model_info``: what it serves now
``POST /weights_checker``            ``{"action": "torchrl_ext:{...}"}``: connect, prefetch, flush, start, load, seal
``POST /pause_generation``           ``{"mode": "abort" | "retract" | "in_place"}``
``POST /flush_cache``                without the plugin; 400 while requests hold on to the cache
``POST /begin_weight_update``        0.5.21 and later: layers in the form that loaders write to; ``/end_weight_update``
``POST /update_weights_from_disk``   without the plugin: a checkpoint directory, ``load_format``, ``weight_version``
``POST /update_weight_version``      ``{"new_version": "7", "abort_all_requests": false}``
``POST /continue_generation``
===================================  =========================================================================

The order is pause, flush, transfer, resume: after the flush nothing of the old weights is cached, and while the server
is paused nothing new is. ``load_format`` and ``weight_version`` are sent with every load, since SGLang keeps the last.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.registry import transports
from torchrl_ext.rpc.client import _nothing
from torchrl_ext.rpc.served import HTTPEngine, restated
from torchrl_ext.rpc.server_info import parse_sglang_info
from torchrl_ext.rpc.sglang_adapter import SGLangAdapter
from torchrl_ext.types import CHANNEL, EngineInfo, Info

__all__ = ["SGLangEngine"]

PAUSE_MODES = ("abort", "retract", "in_place")

_SHORTEST_S, _LONGEST_S = 0.02, 1.0  # between two questions of one kind
_PLUGIN = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages), or let `torchrl-ext serve sglang` "
    'start the server; without it, use the "disk" transport, which SGLang loads by itself'
)


class SGLangEngine(HTTPEngine):
    """An SGLang server.

    Args:
        url: base address of the server itself, never of a router.
        pause_mode: what happens to running requests: ``"retract"`` (also ``"keep"``, vLLM's word for it) puts them back
            into the queue, and they go on with the new weights, their keys and values computed anew; ``"abort"`` ends
            them; ``"in_place"`` freezes them together with their keys and values of the old weights.
        keep_cache: with ``"in_place"``: accept that frozen requests, and later ones with the same prefix, go on with
            keys and values of the old weights. Without, an update is refused while requests run.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        flush_timeout_s: deadline of dropping the cache, in seconds; SGLang refuses as long as a request uses it.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: a setting that cannot work.
    """

    kind: ClassVar[str] = "sglang"

    def __init__(
        self,
        url: str,
        *,
        pause_mode: str = "retract",
        keep_cache: bool = False,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        flush_timeout_s: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        mode = {"keep": "retract"}.get(pause_mode, pause_mode)
        if mode not in PAUSE_MODES:
            raise ConfigError(f"there is no pause mode {pause_mode!r}", expected=f"one of {', '.join(PAUSE_MODES)}")
        if keep_cache and mode != "in_place":
            raise ConfigError(f"keep_cache means nothing with pause mode {mode!r}", expected="pause_mode='in_place'")
        super().__init__(url, timeout_s=timeout_s, load_timeout_s=load_timeout_s, api_key=api_key)
        self._pause_mode, self._keep_cache, self._flush_timeout_s = mode, keep_cache, flush_timeout_s
        self._native = False  # whether the server loads by itself, without the plugin
        self._in_session = False

    def info(self) -> EngineInfo:
        told = self._either("/server_info", "/get_server_info")
        served = self._either("/model_info", "/get_model_info")
        everything = tuple(name for name in transports.names() if name != "memory")
        return parse_sglang_info(self.url, told, served, transports=everything if self._has_plugin() else ("disk",))

    def loads(self) -> list[dict[str, Any]]:
        """Requests by data-parallel rank: ``{"dp_rank", "running", "waiting"}``; by ``/v1/loads`` or ``/get_load``."""
        told = self._either("/v1/loads", "/get_load")
        rows = told.get("loads", []) if isinstance(told, dict) else told
        found = []
        for row in rows:
            waiting = int(row.get("num_waiting_reqs", 0))
            running = int(row.get("num_running_reqs", row.get("num_reqs", waiting) - waiting))
            found.append({"dp_rank": row.get("dp_rank", 0), "running": running, "waiting": waiting})
        return found

    def checksum(self) -> str:
        """One SHA-256 over the runtime parameters of all workers, by ``/weights_checker``; 64 hex digits.

        It tells whether anything changed; it cannot be compared with a trainer's weights.
        """
        told = self._http.post("/weights_checker", {"action": "checksum"}, timeout_s=self._load_timeout_s)
        return str(told["per_engine_checksum"])

    @property
    def verifies(self) -> bool:
        return not self._native

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`. The server generates meanwhile.

        Raises:
            EngineRefusedError: the server lacks our plugin, and the transport needs it; or the parameters cannot land
                in its model, or the world size is not the transport's. It keeps serving what it served.
            EngineUnreachableError, DeadlineError: as they say.
        """
        with self._step("join the transport", state="the engine's weights and its pause are what they were"):
            self._native = not self._has_plugin()
            if not self._native:
                self._refuse_replicas(info)
                self._tell({"connect": {"rank_offset": 1, **info}}, self._load_timeout_s)
                self._await("join the transport")
            elif info.get("transport") != "disk":
                raise EngineRefusedError(
                    f"{self.url} runs SGLang without our plugin, and cannot follow by {info.get('transport')!r}",
                    expected='the plugin in group "sglang.srt.plugins"',
                    hint=_PLUGIN,
                )

    def prefetch(self, version: int) -> None:
        with self._step(f"prefetch version {version}", state="the engine serves what it served"):
            if not self._native:
                self._tell({"prefetch": version})
                self._await(f"stage version {version}")

    def begin(self, version: int) -> None:
        """See `EngineClient.begin`. Where the cache cannot be dropped, the server is resumed: nothing was changed."""
        with self._step(f"pause for version {version}"):
            self.pause()
        with self._step(f"drop what it cached for version {version}", state="nothing was changed, and it serves again"):
            try:
                self._flush()
            except (EngineRefusedError, DeadlineError):
                self.resume()
                raise
        with self._step(f"start version {version}", state=self._paused("the weights it had, untouched")):
            if not self._native:
                self._open_session()
                self._tell({"start": True, "session": self._in_session}, self._load_timeout_s)

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        what = "keep the digests of the new weights" if "verify" in info else "load the new weights"
        with self._step(what, state=self._paused("part of an update")):
            if not self._native:
                self._tell({"load": info}, self._load_timeout_s)
            elif "verify" in info:
                raise ConfigError(
                    f"{self.url} runs SGLang without our plugin, and cannot prove what it holds", hint=_PLUGIN
                )
            else:
                body = {"model_path": info["path"], "load_format": "auto", "weight_version": str(info["version"])}
                body |= {"flush_cache": False, "abort_all_requests": False}
                self._http.post("/update_weights_from_disk", body, timeout_s=self._load_timeout_s)

    def commit(self, version: int) -> None:
        label = str(version)
        with self._step(f"finish version {version}", state=self._paused("part of an update")):
            if not self._native:
                self._tell({"seal": version, "label": label}, self._load_timeout_s)
                self._close_session()
        with self._step(f"resume with version {version}", state=self._paused(f"version {version}, whole")):
            self._http.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
            told = str(self._either("/model_info", "/get_model_info").get("weight_version"))
            if told != label:
                raise EngineRefusedError(f"{self.url} calls its weights {told!r}", expected=repr(label))
            self._version = version
            self.resume()

    def adapter(self, name: str) -> SGLangAdapter:
        """See `EngineClient.adapter`. The server needs ``--enable-lora`` and our plugin."""
        return SGLangAdapter(self, name, **self._access)

    def _hold(self) -> None:
        self._http.post("/pause_generation", {"mode": self._pause_mode}, timeout_s=self._load_timeout_s)

    def _release(self) -> None:
        self._http.post("/continue_generation", {})

    def _flush(self) -> None:
        until, pause_s = time.monotonic() + self._flush_timeout_s, _SHORTEST_S
        while True:
            status, why = self._try_flush()
            if status == 200:
                return
            if self._pause_mode == "in_place":  # frozen requests never let go of it
                if self._keep_cache:
                    return
                raise EngineRefusedError(
                    f"requests that are paused in place keep the cache of the old weights ({self._busy()}): {why}",
                    expected="no running request, or a pause mode that frees what they hold",
                    hint="use pause_mode='retract', or accept old keys and values with keep_cache=True",
                    status=status,
                )
            if time.monotonic() > until:
                raise DeadlineError(
                    f"the cache was not dropped within {self._flush_timeout_s:g} s ({self._busy()}): {why}",
                    hint="look for requests that never end, or raise flush_timeout_s",
                )
            threading.Event().wait(pause_s)
            pause_s = min(_LONGEST_S, 1.5 * pause_s)

    def _try_flush(self) -> tuple[int, str]:
        """200, or 400 while requests use the cache; and SGLang's own words."""
        if not self._native:  # its own route collects garbage too, which takes longer than many an update
            return (200, "") if self._tell({"flush": True})["flushed"] else (400, "the cache is in use")
        answer = self._http.call("POST", "/flush_cache")
        if answer.ok or answer.status == 400:
            return answer.status, answer.message()
        raise EngineRefusedError(
            f"POST {self.url}/flush_cache answered {answer.status}: {answer.message()}", status=answer.status
        )

    def _busy(self) -> str:
        rows = self.loads()
        return f"{sum(row['running'] for row in rows)} running, {sum(row['waiting'] for row in rows)} waiting"

    def _open_session(self) -> None:
        """SGLang's own bracket around a load; one that a trainer left open is closed first."""
        answer = self._http.call("POST", "/begin_weight_update", {}, timeout_s=self._load_timeout_s)
        if answer.status == 400 and "already open" in answer.message():
            self._http.post("/end_weight_update", {}, timeout_s=self._load_timeout_s)
            answer = self._http.call("POST", "/begin_weight_update", {}, timeout_s=self._load_timeout_s)
        self._in_session = answer.ok
        if not answer.ok and answer.status not in (404, 405):
            raise EngineRefusedError(
                f"POST {self.url}/begin_weight_update answered {answer.status}: {answer.message()}",
                status=answer.status,
            )

    def _close_session(self) -> None:
        if self._in_session:
            self._http.post("/end_weight_update", {}, timeout_s=self._load_timeout_s)
            self._in_session = False

    def _has_plugin(self) -> bool:
        try:
            return "torchrl_ext" in self._tell({"hello": True})
        except EngineRefusedError as error:
            if error.status in (404, 405) or "Unsupported action" in error.what:
                return False
            raise

    def _refuse_replicas(self, info: Info) -> None:
        replicas = self.info().dp_size if info.get("transport") not in ("disk", "delta") else 1
        if replicas > 1:
            raise EngineRefusedError(
                f"{self.url} has {replicas} data-parallel replicas, whose workers do not know their ranks in a group",
                expected="--dp-size 1, or a transport through files",
            )

    def _tell(self, message: Info, timeout_s: float | None = None) -> Info:
        """Send a message to our plugin; returns its answer (the first one, where there are data-parallel ranks)."""
        body = {"action": CHANNEL + json.dumps(message)}
        told = self._http.post("/weights_checker", body, timeout_s=timeout_s)
        try:
            answers = [json.loads(text) for text in told["message"].split(" | ")]  # SGLang's own way to join them
        except (KeyError, TypeError, AttributeError, ValueError):
            raise EngineRefusedError(f"{self.url}/weights_checker answered {told!r}", hint=_PLUGIN) from None
        merged: Info = {}
        for answer in answers:
            working = merged.get("working", False) or answer.get("working", False)
            flushed = merged.get("flushed", True) and answer.get("flushed", True)
            merged = {**merged, **answer, "working": working, "flushed": flushed}
        return merged

    def _await(self, what: str) -> None:
        until, pause_s = time.monotonic() + self._load_timeout_s, _SHORTEST_S
        while self._tell({"poll": True})["working"]:
            if time.monotonic() > until:
                raise DeadlineError(f"to {what} takes {self.url} longer than {self._load_timeout_s:g} s")
            threading.Event().wait(pause_s)
            pause_s = min(_LONGEST_S, 1.5 * pause_s)

    def _either(self, route: str, older: str) -> Any:
        """What ``route`` answers, or, where there is none, the one that earlier releases have in its place."""
        try:
            return self._http.get(route)
        except EngineRefusedError as error:
            if error.status not in (404, 405):
                raise
            try:
                return self._http.get(older)
            except EngineRefusedError as second:
                raise restated(second, f"{error.what}; {second.what}") from error
