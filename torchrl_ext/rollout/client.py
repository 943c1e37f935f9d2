"""`InferenceClient`: token ids in, tokens with log-probabilities and weight versions out (the data plane)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.rpc.http import HTTPSession

__all__ = ["Generation", "InferenceClient", "VersionSpan"]

ROUTE = "/inference/v1/generate"


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a generation were sampled by weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: new tokens, without the prompt.
        logprobs: log-probability of each token under the raw distribution of the weights that sampled it; empty
            where none were asked for.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"`` (the engine was paused with mode ``abort``).
        weight_versions: contiguous spans; more than one where weights changed while it ran. Empty where the engine
            does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "length"
    weight_versions: tuple[VersionSpan, ...] = ()


class InferenceClient:
    """Sends prompts to one engine, many at a time. Works with vLLM and with the embedded engine.

    Args:
        url: base address of the engine, or of a router in front of several.
        timeout_s: deadline of one `generate` call, all prompts together, in seconds.
        max_concurrency: most requests in flight.
        api_key: sent as a bearer token.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 120.0, max_concurrency: int = 64, api_key: str | None = None
    ) -> None:
        self._session = HTTPSession(url, timeout_s=timeout_s, api_key=api_key)
        self._timeout_s, self._max_concurrency = timeout_s, max_concurrency

    @property
    def url(self) -> str:
        """The engine's base address."""
        return self._session.url

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
            EngineUnreachableError, EngineRefusedError: what the engine said to the first request that failed.
            DeadlineError: not every generation came in time.
        """
        asked = n if temperature > 0 else 1  # vLLM refuses to make the same continuation twice
        params = {"n": asked, "max_tokens": max_tokens, "temperature": temperature, **sampling}
        params |= {"logprobs": 0} if logprobs else {}
        params |= {"stop_token_ids": list(stop_token_ids)} if stop_token_ids else {}
        bodies = []
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(f"prompt {i} has no token", expected="at least one token id per prompt")
            seeded = params if seed is None else {**params, "seed": seed + i * n}
            bodies.append({"token_ids": [int(token) for token in prompt], "sampling_params": seeded})
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        groups = self._all(bodies, until)
        return [generation for group in groups for generation in (group if asked == n else group * n)]

    def close(self) -> None:
        """Drop the connections. May be called twice."""
        self._session.close()

    def _all(self, bodies: Sequence[Any], until: float) -> list[list[Generation]]:
        """Each body's generations; threads are daemons, so that a caller who is interrupted need not wait for them."""
        work: SimpleQueue[tuple[Any, Future[list[Generation]]]] = SimpleQueue()
        futures: list[Future[list[Generation]]] = []
        for body in bodies:
            futures.append(Future())
            work.put((body, futures[-1]))
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    body, future = work.get_nowait()
                except Empty:
                    return
                try:
                    future.set_result(self._one(body, until))
                except BaseException as error:  # noqa: BLE001 - carried over to the waiting caller
                    stop.set()
                    future.set_exception(error)

        for i in range(min(self._max_concurrency, len(bodies))):
            threading.Thread(target=serve, name=f"generate-{i}", daemon=True).start()
        try:
            done, pending = wait(futures, max(0.0, until - time.monotonic()), return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in futures:
            if future in done:
                future.result()
        if pending:
            raise DeadlineError(
                f"{self.url} answered {len(done)} of {len(futures)} prompts in time",
                hint="is the engine paused? Resume it, ask for fewer tokens, or raise timeout_s",
            )
        return [future.result() for future in futures]

    def _one(self, body: Any, until: float) -> list[Generation]:
        answer = self._session.post(ROUTE, body, timeout_s=max(0.001, until - time.monotonic()))
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return [_generation(choice) for choice in choices]
        except (KeyError, TypeError) as error:
            raise EngineRefusedError(
                f"{self.url}{ROUTE} gave an answer without {error}", expected="choices with token_ids"
            ) from None


def _generation(choice: Any) -> Generation:
    content = (choice.get("logprobs") or {}).get("content") or ()
    return Generation(
        token_ids=tuple(choice["token_ids"] or ()),
        logprobs=tuple(entry["logprob"] for entry in content),
        finish_reason=choice["finish_reason"],
        weight_versions=tuple(
            VersionSpan(version=span["version"], start=span["start"], end=span["end"])
            for span in choice.get("weight_versions") or ()
        ),
    )
