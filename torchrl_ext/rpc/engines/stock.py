"""What clients say to the workers of servers that run nothing of ours, by the routes that such servers have.

The protocol, as far as routes and bodies go, is SGLang's (`sglang.srt.entrypoints.http_server`, 0.5.13 to 0.5.23) and
vLLM's (`vllm.entrypoints.rl.online.api_router`, 0.31 and 0.32):

==========================================  ==================================================================
SGLang
``POST /init_weights_update_group``         ``{"master_address", "master_port", "world_size", "group_name", "backend",
                                            "rank_offset"}``; answers when the group is formed
``POST /destroy_weights_update_group``      ``{"group_name"}``
``POST /update_weights_from_distributed``   ``{"names", "dtypes", "shapes", "load_format": "flattened_bucket", ...}``:
                                            one broadcast
``POST /update_weights_from_disk``          ``{"model_path", "load_format", "weight_version", ...}``; the last values of
                                            the latter two are kept, so they are always sent
vLLM
``POST /init_weight_transfer_engine``       ``{"init_info": {"rank_offset", "world_size", "packed", ...}}``
``POST /start_weight_update``               ``{}``
``POST /update_weights``                    ``{"update_info": {"names", "dtype_names", "shapes"}}``, several times
``POST /finish_weight_update``              ``{"weight_version"}``, or nothing where it ends a failed one
``POST /shutdown_weight_transfer_engine``   0.32
``POST /collective_rpc``                    ``{"method": "reload_weights", "kwargs": {"weights_path"}}``
``POST /update_weight_version``             ``{"new_version"}``, after files
==========================================  ==================================================================

Neither says what it holds afterwards, and both drop a name that they do not know with a line in their log: only their
outputs prove an update (``verify="outputs"``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, final

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.routes import BACKEND
from torchrl_ext.rpc.engines.workers import Workers
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.server_info import keeps_copies, parse_sglang_info, sglang_transports
from torchrl_ext.types import Info, ParamMeta, dtype_name

__all__ = ["FLAGS", "PLUGIN", "StockSGLang", "StockVLLM"]

log = logging.getLogger("torchrl_ext")

PLUGIN = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages), or let `torchrl-ext serve sglang` "
    'start the server; without it, use the "disk" transport, which SGLang loads by itself, or "native"'
)
FLAGS = (
    "install torchrl_ext in the engine's environment (it needs no trainer packages) and start the server with "
    f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\' and VLLM_SERVER_DEV_MODE=1, or let '
    "`torchrl-ext serve vllm` do both"
)
_ABSENT = (404, 501)
_LEAVE_S = 30.0


def _bodies(info: Info) -> Iterator[tuple[list[str], list[str], list[list[int]]]]:
    """Yield names, dtypes and shapes of each call of a handoff; a tensor without elements is in none."""
    for first, stop in info["calls"]:
        metas = [ParamMeta.from_json(row) for row in info["params"][first:stop]]
        metas = [meta for meta in metas if meta.nbytes]
        if metas:
            yield (
                [meta.name for meta in metas],
                [dtype_name(meta.dtype) for meta in metas],
                [list(meta.shape) for meta in metas],
            )


def _unproved(url: str, hint: str) -> ConfigError:
    return ConfigError(f"{url} runs without our plugin, and cannot prove what it holds", hint=hint)


def _proved_by_outputs(url: str, transport: str) -> None:
    log.warning(
        "%s runs without our plugin, and follows by %s: only its outputs show what it loaded (verify='outputs')",
        url,
        transport,
    )


@final
class StockSGLang(Workers):
    """Those of an SGLang server without our plugin.

    Args:
        http: calls its routes.
        told: its ``/server_info``.
        timeout_s: deadline of forming a group, and of each load, in seconds.
    """

    plugged: ClassVar[bool] = False

    def __init__(self, http: HTTPSession, told: Any, timeout_s: float) -> None:
        self._http, self._told, self._timeout_s = http, told, timeout_s
        self._transport, self._group = "disk", ""

    @property
    def sessions(self) -> bool:
        return self._transport == "native"

    def join(self, info: Info) -> None:
        transport, url = str(info.get("transport")), self._http.url
        if transport == "native":
            self._check(info)
        elif transport != "disk":
            raise EngineRefusedError(
                f"{url} runs SGLang without our plugin, and cannot follow by {transport!r}",
                expected='the plugin in group "sglang.srt.plugins"',
                hint=PLUGIN,
            )
        self._transport = transport
        _proved_by_outputs(url, transport)
        if transport == "native":
            group = info["group"]
            self._group = str(group["group_name"])
            self._destroy()  # an earlier trainer may have left one under this name
            body = {**group, "rank_offset": info["rank_offset"]}
            self._http.post("/init_weights_update_group", body, timeout_s=self._timeout_s)

    def _check(self, info: Info) -> None:
        url = self._http.url
        if info.get("make") != "sglang":
            raise EngineRefusedError(
                f"the transport speaks to {info.get('make')!r}, and {url} runs SGLang",
                expected="engines of one make, and make='sglang'",
                hint=PLUGIN,
            )
        if "native" not in sglang_transports(url, self._told):
            described = parse_sglang_info(url, self._told)
            what = (
                f"keeps copies of its weights (weight_cache_mode {self._told['weight_cache_mode']!r})"
                if keeps_copies(self._told)
                else f"has pp {described.pp_size} x dp {described.dp_size}, and gives workers of each the same ranks"
            )
            raise EngineRefusedError(
                f"{url} {what}", expected="pp 1, dp 1 and no weight cache, for its own broadcasts", hint=PLUGIN
            )
        if self._told.get("quantization") and self._http.call("OPTIONS", "/begin_weight_update").status in _ABSENT:
            raise EngineRefusedError(
                f"{url} runs a quantised model, and this release loads new weights into what it made of the old ones",
                expected="SGLang 0.5.21 or later",
                hint=PLUGIN,
            )

    def start(self, *, bracketed: bool = False) -> None:
        return None

    def verify(self, digests: Mapping[str, str]) -> None:
        raise _unproved(self._http.url, PLUGIN)

    def load(self, info: Info) -> None:
        if self._transport == "disk":
            body = {"model_path": info["path"], "load_format": "auto", "weight_version": str(info["version"])}
            body |= {"flush_cache": False, "abort_all_requests": False}
            self._http.post("/update_weights_from_disk", body, timeout_s=self._timeout_s)
            return
        how = {"group_name": self._group, "load_format": "flattened_bucket"}
        how |= {"flush_cache": False, "abort_all_requests": False}  # type: ignore[dict-item]  # of JSON
        try:
            for names, dtypes, shapes in _bodies(info):
                body = {"names": names, "dtypes": dtypes, "shapes": shapes, **how}
                self._http.post("/update_weights_from_distributed", body, timeout_s=self._timeout_s)
        except (EngineError, DeadlineError):
            self.leave()  # it frees workers that wait for one that has failed
            raise

    def finish(self, version: int) -> None:
        return None

    def leave(self) -> None:
        if self._group:
            self._destroy()
            self._group = ""

    def _destroy(self) -> None:
        body = {"group_name": self._group}
        with suppress(EngineError, DeadlineError):  # there may be none, or the server may be gone
            self._http.call("POST", "/destroy_weights_update_group", body, timeout_s=_LEAVE_S)


@final
class StockVLLM(Workers):
    """Those of a vLLM server that does not run our backend.

    Args:
        post: calls a route, with a body and ``timeout_s``, and returns the answer.
        backend: its own weight-transfer backend; None where it has none.
        url: its address, for messages.
        timeout_s: deadline of joining and loading, in seconds.
    """

    plugged: ClassVar[bool] = False

    def __init__(self, post: Callable[..., Info], backend: str | None, url: str, timeout_s: float) -> None:
        self._post, self._backend, self._url, self._timeout_s = post, backend, url, timeout_s
        self._transport, self._clean, self._empty = "disk", True, False

    def join(self, info: Info) -> None:
        transport = str(info.get("transport"))
        if transport not in ("disk", "native"):
            raise EngineRefusedError(
                f"{self._url} runs vLLM without our backend, and cannot follow by {transport!r}",
                expected=f"weight-transfer backend {BACKEND!r}",
                hint=FLAGS,
            )
        if transport == "native" and (self._backend, info.get("make")) != ("nccl", "vllm"):
            raise EngineRefusedError(
                f"the transport speaks to {info.get('make')!r} engines, and {self._url} runs vLLM with weight-transfer "
                f"backend {self._backend!r}",
                expected="make='vllm', and a server with --weight-transfer-config '{\"backend\": \"nccl\"}'",
                hint=FLAGS,
            )
        self._transport, self._clean = transport, False
        _proved_by_outputs(self._url, transport)
        if transport == "native":
            self.leave()  # the group of an earlier trainer
            group = info["group"]
            own = {"rank_offset": info["rank_offset"], "world_size": group["world_size"], "packed": True}
            own |= {"packed_buffer_size_bytes": info["bucket_bytes"], "packed_num_buffers": 2}
            meets = [name for name in ("nccl_unique_id_b64",) if name in group] or ["master_address", "master_port"]
            body = {"init_info": {**own, **{name: group[name] for name in meets}}}
            self._post("/init_weight_transfer_engine", body, timeout_s=self._timeout_s)

    def start(self, *, bracketed: bool = False) -> None:
        """Begin an update, with layers of which nothing is left from one that failed.

        After a failure vLLM 0.32 keeps what a layer was sent, and its count (`model_loader.reload.layerwise`), and goes
        on from there in the next update. A cycle without a tensor in between resets both, while nobody generates.
        """
        if self._transport != "native":
            return
        if not self._clean:
            with suppress(EngineRefusedError):  # one is still active
                self._post("/start_weight_update", {}, timeout_s=self._timeout_s)
            self._post("/finish_weight_update", timeout_s=self._timeout_s)
        self._clean = False
        self._post("/start_weight_update", {}, timeout_s=self._timeout_s)

    def verify(self, digests: Mapping[str, str]) -> None:
        raise _unproved(self._url, FLAGS)

    def load(self, info: Info) -> None:
        if self._transport == "disk":
            body = {"method": "reload_weights", "kwargs": {"weights_path": info["path"]}}
            for _ in range(1 if self._clean else 2):  # an earlier one may have left some half-filled, as in `start`
                self._post("/collective_rpc", body, timeout_s=self._timeout_s)
            return
        for names, dtypes, shapes in _bodies(info):
            body = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
            self._post("/update_weights", body, timeout_s=self._timeout_s)

    def finish(self, version: int) -> None:
        if self._transport == "native":
            self._post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=self._timeout_s)
        else:
            try:
                self._post("/update_weight_version", {"new_version": str(version)})
            except EngineRefusedError as error:  # releases before labels: generations do not say their version then
                if error.status not in (404, 405):
                    raise
        self._clean, self._empty = True, False

    def state(self) -> Info:
        return {"empty": True} if self._empty else {}  # somebody else may have emptied them

    def emptied(self) -> None:
        self._empty = True

    def leave(self) -> None:
        if self._transport == "native":
            with suppress(EngineError, DeadlineError):  # releases before 0.32 lack the route, and drop it themselves
                self._post("/shutdown_weight_transfer_engine", timeout_s=_LEAVE_S)
