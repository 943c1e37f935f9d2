"""Log-probabilities as engines write them in answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchrl_ext.errors import EngineRefusedError

__all__ = ["logprobs_of_embedded", "logprobs_of_sglang", "logprobs_of_vllm"]


def logprobs_of_embedded(url: str, prompts: Sequence[Sequence[int]], answer: Any) -> list[list[float]]:
    """Those of each prompt's tokens after the first, in an answer of `/prompt_logprobs`: ``{"logprobs": [[-3.2]]}``.

    Raises:
        EngineRefusedError: the answer has not one for each.
    """
    try:
        return [_complete(row, prompt) for prompt, row in zip(prompts, answer["logprobs"], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise _without(url, "/prompt_logprobs", error) from error


def logprobs_of_vllm(url: str, prompt: Sequence[int], answer: Any) -> list[float]:
    """Those of ``prompt``'s tokens after the first, in an answer of `/inference/v1/generate`.

    ``prompt_logprobs`` has null for the first token, and for each further one ``{"17": {"logprob": -3.2, ...}}``: by
    token id, the prompt's own token always among them. vLLM writes -9999 for -inf.

    Raises:
        EngineRefusedError: the answer has not one for each.
    """
    try:
        rows = answer["prompt_logprobs"]
        found = [row[str(token)]["logprob"] for token, row in zip(prompt, rows, strict=True) if row is not None]
        return _complete(found, prompt)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _without(url, "/inference/v1/generate", error) from error


def logprobs_of_sglang(url: str, prompt: Sequence[int], answer: Any) -> list[float]:
    """Those of ``prompt``'s tokens after the first, in an answer of `/generate`.

    ``meta_info.input_token_logprobs`` has ``[logprob, token id, text]`` per token, with null for the first one.

    Raises:
        EngineRefusedError: the answer has not one for each.
    """
    try:
        rows = answer["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(prompt):
            raise ValueError("it is about other tokens")
        return _complete([row[0] for row in rows[1:]], prompt)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise _without(url, "/generate", error) from error


def _complete(found: list[Any], prompt: Sequence[int]) -> list[float]:
    if len(found) != len(prompt) - 1:
        raise ValueError(f"there are {len(found)}")
    return [math.nan if value is None else float(value) for value in found]  # JSON has no NaN


def _without(url: str, route: str, error: Exception) -> EngineRefusedError:
    return EngineRefusedError(
        f"{url}{route} answered without the log-probabilities of the prompt: {type(error).__name__}: {error}",
        expected="one for each token after the first",
    )
