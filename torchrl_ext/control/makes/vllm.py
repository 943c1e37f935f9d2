"""Clients of vLLM servers and of the embedded engine.

Routes and bodies are vLLM's (`vllm.entrypoints.serve.dev` and `vllm.entrypoints.rl.online`, 0.32), which it has with
``VLLM_SERVER_DEV_MODE=1``:

==========================================  ====================================================================
``POST /collective_rpc``                    ``{"method": "torchrl_ext", "args": ["{...}"]}``: a message
                                            (`torchrl_ext.base.messages`) for every worker, as JSON. The answer has
                                            ``results``, one object per worker in order of rank. `Commit` and `Undo`
                                            also label the weights and change the namespace of the prefix cache
``GET /is_paused``                          the embedded engine says it in the answer to `State`
``POST /pause?mode=abort|wait|keep``        with ``clear_cache=false``, a parameter that vLLM is about to remove
``POST /update_weight_version``             ``{"new_version": "7"}``, after `Finish`
``POST /reset_prefix_cache``                preempts running requests and drops their keys and values, which the old
                                            weights computed, and the ones that a KV connector keeps elsewhere
``POST /reset_encoder_cache``               multimodal models: drops image embeddings of the old weights
``POST /resume``
``POST /sleep?level=0|1|2&mode=``           0 pauses; 1 moves weights to the host, drops keys and values; 2 drops both
``POST /wake_up?tags=``                     ``weights`` or ``kv_cache``. Waking the last part also resumes the engine
``POST /release_kv_cache_memory``           drops only keys and values
``GET /server_info?config_format=json``     ``additional_config`` has ``torchrl_ext`` if the plugin is there
``POST /inference/v1/generate``             with ``prompt_logprobs``: log-probabilities of given tokens
``POST /v1/load_lora_adapter``              ``{"lora_name", "lora_path", "load_inplace": true}``
``POST /v1/unload_lora_adapter``            ``{"lora_name"}``; ``GET /v1/models`` lists adapters
==========================================  ====================================================================

A server without our plugin takes full versions from files, or broadcasts if it was started with weight-transfer backend
``"nccl"``. It does not report its weights afterwards, and only logs a line when it drops an unknown name, so only its
outputs prove an update (``verify="outputs"``).

==========================================  ====================================================================
``POST /collective_rpc``                    ``{"method": "reload_weights", "kwargs": {"weights_path"}}``: files
``POST /init_weight_transfer_engine``       ``{"init_info": {"rank_offset", "world_size", "packed", ...}}``, where the
                                            server was started with weight-transfer backend ``"nccl"``
``POST /start_weight_update``
``POST /update_weights``                    ``{"update_info": {"names", "dtype_names", "shapes"}}``, several times
``POST /finish_weight_update``              ``{"weight_version": "7"}``
``POST /shutdown_weight_transfer_engine``
==========================================  ====================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

from msgspec import structs

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.base.messages import Commit, Finish, Join, Leave, Load, Message, Start, State, Undo, answers_of
from torchrl_ext.base.registry import Make
from torchrl_ext.base.routes import called, confirmed, merged
from torchrl_ext.base.types import EngineInfo, Info
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.http import HTTPSession, Keys
from torchrl_ext.control.makes.http import HTTPPort, Settings, StockPort, bodies
from torchrl_ext.control.makes.server_info import known_info, server_info
from torchrl_ext.control.port import EngineState, no_adapters, restated
from torchrl_ext.control.serving.router import refuse_router

log = logging.getLogger("torchrl_ext")

__all__ = ["EMBEDDED", "PLUGIN", "VLLM", "EmbeddedPort", "VLLMPort", "embedded_engine", "vllm_engine"]

PLUGIN = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages), or let `torchrl-ext serve vllm` "
    "start the server; if VLLM_PLUGINS is set, add torchrl_ext to it"
)
"""What to do about a server without the plugin."""

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment; vLLM has these routes only in that mode"
_EVERYWHERE = {"reset_running_requests": "true", "reset_external": "true"}
_COPYING_S = 10.0
_KINDS = ("vllm", "embedded")  # the kinds of engine that have these routes

_PROBE = {"prompt_logprobs": 0, "skip_reading_prefix_cache": True, "max_tokens": 1, "temperature": 1.0}
"""Settings that score a prompt: ``prompt_logprobs`` 0 returns only its own tokens; the sampled token is not used."""


class VLLMPort(HTTPPort):
    """A vLLM server whose workers have our plugin."""

    kind: ClassVar[str] = "vllm"
    fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("/pause", "/resume"), ("status",)),
        "/collective_rpc": ("results",),
        "/update_weight_version": ("success",),
    }
    lora_routes: ClassVar[str] = "/v1"
    lora_needs: ClassVar[str] = (
        "start the server with --enable-lora, a --max-lora-rank that fits, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )

    def describe(self) -> EngineInfo:
        """See `Port.describe`. Only ``/server_info`` must answer; other routes and our plugin add details."""
        self._facts, known = server_info(self.http, _KINDS), {}
        for route, field in (("/get_world_size", "world_size"), ("/weight_info", "weight_version")):
            with suppress(EngineRefusedError):
                known[field] = self._ask(route, field)
        info = self._facts.serving(**known)
        if not self.plugin or self.kind != "vllm":
            return info
        try:
            return replace(info, transports=self._followed if self._followed or self.has_plugin() else ())
        except (EngineError, DeadlineError) as error:
            log.warning("%s does not report which transports it can follow: %s", self.url, error)
            return replace(info, transports=())

    def paused(self) -> bool:
        return bool(self._ask("/is_paused", "is_paused"))

    def state(self) -> EngineState:
        return EngineState.of(self.call(State()))

    def call(self, message: Message) -> list[Info]:
        match message:
            case Leave():
                return []
            case Join():
                self._refuse(message)
        if isinstance(message, Commit):
            message = structs.replace(message, keep_cache=self._settings.keep_cache)
        short = isinstance(message, (Commit, Undo))
        answer = self._post("/collective_rpc", called(message), timeout_s=None if short else self.timeout_s)
        answers = answers_of(answer["results"], f"{self.url}/collective_rpc")
        match message:
            case Start():
                self.drop_cached()
            case Commit():
                answers = confirmed(answers, self._facts.engines, self.url)
            case Finish():
                answers = confirmed(answers, self._facts.engines, self.url)
                self._post("/update_weight_version", {"new_version": str(message.version)})
        return answers

    def _refuse(self, message: Join) -> None:
        if self._settings.keep_cache and self._facts.kv_connector:
            raise ConfigError(
                f"{self.url} has KV connector {self._facts.kv_connector}, which would go on serving keys and values of "
                "the old weights",
                expected="keep_cache=False, or a server without a connector",
                state="the engine's weights and its pause are unchanged",
            )

    def drop_cached(self) -> None:
        if self._settings.keep_cache:
            return
        # a connector may still be copying keys and values
        Deadline(min(self.http.timeout_s, _COPYING_S)).poll(
            self._drop_prefixes,
            late=lambda: EngineRefusedError(f"{self.url} could not drop cached keys and values of the old weights"),
        )
        if self._facts.is_multimodal:
            self._post("/reset_encoder_cache")

    def _drop_prefixes(self) -> bool:
        """Return whether the cache was dropped; false while blocks are in use."""
        answer = self._post("/reset_prefix_cache", query=_EVERYWHERE)
        if "success" not in answer:
            raise EngineRefusedError(f"{self.url}/reset_prefix_cache answered {answer!r:.200}", expected="'success'")
        return answer["success"] is True

    def pause(self) -> None:
        # the cache matches the weights until an update starts
        query = {"mode": self._settings.pause_mode, "clear_cache": "false"}
        self._post("/pause", query=query, timeout_s=self.timeout_s)

    def resume(self) -> None:
        self._post("/resume")

    def sleep(self, level: int, tags: frozenset[str]) -> None:
        if tags == frozenset({"kv_cache"}):
            self._post("/release_kv_cache_memory", timeout_s=self.timeout_s)
        else:
            query = {"level": level, "mode": self._settings.pause_mode}
            self._post("/sleep", query=query, timeout_s=self.timeout_s)

    def wake(self, tags: frozenset[str]) -> None:
        for tag in sorted(tags, reverse=True):  # weights first: waking the last part resumes the engine
            self._post("/wake_up", query={"tags": tag}, timeout_s=self.timeout_s)

    def _replace_adapter(self, name: str, path: str, before: str | None) -> None:
        self._adapter("load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": True})

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": _PROBE}

    def _scores(self, answer: Any, prompt: list[int]) -> list[Any]:
        # per token {"17": {"logprob": -3.2, ...}} by token id, always including the prompt's own token
        rows = zip(prompt, answer["prompt_logprobs"], strict=True)
        return [row[str(token)]["logprob"] for token, row in rows if row is not None]  # null for the first token

    def _ask(self, route: str, field: str) -> Any:
        answer = _in_dev_mode(lambda: self.http.get(route))
        if not isinstance(answer, dict) or field not in answer:
            what = f"GET {self.url}{route} answered {str(answer)[:120]!r}"
            raise EngineRefusedError(what, expected=f"an object with {field!r}")
        return answer[field]

    def _post(self, route: str, body: Any = None, **how: Any) -> Info:
        answer = _in_dev_mode(lambda: super(VLLMPort, self)._post(route, body, **how))
        return answer if isinstance(answer, dict) else {}


def _in_dev_mode(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RouteAbsent as error:
        raise restated(error, error.what, expected="vLLM's RL routes", hint=_DEV_MODE) from error


@final
class StockVLLMPort(StockPort, VLLMPort):
    """A vLLM server without our plugin, after it joined a transport; see `VLLMPort`."""

    lacking, wanted, hint = "vLLM without our plugin", 'the plugin in group "vllm.general_plugins"', PLUGIN
    _clean = False  # whether no layer is half-filled, which vLLM cannot report

    def _check(self, offer: Info) -> None:
        if (self._facts.transfer_backend, offer.get("make")) != ("nccl", "vllm"):
            raise EngineRefusedError(
                f"the transport speaks to {offer.get('make')!r} engines, and {self.url} runs vLLM with weight-transfer "
                f"backend {self._facts.transfer_backend!r}",
                expected="make='vllm', and a server with --weight-transfer-config '{\"backend\": \"nccl\"}'",
                hint=PLUGIN,
            )

    def _meeting(self, offer: Info, rank_offset: int) -> tuple[str, Info]:
        group = offer["group"]
        own = {"rank_offset": rank_offset, "world_size": group["world_size"], "packed": True}
        own |= {"packed_buffer_size_bytes": offer["bucket_bytes"], "packed_num_buffers": 2}
        meets = [name for name in ("nccl_unique_id_b64",) if name in group] or ["master_address", "master_port"]
        return "/init_weight_transfer_engine", {"init_info": {**own, **{name: group[name] for name in meets}}}

    def _leaving(self) -> tuple[str, None]:
        return "/shutdown_weight_transfer_engine", None

    def _begin(self) -> None:
        """Begin an update; after a failed one, reset its half-filled layers first.

        After a failure vLLM 0.32 keeps the tensors that a layer received, and their count
        (`model_loader.reload.layerwise`), and would continue from there. An empty update resets both while paused.
        """
        if not self.group:
            return
        if not self._clean:
            with suppress(EngineRefusedError):  # an update may still be active
                self._post("/start_weight_update", {}, timeout_s=self.timeout_s)
            self._post("/finish_weight_update", timeout_s=self.timeout_s)
        self._clean = False
        self._post("/start_weight_update", {}, timeout_s=self.timeout_s)

    def _load(self, message: Load) -> None:
        if not self.group:
            body = {"method": "reload_weights", "kwargs": {"weights_path": message.handoff["path"]}}
            for _ in range(1 if self._clean else 2):  # a failed load may have left half-filled layers, as in `_begin`
                self._clean = False
                self._post("/collective_rpc", body, timeout_s=self.timeout_s)
            return
        for names, dtypes, shapes in bodies(message):
            body = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
            self._post("/update_weights", body, timeout_s=self.timeout_s)

    def _finish(self, label: str) -> None:
        if self.group:
            self._post("/finish_weight_update", {"weight_version": label}, timeout_s=self.timeout_s)
        else:
            self._post("/update_weight_version", {"new_version": label})
        self._clean = True


@final
class EmbeddedPort(VLLMPort):
    """A `torchrl_ext.engines.embedded` engine in another process; see `VLLMPort`."""

    kind: ClassVar[str] = "embedded"

    def paused(self) -> bool:
        return bool(merged(self.call(State())).get("paused"))

    def adapters(self) -> dict[str, str]:
        raise no_adapters(self.kind)

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        return "/prompt_logprobs", {"prompts": [prompt]}

    def _scores(self, answer: Any, prompt: list[int]) -> list[Any]:
        return answer["logprobs"][0]


def vllm_engine(
    url: str,
    *,
    pause_mode: str = "keep",
    keep_cache: bool = False,
    timeout_s: float = 60.0,
    load_timeout_s: float = 600.0,
    api_key: Keys = None,
    kind: str = "vllm",
) -> Engine:
    """Return a client of a vLLM server.

    A server with our plugin supports every transport; others support full files, and broadcasts if started with
    weight-transfer backend ``"nccl"``.

    Args:
        url: base address of the server itself, not of a router.
        pause_mode: what happens to running requests: ``"keep"`` freezes them, and they continue with the new weights
            and recompute their keys and values; ``"wait"`` lets them finish first; ``"abort"`` ends them. Only with
            ``"keep"`` may the server take versions without a pause (``WeightSender(commit=)``).
        keep_cache: with ``"keep"``: keep the keys and values of the old weights. Frozen requests continue with them, as
            do later requests to vLLM with the same prefix and no ``cache_salt`` of their own. Each token is still
            labelled with the version that sampled it. Not for a server with a KV connector.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        kind: ``"embedded"`` for that engine, which speaks vLLM's protocol.

    Raises:
        ConfigError: invalid address, key or pause mode, or ``keep_cache`` with another mode than ``"keep"``.
    """
    how: dict[str, Any] = {"keep_cache": keep_cache, "load_timeout_s": load_timeout_s}
    settings = Settings(live=pause_mode == "keep", pause_mode=pause_mode, **how)
    settings.check(("abort", "wait", "keep"), frozen="keep")
    http = HTTPSession(url, api_key=api_key, timeout_s=timeout_s, check=refuse_router)
    return Engine(partial(_find, kind, http, settings), kind=kind, url=http.url)


embedded_engine = partial(vllm_engine, kind="embedded")
"""Returns a client of a `torchrl_ext.engines.embedded` engine in another process; see `vllm_engine`."""


def _find(kind: str, http: HTTPSession, settings: Settings) -> VLLMPort:
    """Return the port for the server as it is now.

    It is not asked for our method: without the plugin each worker would raise, and vLLM mix up replies from then on.
    """
    facts = known_info(http, kind)
    if kind == EmbeddedPort.kind:
        return EmbeddedPort(http, facts, settings)
    return (VLLMPort if facts.has_plugin else StockVLLMPort)(http, facts, settings)


def _describe(kind: str, http: HTTPSession) -> EngineInfo | None:
    """Return the description of the engine at the session's address; None if it is of another kind."""
    if server_info(http).info.kind != kind:
        return None
    return _find(kind, http, Settings(load_timeout_s=http.timeout_s)).describe()


_ROUTES = ("/collective_rpc", "/pause", "/update_weight_version", "/reset_prefix_cache", "/resume")

VLLM = Make(
    client=vllm_engine,
    describe=partial(_describe, "vllm"),
    dialect="torchrl_ext.control.requests.dialects:VLLMDialect",
    server="torchrl_ext.control.serving.vllm:VLLMSpec",
    router="torchrl_ext.control.serving.vllm:VLLMRouterSpec",
    routes={
        "": _ROUTES,
        "disk": _ROUTES,
        "native": ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    },
)
EMBEDDED = Make(
    client=embedded_engine,
    describe=partial(_describe, "embedded"),
    dialect="torchrl_ext.control.requests.dialects:VLLMDialect",
    server="torchrl_ext.control.serving.embedded:EmbeddedSpec",
    router="torchrl_ext.control.serving.vllm:VLLMRouterSpec",
    routes={"": _ROUTES},
)
