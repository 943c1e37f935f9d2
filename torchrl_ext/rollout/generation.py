"""What is asked of an engine, and what comes back: words that every dialect shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["UNKNOWN_VERSION", "Generation", "GenerationRequest", "VersionSpan", "version_number"]

UNKNOWN_VERSION = -1
"""The number of a weight version that an engine does not tell, or whose label is no number."""


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a generation were sampled by weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it, in no engine's own words.

    Attributes:
        token_ids: the prompt, at least one token.
        n: continuations.
        max_tokens: most new tokens of each.
        temperature: 0 takes the most probable token.
        seed: continuation j is sampled with ``seed + j``; None leaves it to the engine.
        logprobs: ask for the log-probability of each sampled token.
        stop_token_ids: end after one of these.
        more: further sampling settings under vLLM's names: ``top_p``, ``top_k``, ``min_tokens``, ``ignore_eos``...
        adapter: name of the LoRA adapter to generate with; None for the base weights.
    """

    token_ids: tuple[int, ...]
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    logprobs: bool = True
    stop_token_ids: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    def split(self) -> list[GenerationRequest]:
        """The same as requests of one continuation each."""
        seeds = [None if self.seed is None else self.seed + j for j in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: new tokens, without the prompt.
        logprobs: log-probability of each token under the raw distribution of the weights that sampled it; empty
            where none were asked for.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"`` (the engine was paused with mode ``abort``).
        weight_versions: contiguous spans; more than one where weights changed while it ran. Empty where the engine
            does not say. With an adapter they are the adapter's, whose version stays the same all along.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "length"
    weight_versions: tuple[VersionSpan, ...] = ()

    def token_versions(self) -> list[int]:
        """The number of the weight version behind each token; `UNKNOWN_VERSION` where the engine does not say."""
        versions = [UNKNOWN_VERSION] * len(self.token_ids)
        for span in self.weight_versions:
            end = min(span.end, len(versions))
            versions[span.start : end] = [version_number(span.version)] * max(0, end - span.start)
        return versions


def version_number(label: str) -> int:
    """``"7"`` -> 7; ``"default"``, which engines call the weights they started with, -> 0; else `UNKNOWN_VERSION`."""
    if label == "default":
        return 0
    return int(label) if label.isdecimal() else UNKNOWN_VERSION


def spans(rows: Sequence[Mapping[str, Any]] | None) -> tuple[VersionSpan, ...]:
    """``weight_versions`` of an answer; vLLM and SGLang write them alike: ``[{"version", "start", "end"}, ...]``."""
    return tuple(VersionSpan(version=str(row["version"]), start=row["start"], end=row["end"]) for row in rows or ())
