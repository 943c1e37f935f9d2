"""Examines engines for `torchrl-ext doctor`: each by itself, and all of them together."""

from __future__ import annotations

import email.utils
import time
from typing import Any
from urllib.parse import urlsplit

import torchrl_ext
from torchrl_ext.cli.doctor.findings import Examination, Examined, Finding, Notes
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.routes import ADAPTERS_ROUTE, BACKEND
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.rpc.http import Answer, HTTPSession, normalise_url
from torchrl_ext.rpc.router import listed_workers
from torchrl_ext.rpc.server_info import ServerInfo, read_server_info
from torchrl_ext.types import EngineInfo, Info, is_loopback

__all__ = ["compare", "examine"]

SKEW_S, WRONG_S = 5.0, 600.0
"""Seconds between two clocks: past the first a warning; past the second, object stores refuse signed requests."""

_VLLM = ("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update")
_ROUTES = {
    "vllm": (*_VLLM, "/reset_prefix_cache", "/resume"),
    "embedded": (*_VLLM, "/reset_prefix_cache", "/resume"),
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"),
}
_STOCK = {
    ("vllm", "disk"): ("/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"),
    ("vllm", "native"): _VLLM,
    ("sglang", "disk"): ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"),
    ("sglang", "native"): (
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    ),
}
"""Routes by which an engine without our plugin follows."""
_DEV = {"vllm": ("/collective_rpc", "/server_info")}
_OPEN = (
    "keep the port from strangers, by a firewall or a proxy that wants the key: vLLM itself guards only what begins "
    "with /v1, /v2, /inference or /cohere"
)
_KEEPERS = ("ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "FlexKVConnectorV1", "HF3FSKVConnector")
"""vLLM's connectors (0.32) that keep what they were given, and do not override ``KVConnectorBase_V1.reset_cache``."""
_DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment: it has these routes only then"
_PLUGIN = {
    "vllm": "install torchrl_ext in the engine's environment and start it with --weight-transfer-config "
    f'\'{{"backend": "{BACKEND}"}}\'; `torchrl-ext serve vllm` does both',
    "sglang": "install torchrl_ext in the engine's environment; `torchrl-ext serve sglang` does it",
}


def examine(address: str, asked: Examination) -> Examined:
    """Look at one engine. Nothing is changed there; a connected trainer is not disturbed."""
    notes = Notes(address)
    try:
        url = normalise_url(address)
    except ConfigError as error:
        notes.failure("address", error.what, error.expected or "", "write IPv6 addresses in brackets: [::1]:8000")
        return Examined(address=address, notes=notes)
    notes.ok("address", url if "://" in address else f"{url} (http, as no scheme is given)")
    session = HTTPSession(url, api_key=asked.api_key, timeout_s=asked.timeout_s, max_body_bytes=16 << 20)
    try:
        return _examine(address, url, session, asked, notes)
    except WeightSyncError as error:  # it went away between two questions
        notes.error("reachable", error)
        return Examined(address=address, notes=notes)


def _examine(address: str, url: str, session: HTTPSession, asked: Examination, notes: Notes) -> Examined:
    began = time.time()
    answer = session.call("GET", "/server_info", query={"config_format": "json"})
    ended = time.time()
    workers = listed_workers(session)
    if workers is not None:
        notes.failure(
            "router",
            f"a router with {len(workers)} worker(s): it hands a control call to one of them and says that all is well",
            "the address of an engine",
            f"give the engines' own addresses: {' '.join(worker.url for worker in workers) or 'it has none yet'}",
        )
        return Examined(address=address, notes=notes)
    notes.ok("router", "the engine itself, no router")
    try:
        (info,) = discover(url, timeout_s=asked.timeout_s, api_key=asked.api_key)
    except WeightSyncError as error:
        notes.error("routes", error)
        return Examined(address=address, notes=notes)
    notes.ok("reachable", f"{info.kind} {info.version}, {info.worker_type}, serves {info.model or 'a model'}")
    _clock(notes, answer, began, ended)
    _routes(notes, session, info)
    _keys(notes, session, info, asked)
    facts = _facts(info, answer)
    _transports(notes, info, asked, facts)
    _paused(notes, session, info)
    _world(notes, info)
    _kept(notes, facts)
    answers: list[Info] = []
    try:
        access = {"api_key": asked.api_key, "load_timeout_s": max(30.0, asked.timeout_s)}
        answers = engines.make(info.kind, url=url, **access).inspect(asked.question)
    except (ConfigError, EngineRefusedError, DeadlineError) as error:
        if not info.stock:
            notes.warning("plugin", error.what, f"torchrl_ext {torchrl_ext.__version__}", error.hint or "")
    _versions(notes, answers)
    return Examined(address=address, notes=notes, info=info, answers=tuple(answers), dtype=facts.dtype)


def _clock(notes: Notes, answer: Answer, began: float, ended: float) -> None:
    try:
        theirs = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        notes.ok("clock", "the engine does not say what time it is")
        return
    skew_s = max(0.0, theirs - ended, began - (theirs + 1.0))  # a Date header has whole seconds
    if skew_s <= SKEW_S:
        notes.ok("clock", "agrees with this machine's")
        return
    words = (f"{skew_s:,.0f} s apart", f"less than {SKEW_S:g} s", "let both machines follow a time server (NTP)")
    (notes.failure if skew_s > WRONG_S else notes.warning)("clock", *words)


def _routes(notes: Notes, session: HTTPSession, info: EngineInfo) -> None:
    wanted = _ROUTES.get(info.kind, ())
    if info.stock:
        wanted = tuple(route for name in info.transports for route in _STOCK.get((info.kind, name), ()))
    missing = [route for route in wanted if not _has_route(session, route)]
    if missing:
        remedy = _DEV_MODE if info.kind == "vllm" else "update the engine"
        notes.failure("routes", f"lacks {', '.join(missing)}", "every route of a weight update", remedy)
    else:
        notes.ok("routes", "every route of a weight update is there")
    if info.kind == "sglang" and info.stock and not _has_route(session, "/begin_weight_update"):
        notes.warning(
            "routes",
            "no sessions around an update (SGLang 0.5.20 or older)",
            "0.5.21 or later",
            "update the engine, above all where its model is quantised: it would load into what it made of old weights",
        )


def _has_route(session: HTTPSession, route: str) -> bool:
    """Return whether the route exists; it is called by a method that it does not serve, so that nothing happens."""
    return session.call("OPTIONS", route).status not in (404, 501)


def _keys(notes: Notes, session: HTTPSession, info: EngineInfo, asked: Examination) -> None:
    """Note which routes that change an engine answer without the key; they are called so that nothing changes."""
    if asked.api_key is None:
        if not is_loopback(urlsplit(session.url).hostname or ""):
            whoever = f"whoever reaches {session.url} can pause it and change its weights"
            notes.warning("key", whoever, "an API key", "start the engine with one, or keep its port from strangers")
        return
    stranger = HTTPSession(session.url, timeout_s=asked.timeout_s, max_body_bytes=16 << 20)
    tried = {route: stranger.call(method, route, body).status for method, route, body in _harmless_calls(info.kind)}
    opened = [route for route, status in tried.items() if status not in (401, 403, 404)]
    if opened:
        notes.warning("key", f"without the key it answers at {', '.join(opened)}", "the key on every route", _OPEN)
    else:
        notes.ok("key", "every route of a weight update wants the key")


def _harmless_calls(kind: str) -> list[tuple[str, str, Any]]:
    """Return method, route and body of calls that change nothing: by a wrong method, or without content."""
    if kind == "sglang":  # which looks at methods first; one rule holds for all of its routes that change something
        return [("POST", "/weights_checker", {}), ("GET", "/server_info", None)]
    found = [("GET", route, None) for route in (*_ROUTES.get(kind, ()), "/sleep", "/wake_up", *_DEV.get(kind, ()))]
    ours: list[tuple[str, str, Any]] = (
        [("GET", ADAPTERS_ROUTE, None), ("POST", "/update_weights_from_disk", {})] if kind == "vllm" else []
    )
    return [*found, *ours]


def _transports(notes: Notes, info: EngineInfo, asked: Examination, facts: ServerInfo) -> None:
    wanted = asked.transport
    if facts.is_guest:
        notes.failure(
            "plugin",
            "maps weights that a daemon owns (--load-format ipc_cache), so an update would change those of others",
            "an engine with weights of its own",
            "start it with another --load-format",
        )
    elif not info.transports:
        notes.failure(
            "plugin", "follows by no transport", f"weight-transfer backend {BACKEND!r}", _PLUGIN.get(info.kind, "")
        )
    elif wanted is not None and wanted not in info.transports:
        names = ", ".join(info.transports)
        notes.failure(
            "plugin", f"follows by {names}", f"transport {wanted!r}", _PLUGIN.get(info.kind, "use another one")
        )
    elif info.stock:
        _without_plugin(notes, info, wanted)
    else:
        notes.ok("plugin", f"follows by {', '.join(info.transports)}")


def _without_plugin(notes: Notes, info: EngineInfo, wanted: str | None) -> None:
    notes.warning(
        "plugin",
        f"runs without our plugin: follows by {', '.join(info.transports)}",
        "every transport, with digests, changes, slices and rehearsals",
        f"{_PLUGIN.get(info.kind, '')}{_more(info)}",
    )
    notes.warning(
        "proof",
        "what it loads is shown by its outputs alone",
        "digests of what it holds",
        "send with verify='outputs', or install the plugin",
    )
    notes.warning(
        "a part of a version",
        "whoever resumes it after an update that failed lets it serve what landed",
        "workers that refuse to generate",
        "install the plugin, or send again before anybody resumes it",
    )
    if wanted == "native":
        notes.warning(
            "group",
            "the port at which a group of stock engines forms has no secret: whoever reaches it can take a rank",
            "a network of trainer and engines alone",
            "keep it from strangers by a firewall",
        )


def _more(info: EngineInfo) -> str:
    """Return what would let an engine without our plugin follow by broadcasts, where it cannot."""
    if "native" in info.transports:
        return ""
    if info.kind == "vllm":
        return """; with --weight-transfer-config '{"backend": "nccl"}' it follows by 'native', too"""
    return "; with one pipeline stage, one replica and no weight cache it follows by 'native', too"


def _paused(notes: Notes, session: HTTPSession, info: EngineInfo) -> None:
    if info.kind == "sglang":
        return
    try:
        paused = session.get("/is_paused").get("is_paused")
    except (EngineRefusedError, AttributeError):
        return
    if paused:
        notes.warning(
            "paused",
            "the engine is paused",
            "an engine that generates",
            "an update may be under way; after a failed one, the next good update resumes it",
        )


def _world(notes: Notes, info: EngineInfo) -> None:
    told = f"tp {info.tp_size} x pp {info.pp_size} x dp {info.dp_size}, world size {info.world_size}"
    product = info.tp_size * info.pp_size * info.dp_size
    if info.world_size in (product, info.tp_size * info.pp_size):  # replicas may share the workers of one another
        notes.ok("world size", told)
    else:
        remedy = "look at the engine's parallel settings; a collective counts workers by this number"
        notes.warning("world size", told, f"{product}", remedy)


def _kept(notes: Notes, facts: ServerInfo) -> None:
    """Note stores of keys and values that outlive the engine's own cache, and cannot be told to drop theirs."""
    connectors = facts.kv_connectors
    keeping = [name for name in connectors if name in _KEEPERS]
    if keeping:
        notes.warning(
            "kept keys",
            f"{', '.join(keeping)} keeps keys and values of the old weights, and does not drop them with the engine's",
            "no store, or one whose connector has a reset_cache of its own",
            "empty the store after every update, or requests continue what the old weights began",
        )
    elif connectors:
        notes.ok("kept keys", f"{', '.join(connectors)} is told to drop those of the old weights")


def _versions(notes: Notes, answers: list[Info]) -> None:
    if not answers:
        return
    theirs = sorted({str(answer["torchrl_ext"]) for answer in answers})
    one = answers[0]
    told = f"torchrl_ext {', '.join(theirs)}, torch {one.get('torch')}, Python {one.get('python')} on {one.get('host')}"
    if theirs == [torchrl_ext.__version__]:
        notes.ok("versions", told)
    else:
        remedy = "install the same version on both sides"
        notes.warning("versions", told, f"torchrl_ext {torchrl_ext.__version__}, as here", remedy)


def _facts(info: EngineInfo, answer: Answer) -> ServerInfo:
    """Return what an engine says of itself; little where it has only the earlier route."""
    try:
        return read_server_info(info.url, answer.json())
    except (EngineRefusedError, ValueError):
        return ServerInfo(info=info)


def compare(every: list[Examined]) -> list[Finding]:
    """Return findings about all engines together: one given twice, differing models or dtypes, and the world size."""
    notes = Notes("fleet")
    known = [one for one in every if one.info is not None]
    processes: dict[tuple[Any, Any], list[str]] = {}
    for one in known:
        for answer in one.answers[:1]:
            processes.setdefault((answer.get("host"), answer.get("pid")), []).append(one.address)
    for addresses in processes.values():
        if len(addresses) > 1:
            notes.failure(
                "addresses",
                f"{' and '.join(addresses)} lead to one engine",
                "each engine once",
                "leave one of them out",
            )
    for what, values in (
        ("model", {one.address: one.info.model.rstrip("/").rpartition("/")[2] for one in known if one.info}),
        ("dtype", {one.address: one.dtype for one in known if one.dtype not in ("", "auto")}),
    ):
        if len(set(values.values())) > 1:
            told = ", ".join(f"{address}: {value}" for address, value in values.items())
            notes.warning(
                what, told, "the same in all engines", "check that all of them are meant to follow one trainer"
            )
    workers = sum(one.info.world_size for one in known if one.info)
    if len(known) == len(every):
        notes.ok("world size", f"{len(known)} engine(s) with {workers} worker(s): a group has {1 + workers} ranks")
    return notes.rows
