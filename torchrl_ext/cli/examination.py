"""What `torchrl-ext doctor` looks at: a list of checks for each engine, and a comparison of all engines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torchrl_ext
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Inspect
from torchrl_ext.base.registry import engines as makes
from torchrl_ext.base.reports import PROOFS
from torchrl_ext.base.types import EngineInfo, Info, cast_hint, dtype_from_name, dtype_name, is_loopback
from torchrl_ext.control.discovery import discover
from torchrl_ext.control.http import HTTPSession, normalise_url
from torchrl_ext.control.makes.server_info import ServerInfo, server_info
from torchrl_ext.control.serving.router import listed_workers
from torchrl_ext.data.landing.placement import keeps_values
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.transports.disk import SharedRoot
from torchrl_ext.data.weights.checkpoint import CheckpointSource

__all__ = [
    "CHECKS", "Examined", "Finding", "Trainer", "compare", "dtypes_of", "examine", "failed", "failure", "ok", "probe",
    "rehearse",
]  # fmt: skip

_PLUGIN = {
    "vllm": "install torchrl_ext in the engine's environment, and name it in VLLM_PLUGINS if that is set; "
    "`torchrl-ext serve vllm` does it",
    "sglang": "install torchrl_ext in the engine's environment; `torchrl-ext serve sglang` does it",
}
_SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``"ok"``, ``"warning"`` (an update works, with a catch) or ``"failure"`` (an update would fail).
        check: the name of the check.
        found: the actual state.
        expected, remedy: the state that an update needs, and how to reach it; empty if the level is ``"ok"``.
        where: an engine's address, ``"trainer"`` or ``"fleet"``; set after the check.
    """

    level: str
    check: str
    found: str
    expected: str = ""
    remedy: str = ""
    where: str = ""


ok, warning, failure = (partial(Finding, level) for level in ("ok", "warning", "failure"))


def failed(check: str, error: WeightSyncError) -> Finding:
    """Return a failure with the error's texts."""
    return failure(check, error.what, error.expected or "", error.hint or "")


@dataclass(frozen=True)
class Trainer:
    """The trainer's side of an update, as the command line gives it; ``dtypes`` are those of the checkpoint."""

    transport: str | None
    root: str | None
    model: str | None
    dtypes: Sequence[str]
    question: Inspect
    api_key: str | None
    timeout_s: float


@dataclass(frozen=True)
class Examined:
    """What the checks of one engine look at; ``answers`` are its workers', and ``refusal`` why there are none."""

    trainer: Trainer
    http: HTTPSession
    info: EngineInfo
    facts: ServerInfo
    client: Any
    answers: list[Info]
    refusal: WeightSyncError | None


def dtypes_of(directory: str) -> list[str]:
    """Return the dtypes of a checkpoint directory's tensors, the most bytes first."""
    sizes: dict[str, int] = {}
    for meta in CheckpointSource(directory).params():
        sizes[dtype_name(meta.dtype)] = sizes.get(dtype_name(meta.dtype), 0) + meta.nbytes
    return sorted(sizes, key=lambda name: -sizes[name])


def probe(root: str, ends: ExitStack) -> Info:
    """Write a probe into the root until the examination ends; a directory made for it goes too."""
    store = open_store(root)
    if "://" not in store.url and not Path(store.url).exists():
        Path(store.url).mkdir(parents=True)
        ends.enter_context(contextlib.suppress(OSError))  # somebody has put something there
        ends.callback(Path(store.url).rmdir)
    shared = SharedRoot(store, "doctor")
    ends.callback(shared.clear)
    return shared.invite()


# one engine


def examine(trainer: Trainer, address: str) -> tuple[list[Finding], Examined | None]:
    """Look at one engine. Nothing is changed there; a connected trainer is not disturbed.

    Returns:
        The findings, and what the checks looked at; None if the engine did not say what it is.
    """
    findings: list[Finding] = []
    engine: Examined | None = None
    try:
        engine = _ask(address, trainer, findings)
        if engine is not None:
            findings += [finding for check in CHECKS for finding in check(engine)]
    except WeightSyncError as error:  # it does not answer, or no more
        findings.append(failed("reachable", error))
    return findings, engine


def _ask(address: str, trainer: Trainer, findings: list[Finding]) -> Examined | None:
    """Ask the engine for everything that more than one check needs; None, with a finding, if it is no engine."""
    try:
        url = normalise_url(address)
    except ConfigError as error:
        findings.append(failure("address", error.what, error.expected or "", "write IPv6 in brackets: [::1]:8000"))
        return None
    access: Info = {"api_key": trainer.api_key, "timeout_s": trainer.timeout_s}
    http = HTTPSession(url, **access)
    workers = listed_workers(http)
    if workers is not None:
        found = f"a router with {len(workers)} worker(s): it passes each control call to just one of them"
        remedy = f"give the engines' own addresses: {' '.join(workers) or 'it has none yet'}"
        findings.append(failure("router", found, "the address of an engine", remedy))
        return None
    try:
        (info,) = discover(url, **access)
    except EngineRefusedError as error:
        findings.append(failed("routes", error))
        return None
    sizes = f"tp {info.tp_size} x pp {info.pp_size} x dp {info.dp_size}"
    what = f"{info.kind} {info.version}, {info.worker_type}, {sizes}, serves {info.model or '?'}"
    findings.append(ok("reachable", what))
    facts, answers, refusal = ServerInfo(info=info), list[Info](), None
    with contextlib.suppress(EngineRefusedError):  # of a make of others
        facts = server_info(http)
    client = makes.make(info.kind, url=url, api_key=trainer.api_key, load_timeout_s=max(30.0, trainer.timeout_s))
    try:
        answers = client.inspect(trainer.question)
    except (ConfigError, EngineRefusedError, DeadlineError) as error:
        refusal = error
    return Examined(trainer, http, info, facts, client, answers, refusal)


def _routes(engine: Examined) -> Iterator[Finding]:
    info = engine.info
    try:
        table = makes.part(info.kind, "routes")
    except ConfigError:  # a make of others may name none
        table = {}
    wanted = [route for name in (info.transports if info.stock else ("",)) for route in table.get(name, ())]
    # called by a method that a route does not serve, so that nothing happens
    missing = [route for route in wanted if engine.http.call("OPTIONS", route).status in (404, 501)]
    if missing:
        remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment" if info.kind == "vllm" else "update it"
        yield failure("routes", f"lacks {', '.join(missing)}", "every route of a weight update", remedy)
    else:
        yield ok("routes", "every route of a weight update is there")
    if engine.trainer.api_key is None and not is_loopback(urlsplit(engine.http.url).hostname or ""):
        found = f"anyone who can reach {engine.http.url} can pause the engine and replace its weights"
        remedy = "start the engine with an API key, or protect its port with a firewall"
        yield warning("key", found, "an API key", remedy)


def _plugin(engine: Examined) -> Iterator[Finding]:
    info, wanted = engine.info, engine.trainer.transport
    names, remedy = ", ".join(info.transports), _PLUGIN.get(info.kind, "use another transport")
    if not names:
        yield failure("plugin", "follows by no transport", "our plugin, or weights from files", remedy)
    elif wanted is not None and wanted not in info.transports:
        yield failure("plugin", f"follows by {names}", f"transport {wanted!r}", remedy)
    elif info.stock:
        found = f"runs without our plugin: follows by {names}, and only its outputs show which weights it loaded"
        yield warning("plugin", found, "digests of its weights, and workers that refuse a part of a version", remedy)
    else:
        yield ok("plugin", f"follows by {names}")
    if engine.refusal is not None and not info.stock:
        yield warning("plugin", engine.refusal.what, "workers with torchrl_ext", engine.refusal.hint or "")


def _paused(engine: Examined) -> Iterator[Finding]:
    with contextlib.suppress(EngineRefusedError):  # it cannot say
        if engine.client.paused():
            remedy = "an update may be running; after a failed update, the next successful one resumes the engine"
            yield warning("paused", "the engine is paused", "an engine that generates", remedy)


def _versions(engine: Examined) -> Iterator[Finding]:
    theirs = {str(one["torchrl_ext"]) for one in engine.answers}
    for first in engine.answers[:1]:
        found = f"torchrl_ext {', '.join(sorted(theirs))}, torch {first.get('torch')}, Python {first.get('python')}"
        if theirs == {torchrl_ext.__version__}:
            yield ok("versions", found)
        else:
            expected = f"torchrl_ext {torchrl_ext.__version__}, as here"
            yield warning("versions", found, expected, "install the same version on both sides")


def _shared(engine: Examined) -> Iterator[Finding]:
    """Say whether every worker sees the probe in the root."""
    root = engine.trainer.root
    for replied in engine.answers:
        seen = replied.get("root")
        if isinstance(seen, dict) and seen.get("seen"):
            yield ok("shared root", f"worker {replied.get('worker', 0)} reads {root}")
        elif isinstance(seen, dict):
            found = f"{replied.get('host')}:{root} does not contain the trainer's file: {seen.get('why')}"
            remedy = str(seen.get("remedy") or "mount it on both hosts under the same path")
            yield failure("shared root", found, f"the directory {root} of the trainer", remedy)
    if root is not None and not engine.answers:
        found = "the engine has no plugin to look for the probe"
        yield warning("shared root", found, f"{root} in the engine", "check by hand, or install torchrl_ext there")


def _model(engine: Examined) -> Iterator[Finding]:
    """Compare the engine with the checkpoint where training starts."""
    trainer, theirs = engine.trainer, engine.facts.dtype
    if trainer.model is None:
        return
    own, other = _config_of(trainer.model), _config_of(engine.info.model)
    differing = [key for key in _SHAPE if key in own and key in other and own[key] != other[key]]
    if differing:
        found, expected = (", ".join(f"{key} {config[key]}" for key in differing) for config in (other, own))
        remedy = "start the engine with the trainer's checkpoint, or name another one"
        yield failure("model", found, expected, remedy)
    dtype = next(iter(trainer.dtypes), theirs)
    if theirs in ("", "auto", dtype):
        return
    wanted = dtype_from_name(theirs)
    exact = engine.info.kind == "embedded"  # it takes its own dtype only, where our plugins widen
    refused = not engine.info.stock and (exact or not keeps_values(dtype_from_name(dtype), wanted))
    level = failure if refused else warning
    found = f"the engine computes in {theirs}: it refuses other weights, or casts them"
    yield level("dtype", found, f"{dtype}, as in {trainer.model}", cast_hint([("", wanted)]))


def _config_of(directory: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint directory; empty if this machine cannot read it."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((Path(directory) / "config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}


CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    _routes, _plugin, _paused, _versions, _shared, _model,
)  # fmt: skip
"""The checks of one engine, in the order in which their findings are shown."""


def rehearse(engine: Examined) -> Iterator[Finding]:
    """Rehearse an engine with our plugin, and yield a finding for each of its workers."""
    if engine.info.stock or not engine.info.transports:  # other findings say what it lacks
        return
    expected = "every layer equal to a cold start's"
    try:
        engine.client.info()
        proof = engine.client.rehearse("once")
    except WeightSyncError as error:
        yield failure("rehearsal", f"{error.what}. State: {error.state or 'unknown'}", expected, error.hint or "")
        return
    every: tuple[Info, ...] = engine.client.rehearsed or ({},)
    for replied in every:
        rows = [f"{row['layers']} {row['kernel']} {row['verdict']} {row['why']}" for row in replied.get("layers", ())]
        found = f"worker {replied.get('worker', 0)}: proof {replied.get('proof', PROOFS[0])!r}; {'; '.join(rows)}"
        if proof == PROOFS[0]:
            yield warning("rehearsal", found, expected, str(replied.get("why", "")))
        else:
            yield ok("rehearsal", found)


# all engines


def compare(known: Sequence[tuple[str, Examined | None]]) -> Iterator[Finding]:
    """Yield findings about all engines together: an engine given twice, and the size of a group."""
    every = [(address, engine) for address, engine in known if engine is not None]
    processes: dict[tuple[Any, Any], list[str]] = {}
    for address, engine in every:
        for replied in engine.answers[:1]:
            processes.setdefault((replied.get("host"), replied.get("pid")), []).append(address)
    for same in processes.values():
        if len(same) > 1:
            yield failure("addresses", f"{' and '.join(same)} lead to the same engine", "each engine once", "drop one")
    if every and len(every) == len(known):
        workers = sum(engine.info.world_size for _, engine in every)
        yield ok("group", f"{len(every)} engine(s) with {workers} worker(s): a group has {1 + workers} ranks")
