"""Recommend an entry point and a transport for a deployment: the goals of other systems' guides to external engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from torchrl_ext.errors import ConfigError

__all__ = ["DECISIONS", "Decision", "Facts", "Recommendation", "recommend"]

_HEAVY = 0.1
"""A full version is too heavy if its bytes take more than this share of the interval between updates."""


class Decision(NamedTuple):
    """One row of the table of goals: a goal or a condition, and options of `WeightUpdateConfig` to start from."""

    goal: str
    entry_point: str


_FULL, _DELTA = "update_weight_mode=full update_weight_transport=", "update_weight_mode=delta update_weight_transport="

DECISIONS: Mapping[str, Decision] = MappingProxyType(
    {
        "external": Decision(
            "other people start the engines, and the job only connects to them", "rollout_external_engine_addrs"
        ),
        "topology": Decision(
            "the job launches engines, with prefill/decode pools, several models, different groups or overrides",
            "vllm_config",
        ),
        "group": Decision("trainer and engines can form a process group", _FULL + "nccl"),
        "shards": Decision(
            "they can, and the trainer is sharded: each rank sends a worker only the slices that it needs",
            _FULL + "sharded",
        ),
        "path": Decision("trainer and engines cannot form a process group, but see the same path", _FULL + "disk"),
        "heavy": Decision("full checkpoints are too heavy, across clusters or datacenters", _DELTA + "disk"),
        "stack": Decision(
            "engines have another environment, or devices of another model or vendor",
            "rollout_external_engine_addrs update_weight_transport=disk",
        ),
        "validate": Decision("you want to test the delta's coding and loading inside one datacenter", _DELTA + "nccl"),
        "frozen": Decision(
            "frozen reference, reward or tool models are served too", "vllm_config with update_weights: false"
        ),
    }
)
"""The table's rows by short name, in the guides' order; ``shards`` is our addition."""

_ROWS = {
    ("collective", None): "group",
    ("sharded", None): "shards",
    ("disk", None): "path",
    ("delta", "disk"): "heavy",
    ("delta", "collective"): "validate",
}


def _fact(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the choice depends on in a deployment; each field's ``metadata["help"]`` explains it.

    Raises:
        ConfigError: a value or a combination of values is impossible.
    """

    parameters: int = _fact(8_000_000_000, "elements of the model")
    bytes_per_parameter: float = _fact(2.0, "2 for bfloat16")
    trainer_ranks: int = _fact(1, "trainer ranks among which the weights are sharded; 1 if one rank holds them all")
    regions: int = _fact(1, "regions with engines, the trainer's included")
    owned: bool | None = _fact(None, "the training job starts the engines; by default only if topology is set")
    topology: bool = _fact(False, "prefill/decode pools, several models, different groups or overrides are needed")
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
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "int" and (type(value) is not int or value < 1):
                raise ConfigError(f"{one.name} is {value!r}", expected="a whole number of at least 1")
            if one.type == "float" and not 0 < value < math.inf:
                raise ConfigError(f"{one.name} is {value!r}", expected="a positive number")
        not_owned = self.owned is False and self.topology
        for wrong, what, expected in (
            (not_owned, "a topology needs engines that the job starts", "owned=True, or no topology"),
            (self.colocated and self.regions > 1, "colocated engines are where the trainer is", "regions=1"),
            (self.validate_delta and self.colocated, "a delta does not go with colocated engines", "colocated=False"),
        ):
            if wrong:
                raise ConfigError(what, expected=expected)

    @property
    def job_owns(self) -> bool:
        """Whether the job starts the engines: `owned`, or by default `topology`."""
        return self.topology if self.owned is None else self.owned

    @property
    def model_bytes(self) -> float:
        """Bytes of one full version of the weights."""
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The route that was chosen from the facts.

    Attributes:
        facts: from which it was chosen.
        transport: name of the transport.
        encoding: the encoding of deltas; None for full versions.
        carrier: ``"disk"`` or ``"collective"`` for deltas, else None.
        reason: why.
        rejected: why the facts rule each other route out, or leave it behind, by name.
    """

    facts: Facts
    transport: str
    encoding: str | None = None
    carrier: str | None = None
    reason: str
    rejected: Mapping[str, str]

    @property
    def answers(self) -> dict[str, Decision]:
        """The rows of `DECISIONS` that apply, by short name."""
        facts = self.facts
        applies = {
            _ROWS.get((self.transport, self.carrier)): True,
            "topology" if facts.job_owns else "external": True,
            "frozen": facts.frozen_models,
            "stack": not facts.same_stack,
        }
        return {name: decision for name, decision in DECISIONS.items() if applies.get(name)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``make_transport(recommendation.transport, ...)``."""
        settings: dict[str, Any] = {}
        if "disk" in (self.transport, self.carrier):
            settings["root"] = self.facts.shared_path
        elif self.carrier is not None:
            settings["carrier"] = self.carrier
        return settings if self.encoding is None else settings | {"encoding": self.encoding}

    @property
    def options(self) -> dict[str, Any]:
        """The same settings under the names of `WeightUpdateConfig`."""
        settings, names = self.settings, {"disk": "disk", "sharded": "sharded"}
        options = {
            "update_weight_mode": "full" if self.encoding is None else "delta",
            "update_weight_transport": names.get(self.carrier or self.transport, "nccl"),
            "update_weight_disk_dir": settings.get("root"),
            "update_weight_encoding": settings.get("encoding"),
            "colocate": self.facts.colocated or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dictionary."""
        return {
            "facts": asdict(self.facts),
            "answers": {name: decision._asdict() for name, decision in self.answers.items()},
            "transport": self.transport,
            "encoding": self.encoding,
            "carrier": self.carrier,
            "reason": self.reason,
            "options": self.options,
            "rejected": dict(self.rejected),
        }


def recommend(facts: Facts | None = None, **given: Any) -> Recommendation:
    """Recommend a route for weight updates.

    The simplest full route that the facts allow; where a full version's bytes take more than a tenth of the interval
    between updates on that route, slices of all ranks, or else a delta.

    Args:
        facts: facts about the deployment; None builds them from ``given``.
        given: fields of `Facts`, instead of ``facts``.

    Raises:
        ConfigError: the facts are impossible or rule out every route, or both arguments are given.
    """
    names = [one.name for one in fields(Facts)]
    if unknown := sorted(given.keys() - set(names)):
        raise ConfigError(f"there is no fact {unknown[0]!r}", expected=", ".join(names))
    if facts is not None and given:
        raise ConfigError("recommend takes facts, or their fields by name", expected="one of the two")
    facts = facts or Facts(**given)
    obstacles = _obstacles(facts)
    possible = [name for name, why in obstacles.items() if why is None]
    chosen, reason = _choose(facts, possible)
    if not chosen:
        raise ConfigError(
            f"weights cannot reach these engines: {'; '.join(f'{name}: {why}' for name, why in obstacles.items())}",
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    transport, _, carrier = chosen.partition(" over ")
    encoding = None if not carrier else "indices" if facts.validate_delta else "auto"
    rejected = {name: why or f"possible; {chosen}: {reason}" for name, why in obstacles.items() if name != chosen}
    return Recommendation(
        facts=facts, transport=transport, encoding=encoding, carrier=carrier or None, reason=reason, rejected=rejected
    )


def _choose(facts: Facts, possible: list[str]) -> tuple[str, str]:
    """Return the name of the route and the reason; an empty name if none is possible."""
    full = next((name for name in possible if " over " not in name), "")
    delta = next((name for name in possible if " over " in name), "")
    speed = facts.network_bytes_s if full in ("collective", "sharded") else facts.path_bytes_s
    seconds = facts.model_bytes / speed
    if facts.validate_delta:
        return delta, "the plainest encoding over a group needs no shared path and is the easiest to inspect"
    if full == "ipc":
        return full, "trainer and engines share their devices: weights go from memory to memory"
    if full and (seconds <= _HEAVY * facts.interval_s or not delta):
        return full, f"the simplest route that the facts allow; its bytes take {seconds:,.3g} s"
    if full:
        heavy = f"{seconds:,.3g} s of the {facts.interval_s:g} s between two updates"
        if "sharded" in possible:
            return "sharded", f"one rank's broadcast is too heavy ({heavy}), and every rank can send its own slices"
        return delta, f"full versions are too heavy: {heavy}"
    return delta, "full versions have no route here"


def _obstacles(facts: Facts) -> dict[str, str | None]:
    """Return every route, simplest first, and why the facts rule it out; None if they do not."""
    group = files = None
    if facts.colocated:
        group = "two processes on one device cannot be ranks of one group"
    elif not facts.group:
        group = "trainer and engines cannot form a process group"
    elif not facts.same_stack:
        group = "a group needs compatible devices and libraries at both ends"
    elif facts.regions > 1:
        group = "a group does not reach over regions"
    if facts.shared_path is None:
        files = "trainer and engines share no path"
    store = "://" in (facts.shared_path or "").removeprefix("file://")
    bucket = "full versions are checkpoint directories, and an object store has none" if store else None
    no_delta = "memory handles would not become smaller by a delta" if facts.colocated else None
    validated = "a delta over a group is to be tested" if facts.validate_delta else None
    one = "the trainer has one rank, which holds all that is to be sent" if facts.trainer_ranks == 1 else None
    return {
        "ipc": validated or (None if facts.colocated else "trainer and engines share no device"),
        "collective": group or validated,
        "sharded": group or validated or one,
        "disk": validated or files or bucket,
        "delta over disk": validated or no_delta or files,
        "delta over collective": no_delta or group,
    }
