"""Recommend an entry point and a transport for a deployment, with the predicted cost of an update.

The goals come from other systems' guides to external engines; `torchrl_ext.planning.costs` predicts the costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.costs import ENCODINGS, MEASURED, Route, routes
from torchrl_ext.planning.facts import Facts

__all__ = ["DECISIONS", "Decision", "Recommendation", "recommend"]

_HEAVY = 0.1
"""A full update is too heavy if it takes more than this share of the interval between updates."""


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


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The route that was chosen from the facts, the reason, and all routes with their predicted costs."""

    facts: Facts
    chosen: Route
    reason: str
    routes: tuple[Route, ...]

    @property
    def answers(self) -> dict[str, Decision]:
        """The rows of `DECISIONS` that apply, by short name."""
        facts = self.facts
        applies = {
            _ROWS.get((self.chosen.transport, self.chosen.carrier)): True,
            "topology" if facts.job_owns else "external": True,
            "frozen": facts.frozen_models,
            "stack": not facts.same_stack,
        }
        return {name: decision for name, decision in DECISIONS.items() if applies.get(name)}

    @property
    def rejected(self) -> dict[str, str]:
        """Why each other route was not chosen, by its label."""
        return {route.label: _why_not(route, self.chosen) for route in self.routes if route is not self.chosen}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``make_transport(recommendation.chosen.transport, ...)``."""
        route = self.chosen
        settings: dict[str, Any] = {}
        if "disk" in (route.transport, route.carrier):
            settings["root"] = self.facts.shared_path
        elif route.carrier is not None:
            settings["carrier"] = route.carrier
        if route.encoding is not None:
            settings["encoding"] = route.encoding
        if route.encoding == "auto":  # auto chooses by the speed at which a delta travels, publishing included
            seconds = sum(route.spans.get(phase, 0.0) for phase in ("publish", "cross", "fetch", "send"))
            settings["settings"] = {"link_bytes_s": float(max(1, round(route.bytes / seconds)))}
        return settings

    @property
    def options(self) -> dict[str, Any]:
        """The same settings under the names of `WeightUpdateConfig`."""
        settings, names = self.settings, {"disk": "disk", "sharded": "sharded"}
        options = {
            "update_weight_mode": "full" if self.chosen.encoding is None else "delta",
            "update_weight_transport": names.get(self.chosen.carrier or self.chosen.transport, "nccl"),
            "update_weight_disk_dir": settings.get("root"),
            "update_weight_encoding": settings.get("encoding"),
            "update_weight_link_bytes_s": settings.get("settings", {}).get("link_bytes_s"),
            "colocate": self.facts.colocated or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the predictions assume or leave out."""
        facts = self.facts
        notes = {
            "torchrl-ext bench measured the other figures on two shared CPU cores": True,
            "no GPU was measured: NCCL and device copies use the speeds in your facts, and reading files uses the "
            "speed of two CPU cores": not facts.on_host,
            "the prediction assumes that coding scales with the number of cores": facts.cores > 2,
            "the prediction assumes one copy per region, by a mirrored bucket or a relay; without it, every engine "
            "reads across regions": (self.chosen.carrier == "disk" and facts.regions > 1),
            "leave the addresses of external engines with frozen models out, so that no call reaches them": (
                facts.frozen_models and not facts.job_owns
            ),
            "this library does not restart external engines; their owner does": not facts.job_owns,
        }
        return tuple(note for note, applies in notes.items() if applies)

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation, with `MEASURED` and `ENCODINGS`, as a JSON-safe dictionary."""
        rejected = self.rejected
        return {
            "facts": asdict(self.facts),
            "answers": {name: decision._asdict() for name, decision in self.answers.items()},
            "transport": self.chosen.transport,
            "encoding": self.chosen.encoding,
            "carrier": self.chosen.carrier,
            "reason": self.reason,
            "options": self.options,
            "predicted": self.chosen.to_json(),
            "rejected": rejected,
            "routes": [route.to_json() | {"rejected": rejected.get(route.label)} for route in self.routes],
            "notes": list(self.notes),
            "measured": {name: one._asdict() for name, one in MEASURED.items()},
            "encodings": {name: one._asdict() for name, one in ENCODINGS.items()},
        }


def recommend(facts: Facts | None = None, **given: Any) -> Recommendation:
    """Recommend a route for weight updates.

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
    every = routes(facts)
    chosen, reason = _choose(facts, every)
    return Recommendation(facts=facts, chosen=chosen, reason=reason, routes=tuple(every))


def _choose(facts: Facts, every: list[Route]) -> tuple[Route, str]:
    """Return the simplest full route that is not too heavy, else the fastest route, and the reason."""
    possible = [route for route in every if route.obstacle is None and route.encoding in (None, "auto")]
    if facts.validate_delta:
        plainest = ("collective", "indices", None)
        possible = [route for route in every if (route.carrier, route.encoding, route.obstacle) == plainest]
    if not possible:
        obstacles = {route.transport: route.obstacle for route in every if route.obstacle is not None}
        raise ConfigError(
            f"weights cannot reach these engines: {'; '.join(map(': '.join, obstacles.items()))}",
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    if facts.validate_delta:
        return possible[0], "the plainest encoding over a group needs no shared path and is the easiest to inspect"
    if facts.colocated:
        return possible[0], "trainer and engines share their devices: weights go from memory to memory"
    full = [route for route in possible if route.encoding is None]
    light = [route for route in full if route.seconds <= _HEAVY * facts.interval_s]
    if light:
        share = f"less than {_HEAVY:.0%} of the time between two updates"
        return light[0], f"the simplest route that the facts allow; it takes {share}"
    best = min(possible, key=lambda route: route.seconds)
    if best in full:
        return best, "no route takes less time, a delta included"
    if not full:
        return best, "full updates have no route here"
    least = min(route.seconds for route in full)
    return best, f"full updates are too heavy: {least:,.3g} s of the {facts.interval_s:g} s between two updates"


def _why_not(route: Route, chosen: Route) -> str:
    if route.obstacle is not None:
        return route.obstacle
    if (route.transport, route.carrier, route.spans) == (chosen.transport, chosen.carrier, chosen.spans):
        return f"what {chosen.encoding!r} comes to here"
    if route.seconds > chosen.seconds:
        return f"possible, and slower: {route.seconds:,.3g} s for {chosen.seconds:,.3g} s"
    return f"possible, and not needed: {route.seconds:,.3g} s for {chosen.seconds:,.3g} s by a simpler route"
