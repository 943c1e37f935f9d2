"""Clients of SGLang servers.

Routes and bodies are SGLang's (`sglang.srt.entrypoints.http_server`, 0.5.23). If the server has our plugin,
our messages (`torchrl_ext.base.messages`) travel in the ``action`` field of ``/weights_checker``:

==========================================  ==================================================================
``GET /server_info``                        the server's start-up settings; ``GET /model_info``: the model it serves now
``POST /weights_checker``                   ``{"action": "torchrl_ext:{...}"}``: our messages
``GET /ready``                              503 while it is paused
``POST /pause_generation``                  ``{"mode": "abort" | "retract" | "in_place"}``
``POST /flush_cache``                       without the plugin; 400 while requests hold the cache
``POST /begin_weight_update``               puts layers into the form that loaders write, until
                                            ``/end_weight_update``
``POST /update_weight_version``             ``{"new_version": "7", "abort_all_requests": false}``
``POST /continue_generation``
``POST /release_memory_occupation``         ``{"tags": [...]}``; the server exits if it is not idle
``POST /resume_memory_occupation``          ``{"tags": [...]}``; the server exits if one of the tags is awake
``POST /generate``                          ``logprob_start_len: 0``: log-probabilities of given tokens
``POST /load_lora_adapter``                 ``{"lora_name", "lora_path"}``; ``GET /v1/models`` lists them
``POST /unload_lora_adapter``               ``{"lora_name"}``; answers when no request uses it any more
==========================================  ==================================================================

A server without the plugin takes full files, or its own broadcasts. It does not report its weights afterwards, and
only logs a line when it drops an unknown name, so only its outputs prove an update (``verify="outputs"``).

==========================================  ==================================================================
``POST /init_weights_update_group``         ``{"master_address", "master_port", "world_size", "group_name", "backend",
                                            "rank_offset"}``; answers once the group is formed
``POST /destroy_weights_update_group``      ``{"group_name"}``
``POST /update_weights_from_distributed``   ``{"names", "dtypes", "shapes", "load_format": "flattened_bucket", ...}``:
                                            one broadcast
``POST /update_weights_from_disk``          ``{"model_path", "load_format", "weight_version", ...}``; SGLang keeps the
                                            last values of the latter two, so they are always sent
==========================================  ==================================================================

The order is pause, flush, transfer, resume, so that a paused server holds no cache of the old weights. A version that
the workers have staged, and write between two batches, needs only ``/weights_checker`` and ``/update_weight_version``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

from msgspec import structs

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.base.messages import Commit, Finish, Join, Leave, Load, Message, Start, State, Undo, answers_of
from torchrl_ext.base.registry import Make
from torchrl_ext.base.routes import CHANNEL, Flush, merged, version_label
from torchrl_ext.base.types import EngineInfo, Info
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.http import HTTPSession, Keys
from torchrl_ext.control.makes.http import HTTPPort, Settings, StockPort, bodies
from torchrl_ext.control.makes.server_info import known_info, server_info
from torchrl_ext.control.port import EngineState
from torchrl_ext.control.serving.router import refuse_router

__all__ = ["SGLANG", "SGLangPort", "sglang_engine"]

log = logging.getLogger("torchrl_ext")

_GRAPHS = "cuda_graph"  # this tag sleeps and wakes with the cache
_PLUGIN = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages), or let `torchrl-ext serve sglang` "
    'start the server; without it, use the "disk" transport, which SGLang loads by itself, or "native"'
)
_REPORTING = (
    "/weights_checker", "/begin_weight_update", "/end_weight_update", "/update_weight_version",
    "/init_weights_update_group", "/update_weights_from_distributed",
)  # fmt: skip


class SGLangPort(HTTPPort):
    """An SGLang server whose workers run our plugin."""

    kind: ClassVar[str] = "sglang"
    fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("/pause_generation", "/continue_generation"), ("message", "status")),
        **dict.fromkeys(_REPORTING, ("success", "message")),
        "/update_weights_from_disk": ("success", "message", "num_paused_requests"),
    }
    lora_routes: ClassVar[str] = ""
    lora_needs: ClassVar[str] = "start the server with --enable-lora, --max-lora-rank and --lora-target-modules"
    _opened = False  # whether a session of this client's is open, with which the server would refuse to continue

    def describe(self) -> EngineInfo:
        """See `Port.describe`. Only ``/server_info`` must answer; ``/model_info`` and our plugin add details."""
        facts, model = server_info(self.http, (self.kind,)), {}
        try:
            model = self._model()
        except EngineRefusedError as error:
            if not isinstance(error, RouteAbsent):
                log.warning("%s does not report the version that it serves: %s", self.url, error)
        info = facts.serving(weight_version=model.get("weight_version"), model=model.get("model_path"))
        return replace(info, transports=self._followed) if self.plugin else info

    def _model(self) -> Info:
        answer = self.http.get("/model_info")
        return answer if isinstance(answer, dict) else {}

    def paused(self) -> bool:
        if merged(self._say(State())).get("paused"):
            return True
        return self._unready()  # only the server's main process knows of a pause of mode "abort"

    def _unready(self) -> bool:
        ready = self.http.call("GET", "/ready")
        if ready.status == 503:
            return True
        ready.checked()
        return False

    def state(self) -> EngineState:
        return EngineState.of(self._say(State()))

    def call(self, message: Message) -> list[Info]:
        match message:
            case Join():
                self._refuse(message)
            case Start():
                return self._start(message)
            case Leave():
                return []
            case Commit():
                answers = self._say(structs.replace(message, keep_cache=self._settings.keep_cache))
                self._label(str(message.version))
                return answers
            case Undo():
                answers = self._say(message)
                if self._opened:
                    self._end_session()
                self._label(version_label(int(merged(answers)["version"])))
                return answers
        answers = self._say(message, self.timeout_s)
        if isinstance(message, Finish):
            self._session("end")
            self._label(str(message.version))
        return answers

    def _refuse(self, message: Join) -> None:
        replicas = self._facts.info.dp_size
        if message.transport not in ("disk", "delta") and replicas > 1:
            raise EngineRefusedError(
                f"{self.url} has {replicas} data-parallel replicas, whose workers do not know their ranks in a process "
                "group",
                expected="--dp-size 1, or a transport through files",
            )
        if self._facts.stores_keys:  # SGLang's own flush leaves a store alone
            raise ConfigError(
                f"{self.url} keeps keys and values in a store, which would go on serving those of the old weights",
                expected="a server without --hicache-storage-backend and LMCache",
                state="the engine's weights and its pause are unchanged",
            )

    def _start(self, message: Start) -> list[Info]:
        """Start on the workers, which refuse a replaced sender before anything else happens; then drop the cache."""
        answers = self._say(Start(connection=message.connection, bracketed=True), self.timeout_s)
        self.drop_cached()
        try:
            self._open_session()
        except (EngineError, DeadlineError):
            with suppress(EngineError, DeadlineError):
                self._session("end")
            raise
        return answers

    def _say(self, message: Message, timeout_s: float | None = None) -> list[Info]:
        """Send workers a message; each data-parallel rank gives one answer."""
        body = {"action": CHANNEL + json.dumps(message.to_json())}
        answer = self._post("/weights_checker", body, timeout_s=timeout_s)
        try:
            rows = [json.loads(text) for text in answer["message"].split(" | ")]  # SGLang's separator
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise EngineRefusedError(f"{self.url}/weights_checker answered {answer!r}", hint=_PLUGIN) from None
        return answers_of(rows, f"{self.url}/weights_checker")

    def _open_session(self) -> None:
        """Begin a session, after ending one that a trainer left open."""
        try:
            self._session("begin")
        except EngineRefusedError as error:
            if "already open" not in error.what:
                raise
            self._session("end")
            self._session("begin")

    def _end_session(self) -> None:
        """End a session that an update left open, if there is one."""
        try:
            self._session("end")
        except EngineRefusedError as error:
            if "no weight-update session" not in error.what:
                raise

    def _session(self, verb: str) -> None:
        self._post(f"/{verb}_weight_update", {}, timeout_s=self.timeout_s)
        self._opened = verb == "begin"

    def _label(self, label: str) -> None:
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        found = str(self._model().get("weight_version"))
        if found != label:
            raise EngineRefusedError(f"{self.url} calls its weights {found!r}", expected=repr(label))

    def pause(self) -> None:
        mode = self._settings.pause_mode
        pooled = self._facts.info.worker_type in ("prefill", "decode")  # each engine has one half of a request
        modes = ["abort" if pooled and mode == "retract" else mode]
        if modes == ["abort"] and self.paused():
            modes = ["retract", "abort"]  # "abort" by itself would wait forever for requests that are paused in place
        for mode in modes:
            self._post("/pause_generation", {"mode": mode}, timeout_s=self.timeout_s)

    def resume(self) -> None:
        if self._opened:  # by an update that loaded nothing
            self._end_session()
        self._post("/continue_generation", {})

    def sleep(self, level: int, tags: frozenset[str]) -> None:
        """See `Port.sleep`. It needs ``--enable-memory-saver``, and ``--enable-weights-cpu-backup`` for level 1.

        Running requests return to the queue, unless the pause mode is ``"abort"``.
        """
        if level == 1 and "weights" in tags and not server_info(self.http, (self.kind,)).has_backup:
            raise EngineRefusedError(
                f"{self.url} keeps no copy of its weights on the host",
                expected="a server with --enable-weights-cpu-backup",
                hint="start it so, sleep at level 2, or sleep(tags=['kv_cache'])",
            )
        if self._settings.pause_mode == "in_place":
            self._post("/pause_generation", {"mode": "retract"}, timeout_s=self.timeout_s)
        self._flush(frozen=False)
        released = sorted({*tags, _GRAPHS} - self.state().asleep)
        if released:  # SGLang treats an empty list as all tags
            self.http.post("/release_memory_occupation", {"tags": released}, timeout_s=self.timeout_s)

    def wake(self, tags: frozenset[str]) -> None:
        self.http.post("/resume_memory_occupation", {"tags": sorted(tags)}, timeout_s=self.timeout_s)

    def drop_cached(self) -> None:
        if not self._settings.keep_cache:
            self._flush(frozen=self._settings.pause_mode == "in_place")

    def _flush(self, *, frozen: bool) -> None:
        """Drop keys and values; fail at once if ``frozen`` requests hold the cache, since waiting would not help."""
        why = ""
        for _ in Deadline(self._settings.flush_timeout_s).pauses():
            why = self._flushed()
            if not why:
                return
            if frozen:
                raise EngineRefusedError(
                    f"requests that are paused in place keep the cache of the old weights: {why}",
                    expected="no running request, or a pause mode that frees what they hold",
                    hint="use pause_mode='retract', or accept old keys and values with keep_cache=True",
                )
        raise DeadlineError(
            f"the cache was not dropped within {self._settings.flush_timeout_s:g} s: {why}",
            hint="find requests that never end, or raise flush_timeout_s",
        )

    def _flushed(self) -> str:
        """Try to drop the cache; return "", or why that is not possible yet."""
        # not by SGLang's own route: it also collects garbage, which can take longer than an update
        return "" if merged(self._say(Flush())).get("flushed") else "the cache is in use"

    def _replace_adapter(self, name: str, path: str, before: str | None) -> None:
        """Unload the earlier adapter, whose name SGLang would not load again, and load it anew if the new one fails."""
        if before is not None:
            self.unload_adapter(name)
        try:
            self._adapter("load_lora_adapter", {"lora_name": name, "lora_path": path})
        except EngineRefusedError:
            if before is not None:
                with suppress(EngineError, DeadlineError):
                    self._adapter("load_lora_adapter", {"lora_name": name, "lora_path": before})
            raise

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
        return "/generate", {**body, "return_logprob": True, "logprob_start_len": 0}

    def _scores(self, answer: Any, prompt: list[int]) -> list[Any]:
        rows = answer["meta_info"]["input_token_logprobs"]  # [logprob, token id, text] per token; null for the first
        if [row[1] for row in rows] != prompt:
            raise ValueError("it is about other tokens")
        return [row[0] for row in rows[1:]]


@final
class StockSGLangPort(StockPort, SGLangPort):
    """An SGLang server without our plugin, after it joined a transport; see `SGLangPort`."""

    lacking, wanted, hint = "SGLang without our plugin", 'the plugin in group "sglang.srt.plugins"', _PLUGIN

    def paused(self) -> bool:
        return self._unready()

    def _begin(self) -> None:
        if self.group:
            self._open_session()
            return
        self._end_session()

    def _check(self, offer: Info) -> None:
        if offer.get("make") == self.kind and "native" in self._facts.info.transports:
            return
        raise EngineRefusedError(
            f"{self.url} cannot take broadcasts of a transport that speaks to {offer.get('make')!r}",
            expected="make='sglang', and a server with one pipeline stage, one replica, and no weight cache",
            hint=_PLUGIN,
        )

    def _meeting(self, offer: Info, rank_offset: int) -> tuple[str, Info]:
        return "/init_weights_update_group", {**offer["group"], "rank_offset": rank_offset}

    def _leaving(self) -> tuple[str, Info]:
        return "/destroy_weights_update_group", self._named()

    def _finish(self, label: str) -> None:
        if self.group:
            self._session("end")
        self._label(label)

    def _named(self) -> Info:
        return {"group_name": str((self.group or {})["group_name"])}

    def _load(self, message: Load) -> None:
        how: dict[str, Any] = {"flush_cache": False, "abort_all_requests": False}
        if not self.group:
            body = {"model_path": message.handoff["path"], "load_format": "auto"}
            body |= {"weight_version": str(message.version), **how}
            self._post("/update_weights_from_disk", body, timeout_s=self.timeout_s)
            return
        how |= {**self._named(), "load_format": "flattened_bucket"}
        try:
            for names, dtypes, shapes in bodies(message):
                body = {"names": names, "dtypes": dtypes, "shapes": shapes, **how}
                self._post("/update_weights_from_distributed", body, timeout_s=self.timeout_s)
        except (EngineError, DeadlineError):
            self.call(Leave())  # frees workers that wait for a failed one
            raise

    def _flushed(self) -> str:
        answer = self.http.call("POST", "/flush_cache")
        words = f"POST {self.url}/flush_cache answered {answer.status}: {answer.message()}"
        if not answer.ok and answer.status != 400:
            raise EngineRefusedError(words, status=answer.status)
        return "" if answer.ok else words


def sglang_engine(
    url: str,
    *,
    pause_mode: str = "keep",
    keep_cache: bool = False,
    timeout_s: float = 60.0,
    load_timeout_s: float = 600.0,
    flush_timeout_s: float = 60.0,
    api_key: Keys = None,
) -> Engine:
    """Return a client of an SGLang server.

    Args:
        url: base address of the server itself, not of a router.
        pause_mode: what happens to running requests. ``"retract"`` returns them to the queue; they continue with the
            new weights and recompute their keys and values. ``"abort"`` ends them. ``"in_place"`` freezes them with
            the keys and values of the old weights. ``"keep"``, vLLM's name, means ``"retract"``, or ``"in_place"``
            with ``keep_cache``; only with it may the server take versions without a pause (``WeightSender(commit=)``).
            Prefill and decode pools use ``"abort"`` for ``"retract"``, because requests between the two pools would
            hold the cache during the pause.
        keep_cache: keep the keys and values of the old weights: frozen requests, and later requests with the same
            prefix, continue with them. Each token is still labelled with the version that sampled it. Without it,
            updates fail while requests are frozen in place.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        flush_timeout_s: deadline of dropping the cache, in seconds; SGLang refuses while a request uses it.
        api_key: sent as a bearer token; see `HTTPSession` for several.

    Raises:
        ConfigError: invalid address, key or pause mode, or ``keep_cache`` with another mode than ``"in_place"``.
    """
    live = pause_mode == "keep"
    if live:
        pause_mode = "in_place" if keep_cache else "retract"
    settings = Settings(
        live=live,
        pause_mode=pause_mode,
        keep_cache=keep_cache,
        load_timeout_s=load_timeout_s,
        flush_timeout_s=flush_timeout_s,
    )
    settings.check(("abort", "retract", "in_place"), frozen="in_place")
    http = HTTPSession(url, api_key=api_key, timeout_s=timeout_s, check=refuse_router)
    return Engine(partial(_find, http, settings), kind=SGLangPort.kind, url=http.url)


def _find(http: HTTPSession, settings: Settings) -> SGLangPort:
    facts = known_info(http, SGLangPort.kind)
    port = SGLangPort(http, facts, settings)
    try:
        return port if port.has_plugin() else StockSGLangPort(http, facts, settings)
    except EngineRefusedError as error:  # control routes want a key that this client lacks
        log.warning("%s does not report whether it has our plugin: %s", http.url, error)
        return port


def describe_sglang(http: HTTPSession) -> EngineInfo | None:
    """Return the description of the SGLang server at the session's address; None if it is another engine."""
    if server_info(http).info.kind != SGLangPort.kind:
        return None
    return _find(http, Settings(load_timeout_s=http.timeout_s)).describe()


SGLANG = Make(
    client=sglang_engine,
    describe=describe_sglang,
    dialect="torchrl_ext.control.requests.dialects:SGLangDialect",
    server="torchrl_ext.control.serving.sglang:SGLangSpec",
    router="torchrl_ext.control.serving.sglang:SGLangRouterSpec",
    routes={
        "": ("/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"),
        "disk": ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"),
        "native": (
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
        ),
    },
)
