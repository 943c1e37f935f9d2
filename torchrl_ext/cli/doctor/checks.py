"""The checks of `torchrl-ext doctor`: a list of functions for each engine, and a comparison of all engines."""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torchrl_ext
from torchrl_ext.cli.doctor.shared import (
    Context,
    Finding,
    Trainer,
    config_of,
    failed,
    failure,
    ok,
    sizes_of,
    warning,
)
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.landing.placement import keeps_values
from torchrl_ext.messages import Inspect
from torchrl_ext.registry import engines
from torchrl_ext.routes import BACKEND
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.rpc.http import HTTPSession, normalise_url
from torchrl_ext.rpc.router import listed_workers
from torchrl_ext.rpc.server_info import ServerInfo, read_server_info
from torchrl_ext.types import PROOFS, Info, cast_hint, dtype_from_name, is_loopback

__all__ = ["CHECKS", "compare", "examine", "rehearse"]

_SKEW_S, _WRONG_S = 5.0, 600.0  # clocks: past the first a warning; past the second, stores refuse signed requests
_MAX_BODY_BYTES = 16 << 20
_PLUGIN = {
    "vllm": "install torchrl_ext in the engine's environment and start it with --weight-transfer-config "
    f'\'{{"backend": "{BACKEND}"}}\'; `torchrl-ext serve vllm` does both',
    "sglang": "install torchrl_ext in the engine's environment; `torchrl-ext serve sglang` does it",
}
_NATIVE = {
    "vllm": """; with --weight-transfer-config '{"backend": "nccl"}' it can also follow by 'native'""",
    "sglang": "; with one pipeline stage, one replica and no weight cache it can also follow by 'native'",
}
_FIREWALL = (
    "protect the port with a firewall, or with a proxy that requires the key: vLLM itself guards only routes that "
    "begin with /v1, /v2, /inference or /cohere"
)
_KEEPERS = ("ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "FlexKVConnectorV1", "HF3FSKVConnector")
"""vLLM's connectors (0.32) that keep what they were given, and do not override ``KVConnectorBase_V1.reset_cache``."""
_SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


def examine(address: str, trainer: Trainer) -> tuple[list[Finding], Context | None]:
    """Look at one engine. Nothing is changed there; a connected trainer is not disturbed.

    Returns:
        The findings, and what the checks looked at; None if the engine did not say what it is.
    """
    findings: list[Finding] = []
    engine: Context | None = None
    try:
        engine = _ask(address, trainer, findings)
        if engine is not None:
            for check in CHECKS:
                findings += check(engine)
    except WeightSyncError as error:  # it went away between two questions
        findings.append(failed("reachable", error))
    return [replace(finding, where=address) for finding in findings], engine


def _ask(address: str, trainer: Trainer, findings: list[Finding]) -> Context | None:
    """Ask the engine for everything that more than one check needs; None, with a finding, if it does not answer."""
    try:
        url = normalise_url(address)
    except ConfigError as error:
        remedy = "write IPv6 addresses in brackets: [::1]:8000"
        findings.append(failure("address", error.what, error.expected or "", remedy))
        return None
    findings.append(ok("address", url if "://" in address else f"{url} (http, as no scheme is given)"))
    access: Info = {"api_key": trainer.api_key, "timeout_s": trainer.timeout_s}
    http = HTTPSession(url, **access, max_body_bytes=_MAX_BODY_BYTES)
    began = time.time()
    answer = http.call("GET", "/server_info", query={"config_format": "json"})
    ended, workers = time.time(), listed_workers(http)
    if workers is not None:
        found = (
            f"a router with {len(workers)} worker(s): it passes each control call to just one of them and answers 200"
        )
        remedy = f"give the engines' own addresses: {' '.join(worker.url for worker in workers) or 'it has none yet'}"
        findings.append(failure("router", found, "the address of an engine", remedy))
        return None
    findings.append(ok("router", "the engine itself, no router"))
    try:
        (info,) = discover(url, **access)
    except WeightSyncError as error:
        findings.append(failed("routes", error))
        return None
    found = f"{info.kind} {info.version}, {info.worker_type}, serves {info.model or 'a model'}"
    findings.append(ok("reachable", found))
    facts, answers, refusal = ServerInfo(info=info), list[Info](), None
    with contextlib.suppress(EngineRefusedError, ValueError):  # it has only the route's earlier name
        facts = read_server_info(url, answer.json())
    client = engines.make(info.kind, url=url, api_key=trainer.api_key, load_timeout_s=max(30.0, trainer.timeout_s))
    try:
        answers = client.inspect(trainer.question)
    except (ConfigError, EngineRefusedError, DeadlineError) as error:
        refusal = error
    return Context(
        trainer=trainer,
        http=http,
        info=info,
        facts=facts,
        date=(answer, began, ended),
        client=client,
        answers=answers,
        refusal=refusal,
    )


def _clock(engine: Context) -> Iterator[Finding]:
    answer, began, ended = engine.date
    try:
        theirs = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        yield ok("clock", "the engine does not report its time")
        return
    skew_s = max(0.0, theirs - ended, began - (theirs + 1.0))  # a Date header has whole seconds
    if skew_s <= _SKEW_S:
        yield ok("clock", "agrees with this machine's")
        return
    level, remedy = failure if skew_s > _WRONG_S else warning, "synchronise both machines with a time server (NTP)"
    yield level("clock", f"{skew_s:,.0f} s apart", f"less than {_SKEW_S:g} s", remedy)


def _routes(engine: Context) -> Iterator[Finding]:
    info, table = engine.info, _update_routes(engine)
    wanted = [route for name in (info.transports if info.stock else ("",)) for route in table.get(name, ())]
    missing = [route for route in wanted if not _has_route(engine.http, route)]
    if missing:
        remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment" if info.kind == "vllm" else "update it"
        yield failure("routes", f"lacks {', '.join(missing)}", "every route of a weight update", remedy)
    else:
        yield ok("routes", "every route of a weight update is there")
    if info.kind == "sglang" and info.stock and not _has_route(engine.http, "/begin_weight_update"):
        found = "no sessions around an update (SGLang 0.5.20 or older)"
        remedy = "update the engine, above all for a quantised model: it would load into weights derived from old ones"
        yield warning("routes", found, "0.5.21 or later", remedy)


def _update_routes(engine: Context) -> Mapping[str, Sequence[str]]:
    """Return the routes of the engine's `torchrl_ext.registry.Make`; none if it names none."""
    try:
        routes: Mapping[str, Sequence[str]] = engines.part(engine.info.kind, "routes")
        return routes
    except ConfigError:
        return {}


def _has_route(http: HTTPSession, route: str) -> bool:
    """Return whether the route exists. It is called by a method that it does not serve, so nothing happens."""
    return http.call("OPTIONS", route).status not in (404, 501)


def _key(engine: Context) -> Iterator[Finding]:
    """Call routes that change an engine without the key, in ways that change nothing."""
    url, kind = engine.http.url, engine.info.kind
    if engine.trainer.api_key is None:
        if not is_loopback(urlsplit(url).hostname or ""):
            remedy = "start the engine with an API key, or protect its port with a firewall"
            yield warning(
                "key", f"anyone who can reach {url} can pause the engine and replace its weights", "an API key", remedy
            )
        return
    calls: list[tuple[str, str, Any]] = [("POST", "/weights_checker", {}), ("GET", "/server_info", None)]
    if kind != "sglang":  # SGLang has one rule for all of its routes that change something
        names = [*_update_routes(engine).get("", ()), "/sleep", "/wake_up"]
        calls = [("GET", route, None) for route in names]
    if kind == "vllm":
        calls += [("GET", route, None) for route in ("/collective_rpc", "/server_info")]
        calls.append(("POST", "/update_weights_from_disk", {}))
    stranger = HTTPSession(url, timeout_s=engine.trainer.timeout_s, max_body_bytes=_MAX_BODY_BYTES)
    tried = {route: stranger.call(method, route, body).status for method, route, body in calls}
    opened = ", ".join(route for route, status in tried.items() if status not in (401, 403, 404))
    if opened:
        yield warning("key", f"these routes answer without the key: {opened}", "the key on every route", _FIREWALL)
    else:
        yield ok("key", "every route of a weight update asks for the key")


def _plugin(engine: Context) -> Iterator[Finding]:
    info, wanted = engine.info, engine.trainer.transport
    names, remedy = ", ".join(info.transports), _PLUGIN.get(info.kind, "use another transport")
    if engine.facts.is_guest:
        found = (
            "maps weights that a daemon owns (--load-format ipc_cache), so an update would also change other engines"
        )
        remedy = "start it with another --load-format"
        yield failure("plugin", found, "an engine with weights of its own", remedy)
    elif not names:
        yield failure("plugin", "follows by no transport", f"weight-transfer backend {BACKEND!r}", remedy)
    elif wanted is not None and wanted not in info.transports:
        yield failure("plugin", f"follows by {names}", f"transport {wanted!r}", remedy)
    elif info.stock:
        expected = "every transport, with digests, deltas, slices and rehearsals"
        more = "" if "native" in info.transports else _NATIVE.get(info.kind, "")
        yield warning("plugin", f"runs without our plugin: follows by {names}", expected, f"{remedy}{more}")
        yield from _stock(wanted)
    else:
        yield ok("plugin", f"follows by {names}")
    if engine.refusal is not None and not info.stock:
        error = engine.refusal
        yield warning("plugin", error.what, f"torchrl_ext {torchrl_ext.__version__}", error.hint or "")


def _stock(wanted: str | None) -> Iterator[Finding]:
    """Yield what an engine without our plugin gives up."""
    remedy = "send with verify='outputs', or install the plugin"
    yield warning("proof", "only its outputs show which weights it loaded", "digests of its weights", remedy)
    found = "after a failed update, a resume lets it serve a part of a version"
    remedy = "install the plugin, or send again before you resume it"
    yield warning("a part of a version", found, "workers that refuse to generate", remedy)
    if wanted == "native":
        found = "the port at which stock engines form a group has no secret: anyone who can reach it can take a rank"
        expected = "a network that only trainer and engines can reach"
        yield warning("group", found, expected, "protect it with a firewall")


def _paused(engine: Context) -> Iterator[Finding]:
    if engine.info.kind == "sglang":  # it has no route that says so
        return
    with contextlib.suppress(EngineRefusedError, AttributeError):
        if engine.http.get("/is_paused").get("is_paused"):
            remedy = "an update may be running; after a failed update, the next successful one resumes the engine"
            yield warning("paused", "the engine is paused", "an engine that generates", remedy)


def _world_size(engine: Context) -> Iterator[Finding]:
    info = engine.info
    found = f"tp {info.tp_size} x pp {info.pp_size} x dp {info.dp_size}, world size {info.world_size}"
    replica = info.tp_size * info.pp_size
    if info.world_size in (replica * info.dp_size, replica):  # replicas may share their workers
        yield ok("world size", found)
    else:
        remedy = "check the engine's parallel settings; a collective counts workers by this number"
        yield warning("world size", found, f"{replica * info.dp_size}", remedy)


def _kept_keys(engine: Context) -> Iterator[Finding]:
    """Look for stores of keys and values that outlive the engine's own cache and do not drop theirs with it."""
    connectors = engine.facts.kv_connectors
    keeping = ", ".join(name for name in connectors if name in _KEEPERS)
    if keeping:
        found = f"{keeping} keeps keys and values of the old weights when the engine drops its own"
        expected = "no store, or one whose connector has a reset_cache of its own"
        remedy = "empty the store after every update, or requests continue from the old weights"
        yield warning("kept keys", found, expected, remedy)
    elif connectors:
        yield ok("kept keys", f"{', '.join(connectors)} drops keys and values of the old weights")


def _versions(engine: Context) -> Iterator[Finding]:
    if not engine.answers:
        return
    first, theirs = engine.answers[0], sorted({str(answer["torchrl_ext"]) for answer in engine.answers})
    place = f"Python {first.get('python')} on {first.get('host')}"
    found = f"torchrl_ext {', '.join(theirs)}, torch {first.get('torch')}, {place}"
    if theirs == [torchrl_ext.__version__]:
        yield ok("versions", found)
    else:
        expected = f"torchrl_ext {torchrl_ext.__version__}, as here"
        yield warning("versions", found, expected, "install the same version on both sides")


def _shared(engine: Context) -> Iterator[Finding]:
    """Compare what workers and trainer see of the shared root and the network; remove the workers' probes."""
    trainer = engine.trainer
    for answer in engine.answers:
        root, dialled = answer.get("root"), answer.get("dial")
        worker = f" (worker {answer['worker']})" if len(engine.answers) > 1 and "worker" in answer else ""
        if isinstance(root, dict):
            yield trainer.judge_root(root, str(answer.get("host")), worker)
            if root.get("probe") is not None:
                with contextlib.suppress(WeightSyncError):  # a hidden file stays; the next trainer sweeps it
                    engine.client.inspect(Inspect(clear={"root": str(trainer.root), "probe": root["probe"]}))
        if isinstance(dialled, dict) and dialled.get("reached"):
            yield ok("group", f"the engine can reach the trainer{worker}")
        elif isinstance(dialled, dict):
            found = f"the engine cannot reach the trainer{worker}: {dialled.get('why')}"
            expected = "a connection from every worker to the trainer, where a process group meets"
            remedy = "allow the connection, name another interface in master_address, or use a shared root"
            yield failure("group", found, expected, remedy)
    if trainer.root is not None and not engine.answers:
        found, expected = "the engine has no plugin to look for the probe", f"{trainer.root} in the engine"
        remedy = "check it by hand, or install torchrl_ext in the engine's environment"
        yield warning("shared root", found, expected, remedy)


def _model(engine: Context) -> Iterator[Finding]:
    """Compare the engine with the checkpoint where training starts; without one, its dtype with its own checkpoint."""
    trainer, served, theirs = engine.trainer, engine.info.model, engine.facts.dtype
    if trainer.model is not None:
        own, other = config_of(trainer.model), config_of(served)
        differing = [key for key in _SHAPE if key in own and key in other and own[key] != other[key]]
        if differing:
            found, expected = (", ".join(f"{key} {config[key]}" for key in differing) for config in (other, own))
            remedy = "start the engine with the trainer's checkpoint, or name another one"
            yield failure("model", found, expected, remedy)
    start, sizes = trainer.model or served, trainer.sizes
    if trainer.model is None and Path(served).is_dir():
        with contextlib.suppress(WeightSyncError):
            sizes = sizes_of(served)
    dtype = next(iter(sizes), theirs)
    if theirs in ("", "auto", dtype):
        return
    wanted = dtype_from_name(theirs)
    exact = engine.info.kind == "embedded"  # it takes its own dtype only, where our plugins widen
    refused = not engine.info.stock and (exact or not keeps_values(dtype_from_name(dtype), wanted))
    level = failure if refused and trainer.model is not None else warning
    found = f"the engine computes in {theirs}: it refuses other weights, or casts them"
    yield level("dtype", found, f"{dtype}, as in {start}", cast_hint([("", wanted)]))


CHECKS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    _clock, _routes, _key, _plugin, _paused, _world_size, _kept_keys, _versions, _shared, _model,
)  # fmt: skip
"""The checks of one engine, in the order in which their findings are shown."""


def rehearse(engine: Context) -> Iterator[Finding]:
    """Rehearse an engine with our plugin, and yield a finding for each of its workers."""
    if engine.info.stock or not engine.info.transports:  # other findings say what it lacks
        return
    expected = "every layer equal to a cold start's"
    try:
        engine.client.info()
        engine.client.rehearse("once")
    except WeightSyncError as error:
        found = f"{error.what}. State: {error.state or 'unknown'}"
        yield failure("rehearsal", found, expected, error.hint or "")
        return
    every: tuple[Info, ...] = engine.client.rehearsed or ({},)
    for told in every:
        rows = [
            f"{row['layers']} {row['kernel']} {row['verdict']}" + (f" ({row['why']})" if row["why"] else "")
            for row in told.get("layers", ())
        ]
        worker = f"worker {told['worker']}: " if told.get("worker") else ""
        found = f"{worker}proof {told.get('proof', PROOFS[0])!r}; {'; '.join(rows) or 'nothing was rehearsed'}"
        if engine.client.proof == PROOFS[0]:
            yield warning("rehearsal", found, expected, str(told.get("why", "")))
        else:
            yield ok("rehearsal", found)


def compare(known: Sequence[tuple[str, Context | None]]) -> Iterator[Finding]:
    """Yield findings about all engines together: an engine given twice, differing models or dtypes, the world size.

    Args:
        known: address and context of each engine; None for one that did not say what it is.
    """
    every = [(address, engine) for address, engine in known if engine is not None]
    processes: dict[tuple[Any, Any], list[str]] = {}
    for address, engine in every:
        for answer in engine.answers[:1]:
            processes.setdefault((answer.get("host"), answer.get("pid")), []).append(address)
    for addresses in processes.values():
        if len(addresses) > 1:
            found = f"{' and '.join(addresses)} lead to the same engine"
            yield failure("addresses", found, "each engine once", "leave all but one out")
    models = {address: Path(engine.info.model).name for address, engine in every}
    dtypes = {address: engine.facts.dtype for address, engine in every if engine.facts.dtype != "auto"}
    for check, values in (("model", models), ("dtype", dtypes)):
        if len({*values.values()} - {""}) > 1:
            found = ", ".join(f"{address}: {value}" for address, value in values.items())
            remedy = "check that all of them should follow this trainer"
            yield warning(check, found, "the same in all engines", remedy)
    if len(every) == len(known):
        workers = sum(engine.info.world_size for _, engine in every)
        yield ok("world size", f"{len(every)} engine(s) with {workers} worker(s): a group has {1 + workers} ranks")
