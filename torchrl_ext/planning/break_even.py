"""Where two routes take equally long, by bandwidth and by density."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchrl_ext.planning.costs import Route, collective, delta, disk
from torchrl_ext.planning.facts import Facts

__all__ = ["BreakEven", "break_evens"]


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Where two routes take equally long.

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


def break_evens(facts: Facts) -> list[BreakEven]:
    """Compare deltas with full updates over the same carrier, by bandwidth and by density; and two encodings.

    A delta is found in time proportional to the model, so on a link that is fast enough a full update is sooner there.
    """
    found = []
    for full, carrier, speed in ((disk, "disk", "disk_bytes_s"), (collective, "collective", "network_bytes_s")):

        def by(encoding: str, carrier: str = carrier) -> Callable[[Facts], Route]:
            return lambda at: delta(at, encoding, carrier)

        found += [_even(facts, speed, by(encoding), full) for encoding in ("auto", "xor", "indices")]
        found.append(_even(facts, speed, by("context"), by("ulp")))
        found.append(_even(facts, "density", by("auto"), full))
    return found


def _even(facts: Facts, quantity: str, low: Callable[[Facts], Route], high: Callable[[Facts], Route]) -> BreakEven:
    """Bisection on a logarithmic scale; one route is faster at the lower end, or everywhere."""

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
