"""Requests and generations independent of the engine's kind, and continuation of requests that an engine aborted.

An engine that is paused with mode ``abort`` returns its requests with the tokens so far. The client appends these to
the prompt and requests the rest from any free engine. Tokens, log-probabilities, weight versions, the budget
(``max_tokens``, ``min_tokens``) carry over. Frequency and presence penalties start again, because engines count tokens
per request. A request with stop strings starts again as a whole, because one may span two answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
from torch import Tensor

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import label_number

__all__ = [
    "UNKNOWN_VERSION",
    "Generation",
    "GenerationRequest",
    "VersionSpan",
    "checked_prompt",
    "version_number",
]

UNKNOWN_VERSION = -1
"""The number of a weight version that an engine does not report, or whose label is not a number."""


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a generation, which the weights labelled ``version`` sampled."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and its sampling settings, independent of the engine's kind.

    Attributes:
        token_ids: the prompt, at least one token.
        n: number of continuations.
        max_tokens: maximum new tokens per continuation.
        temperature: 0 takes the most probable token.
        seed: continuation j is sampled with ``seed + j``; None leaves it to the engine.
        logprobs: whether to return the log-probability of each sampled token.
        stop_token_ids: token ids that end a continuation.
        more: further sampling settings under vLLM's names: ``top_p``, ``top_k``, ``min_tokens``, ``ignore_eos``...
        adapter: name of the LoRA adapter to generate with; None for the base weights.
        cache_key: the request reuses only keys and values that requests with the same key left in the engine's prefix
            cache; None for those without a key.
        session_id: a router sends the requests of one session to one engine; None or "" for no session.
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
    cache_key: str | None = None
    session_id: Any = None

    def split(self) -> list[GenerationRequest]:
        """Return one request per continuation."""
        seeds = [None if self.seed is None else self.seed + j for j in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def after(self, so_far: Generation) -> GenerationRequest:
        """Return the request for the tokens that are left after those of its one continuation so far."""
        count, more = len(so_far.token_ids), dict(self.more)
        if "min_tokens" in more:
            more["min_tokens"] = max(0, more["min_tokens"] - count)
        return replace(
            self,
            token_ids=(*self.token_ids, *so_far.token_ids),
            max_tokens=self.max_tokens - count,
            seed=None if self.seed is None else self.seed + count,  # else an engine would repeat the first one's draws
            more=more,
        )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: new tokens, without the prompt.
        logprobs: natural-log probability of each token under the weights that sampled it, in nats; empty if not
            requested. vLLM and the embedded engine report that of the raw logits, SGLang that after the temperature
            (unless its environment has ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``).
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"`` (the engine was paused with mode ``abort``).
        weight_versions: contiguous spans, several if the weights changed during the generation; empty if the engine
            reports none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "length"
    weight_versions: tuple[VersionSpan, ...] = ()

    def token_versions(self) -> list[int]:
        """Return the number of each token's weight version; `UNKNOWN_VERSION` where the engine reports none."""
        versions = [UNKNOWN_VERSION] * len(self.token_ids)
        for span in self.weight_versions:
            end = min(span.end, len(versions))
            versions[span.start : end] = [version_number(span.version)] * max(0, end - span.start)
        return versions

    def extended(self, answer: Generation, budget: int) -> Generation:
        """Return this and the answer to `GenerationRequest.after`; ``budget`` tokens that are spent end it."""
        count, versions = len(self.token_ids), list(self.weight_versions)
        for span in answer.weight_versions:
            if span.end == span.start:
                continue
            moved = replace(span, start=span.start + count, end=span.end + count)
            if versions and versions[-1].version == moved.version and versions[-1].end == moved.start:
                moved = replace(moved, start=versions.pop().start)
            versions.append(moved)
        spent = answer.finish_reason == "abort" and count + len(answer.token_ids) >= budget
        return Generation(
            token_ids=(*self.token_ids, *answer.token_ids),
            logprobs=(*self.logprobs, *answer.logprobs),
            finish_reason="length" if spent else answer.finish_reason,
            weight_versions=tuple(versions),
        )


def checked_prompt(prompt: Sequence[int] | Tensor, index: int) -> tuple[int, ...]:
    """Return the token ids of a prompt; a tensor on a device is copied once, not token by token.

    Raises:
        ConfigError: it is empty or not a flat sequence of non-negative integers; the message has its index.
    """
    if not len(prompt):
        raise ConfigError(f"prompt {index} has no token", expected="at least one token id per prompt")
    ids = numpy.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise ConfigError(
            f"prompt {index} is not a list of token ids", expected="whole numbers from 0 on, in one dimension"
        )
    return tuple(ids.tolist())


def version_number(label: str) -> int:
    """Return 7 for ``"7"``, 0 for ``"default"`` (the engines' label of initial weights), else `UNKNOWN_VERSION`."""
    if label == "default":
        return 0
    number = label_number(label)
    return UNKNOWN_VERSION if number is None else number
