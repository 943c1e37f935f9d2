"""What a switch of weights does to requests that stream: run by `tests.bench.switch` where vLLM is.

Reads one JSON object from standard input and prints one line of JSON last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import torchrl_ext as tx
from torchrl_ext.weights.checkpoint import CheckpointSource


def main() -> None:
    """Read, measure, print."""
    print(json.dumps(asyncio.run(_measured(**json.loads(sys.stdin.read())))))


async def _measured(
    *, models: list[str], requests: int, tokens: int, switches: int, repeats: int, way: str
) -> dict[str, Any]:
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=models[0],
            max_model_len=tokens + 64,
            max_num_seqs=requests,
            enforce_eager=True,
            weight_transfer_config={"backend": "torchrl_ext"},
        )
    )
    try:
        engine: Any = tx.make_engine("inprocess", engine=llm)  # an `InProcessEngine`, which also switches
        if way == "state dict":
            loaded = [dict(iter(CheckpointSource(model))) for model in models]
            switch = [lambda own=own: engine.update_model_weights_from_state_dict(own) for own in loaded]
        else:
            switch = [lambda own=own: engine.update_model_weights(own) for own in models]
        await _streams(llm, requests, 8, "warm")
        await switch[1]()  # the first one joins a transport, and checks parameters
        rounds = []
        for turn in range(repeats):
            quiet = await _streams(llm, requests, tokens, f"quiet-{turn}")
            running = asyncio.create_task(_streams(llm, requests, tokens, f"busy-{turn}"))
            pauses = []
            for index in range(switches):
                await asyncio.sleep(0.2)  # so that switches are spread over the generation, not for synchronisation
                report = await switch[index % 2]()
                pauses.append(report.engines[0].pause_s)
            rounds.append({"without": quiet, "with": await running, "pauses_s": pauses})
        return {"rounds": rounds}
    finally:
        llm.shutdown()


async def _streams(llm: AsyncLLM, requests: int, tokens: int, name: str) -> dict[str, Any]:
    """Requests that stream at the same time: gaps between their tokens in seconds, and what became of them."""
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)

    async def one(number: int) -> tuple[list[float], bool, int]:
        prompt = {"prompt_token_ids": [3, 17, 42, 99, 7, 11 + number]}
        gaps: list[float] = []
        before: float | None = None
        last: Any = None
        async for out in llm.generate(prompt, sampling, f"{name}-{number}"):
            now = time.perf_counter()
            if before is not None:
                gaps.append(now - before)
            before, last = now, out.outputs[0]
        spans = last.weight_versions or []
        known = bool(spans) and spans[0].start == 0 and spans[-1].end == len(last.token_ids) == tokens
        return gaps, known, len(spans)

    found = await asyncio.gather(*(one(number) for number in range(requests)))
    gaps = sorted(gap for row, _, _ in found for gap in row)
    at = {"p50": gaps[len(gaps) // 2], "p95": gaps[int(len(gaps) * 0.95)], "max": gaps[-1]}
    return {
        **{f"{key}_s": value for key, value in at.items()},
        "complete_with_versions": sum(known for _, known, _ in found),
        "requests": requests,
        "spanned_a_switch": sum(spans > 1 for _, _, spans in found),
    }


if __name__ == "__main__":
    main()
