"""The client that drives an SGLang server over HTTP.

The protocol, as far as routes and bodies go, is SGLang's (`sglang.srt.entrypoints.http_server`, 0.5.19 to 0.5.23).
Where the server has our plugin, messages of ours travel as the ``action`` of ``/weights_checker``
(`torchrl_ext.messages`); a server without it follows by full files, and by its own broadcasts:

===================================  =========================================================================
``GET /server_info``                 what the server was started with; ``GET /model_info``: what it serves now
``POST /weights_checker``            ``{"action": "torchrl_ext:{...}"}``: our messages
``POST /pause_generation``           ``{"mode": "abort" | "retract" | "in_place"}``
``POST /flush_cache``                without the plugin; 400 while requests hold on to the cache
``POST /hicache/storage-backend``    ``/clear``, where keys and values are kept in a store too
``POST /begin_weight_update``        0.5.21 and later: layers in the form that loaders write to; ``/end_weight_update``
``POST /update_weights_from_disk``   without the plugin: see `torchrl_ext.rpc.engines.stock`, which has more routes
``POST /update_weight_version``      ``{"new_version": "7", "abort_all_requests": false}``
``POST /continue_generation``
``POST /generate``                   ``logprob_start_len: 0``: log-probabilities of given tokens
===================================  =========================================================================

The order is pause, flush, transfer, resume: after the flush nothing of the old weights is cached, and while the server
is paused nothing new is. `torchrl_ext.rpc.engines.sleep` has the routes of sleep.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from torchrl_ext import messages
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.messages import Message
from torchrl_ext.registry import Make
from torchrl_ext.routes import CHANNEL, Flush, ListAdapters, merged
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.engines.adapters import AdapterClient
from torchrl_ext.rpc.engines.base import HTTPEngine, is_absent, restated
from torchrl_ext.rpc.engines.sleep import SleepState, check_sleep, named_tags
from torchrl_ext.rpc.engines.stock import PLUGIN, StockSGLang
from torchrl_ext.rpc.engines.workers import PluggedSGLang, Workers
from torchrl_ext.rpc.server_info import parse_sglang_info, sglang_transports, stores_keys
from torchrl_ext.types import EngineInfo, Info, Part

__all__ = ["SGLangEngine"]

log = logging.getLogger("torchrl_ext")

PAUSE_MODES = ("abort", "retract", "in_place")

_ABSENT = (404, 405, 501)
_OK, _NOT_READY = 200, 503
_GRAPHS = "cuda_graph"  # sleeps and wakes with the cache
_ADAPTERS = (
    "install torchrl_ext in the engine's environment, or let `torchrl-ext serve sglang --lora-rank N` start the server"
)
_LORA = (
    "start the server with --enable-lora, --max-lora-rank and --lora-target-modules "
    "(`torchrl-ext serve sglang --lora-rank N`)"
)
_CLEAR = ("/hicache/storage-backend/clear", "/clear_hicache_storage_backend")


class SGLangEngine(HTTPEngine):
    """Drives an SGLang server through weight updates.

    Args:
        url: base address of the server itself, never of a router.
        pause_mode: what happens to running requests: ``"retract"`` puts them back into the queue, and they go on with
            the new weights, their keys and values computed anew; ``"abort"`` ends them; ``"in_place"`` freezes them
            together with their keys and values of the old weights. ``"keep"``, vLLM's word, is ``"retract"``, and with
            ``keep_cache`` ``"in_place"``. In pools ``"retract"`` is ``"abort"``, since requests between the two pools
            would use the cache for as long as these are paused.
        keep_cache: leave keys and values of the old weights where they are: frozen requests, and later ones with the
            same prefix, go on with them. Each token still has the version of the weights that sampled it. Not for a
            server that keeps keys and values in a store. Without, an update of a server whose requests are frozen in
            place is refused.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        flush_timeout_s: deadline of dropping the cache, in seconds; SGLang refuses as long as a request uses it.
        api_key: sent as a bearer token; see `HTTPSession` for several.

    Raises:
        ConfigError: a setting that cannot work.
    """

    kind: ClassVar[str] = "sglang"

    def __init__(
        self,
        url: str,
        *,
        pause_mode: str = "keep",
        keep_cache: bool = False,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        flush_timeout_s: float = 60.0,
        api_key: str | tuple[str, ...] | None = None,
    ) -> None:
        mode = ("in_place" if keep_cache else "retract") if pause_mode == "keep" else pause_mode
        if mode not in PAUSE_MODES:
            raise ConfigError(f"there is no pause mode {pause_mode!r}", expected=f"one of {', '.join(PAUSE_MODES)}")
        if keep_cache and mode != "in_place":
            raise ConfigError(
                f"keep_cache means nothing with pause mode {mode!r}", expected="pause_mode='keep', or 'in_place'"
            )
        super().__init__(url, timeout_s=timeout_s, load_timeout_s=load_timeout_s, api_key=api_key)
        self._pause_mode, self._keep_cache, self._flush_timeout_s = mode, keep_cache, flush_timeout_s
        self._stores = False  # whether it keeps keys and values in a store that its own flush leaves alone
        self._pooled = False  # whether it prefills or decodes alone
        self._plugged = PluggedSGLang(self.tell, self._await_idle, self._tell, self._replicas)
        self._workers: Workers = self._plugged
        self._in_session = False

    def info(self) -> EngineInfo:
        """See `EngineClient.info`. ``/server_info`` suffices; ``/model_info`` and our plugin may add to it."""
        told = self._told()
        try:
            served = self._either("/model_info", "/get_model_info")
        except EngineRefusedError as error:
            served = None
            if error.status not in _ABSENT:
                log.warning("%s does not say what it serves now: %s", self.url, error)
        transports: tuple[str, ...] = ()  # none where control routes want a key that this client lacks
        try:
            transports = self.followed() if self._has_plugin() else sglang_transports(self.url, told)
        except EngineRefusedError as error:
            log.warning("%s does not say whether it has our plugin: %s", self.url, error)
        return parse_sglang_info(self.url, told, served, transports=transports)

    def _has_plugin(self) -> bool:
        try:
            return any("torchrl_ext" in answer for answer in self._tell(messages.Inspect()))
        except EngineRefusedError as error:
            if is_absent(error):
                return False
            raise

    def _told(self) -> Any:
        return self._either("/server_info", "/get_server_info")

    def loads(self) -> list[dict[str, Any]]:
        """Count requests by data-parallel rank, from ``/v1/loads`` or ``/get_load``.

        Returns:
            Per rank ``{"dp_rank", "running", "waiting"}``.
        """
        told = self._either("/v1/loads", "/get_load")
        found = []
        try:
            for row in told["loads"] if isinstance(told, dict) else told:
                waiting = int(row.get("num_waiting_reqs", 0))
                running = int(row.get("num_running_reqs", row.get("num_reqs", waiting) - waiting))
                found.append({"dp_rank": row.get("dp_rank", 0), "running": running, "waiting": waiting})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineRefusedError(
                f"{self.url} answered {str(told)[:120]!r} about its load", expected="a list of counts of requests"
            ) from error
        return found

    @property
    def verifies(self) -> bool:
        return self._workers.plugged

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`. The server generates meanwhile.

        Raises:
            ConfigError: ``keep_cache``, and the server keeps keys and values in a store.
            EngineRefusedError: the server lacks our plugin, and the transport needs it; or the parameters cannot land
                in its model, or the world size is not the transport's. It keeps serving what it served.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        with self._step("join the transport", state="the engine's weights and its pause are what they were"):
            plugged, told = self._has_plugin(), self._told()
            stores = stores_keys(told)
            if stores and self._keep_cache:
                raise ConfigError(
                    f"{self.url} keeps keys and values in a store, which would hand those of old weights on for ever",
                    expected="keep_cache=False, or a server without a store",
                    state="the engine's weights and its pause are what they were",
                )
            self._workers.leave()  # of another transport, or from before a failure
            self._workers = self._plugged if plugged else StockSGLang(self._http, told, self._load_timeout_s)
            self._connection = str(info.get("connection", ""))
            self._workers.join(info)
            mode = told.get("disaggregation_mode") if isinstance(told, dict) else None
            self._stores, self._pooled = stores, mode in ("prefill", "decode")

    def rehearse(self, how: str = "once") -> None:
        """See `EngineClient.rehearse`. Weights that sleep are woken for it; a server without our plugin proves
        nothing."""
        if self._workers.plugged:
            with self._step("wake its weights", state=f"{self.url} sleeps"):
                self._wake(frozenset({"weights"}), self.sleep_state())
            super().rehearse(how)

    def tell(self, message: Message) -> list[Info]:
        return self._tell(message, self._load_timeout_s)

    def _tell(self, message: Message, timeout_s: float | None = None) -> list[Info]:
        """See `HTTPEngine.tell`; each data-parallel rank gives one answer."""
        body = {"action": CHANNEL + json.dumps(message.to_json())}
        told = self._http.post("/weights_checker", body, timeout_s=timeout_s)
        try:
            return [dict(json.loads(text)) for text in told["message"].split(" | ")]  # SGLang's own way to join them
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise EngineRefusedError(f"{self.url}/weights_checker answered {told!r}", hint=PLUGIN) from None

    def prefetch(self, version: int, part: Part | None = None) -> None:
        with self._step(f"prefetch version {version}", state="the engine serves what it served"):
            if self._workers.plugged:
                self._wake(frozenset({"weights"}), self.sleep_state())  # staging checks changes against them
            self._workers.prefetch(version, part)

    def begin(self, version: int) -> None:
        """See `EngineClient.begin`. Where the cache cannot be dropped, nothing was changed, and a server that served
        before serves again."""
        before = self._before = self._halt(f"pause for version {version}")
        with self._step(f"drop what it cached for version {version}", undo=self._undo_of(before)):
            if not self._keep_cache:
                self._flush(frozen=self._pause_mode == "in_place")
        with self._step(f"start version {version}", state=self._paused("the weights it had, untouched")):
            self._workers.confirm()
            self._wake(frozenset({"weights"}), before)
            if self._workers.sessions:
                self._open_session()
            elif self._in_session:  # an update that failed left it open; a server that was started again has none
                self._http.call("POST", "/end_weight_update", {}, timeout_s=self._load_timeout_s)
                self._in_session = False
            self._workers.start(bracketed=self._in_session)

    def _load(self, info: Info) -> None:
        self._workers.load(info)

    def _finish(self, version: int) -> None:
        self._workers.finish(version)
        if self._in_session:
            self._http.post("/end_weight_update", {}, timeout_s=self._load_timeout_s)
            self._in_session = False

    def _label(self, version: int) -> None:
        label = str(version)
        self._http.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        served = self._either("/model_info", "/get_model_info")
        told = str(served.get("weight_version")) if isinstance(served, dict) else str(served)[:120]
        if told != label:
            raise EngineRefusedError(f"{self.url} calls its weights {told!r}", expected=repr(label))

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
        return "/generate", {**body, "return_logprob": True, "logprob_start_len": 0}

    def _scores(self, told: Any, prompt: list[int]) -> list[Any]:
        """See `HTTPEngine._scores`; the answer has ``[logprob, token id, text]`` per token, with null for the first."""
        rows = told["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != prompt:
            raise ValueError("it is about other tokens")
        return [row[0] for row in rows[1:]]

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        """See `EngineClient.sleep`. A server needs our plugin, which says what sleeps, ``--enable-memory-saver`` to
        give memory back, and ``--enable-weights-cpu-backup`` for level 1. Requests go back into the queue with any
        ``pause_mode`` but ``"abort"``, since their keys and values are dropped."""
        wanted = check_sleep(level, tags)
        with self._step(f"sleep at level {level}", state=f"{self.url} was not told to pause"):
            if wanted:
                self._refuse_impossible(level, wanted)
        before = self._halt("pause")
        if wanted:
            with self._step(f"sleep at level {level}", undo=self._undo_of(before)):
                if self._pause_mode == "in_place":
                    self._http.post("/pause_generation", {"mode": "retract"}, timeout_s=self._load_timeout_s)
                self._flush()  # what is frozen, too: the cache gives its memory up
            with self._step(f"sleep at level {level}", state=self._paused("what it had, or gave that up")):
                if level == 2 and "weights" in wanted:
                    self._plugged.emptied()
                released = sorted({*wanted, _GRAPHS} - before.asleep)
                if released:  # SGLang takes an empty list for all of them
                    self._http.post("/release_memory_occupation", {"tags": released}, timeout_s=self._load_timeout_s)

    def _refuse_impossible(self, level: int, wanted: frozenset[str]) -> None:
        if not self._has_plugin():
            raise EngineRefusedError(
                f"{self.url} runs SGLang without our plugin, and does not say what of it sleeps", hint=PLUGIN
            )
        if level == 1 and "weights" in wanted and not self._told().get("enable_weights_cpu_backup"):
            raise EngineRefusedError(
                f"{self.url} keeps no copy of its weights on the host",
                expected="a server with --enable-weights-cpu-backup",
                hint="start it so, sleep at level 2, or sleep(tags=['kv_cache'])",
            )

    def sleep_state(self) -> SleepState:
        told: Info = {}  # stays so without our plugin
        try:
            told = self._workers.state()
        except EngineRefusedError as error:
            if not self._lacks_plugin(error):
                raise
        pauses = {_OK: False, _NOT_READY: True}.get(self._ready()), told.get("paused")  # each may know of its own alone
        known = [bool(one) for one in pauses if one is not None]
        paused = any(known) if known else None
        return SleepState(paused=paused, asleep=named_tags(told.get("asleep")), empty=bool(told.get("empty")))

    def _ready(self) -> int:
        return self._http.call("GET", "/ready").status  # its scheduler does not know of every pause

    def _is_empty(self, state: SleepState, waking: Collection[str]) -> bool:
        return bool(state.empty)

    def _wake(self, wanted: frozenset[str], state: SleepState) -> bool:
        tags = state.asleep & (wanted | {_GRAPHS} if "kv_cache" in wanted else wanted)
        if tags:
            self._http.post("/resume_memory_occupation", {"tags": sorted(tags)}, timeout_s=self._load_timeout_s)
        return not state.asleep - tags

    def adapter(self, name: str) -> EngineClient:
        """See `EngineClient.adapter`. The server needs ``--enable-lora`` and our plugin."""
        return AdapterClient(self, name, self._adapters, self._tell_adapters, plugin=_ADAPTERS, lora=_LORA)

    def _adapters(self) -> Info:
        return self._tell_adapters(ListAdapters())["adapters"]

    def _tell_adapters(self, message: Message) -> Info:
        told = merged(self.tell(message))
        if isinstance(told.get("adapters"), dict):
            return told
        expected = "what the name of every adapter stands for"
        raise EngineRefusedError(f"{self.url} answered {told!r}", expected=expected, hint=_ADAPTERS)

    def _hold(self) -> None:
        modes = ["abort" if self._pooled and self._pause_mode == "retract" else self._pause_mode]
        if modes == ["abort"] and self._ready() == _NOT_READY:
            modes = ["retract", "abort"]  # abort alone would wait for ever for requests that are paused in place
        for mode in modes:
            self._http.post("/pause_generation", {"mode": mode}, timeout_s=self._load_timeout_s)

    def _release(self) -> None:
        self._http.post("/continue_generation", {})

    def _flush(self, *, frozen: bool = False) -> None:
        """Drop keys and values: those in the server, then those that it, or an earlier one, put into a store.

        Args:
            frozen: requests that run hold on to the cache until they are resumed, so that waiting is in vain.
        """
        self._flush_own(frozen)
        if self._stores:
            newer, older = _CLEAR
            answer = self._http.call("POST", newer, timeout_s=self._load_timeout_s)
            if answer.status in _ABSENT:
                answer = self._http.call("POST", older, timeout_s=self._load_timeout_s)
            if not answer.ok:
                raise EngineRefusedError(
                    f"{self.url} could not clear the store of keys and values of the old weights: {answer.message()}",
                    hint="look at the store's log, or start the server without --hicache-storage-backend",
                    status=answer.status,
                )

    def _flush_own(self, frozen: bool) -> None:
        status, why = 0, ""
        for _ in Deadline(self._flush_timeout_s).pauses():
            status, why = self._try_flush()
            if status == 200:
                return
            if frozen:
                raise EngineRefusedError(
                    f"requests that are paused in place keep the cache of the old weights ({self._busy()}): {why}",
                    expected="no running request, or a pause mode that frees what they hold",
                    hint="use pause_mode='retract', or accept old keys and values with keep_cache=True",
                    status=status,
                )
        raise DeadlineError(
            f"the cache was not dropped within {self._flush_timeout_s:g} s ({self._busy()}): {why}",
            hint="look for requests that never end, or raise flush_timeout_s",
        )

    def _try_flush(self) -> tuple[int, str]:
        """Try to drop the cache; return 200, or 400 while requests use it, and SGLang's message."""
        if self._workers.plugged:  # SGLang's route collects garbage too, which can take longer than an update
            flushed = merged(self._tell(Flush())).get("flushed")
            return (200, "") if flushed else (400, "the cache is in use")
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
        """Open SGLang's own session for an update of weights; end one first that a trainer left open."""
        answer = self._http.call("POST", "/begin_weight_update", {}, timeout_s=self._load_timeout_s)
        if answer.status == 400 and "already open" in answer.message():
            self._http.post("/end_weight_update", {}, timeout_s=self._load_timeout_s)
            answer = self._http.call("POST", "/begin_weight_update", {}, timeout_s=self._load_timeout_s)
        self._in_session = answer.ok
        if not answer.ok and answer.status not in _ABSENT:
            raise EngineRefusedError(
                f"POST {self.url}/begin_weight_update answered {answer.status}: {answer.message()}",
                status=answer.status,
            )

    def _replicas(self) -> tuple[str, int]:
        return self.url, self.info().dp_size

    def close(self) -> None:
        """Have the workers leave the group that they joined, where they run nothing of ours; the server serves on."""
        self._workers.leave()

    def _either(self, route: str, older: str) -> Any:
        """Return the answer of ``route``, or, where the server lacks it, of the route that earlier releases have."""
        try:
            return self._http.get(route)
        except EngineRefusedError as error:
            if error.status not in _ABSENT:
                raise
            try:
                return self._http.get(older)
            except EngineRefusedError as second:
                raise restated(second, f"{error.what}; {second.what}") from error


SGLANG = Make(
    client=SGLangEngine,
    dialect="torchrl_ext.rollout.dialects:SGLangDialect",
    server="torchrl_ext.serving.engines.sglang:SGLangServer",
)
