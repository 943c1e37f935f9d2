"""Coefficients of the planner's cost model, fitted to documents of ``torchrl-ext bench ... --json``.

The model is a sum of terms, each a count (bytes, changed elements, memory lines, tensors) times a coefficient. The
coefficients that come with the library are in `torchrl_ext.planning.fitted`; `refit` makes others from a machine's own
documents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from torchrl_ext.errors import ConfigError

__all__ = ["CODED", "LINE_BYTES", "Coefficient", "Fit", "lines_touched", "place_bits", "refit"]

CODED = ("ulp", "context", "xor", "overwrite")
"""Encodings whose size and speed are fitted; `indices` and `deltas` have sizes that follow from their formats."""

LINE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """One number of the model.

    Attributes:
        value: in ``unit``.
        unit: what it multiplies, for example ``"s/byte"``.
        spread: the rounds it was fitted to lie within ``value / spread`` and ``value * spread`` of it.
        command: the command whose JSON document it was fitted to.
    """

    value: float
    unit: str
    spread: float
    command: str


Fit = Mapping[str, Coefficient]


def place_bits(density: float) -> float:
    """Bits per changed element that its place takes at least: the entropy of a Bernoulli process, H(p) / p."""
    if density >= 1:
        return 0.0
    return -(math.log2(density) + (1 - density) / density * math.log2(1 - density))


def lines_touched(elements: float, density: float, width_bytes: float) -> float:
    """Memory lines of 64 bytes in which at least one of ``elements`` changes, when changes are scattered."""
    per_line = LINE_BYTES / width_bytes
    return elements / per_line * (1 - (1 - density) ** per_line)


def refit(known: Fit, documents: Iterable[Mapping[str, Any]]) -> Fit:
    """``known`` with the coefficients that ``documents`` (of ``bench --json``) tell in place of its own.

    Raises:
        ConfigError: a document is of no benchmark that the model is fitted to.
    """
    fit = dict(known)
    for document in documents:
        makers = [maker for keys, maker in _MAKERS.items() if all(key in document for key in keys)]
        if not makers:
            raise ConfigError(
                f"a document with {', '.join(sorted(document)) or 'nothing'} tells nothing about costs",
                expected="what `torchrl-ext bench transport|delta|landing --json` printed",
            )
        try:
            for maker in makers:
                fit |= maker(document, fit)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(
                f"a document of `torchrl-ext bench` cannot be used: {type(error).__name__} {error}",
                expected="one of this version of torchrl_ext",
            ) from error
    return MappingProxyType(fit)


def _transport(document: Mapping[str, Any], known: Fit) -> dict[str, Coefficient]:
    """Seconds per byte of the collective and of a publication, and what a tensor costs beside its bytes."""
    command = "torchrl-ext bench transport"
    model, small, disk = document["model"], document["small"], document["disk"]
    per_byte = _per(model["seconds"]["buckets"], model["bytes"], "s/byte", command)
    overhead_s = [max(0.0, taken - per_byte.value * small["bytes"]) for taken in small["seconds"]["buckets"]]
    return {
        "collective": per_byte,
        "collective_tensor": _per(overhead_s, small["tensors"], "s/tensor", command),
        "publish": _per(disk["seconds"]["publish"], disk["bytes"], "s/byte", command),
    }


def _delta(document: Mapping[str, Any], known: Fit) -> dict[str, Coefficient]:
    """Bits and seconds of the encodings, and of one copy."""
    command = "torchrl-ext bench delta"
    rows = [row for row in document["sets"] if row["changed"] and "clustered" not in row["data"]]
    sparse = [row for row in rows if row["density"] <= 0.5]  # beyond it everything is sent whole
    found = {
        "threads": Coefficient(value=float(document["threads"]), unit="threads", spread=1.0, command=command),
        "copy": _per([median(row["seconds"]["copy"]) / row["dense_bytes"] for row in rows], 1.0, "s/byte", command),
    }
    for name in CODED:
        bits = _solve(
            [(place_bits(row["density"]), 1.0) for row in sparse], [row["bits_per_changed"][name] for row in sparse]
        )
        found |= _named(f"{name}_bits", ("place", "step"), ("bit/bit", "bit/change"), bits, command)
        taken = _solve(
            [(row["dense_bytes"], row["changed"]) for row in sparse], [median(row["seconds"][name]) for row in sparse]
        )
        found |= _named(f"{name}_encode", ("byte", "change"), ("s/byte", "s/change"), taken, command)
    return found


def _commit(document: Mapping[str, Any], known: Fit) -> dict[str, Coefficient]:
    """Seconds of staging, committing and reloading in vLLM's model class."""
    command, commit = "torchrl-ext bench landing", document["commit"]
    size = 2.0 * commit["parameters"]
    rows = [(commit["parameters"], row) for row in commit["rows"]]
    rows += [(row["parameters"], row) for row in commit.get("by_size", ())]
    counted = [(1.0, lines_touched(total, row["density"], 2.0), row) for total, row in rows]
    committed = _solve([row[:2] for row in counted], [row["commit_s"] for *_, row in counted])
    staged = _solve(
        [(one, lines, row["changed"]) for one, lines, row in counted], [row["stage_s"] for *_, row in counted]
    )
    reloads = [(commit["parameters"], commit["reload_s"])]
    reloads += [(row["parameters"], row["reload_s"]) for row in commit.get("by_size", ())]
    return {
        **_named("commit", ("once", "line"), ("s", "s/line"), committed, command),
        **_named("stage", ("once", "line", "change"), ("s", "s/line", "s/change"), staged, command),
        "reload": _per([taken / (2.0 * total) for total, taken in reloads], 1.0, "s/byte", command),
        "load": _per([commit["load_in_memory_s"]], size, "s/byte", command),
    }


def _pause(document: Mapping[str, Any], known: Fit) -> dict[str, Coefficient]:
    """What a pause costs beside the commit: the control calls and whatever the server is just doing."""
    found = document["end_to_end"]
    lines = lines_touched(found["parameters"], found["density"], 2.0)
    commit_s = known["commit_once"].value + known["commit_line"].value * lines
    beside = [max(1e-4, pause_s - commit_s) for pause_s in found["pauses_s"]["delta"]]
    return {"control": _per(beside, 1.0, "s", "torchrl-ext bench landing --engine vllm")}


_MAKERS: dict[tuple[str, ...], Callable[[Mapping[str, Any], Fit], dict[str, Coefficient]]] = {
    ("model", "small", "disk"): _transport,
    ("sets", "threads"): _delta,
    ("commit",): _commit,
    ("end_to_end",): _pause,
}


def _per(seconds: Sequence[float], count: float, unit: str, command: str) -> Coefficient:
    middle = median(seconds)
    spread = max((max(one / middle, middle / one) for one in seconds if one > 0 and middle > 0), default=1.0)
    return Coefficient(value=middle / count, unit=unit, spread=spread, command=command)


def _named(
    name: str, parts: Sequence[str], units: Sequence[str], solved: tuple[list[float], float], command: str
) -> dict[str, Coefficient]:
    values, spread = solved
    return {
        f"{name}_{part}": Coefficient(value=value, unit=unit, spread=spread, command=command)
        for part, unit, value in zip(parts, units, values, strict=True)
    }


def _solve(counts: Sequence[Sequence[float]], found: Sequence[float]) -> tuple[list[float], float]:
    """Weights, none negative, whose sums come closest to ``found`` in proportion; and the largest factor between.

    There are two or three weights, so every choice of those that are not zero is tried.
    """
    table = np.asarray(counts, float) / np.asarray(found, float)[:, None]
    ones, width = np.ones(len(table)), table.shape[1]
    best, least = np.zeros(width), np.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        part, *_ = np.linalg.lstsq(table[:, kept], ones, rcond=None)
        weights = np.zeros(width)
        weights[list(kept)] = part
        off = float(((table @ weights - 1) ** 2).sum())
        if (part >= 0).all() and off < least:
            best, least = weights, off
    told = table @ best
    return best.tolist(), float(max(np.max(told), np.max(1 / np.maximum(told, 1e-3)), 1.0))
