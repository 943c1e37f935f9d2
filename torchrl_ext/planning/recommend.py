"""Recommends an entry point and a transport from facts about a deployment, with the predicted cost of an update.

The goals are those of the external-engine guides of slime and vime; `torchrl_ext.planning.costs` predicts the costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.costs import ENCODINGS, MEASURED, Route, collective, delta, disk, routes
from torchrl_ext.planning.facts import Facts

__all__ = ["DECISIONS", "Answer", "BreakEven", "Recommendation", "recommend"]

HEAVY = 0.1
"""A full update is too heavy when it takes more than this share of the time from one update to the next."""


@dataclass(frozen=True)
class Answer:
    """One row of the table of goals.

    Attributes:
        goal: what somebody wants or has.
        entry_point: options of `WeightUpdateConfig` to start from.
    """

    goal: str
    entry_point: str


_FULL, _DELTA = "update_weight_mode=full update_weight_transport=", "update_weight_mode=delta update_weight_transport="

DECISIONS: Mapping[str, Answer] = MappingProxyType(
    {
        "external": Answer(
            "engines are launched by somebody else, and the job only connects to them", "rollout_external_engine_addrs"
        ),
        "topology": Answer(
            "the job launches engines, with prefill/decode pools, several models, different groups or overrides",
            "vllm_config",
        ),
        "group": Answer("trainer and engines can form a process group", _FULL + "nccl"),
        "shards": Answer(
            "they can, and the trainer is sharded: each rank sends a worker only the slices that it needs",
            _FULL + "sharded",
        ),
        "path": Answer("trainer and engines cannot form a process group, but see the same path", _FULL + "disk"),
        "heavy": Answer("full checkpoints are too heavy, across clusters or datacenters", _DELTA + "disk"),
        "stack": Answer(
            "engines have an environment of their own, or devices of another model or vendor",
            "rollout_external_engine_addrs update_weight_transport=disk",
        ),
        "validate": Answer("the delta's coding and landing are to be tried inside one datacenter", _DELTA + "nccl"),
        "frozen": Answer(
            "frozen reference, reward or tool models are served too", "vllm_config with update_weights: false"
        ),
    }
)
"""The rows of the table by short names, in the order of the guides; ``shards`` is ours."""

_ROWS = {
    ("collective", None): "group",
    ("sharded", None): "shards",
    ("disk", None): "path",
    ("delta", "disk"): "heavy",
    ("delta", "collective"): "validate",
}


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The value of a fact at which two routes take equally long.

    Attributes:
        below: label of the route that is faster below ``value``.
        above: label of the one that is faster above it.
        quantity: the fact that is varied.
        value: in the fact's own unit; None where ``always`` is faster whatever its value.
        always: label of that route; None where there is a ``value``.
    """

    below: str
    above: str
    quantity: str
    value: float | None
    always: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The route and the options to start from, with reasons and predictions.

    Attributes:
        facts: what it was made from.
        answers: rows of `DECISIONS` that apply, by their short names.
        chosen: the route to take.
        reason: why this one.
        options: settings of `WeightUpdateConfig`, by their names.
        rejected: every other route's label and why not.
        routes: all routes with their predicted costs.
        break_evens: where deltas and full updates take equally long.
        notes: what the figures leave out.
    """

    facts: Facts
    answers: Mapping[str, Answer]
    chosen: Route
    reason: str
    options: Mapping[str, Any]
    rejected: Mapping[str, str]
    routes: tuple[Route, ...]
    break_evens: tuple[BreakEven, ...]
    notes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``make_transport(recommendation.chosen.transport, ...)``."""
        if self.chosen.transport == "disk":
            return {"root": self.facts.shared_path}
        if self.chosen.transport != "delta":
            return {}
        disk = self.chosen.carrier == "disk"
        where: dict[str, Any] = {"root": self.facts.shared_path} if disk else {"carrier": "collective"}
        if (link_bytes_s := _link_bytes_s(self.chosen)) is not None:
            where["settings"] = {"link_bytes_s": link_bytes_s}
        return {**where, "encoding": self.chosen.encoding}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dictionary of everything."""
        return {
            "facts": self.facts.to_json(),
            "answers": {name: vars(answer) for name, answer in self.answers.items()},
            "transport": self.chosen.transport,
            "encoding": self.chosen.encoding,
            "carrier": self.chosen.carrier,
            "reason": self.reason,
            "options": dict(self.options),
            "predicted": self.chosen.to_json(),
            "rejected": dict(self.rejected),
            "routes": [route.to_json() | {"rejected": self.rejected.get(route.label)} for route in self.routes],
            "break_evens": [vars(one) for one in self.break_evens],
            "notes": list(self.notes),
            "measured": {name: vars(one) for name, one in MEASURED.items()},
            "encodings": {name: vars(one) for name, one in ENCODINGS.items()},
        }


def recommend(facts: Facts | None = None, **given: Any) -> Recommendation:
    """Recommend the route that weights should take.

    Args:
        facts, given: about the deployment, as a `Facts` or by the names of its fields.

    Raises:
        ConfigError: the facts are impossible, or rule out every route.
    """
    if facts is not None and given:
        raise ConfigError("recommend takes facts, or their fields by name", expected="one of the two")
    if facts is None:
        unknown = sorted(set(given) - set(Facts.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"there is no fact {unknown[0]!r}", expected=", ".join(Facts.__dataclass_fields__))
        facts = Facts(**given)
    every = routes(facts)
    chosen, reason = _choose(facts, every)
    return Recommendation(
        facts=facts,
        answers=_answers(facts, chosen),
        chosen=chosen,
        reason=reason,
        options=_options(facts, chosen),
        rejected={route.label: _why_not(route, chosen) for route in every if route is not chosen},
        routes=tuple(every),
        break_evens=tuple(_break_evens(facts)),
        notes=_notes(facts, chosen),
    )


def _choose(facts: Facts, every: list[Route]) -> tuple[Route, str]:
    possible = [route for route in every if route.obstacle is None]
    if facts.validate_delta:
        possible = [route for route in possible if route.carrier == "collective" and route.encoding == "indices"]
    else:
        possible = [route for route in possible if route.encoding in (None, "auto")]
    if not possible:
        obstacles = {route.transport: route.obstacle for route in every if route.obstacle is not None}
        raise ConfigError(
            "weights cannot reach these engines: "
            + "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items()),
            expected="a process group, a shared path or bucket, or a device that both share",
        )
    if facts.validate_delta:
        return possible[0], "the plainest encoding over a group, which needs no shared path, is the easiest to look at"
    if facts.colocated:
        return possible[0], "trainer and engines share their devices: weights go from memory to memory"
    full = [route for route in possible if route.encoding is None]
    light = [route for route in full if route.seconds <= HEAVY * facts.interval_s]
    if light:
        return light[0], (
            f"the simplest route that the facts allow; it takes less than {HEAVY:.0%} of the time between two updates"
        )
    best = min(possible, key=lambda route: route.seconds)
    if best in full:
        return best, "no route takes less time, a delta included"
    if not full:
        return best, "full updates have no route here"
    return best, (
        f"full updates are too heavy: {min(route.seconds for route in full):,.3g} s of the {facts.interval_s:g} s "
        "between two updates"
    )


def _answers(facts: Facts, chosen: Route) -> dict[str, Answer]:
    names = {_ROWS.get((chosen.transport, chosen.carrier))}
    names |= {"topology"} if _owned(facts) else {"external"}
    names |= {"frozen"} if facts.frozen_models else set()
    names |= set() if facts.same_stack else {"stack"}
    return {name: answer for name, answer in DECISIONS.items() if name in names}


def _owned(facts: Facts) -> bool:
    return facts.owned if facts.owned is not None else facts.topology


def _options(facts: Facts, chosen: Route) -> dict[str, Any]:
    disk = "disk" in (chosen.transport, chosen.carrier)
    options: dict[str, Any] = {
        "update_weight_mode": "delta" if chosen.transport == "delta" else "full",
        "update_weight_transport": "disk" if disk else "sharded" if chosen.transport == "sharded" else "nccl",
    }
    if disk:
        options["update_weight_disk_dir"] = facts.shared_path
    if chosen.encoding is not None:
        options["update_weight_encoding"] = chosen.encoding
    if (link_bytes_s := _link_bytes_s(chosen)) is not None:
        options["update_weight_link_bytes_s"] = link_bytes_s
    if facts.colocated:
        options["colocate"] = True
    return options


def _link_bytes_s(route: Route) -> float | None:
    """Return the speed at which a delta travels, publishing included, by which ``auto`` chooses; None without it."""
    if route.encoding != "auto":
        return None
    seconds = sum(span.seconds for span in route.spans if span.name in ("publish", "cross", "fetch", "send"))
    return float(max(1, round(route.bytes / seconds)))


def _why_not(route: Route, chosen: Route) -> str:
    if route.obstacle is not None:
        return route.obstacle
    if (route.transport, route.carrier, route.spans) == (chosen.transport, chosen.carrier, chosen.spans):
        return f"what {chosen.encoding!r} comes to here"
    if route.seconds > chosen.seconds:
        return f"possible, and slower: {route.seconds:,.3g} s for {chosen.seconds:,.3g} s"
    return f"possible, and not needed: {route.seconds:,.3g} s for {chosen.seconds:,.3g} s by a simpler route"


def _notes(facts: Facts, chosen: Route) -> tuple[str, ...]:
    notes = ["what the facts do not tell was measured by torchrl-ext bench on two shared CPU cores"]
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


def _break_evens(facts: Facts) -> list[BreakEven]:
    """Compare deltas with full updates over the same carrier, by bandwidth and by density; and two encodings.

    A delta is found in time proportional to the model, so on a link that is fast enough a full update is sooner there.
    """
    found = []
    for full, carrier, speed in ((disk, "disk", "disk_bytes_s"), (collective, "collective", "network_bytes_s")):
        encodings = ("auto", "xor", "indices", "ulp", "context")
        by = {name: partial(delta, encoding=name, carrier=carrier) for name in encodings}
        found += [_even(facts, speed, by[name], full) for name in encodings[:3]]
        found += [_even(facts, speed, by["context"], by["ulp"]), _even(facts, "density", by["auto"], full)]
    return found


def _even(facts: Facts, quantity: str, low: Callable[[Facts], Route], high: Callable[[Facts], Route]) -> BreakEven:
    """Find where ``low`` stops being faster than ``high``, by bisection on a logarithmic scale."""

    def behind(value: float) -> float:
        changed: dict[str, Any] = {quantity: value}
        at = replace(facts, **changed)
        return low(at).seconds - high(at).seconds

    names = {"below": low(facts).label, "above": high(facts).label, "quantity": quantity}
    first, last = (1e-6, 1.0) if quantity == "density" else (1e5, 1e13)
    if behind(first) >= 0:
        return BreakEven(**names, value=None, always=names["above"])
    if behind(last) <= 0:
        return BreakEven(**names, value=None, always=names["below"])
    for _ in range(60):
        middle = math.sqrt(first * last)
        first, last = (middle, last) if behind(middle) < 0 else (first, middle)
    return BreakEven(**names, value=math.sqrt(first * last))
