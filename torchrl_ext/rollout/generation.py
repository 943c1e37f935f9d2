"""Requests for tokens and generations, in no engine's own form, and the rest of a request that an engine aborted.

An engine that is paused with mode ``abort`` ends its requests with the tokens they have. The rest is asked for with
those tokens as part of the prompt, from whichever engine is free. Carried along are tokens, log-probabilities, weight
versions, the budget (``max_tokens``, ``min_tokens``), and the stop strings that the last tokens may have begun.
Frequency and presence penalties start anew: engines count them over the tokens of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
from torch import Tensor

from torchrl_ext.errors import ConfigError

__all__ = [
    "UNKNOWN_VERSION",
    "Generation",
    "GenerationRequest",
    "PartialGeneration",
    "VersionSpan",
    "checked_prompt",
    "version_number",
]

UNKNOWN_VERSION = -1
"""The number of a weight version that an engine does not report, or whose label is no number."""

_TOKENS_PER_CHARACTER = 4  # at most: a character of UTF-8, with one token for each byte


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """A span of a generation: its tokens ``[start, end)`` were sampled by weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it, in no engine's own form.

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
        session_id: requests of one session stay on one engine behind a router; None or "" for none.
        route: takes the place of the dialect's route.
        fields: further fields of the body.
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
    session_id: Any = None
    route: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def split(self) -> list[GenerationRequest]:
        """Return the same request as several requests of one continuation each."""
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
        extras: further fields that were asked for, as the engine gave them, one mapping per answer of which this is
            joined: ``prompt_logprobs``, ``routed_experts``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "length"
    weight_versions: tuple[VersionSpan, ...] = ()
    extras: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)

    def token_versions(self) -> list[int]:
        """Return the number of each token's weight version; `UNKNOWN_VERSION` where the engine does not say."""
        versions = [UNKNOWN_VERSION] * len(self.token_ids)
        for span in self.weight_versions:
            end = min(span.end, len(versions))
            versions[span.start : end] = [version_number(span.version)] * max(0, end - span.start)
        return versions


def checked_prompt(prompt: Sequence[int] | Tensor, index: int) -> tuple[int, ...]:
    """Return the token ids of a prompt, read at once: a tensor on a device costs one wait, and not one per token.

    Raises:
        ConfigError: it is empty, or is no flat sequence of whole numbers from 0 on; the message has its index.
    """
    if not len(prompt):
        raise ConfigError(f"prompt {index} has no token", expected="at least one token id per prompt")
    ids = numpy.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise ConfigError(
            f"prompt {index} is no list of token ids", expected="whole numbers from 0 on, in one dimension"
        )
    return tuple(ids.tolist())


def version_number(label: str) -> int:
    """Return 7 for ``"7"``, 0 for ``"default"`` (engines' label of the weights they started with), or else
    `UNKNOWN_VERSION`."""
    if label == "default":
        return 0
    return int(label) if label.isdecimal() else UNKNOWN_VERSION


@dataclass(frozen=True, kw_only=True)
class PartialGeneration:
    """The generation of one prompt so far, joined from the answers of engines that aborted it.

    Attributes:
        request: the first request; of one continuation.
        so_far: everything so far, as one generation.
        joined: number of tokens before the last answer.
    """

    request: GenerationRequest
    so_far: Generation = field(default_factory=lambda: Generation(token_ids=(), finish_reason="abort"))
    joined: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask for."""
        return self.so_far.finish_reason != "abort"

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        found = self.request.more.get("stop") or ()
        return (found,) if isinstance(found, str) else tuple(found)

    def remaining(self) -> GenerationRequest:
        """Return the request for the rest."""
        count = len(self.so_far.token_ids)
        more = dict(self.request.more)
        if "min_tokens" in more:
            more["min_tokens"] = max(0, more["min_tokens"] - count)
        seed = self.request.seed
        return replace(
            self.request,
            token_ids=(*self.request.token_ids, *self.so_far.token_ids),
            max_tokens=self.request.max_tokens - count,
            seed=None if seed is None else seed + count,  # else the new engine would repeat the draws of the first
            more=more,
        )

    def extended(self, answer: Generation) -> PartialGeneration:
        """Return this with an engine's answer to `remaining` added; a budget that is used up ends it (``"length"``)."""
        before, count = self.so_far, len(self.so_far.token_ids)
        versions = list(before.weight_versions)
        for span in answer.weight_versions:
            if span.end == span.start:
                continue
            moved = replace(span, start=span.start + count, end=span.end + count)
            if versions and versions[-1].version == moved.version and versions[-1].end == moved.start:
                moved = replace(moved, start=versions.pop().start)
            versions.append(moved)
        spent = answer.finish_reason == "abort" and count + len(answer.token_ids) >= self.request.max_tokens
        so_far = Generation(
            token_ids=(*before.token_ids, *answer.token_ids),
            logprobs=(*before.logprobs, *answer.logprobs),
            finish_reason="length" if spent else answer.finish_reason,
            weight_versions=tuple(versions),
            extras=(*before.extras, *answer.extras),
        )
        return replace(self, so_far=so_far, joined=count)

    def stop_candidates(self) -> list[tuple[int, tuple[int, ...]]]:
        """List the ends of a stop string that may have begun before the last answer and ended in it, where no engine
        sees it: the number of tokens to keep, and the tokens whose text would show it."""
        tokens = self.so_far.token_ids
        if not self.stops or not 0 < self.joined < len(tokens):
            return []
        reach = _TOKENS_PER_CHARACTER * max(map(len, self.stops))
        first, least = max(0, self.joined - reach), self.request.more.get("min_tokens", 0)
        ends = range(max(self.joined + 1, least), min(len(tokens), self.joined + reach) + 1)
        return [(end, tokens[first:end]) for end in ends]

    def stopped(self, candidates: Sequence[tuple[int, tuple[int, ...]]], texts: Sequence[str]) -> PartialGeneration:
        """Return this, cut after the first of ``candidates`` whose text has a stop string; unchanged without one."""
        made = self.so_far
        for (end, _), text in zip(candidates, texts, strict=True):
            if any(stop in text for stop in self.stops):
                kept = (replace(one, end=min(one.end, end)) for one in made.weight_versions if one.start < end)
                so_far = replace(
                    made,
                    token_ids=made.token_ids[:end],
                    logprobs=made.logprobs[:end],
                    finish_reason="stop",
                    weight_versions=tuple(kept),
                )
                return replace(self, so_far=so_far)
        return self
