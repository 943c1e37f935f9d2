"""`InferenceClient`: token ids in, tokens with log-probabilities and weight versions out (the data plane)."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError
from torchrl_ext.rollout.endpoints import Endpoints
from torchrl_ext.rollout.generation import Generation, GenerationRequest, VersionSpan
from torchrl_ext.rpc.discovery import discover

__all__ = ["Generation", "InferenceClient", "VersionSpan"]


class InferenceClient:
    """Sends prompts to one engine or to several that serve the same policy, many at a time.

    A prompt goes to the engine that has the fewest in work. One that cannot be reached, or says that it is broken
    (HTTP 5xx), is given its prompts no longer: they are asked of another engine from the start, and the engine is
    tried again after ``retire_s``. Safe to use from many threads, and to send to another process.

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
        self._endpoints = Endpoints(
            urls, kinds, timeout_s=timeout_s, cap=max_concurrency, api_key=api_key, retire_s=retire_s
        )
        self._timeout_s, self._adapter = timeout_s, adapter

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
        logprobs: bool = True,
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
            logprobs: ask for the log-probability of each sampled token.
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
                    logprobs=logprobs,
                    stop_token_ids=tuple(stop_token_ids),
                    more=sampling,
                    adapter=self._adapter,
                )
            )
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        groups = self._all(requests, until)
        return [generation for group in groups for generation in (group if asked == n else group * n)]

    def close(self) -> None:
        """Drop the connections. May be called twice."""
        self._endpoints.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(InferenceClient, **self._settings), (list(self.urls),)

    def _all(self, requests: Sequence[GenerationRequest], until: float) -> list[list[Generation]]:
        """Each request's generations; threads are daemons, so that an interrupted caller need not wait for them."""
        work: SimpleQueue[tuple[GenerationRequest, Future[list[Generation]]]] = SimpleQueue()
        futures: list[Future[list[Generation]]] = []
        for request in requests:
            futures.append(Future())
            work.put((request, futures[-1]))
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    request, future = work.get_nowait()
                except Empty:
                    return
                try:
                    future.set_result(self._endpoints.ask(request, until))
                except BaseException as error:  # noqa: BLE001 - carried over to the waiting caller
                    stop.set()
                    future.set_exception(error)

        for i in range(min(self._endpoints.capacity, len(requests))):
            threading.Thread(target=serve, name=f"generate-{i}", daemon=True).start()
        try:
            done, pending = wait(futures, max(0.0, until - time.monotonic()), return_when=FIRST_EXCEPTION)
            owing = self._endpoints.busy() if pending else ()
        finally:
            stop.set()
        for future in futures:
            if future in done:
                future.result()
        if pending:
            raise DeadlineError(
                f"{', '.join(owing) or self.url} answered too late: {len(done)} of {len(futures)} prompts are done",
                hint="is the engine paused? Resume it, ask for fewer tokens, or raise timeout_s",
            )
        return [future.result() for future in futures]
