"""Recommend an entry point and a transport for a deployment: the goals of other systems' guides to external engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_ext.base.errors import ConfigError

__all__ = ["GOALS", "Facts", "Goal", "Recommendation", "recommend"]


@dataclass(frozen=True)
class Goal:
    """One row of the table: a goal or a condition, and options of `WeightUpdateConfig` to start from."""

    goal: str
    entry_point: str


_FULL, _DELTA = "update_weight_mode=full update_weight_transport=", "update_weight_mode=delta update_weight_transport="
_EXTERNAL = "rollout_external_engine_addrs"

GOALS = {
    "external": Goal("other people start the engines, and the job only connects to them", _EXTERNAL),
    "topology": Goal(
        "the job launches engines, with prefill/decode pools, several models, different groups or overrides",
        "vllm_config",
    ),
    "group": Goal("trainer and engines can form a process group", _FULL + "nccl"),
    "shards": Goal("they can, and each rank of a sharded trainer sends slices", _FULL + "sharded"),
    "path": Goal("trainer and engines cannot form a process group, but see the same path", _FULL + "disk"),
    "heavy": Goal("full checkpoints are too heavy, across clusters or datacenters", _DELTA + "disk"),
    "stack": Goal(
        "engines have another environment, or devices of another model or vendor",
        _EXTERNAL + " update_weight_transport=disk",
    ),
    "validate": Goal("you want to test the delta's coding and loading inside one datacenter", _DELTA + "nccl"),
    "frozen": Goal("frozen reference, reward or tool models are served too", "vllm_config with update_weights: false"),
}
"""The table's rows by short name, in the guides' order; ``shards`` is our addition."""

_ROWS = {
    "ipc": "group",
    "collective": "group",
    "sharded": "shards",
    "disk": "path",
    "delta over disk": "heavy",
    "delta over collective": "validate",
}
"""Routes, simplest first, and the row of each."""


def _fact(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the choice depends on in a deployment; each field's ``metadata["help"]`` explains it."""

    topology: bool = _fact(False, "the job starts engines: pools, several models, different groups or overrides")
    frozen_models: bool = _fact(False, "reference, reward or tool models are served beside the policy")
    colocated: bool = _fact(False, "trainer and engines share their devices")
    same_stack: bool = _fact(True, "engines run in a compatible environment on compatible devices")
    group: bool = _fact(True, "a process group between trainer and engines can be formed")
    sharded: bool = _fact(False, "the weights are sharded among several trainer ranks")
    shared_path: str | None = _fact(None, "directory or bucket that both sides see")
    heavy: bool = _fact(False, "full versions take too long between trainer and engines")
    validate_delta: bool = _fact(False, "you want to test the delta's coding and loading within one datacenter")


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The route that was chosen from the facts; as text, the line of Python that makes its transport.

    Attributes:
        facts: from which it was chosen.
        answers: the rows of `GOALS` that apply, by short name.
        transport: name of the transport.
        settings: for ``make_transport(recommendation.transport, ...)``.
        options: the same settings under the names of `WeightUpdateConfig`.
        rejected: why the facts rule each other route out, or leave it behind, by name.
    """

    facts: Facts
    answers: Mapping[str, Goal]
    transport: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    rejected: Mapping[str, str]

    def __str__(self) -> str:
        settings = (f", {name}={json.dumps(value)}" for name, value in self.settings.items())
        return f"tx.make_transport({json.dumps(self.transport)}{''.join(settings)})"


def recommend(**facts: Any) -> Recommendation:
    """Recommend a route for weight updates: the simplest full one that the facts allow.

    Where full versions are too heavy, slices of all ranks, or else a delta.

    Args:
        facts: fields of `Facts`.

    Raises:
        ConfigError: there is no such fact, or the facts rule out every route.
    """
    try:
        given = Facts(**facts)
    except TypeError as error:
        raise ConfigError(f"{error}", expected=f"some of {', '.join(Facts.__dataclass_fields__)}") from None
    obstacles = dict(zip(_ROWS, _obstacles(given), strict=True))
    possible = [name for name, why in obstacles.items() if not why]
    if not possible:
        raise ConfigError(
            f"weights cannot reach these engines: {'; '.join(f'{name}: {why}' for name, why in obstacles.items())}",
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    light = [name for name in possible if name in ("sharded", "delta over disk", "delta over collective")]
    chosen = light[0] if given.heavy and light else possible[0]
    options: dict[str, Any] = dict(option.split("=") for option in GOALS[_ROWS[chosen]].entry_point.split())
    transport, _, carrier = chosen.partition(" over ")
    settings: dict[str, Any] = {"carrier": carrier} if carrier == "collective" else {}  # a root says the rest
    if "disk" in (transport, carrier):
        settings["root"] = options["update_weight_disk_dir"] = given.shared_path
    if given.colocated:
        options["colocate"] = True
    if given.validate_delta:
        settings["encoding"] = options["update_weight_encoding"] = "indices"
    applies = {
        _ROWS[chosen]: chosen != "ipc",
        "topology" if given.topology else "external": True,
        "frozen": given.frozen_models,
        "stack": not given.same_stack,
    }
    return Recommendation(
        facts=given,
        answers={name: goal for name, goal in GOALS.items() if applies.get(name)},
        transport=transport,
        settings=settings,
        options=options,
        rejected={name: why or f"possible; {chosen} fits better" for name, why in obstacles.items() if name != chosen},
    )


def _obstacles(facts: Facts) -> tuple[str, ...]:
    """Return why the facts rule out each route of `_ROWS`; empty if they do not."""
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
    one = "" if facts.sharded else "one rank of the trainer holds all that is to be sent"
    return (
        validated or memory,
        group or validated,
        group or validated or one,
        validated or files or bucket,
        validated or no_delta or files,
        no_delta or group,
    )
