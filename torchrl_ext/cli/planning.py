"""Recommend an entry point and a transport for a deployment: the goals of other systems' guides to external engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchrl_ext.base.errors import ConfigError

__all__ = ["DECISIONS", "Decision", "Facts", "Recommendation", "recommend"]

_HEAVY = 0.1
"""A full version is too heavy if its bytes take more than this share of the interval between updates."""


@dataclass(frozen=True)
class Decision:
    """One row of the table of goals: a goal or a condition, and options of `WeightUpdateConfig` to start from."""

    goal: str
    entry_point: str


_FULL, _DELTA = "update_weight_mode=full update_weight_transport=", "update_weight_mode=delta update_weight_transport="
_EXTERNAL = "rollout_external_engine_addrs"

DECISIONS = {
    "external": Decision("other people start the engines, and the job only connects to them", _EXTERNAL),
    "topology": Decision(
        "the job launches engines, with prefill/decode pools, several models, different groups or overrides",
        "vllm_config",
    ),
    "group": Decision("trainer and engines can form a process group", _FULL + "nccl"),
    "shards": Decision("they can, and each rank of a sharded trainer sends slices", _FULL + "sharded"),
    "path": Decision("trainer and engines cannot form a process group, but see the same path", _FULL + "disk"),
    "heavy": Decision("full checkpoints are too heavy, across clusters or datacenters", _DELTA + "disk"),
    "stack": Decision(
        "engines have another environment, or devices of another model or vendor",
        _EXTERNAL + " update_weight_transport=disk",
    ),
    "validate": Decision("you want to test the delta's coding and loading inside one datacenter", _DELTA + "nccl"),
    "frozen": Decision(
        "frozen reference, reward or tool models are served too", "vllm_config with update_weights: false"
    ),
}
"""The table's rows by short name, in the guides' order; ``shards`` is our addition."""

_ROWS = {
    "collective": "group",
    "sharded": "shards",
    "disk": "path",
    "delta over disk": "heavy",
    "delta over collective": "validate",
}


def _fact(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the choice depends on in a deployment; each field's ``metadata["help"]`` explains it.

    Raises:
        ConfigError: a number is not positive.
    """

    parameters: float = _fact(8_000_000_000, "elements of the model, which has two bytes for each")
    trainer_ranks: float = _fact(1, "trainer ranks among which the weights are sharded; 1 if one rank holds them all")
    topology: bool = _fact(False, "the job starts engines: pools, several models, different groups or overrides")
    frozen_models: bool = _fact(False, "reference, reward or tool models are served beside the policy")
    colocated: bool = _fact(False, "trainer and engines share their devices")
    same_stack: bool = _fact(True, "engines run in a compatible environment on compatible devices")
    group: bool = _fact(True, "a process group between trainer and engines can be formed")
    shared_path: str | None = _fact(None, "directory or bucket that both sides see")
    validate_delta: bool = _fact(False, "you want to test the delta's coding and loading within one datacenter")
    network_bytes_s: float = _fact(12.5e9, "bytes a second of a process group between trainer and engines")
    path_bytes_s: float = _fact(2e9, "bytes a second of the shared path; the slowest link, if regions read it")
    interval_s: float = _fact(60.0, "seconds from one update to the next")

    def __post_init__(self) -> None:
        for fact in fields(self):
            value = getattr(self, fact.name)
            if type(fact.default) in (int, float) and not 0 < value < math.inf:
                raise ConfigError(f"{fact.name} is {value!r}", expected="a positive number")


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The route that was chosen from the facts.

    Attributes:
        facts: from which it was chosen.
        answers: the rows of `DECISIONS` that apply, by short name.
        transport: name of the transport.
        settings: for ``make_transport(recommendation.transport, ...)``.
        options: the same settings under the names of `WeightUpdateConfig`.
        reason: why.
        rejected: why the facts rule each other route out, or leave it behind, by name.
    """

    facts: Facts
    answers: Mapping[str, Decision]
    transport: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    reason: str
    rejected: Mapping[str, str]


def recommend(**facts: Any) -> Recommendation:
    """Recommend a route for weight updates.

    The simplest full route that the facts allow; where a full version's bytes take more than a tenth of the interval
    between updates on that route, slices of all ranks, or else a delta.

    Args:
        facts: fields of `Facts`.

    Raises:
        ConfigError: the facts are impossible or rule out every route.
    """
    given = Facts(**facts)
    obstacles = _obstacles(given)
    chosen, reason = _choose(given, [name for name, why in obstacles.items() if not why])
    if not chosen:
        raise ConfigError(
            f"weights cannot reach these engines: {'; '.join(f'{name}: {why}' for name, why in obstacles.items())}",
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    row = _ROWS.get(chosen)
    point = DECISIONS[row].entry_point if row else _FULL + "nccl"
    options: dict[str, Any] = dict(option.split("=") for option in point.split())
    transport, _, carrier = chosen.partition(" over ")
    settings: dict[str, Any] = {"carrier": carrier} if carrier else {}
    if "disk" in (transport, carrier):
        settings["root"] = options["update_weight_disk_dir"] = given.shared_path
    if given.colocated:
        options["colocate"] = True
    if given.validate_delta:
        settings["encoding"] = options["update_weight_encoding"] = "indices"
    applies = {
        row: True,
        "topology" if given.topology else "external": True,
        "frozen": given.frozen_models,
        "stack": not given.same_stack,
    }
    return Recommendation(
        facts=given,
        answers={name: decision for name, decision in DECISIONS.items() if applies.get(name)},
        transport=transport,
        settings=settings,
        options=options,
        reason=reason,
        rejected={name: why or f"possible; {chosen}: {reason}" for name, why in obstacles.items() if name != chosen},
    )


def _choose(facts: Facts, possible: list[str]) -> tuple[str, str]:
    """Return the name of the route and the reason; an empty name if none is possible."""
    full = next((name for name in possible if " over " not in name), "")
    delta = next((name for name in possible if " over " in name), "")
    if facts.validate_delta:
        return delta, "the plainest encoding over a group needs no shared path and is the easiest to inspect"
    if full == "ipc":
        return full, "trainer and engines share their devices: weights go from memory to memory"
    if not full:
        return delta, "full versions have no route here"
    seconds = 2 * facts.parameters / (facts.network_bytes_s if full == "collective" else facts.path_bytes_s)
    if seconds <= _HEAVY * facts.interval_s or not delta:
        return full, f"the simplest route that the facts allow; its bytes take {seconds:,.3g} s"
    heavy = f"full versions are too heavy: {seconds:,.3g} s of the {facts.interval_s:g} s between two updates"
    if "sharded" in possible:
        return "sharded", f"{heavy}; every rank can send its own slices"
    return delta, heavy


def _obstacles(facts: Facts) -> dict[str, str]:
    """Return every route, simplest first, and why the facts rule it out; empty if they do not."""
    group, memory = "", "" if facts.colocated else "trainer and engines share no device"
    if facts.colocated:
        group = "two processes on one device cannot be ranks of one group"
    elif not facts.group:
        group = "trainer and engines cannot form a process group"
    elif not facts.same_stack:
        group = "a group needs compatible devices and libraries at both ends"
    files = "" if facts.shared_path else "trainer and engines share no path"
    store = "://" in (facts.shared_path or "").removeprefix("file://")
    bucket = "full versions are checkpoint directories, and an object store has none" if store else ""
    no_delta = "memory handles would not become smaller by a delta" if facts.colocated else ""
    validated = "a delta over a group is to be tested" if facts.validate_delta else ""
    one = "the trainer has one rank, which holds all that is to be sent" if facts.trainer_ranks == 1 else ""
    return {
        "ipc": validated or memory,
        "collective": group or validated,
        "sharded": group or validated or one,
        "disk": validated or files or bucket,
        "delta over disk": validated or no_delta or files,
        "delta over collective": no_delta or group,
    }
