"""What `torchrl-ext doctor` looks at in each engine, and in the trainer's root and checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torchrl_ext
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Inspect
from torchrl_ext.base.registry import engines as makes
from torchrl_ext.base.types import EngineInfo, Info, cast_hint, dtype_from_name, dtype_name
from torchrl_ext.control.discovery import discover
from torchrl_ext.control.http import HTTPSession, normalise_url
from torchrl_ext.control.makes.server_info import ServerInfo, server_info
from torchrl_ext.control.serving.router import listed_workers
from torchrl_ext.data.landing.placement import keeps_values
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.transports.disk import SharedRoot
from torchrl_ext.data.weights.checkpoint import CheckpointSource

__all__ = ["Finding", "Trainer", "dtypes_of", "examine", "failed", "failure", "ok", "probe"]

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
        where: an engine's address, or ``"trainer"``; set after the check.
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


def examine(trainer: Trainer, address: str) -> tuple[EngineInfo | None, list[Finding]]:
    """Look at one engine, and change nothing there; a connected trainer is not disturbed.

    Returns:
        What the engine is, or None if it did not say so, and the findings.
    """
    access: Info = {"api_key": trainer.api_key, "timeout_s": trainer.timeout_s}
    try:
        http = HTTPSession(normalise_url(address), **access)
        workers = listed_workers(http)
        if workers is not None:
            found = f"a router with {len(workers)} worker(s): it passes each control call to just one of them"
            remedy = f"give the engines' own addresses: {' '.join(workers) or 'it has none yet'}"
            return None, [failure("router", found, "the address of an engine", remedy)]
        (info,) = discover(http.url, **access)
    except EngineRefusedError as error:
        return None, [failed("routes", error)]
    except WeightSyncError as error:
        return None, [failed("reachable", error)]
    sizes = f"tp {info.tp_size} x pp {info.pp_size} x dp {info.dp_size}"
    what = f"{info.kind} {info.version}, {info.worker_type}, {sizes}, serves {info.model or '?'}"
    findings = [ok("reachable", what)]
    try:
        findings += _checked(trainer, http, info)
    except WeightSyncError as error:  # it answers no more
        findings.append(failed("reachable", error))
    return info, findings


def _checked(trainer: Trainer, http: HTTPSession, info: EngineInfo) -> Iterator[Finding]:
    facts, answers, refusal = ServerInfo(info=info), list[Info](), None
    with contextlib.suppress(EngineRefusedError):  # of a make of others
        facts = server_info(http)
    client = makes.make(info.kind, url=http.url, api_key=trainer.api_key, load_timeout_s=max(30.0, trainer.timeout_s))
    try:
        answers = client.inspect(trainer.question)
    except (ConfigError, EngineRefusedError, DeadlineError) as error:
        refusal = error
    yield _routes(info, http)
    yield _plugin(info, trainer.transport)
    if refusal is not None and not info.stock:
        yield warning("plugin", refusal.what, "workers with torchrl_ext", refusal.hint or "")
    with contextlib.suppress(EngineRefusedError):  # it cannot say
        if client.paused():
            remedy = "an update may be running; after a failed update, the next successful one resumes the engine"
            yield warning("paused", "the engine is paused", "an engine that generates", remedy)
    yield from _versions(answers)
    yield from _shared(answers, trainer.root)
    if trainer.model is not None:
        yield from _model(info, facts.dtype, trainer.model, trainer.dtypes)


def _routes(info: EngineInfo, http: HTTPSession) -> Finding:
    try:
        table = makes.part(info.kind, "routes")
    except ConfigError:  # a make of others may name none
        table = {}
    wanted = [route for name in (info.transports if info.stock else ("",)) for route in table.get(name, ())]
    # called by a method that a route does not serve, so that nothing happens
    missing = [route for route in wanted if http.call("OPTIONS", route).status in (404, 501)]
    if not missing:
        return ok("routes", "every route of a weight update is there")
    remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment" if info.kind == "vllm" else "update it"
    return failure("routes", f"lacks {', '.join(missing)}", "every route of a weight update", remedy)


def _plugin(info: EngineInfo, wanted: str | None) -> Finding:
    names, remedy = ", ".join(info.transports), _PLUGIN.get(info.kind, "use another transport")
    if not names:
        return failure("plugin", "follows by no transport", "our plugin, or weights from files", remedy)
    if wanted is not None and wanted not in info.transports:
        return failure("plugin", f"follows by {names}", f"transport {wanted!r}", remedy)
    if info.stock:
        found = f"runs without our plugin: follows by {names}, and only its outputs show which weights it loaded"
        return warning("plugin", found, "digests of its weights, and workers that refuse a part of a version", remedy)
    return ok("plugin", f"follows by {names}")


def _versions(answers: Sequence[Info]) -> Iterator[Finding]:
    theirs = {str(one["torchrl_ext"]) for one in answers}
    for first in answers[:1]:
        found = f"torchrl_ext {', '.join(sorted(theirs))}, torch {first.get('torch')}, Python {first.get('python')}"
        if theirs == {torchrl_ext.__version__}:
            yield ok("versions", found)
        else:
            expected = f"torchrl_ext {torchrl_ext.__version__}, as here"
            yield warning("versions", found, expected, "install the same version on both sides")


def _shared(answers: Sequence[Info], root: str | None) -> Iterator[Finding]:
    """Say whether every worker sees the probe in the root."""
    for replied in answers:
        seen = replied.get("root")
        if isinstance(seen, dict) and seen.get("seen"):
            yield ok("shared root", f"worker {replied.get('worker', 0)} reads {root}")
        elif isinstance(seen, dict):
            found = f"{replied.get('host')}:{root} does not contain the trainer's file: {seen.get('why')}"
            remedy = str(seen.get("remedy") or "mount it on both hosts under the same path")
            yield failure("shared root", found, f"the directory {root} of the trainer", remedy)
    if root is not None and not answers:
        found = "the engine has no plugin to look for the probe"
        yield warning("shared root", found, f"{root} in the engine", "check by hand, or install torchrl_ext there")


def _model(info: EngineInfo, theirs: str, directory: str, dtypes: Sequence[str]) -> Iterator[Finding]:
    """Compare the engine with the checkpoint where training starts."""
    own, other = _config_of(directory), _config_of(info.model)
    differing = [key for key in _SHAPE if key in own and key in other and own[key] != other[key]]
    if differing:
        found, expected = (", ".join(f"{key} {config[key]}" for key in differing) for config in (other, own))
        remedy = "start the engine with the trainer's checkpoint, or name another one"
        yield failure("model", found, expected, remedy)
    dtype = next(iter(dtypes), theirs)
    if theirs in ("", "auto", dtype):
        return
    wanted = dtype_from_name(theirs)
    exact = info.kind == "embedded"  # it takes its own dtype only, where our plugins widen
    refused = not info.stock and (exact or not keeps_values(dtype_from_name(dtype), wanted))
    level = failure if refused else warning
    found = f"the engine computes in {theirs}: it refuses other weights, or casts them"
    yield level("dtype", found, f"{dtype}, as in {directory}", cast_hint([("", wanted)]))


def _config_of(directory: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint directory; empty if this machine cannot read it."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((Path(directory) / "config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}
