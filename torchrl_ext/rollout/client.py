"""`InferenceClient`: token ids in, tokens with log-probabilities and weight versions out (the data plane)."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError
from torchrl_ext.rollout.endpoints import Endpoints
from torchrl_ext.rollout.generation import Carried, Generation, GenerationRequest, VersionSpan
from torchrl_ext.rollout.loops import BackgroundLoop, each
from torchrl_ext.rollout.waits import Waits
from torchrl_ext.rpc.discovery import discover

__all__ = ["Generation", "InferenceClient", "VersionSpan"]


class InferenceClient:
    """Sends prompts to one engine or to several that serve the same policy, many at a time.

    A prompt goes to the engine that has the fewest in work. One that cannot be reached, or says that it is broken
    or busy (HTTP 500, 502 to 504, 429), is given its prompts no longer: they are asked of another engine from the
    start, and the engine is tried again after ``retire_s``. What an engine aborts (an update that pauses with mode
    ``abort``) goes on with the tokens that it has, on any engine; with stop strings, which may straddle the two
    parts, from the start. Safe to use from many threads, and to send to another process.

    Args:
        url: base address of an engine (or of a router in front of several), or a list of addresses.
        kind: ``"vllm"``, ``"embedded"`` or ``"sglang"``; one for all, or one per address. `connect` finds out.
        timeout_s: deadline of one `generate` call, all prompts together, in seconds.
        max_concurrency: most requests in work at one engine, over all calls of this client.
        api_key: sent as a bearer token.
        retire_s: seconds for which an engine that failed is left alone while others answer.
        adapter: name of the LoRA adapter to generate with (`AdapterSender`); None for the base weights.

    Raises:
        ConfigError: no address, one twice or one that cannot work, or a kind that nobody knows.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        kind: str | Sequence[str] = "vllm",
        timeout_s: float = 120.0,
        max_concurrency: int = 64,
        api_key: str | None = None,
        retire_s: float = 30.0,
        adapter: str | None = None,
    ) -> None:
        self._settings = {
            "kind": kind,
            "timeout_s": timeout_s,
            "max_concurrency": max_concurrency,
            "api_key": api_key,
            "retire_s": retire_s,
            "adapter": adapter,
        }
        urls = [url] if isinstance(url, str) else list(url)
        kinds = [kind] * len(urls) if isinstance(kind, str) else list(kind)
        self._timeout_s, self._adapter = timeout_s, adapter
        self._make = functools.partial(Endpoints, urls, kinds, cap=max_concurrency, api_key=api_key, retire_s=retire_s)
        self._opening = threading.Lock()
        self._endpoints: Endpoints = self._make()
        self._loop: BackgroundLoop | None = None

    @classmethod
    def connect(cls, *addresses: str, api_key: str | None = None, **settings: Any) -> InferenceClient:
        """A client for the engines at ``addresses``, whatever their kinds.

        Args:
            addresses: as for `torchrl_ext.discover`: engines, not routers.
            api_key: sent as a bearer token.
            settings: further arguments of the class.

        Raises:
            ConfigError, EngineUnreachableError, EngineRefusedError, DeadlineError: as `torchrl_ext.discover`.
        """
        found = discover(*addresses, api_key=api_key)
        return cls([info.url for info in found], kind=[info.kind for info in found], api_key=api_key, **settings)

    @property
    def url(self) -> str:
        """The engine's base address, or all of them."""
        return ", ".join(self.urls)

    @property
    def urls(self) -> tuple[str, ...]:
        """The base address of each engine."""
        return self._endpoints.urls

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        seed: int | None = None,
        logprobs: bool | int | None = True,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Continue every prompt ``n`` times.

        Args:
            prompts: token ids, at least one per prompt.
            n: continuations per prompt.
            max_tokens: most new tokens of each.
            temperature: 0 takes the most probable token.
            seed: continuation j of prompt i is sampled with ``seed + i * n + j``; None leaves it to the engine.
            logprobs: ask for the log-probability of each sampled token; any number does as well (in vLLM's convention
                0 is that of the sampled token alone), False and None do not.
            stop_token_ids: end after one of these.
            timeout_s: deadline of this call in place of the client's.
            sampling: further fields of vLLM's ``sampling_params``.

        Returns:
            ``len(prompts) * n`` generations, those of one prompt together, in the order of ``prompts``.

        Raises:
            ConfigError: a prompt is empty.
            EngineUnreachableError, EngineRefusedError: what the engine said to the first request that no engine took.
            DeadlineError: not every generation came in time; names the engines that owe some.
        """
        endpoints, loop = self._opened()
        asked = n if temperature > 0 else 1  # vLLM refuses to make the same continuation twice
        requests = []
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(f"prompt {i} has no token", expected="at least one token id per prompt")
            requests.append(
                GenerationRequest(
                    token_ids=tuple(int(token) for token in prompt),
                    n=asked,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=None if seed is None else seed + i * n,
                    logprobs=logprobs is not None and logprobs is not False,
                    stop_token_ids=tuple(stop_token_ids),
                    more=sampling,
                    adapter=self._adapter,
                )
            )
        if seed is not None and endpoints.one_seed_per_request:
            requests = [one for request in requests for one in request.split()]
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        found = [generation for group in loop.run(_all(endpoints, requests, until)) for generation in group]
        return found if asked == n else [generation for generation in found for _ in range(n)]

    def close(self) -> None:
        """Drop the connections, and end what is in work with an error. May be called twice; a later call opens anew."""
        with self._opening:
            endpoints, loop, self._loop = self._endpoints, self._loop, None
        if loop is not None:
            loop.stop(endpoints.close())

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(InferenceClient, **self._settings), (list(self.urls),)

    def _opened(self) -> tuple[Endpoints, BackgroundLoop]:
        with self._opening:
            if self._loop is None or not self._loop.alive:
                self._endpoints, self._loop = self._make(), BackgroundLoop()
            return self._endpoints, self._loop


async def _all(endpoints: Endpoints, requests: Sequence[GenerationRequest], until: float) -> list[list[Generation]]:
    """Each request's generations; the first error, and the deadline, end every request that is in work."""
    work, found = deque(enumerate(requests)), {}

    async def serve() -> None:
        while work:
            i, request = work.popleft()
            found[i] = await _whole(endpoints, request, until)

    serving = [asyncio.ensure_future(serve()) for _ in range(min(endpoints.capacity, len(requests)))]
    if not serving:
        return []
    try:
        left_s = max(0.0, until - time.monotonic())
        done, pending = await asyncio.wait(serving, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        owing = endpoints.busy()
    finally:
        for one in serving:
            one.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
    for one in done:
        one.result()
    if pending:
        raise DeadlineError(
            f"{', '.join(owing or endpoints.urls)} answered too late: {len(found)} of {len(requests)} prompts are done",
            hint="is the engine paused? Resume it, ask for fewer tokens, or raise timeout_s",
        )
    return [found[i] for i in range(len(requests))]


async def _whole(endpoints: Endpoints, request: GenerationRequest, until: float) -> list[Generation]:
    """The continuations of one request, each to its own end."""
    found = await endpoints.ask(request, until)
    if all(one.finish_reason != "abort" for one in found):
        return found
    return await each(
        [
            _to_its_end(endpoints, Carried(request=one), part, until)
            for one, part in zip(request.split(), found, strict=True)
        ]
    )


async def _to_its_end(endpoints: Endpoints, carried: Carried, found: Generation, until: float) -> Generation:
    waits = Waits(until)
    while True:
        if found.finish_reason != "abort" or not carried.stops:  # what nobody can look at for a stop string is dropped
            carried = carried.extended(found)
        if carried.done:
            return carried.made
        if carried.stops or not found.token_ids:
            await waits.wait(EngineError(f"{', '.join(endpoints.urls)}: requests are aborted before they have a token"))
        (found,) = await endpoints.ask(carried.remaining(), until)
