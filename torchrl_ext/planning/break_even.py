"""Where two roads take equally long, by bandwidth and by density."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchrl_ext.planning.costs import CostModel, Road
from torchrl_ext.planning.facts import Facts
from torchrl_ext.planning.fits import Fit

__all__ = ["BreakEven", "break_evens"]

_MOST = 1e13  # bytes a second


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Where two roads take equally long.

    Attributes:
        below: label of the road that is faster below ``value``.
        above: label of the one that is faster above it.
        quantity: the fact that is varied.
        value: in the fact's own unit; None where ``always`` is faster whatever its value.
        always: label of that road; None where there is a ``value``.
    """

    below: str
    above: str
    quantity: str
    value: float | None
    always: str | None = None


def break_evens(facts: Facts, fit: Fit) -> list[BreakEven]:
    """Of deltas against full updates over the same carrier, by bandwidth and by density; and of two encodings.

    A delta is found in time proportional to the model, so on a link that is fast enough a full update is sooner there.
    """
    found = []
    for full, carrier, quantity in (("disk", "disk", "disk_bytes_s"), ("collective", "collective", "network_bytes_s")):
        for encoding in ("auto", "xor", "indices"):
            found.append(
                _even(
                    facts,
                    quantity,
                    lambda at, e=encoding, c=carrier: CostModel(at, fit).delta(e, c),
                    lambda at, f=full: getattr(CostModel(at, fit), f)(),
                    (1e5, _MOST),
                )
            )
        found.append(
            _even(
                facts,
                quantity,
                lambda at, c=carrier: CostModel(at, fit).delta("context", c),
                lambda at, c=carrier: CostModel(at, fit).delta("ulp", c),
                (1e5, _MOST),
            )
        )
        found.append(
            _even(
                facts,
                "density",
                lambda at, c=carrier: CostModel(at, fit).delta("auto", c),
                lambda at, f=full: getattr(CostModel(at, fit), f)(),
                (1e-6, 1.0),
            )
        )
    return found


def _even(
    facts: Facts,
    quantity: str,
    low: Callable[[Facts], Road],
    high: Callable[[Facts], Road],
    between: tuple[float, float],
) -> BreakEven:
    """Bisection on a logarithmic scale; one road is faster at the lower end, or everywhere."""

    def behind(value: float) -> float:
        at = replace(facts, **{quantity: value})
        return low(at).seconds - high(at).seconds

    names = {"below": low(facts).label, "above": high(facts).label, "quantity": quantity}
    first, last = between
    if behind(first) >= 0:
        return BreakEven(**names, value=None, always=names["above"])
    if behind(last) <= 0:
        return BreakEven(**names, value=None, always=names["below"])
    for _ in range(60):
        middle = math.sqrt(first * last)
        first, last = (middle, last) if behind(middle) < 0 else (first, middle)
    return BreakEven(**names, value=math.sqrt(first * last))
