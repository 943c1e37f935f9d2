"""Log-probabilities of given tokens from vLLM's `LLM` or `AsyncLLM`, in their own process."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

__all__ = ["logprobs"]

_SAMPLING = SamplingParams(  # 0: the prompt's own tokens, whatever their rank
    prompt_logprobs=0,
    skip_reading_prefix_cache=True,
    max_tokens=1,
    temperature=1.0,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


def logprobs(
    llm: Any, prompts: Sequence[Sequence[int]], *, asynchronous: bool
) -> list[list[float]] | Awaitable[list[list[float]]]:
    """Return what `EngineClient.logprobs` does; of an `AsyncLLM` an awaitable of it, for its loop."""
    if asynchronous:
        return _ask_all(llm, prompts)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(asked, _SAMPLING, use_tqdm=False)
    return [_read(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


async def _ask_all(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    found = []
    for prompt in prompts:
        answers = llm.generate({"prompt_token_ids": list(prompt)}, _SAMPLING, f"torchrl-ext-{uuid.uuid4().hex}")
        (output,) = [answer async for answer in answers]
        found.append(_read(prompt, output))
    return found


def _read(prompt: Sequence[int], output: Any) -> list[float]:
    rows = output.prompt_logprobs
    return [row[token].logprob for token, row in zip(prompt[1:], rows[1:], strict=True)]
