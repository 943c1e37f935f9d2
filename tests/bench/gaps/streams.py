"""A process of clients that read tokens one by one: ``python -m tests.bench.gaps.streams KIND URL STREAMS TOKENS``.

All clients begin a request together, so that no prompt is computed between tokens that are timed. For each token the
process prints a line with the number of the round, that of the client, and the time of `time.perf_counter`. It ends
with its input.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from contextlib import suppress
from typing import Any

import aiohttp

PROMPT, VOCABULARY = 8, 500


def request(kind: str, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """Return route and body of a request that streams a number of tokens."""
    sampling = {"temperature": 0, "ignore_eos": True}
    if kind == "sglang":
        more = {"sampling_params": sampling | {"max_new_tokens": tokens}}
        return "/generate", {"input_ids": prompt, "stream": True, **more}
    if kind == "vllm":
        return "/v1/completions", {
            "model": "policy",
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            **sampling,
        }
    return "/stream", {"token_ids": prompt, "sampling_params": sampling | {"max_tokens": tokens}}


async def follow(http: aiohttp.ClientSession, kind: str, tokens: int, head: str) -> None:
    """Stream one request, and print a line for each token."""
    route, body = request(kind, [random.randrange(3, VOCABULARY) for _ in range(PROMPT)], tokens)
    async with http.post(route, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                print(head, time.perf_counter(), flush=True)


async def main(kind: str, url: str, streams: int, tokens: int) -> None:
    """Stream rounds of requests until the input ends."""
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as http:
        for turn in itertools.count():
            every = asyncio.gather(*(follow(http, kind, tokens, f"{turn} {client}") for client in range(streams)))
            await asyncio.wait([every, ended], return_when=asyncio.FIRST_COMPLETED)
            if not every.done():
                every.cancel()
            with suppress(asyncio.CancelledError):
                await every
            if ended.done():
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
