"""`recommend`: which entry point, which transport, and what an update will cost, from facts about a deployment.

The table of goals is the one of the external-engine guides of slime and vime; the costs are predictions of a model
that is fitted to this library's own benchmarks (`torchrl_ext.planning.fits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.break_even import BreakEven, break_evens
from torchrl_ext.planning.costs import Road, roads
from torchrl_ext.planning.facts import Facts
from torchrl_ext.planning.fits import Fit
from torchrl_ext.planning.fitted import FITTED

__all__ = ["DECISIONS", "Answer", "Recommendation", "recommend"]

HEAVY = 0.1
"""A full update is too heavy when it takes more than this share of the time from one update to the next."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row of the table.

    Attributes:
        goal: what somebody wants or has.
        entry_point: options of `WeightUpdateConfig` to start from.
    """

    goal: str
    entry_point: str


DECISIONS: Mapping[str, Answer] = MappingProxyType(
    {
        "external": Answer(
            goal="engines are launched by somebody else, and the job only connects to them",
            entry_point="rollout_external_engine_addrs",
        ),
        "topology": Answer(
            goal="the job launches engines, with prefill/decode pools, several models, different groups or overrides",
            entry_point="vllm_config",
        ),
        "group": Answer(
            goal="trainer and engines can form a process group",
            entry_point="update_weight_mode=full update_weight_transport=nccl",
        ),
        "path": Answer(
            goal="trainer and engines cannot form a process group, but see the same path",
            entry_point="update_weight_mode=full update_weight_transport=disk",
        ),
        "heavy": Answer(
            goal="full checkpoints are too heavy, across clusters or datacenters",
            entry_point="update_weight_mode=delta update_weight_transport=disk",
        ),
        "stack": Answer(
            goal="engines have an environment of their own, or devices of another model or vendor",
            entry_point="rollout_external_engine_addrs update_weight_transport=disk",
        ),
        "validate": Answer(
            goal="the delta's coding and landing are to be tried inside one datacenter",
            entry_point="update_weight_mode=delta update_weight_transport=nccl",
        ),
        "frozen": Answer(
            goal="frozen reference, reward or tool models are served too",
            entry_point="vllm_config with update_weights: false",
        ),
    }
)
"""Goal by a short name, in the order of the guides."""

_WAYS = {
    ("collective", None): "group",
    ("disk", None): "path",
    ("delta", "disk"): "heavy",
    ("delta", "collective"): "validate",
}


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to start from, and why.

    Attributes:
        facts: what it was made from.
        answers: rows of `DECISIONS` that apply, by their short names.
        chosen: the road to take.
        reason: why this one.
        options: settings of `WeightUpdateConfig`, by their names.
        rejected: every other road's label and why not.
        roads: all roads with their predicted costs.
        break_evens: where deltas and full updates take equally long.
        notes: what the figures leave out.
        fit: coefficients behind the figures.
    """

    facts: Facts
    answers: Mapping[str, Answer]
    chosen: Road
    reason: str
    options: Mapping[str, Any]
    rejected: Mapping[str, str]
    roads: tuple[Road, ...]
    break_evens: tuple[BreakEven, ...]
    notes: tuple[str, ...]
    fit: Fit = field(repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for ``make_transport(recommendation.chosen.transport, ...)``."""
        if self.chosen.transport == "disk":
            return {"root": self.facts.shared_path}
        if self.chosen.transport != "delta":
            return {}
        where = {"root": self.facts.shared_path} if self.chosen.carrier == "disk" else {"carrier": "collective"}
        return {**where, "encoding": self.chosen.encoding}

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe dictionary of everything."""
        return {
            "facts": self.facts.to_json(),
            "answers": {name: vars(answer) for name, answer in self.answers.items()},
            "transport": self.chosen.transport,
            "encoding": self.chosen.encoding,
            "carrier": self.chosen.carrier,
            "reason": self.reason,
            "options": dict(self.options),
            "predicted": _road_json(self.chosen),
            "rejected": dict(self.rejected),
            "roads": [_road_json(road) | {"rejected": self.rejected.get(road.label)} for road in self.roads],
            "break_evens": [vars(one) for one in self.break_evens],
            "notes": list(self.notes),
            "fit": {name: vars(one) for name, one in self.fit.items()},
        }


def _road_json(road: Road) -> dict[str, Any]:
    return {
        "label": road.label,
        "transport": road.transport,
        "encoding": road.encoding,
        "carrier": road.carrier,
        "bytes": road.bytes,
        "seconds": road.seconds,
        "seconds_low": road.low_s,
        "seconds_high": road.high_s,
        "pause_s": road.pause_s,
        "spans": [vars(span) for span in road.spans],
    }


def recommend(facts: Facts | None = None, *, fit: Fit = FITTED, **given: Any) -> Recommendation:
    """Which way weights should go.

    Args:
        facts: about the deployment; or give its fields by name.
        fit: coefficients of the cost model, see `torchrl_ext.planning.fits.refit`.
        given: fields of `Facts`.

    Raises:
        ConfigError: facts that cannot be, or under which nothing works.
    """
    if facts is not None and given:
        raise ConfigError("recommend takes facts, or their fields by name", expected="one of the two")
    if facts is None:
        unknown = sorted(set(given) - set(Facts.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"there is no fact {unknown[0]!r}", expected=", ".join(Facts.__dataclass_fields__))
        facts = Facts(**given)
    every = roads(facts, fit)
    chosen, reason = _choose(facts, every)
    return Recommendation(
        facts=facts,
        answers=_answers(facts, chosen),
        chosen=chosen,
        reason=reason,
        options=_options(facts, chosen),
        rejected={road.label: _why_not(road, chosen) for road in every if road is not chosen},
        roads=tuple(every),
        break_evens=tuple(break_evens(facts, fit)),
        notes=_notes(facts, chosen),
        fit=fit,
    )


def _choose(facts: Facts, every: list[Road]) -> tuple[Road, str]:
    open_roads = [road for road in every if road.obstacle is None]
    if facts.validate_delta:
        open_roads = [road for road in open_roads if road.carrier == "collective" and road.encoding == "indices"]
    else:
        open_roads = [road for road in open_roads if road.encoding in (None, "auto")]
    if not open_roads:
        obstacles = {road.transport: road.obstacle for road in every if road.obstacle is not None}
        raise ConfigError(
            "weights cannot reach these engines: "
            + "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items()),
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    if facts.validate_delta:
        return open_roads[
            0
        ], "the plainest encoding over a group, which needs no shared path, is the easiest to look at"
    if facts.colocated:
        return open_roads[0], "trainer and engines share their devices: weights go from memory to memory"
    full = [road for road in open_roads if road.encoding is None]
    light = [road for road in full if road.seconds <= HEAVY * facts.interval_s]
    if light:
        return light[0], (
            f"the simplest road that the facts allow; it takes less than {HEAVY:.0%} of the time between two updates"
        )
    best = min(open_roads, key=lambda road: road.seconds)
    if best in full:
        return best, "no road takes less time, a delta included"
    if not full:
        return best, "full updates have no road here"
    return best, (
        f"full updates are too heavy: {min(road.seconds for road in full):,.3g} s of the {facts.interval_s:g} s "
        "between two updates"
    )


def _answers(facts: Facts, chosen: Road) -> dict[str, Answer]:
    names = {_WAYS.get((chosen.transport, chosen.carrier))}
    names |= {"topology"} if _owned(facts) else {"external"}
    names |= {"frozen"} if facts.frozen_models else set()
    names |= set() if facts.same_stack else {"stack"}
    return {name: answer for name, answer in DECISIONS.items() if name in names}


def _owned(facts: Facts) -> bool:
    return facts.owned if facts.owned is not None else facts.topology


def _options(facts: Facts, chosen: Road) -> dict[str, Any]:
    disk = "disk" in (chosen.transport, chosen.carrier)
    options: dict[str, Any] = {
        "update_weight_mode": "delta" if chosen.transport == "delta" else "full",
        "update_weight_transport": "disk" if disk else "nccl",
    }
    if disk:
        options["update_weight_disk_dir"] = facts.shared_path
    if chosen.encoding is not None:
        options["update_weight_encoding"] = chosen.encoding
    if facts.colocated:
        options["colocate"] = True
    return options


def _why_not(road: Road, chosen: Road) -> str:
    if road.obstacle is not None:
        return road.obstacle
    if (road.transport, road.carrier, road.spans) == (chosen.transport, chosen.carrier, chosen.spans):
        return f"what {chosen.encoding!r} comes to here"
    if road.seconds > chosen.seconds:
        return f"possible, and slower: {road.seconds:,.3g} s for {chosen.seconds:,.3g} s"
    return f"possible, and not needed: {road.seconds:,.3g} s for {chosen.seconds:,.3g} s by a simpler road"


def _notes(facts: Facts, chosen: Road) -> tuple[str, ...]:
    notes = ["figures come from a model fitted to torchrl-ext bench on two CPU cores; `plan --fit` takes your own runs"]
    if facts.device == "cuda":
        notes.append(
            "no GPU was measured: NCCL and copies on a device are taken at the speeds that the facts give, and reading "
            "files at that of two CPU cores"
        )
    if facts.cores > 2:
        notes.append("coding is taken to speed up with the number of cores")
    if chosen.carrier == "disk" and facts.regions > 1:
        notes.append("one copy per region: a mirrored bucket or a relay; without, every engine reads across regions")
    if facts.frozen_models and not _owned(facts):
        notes.append(
            "frozen models on engines of somebody else: leave their addresses out, so that no call reaches them"
        )
    if _owned(facts) is False:
        notes.append("nobody here restarts external engines: their owner does")
    return tuple(notes)
