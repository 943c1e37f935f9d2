"""`InferenceClient`: token ids in; tokens with log-probabilities and weight versions out (the data plane)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.discovery import discover
from torchrl_ext.control.http import Keys, run
from torchrl_ext.control.requests.generation import Generation, GenerationRequest, VersionSpan, checked_prompt
from torchrl_ext.control.requests.requests import Requests, targets

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

__all__ = ["Generation", "InferenceClient", "VersionSpan"]


class InferenceClient:
    """Sends prompts to one engine, or to several that serve the same policy.

    Each prompt goes to the engine with the fewest requests in flight. If an engine is unreachable, or answers HTTP 429,
    500 or 502 to 504, its prompts start again on another engine, and the client avoids the failed one for ``retire_s``.
    If an engine aborts a generation (an update with pause mode ``abort``), the client continues it from its tokens on
    any engine; with stop strings it starts again, because one may span two answers. Thread-safe and picklable.

    Args:
        url: base address of an engine or of a router, or a list of addresses.
        kind: ``"vllm"``, ``"embedded"`` or ``"sglang"``; one for all, or one per address. `connect` detects it.
        timeout_s: deadline of one `generate` call, for all its prompts together, in seconds.
        max_concurrency: maximum requests in flight per engine, over all calls of this client.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        retire_s: seconds for which a failed engine is avoided while others answer.
        persistent: once every address has failed, retry until the deadline and log a warning every minute, because a
            router may find another engine meanwhile.
        adapter: name of the LoRA adapter to generate with (`torchrl_ext.LoraPublisher`); None for the base weights.

    Raises:
        ConfigError: no address, a duplicate or invalid one, an unknown kind, or ``max_concurrency`` below 1.

    Example:
        >>> client = tx.InferenceClient.connect(address)
        >>> [answer] = client.generate([[1, 2, 3]], max_tokens=4, temperature=0.0)
        >>> len(answer.token_ids), answer.finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        kind: str | Sequence[str] = "vllm",
        timeout_s: float = 120.0,
        max_concurrency: int = 64,
        api_key: Keys = None,
        retire_s: float = 30.0,
        persistent: bool = False,
        adapter: str | None = None,
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {max_concurrency}", expected="at least 1")
        urls = [url] if isinstance(url, str) else list(url)
        self._targets, self._timeout_s, self._adapter = targets(urls, kind), timeout_s, adapter
        how: dict[str, Any] = {"api_key": api_key, "retire_s": retire_s, "persistent": persistent}
        self._settings: dict[str, Any] = {"kind": kind, "timeout_s": timeout_s, "adapter": adapter, **how}
        self._settings["max_concurrency"] = max_concurrency
        self._requests = Requests(self._targets, limit=max_concurrency, **how)

    @classmethod
    def connect(cls, *addresses: str, api_key: Keys = None, **settings: Any) -> InferenceClient:
        """Return a client for the engines at ``addresses``, and detect their kinds.

        Args:
            addresses: engines, not routers, as for `torchrl_ext.discover`.
            api_key: sent as a bearer token; see `HTTPSession` for several.
            settings: further arguments of the class.

        Raises:
            ConfigError, EngineUnreachableError, EngineRefusedError, DeadlineError: as `torchrl_ext.discover`.
        """
        found = discover(*addresses, api_key=api_key)
        return cls([info.url for info in found], kind=[info.kind for info in found], api_key=api_key, **settings)

    @property
    def urls(self) -> tuple[str, ...]:
        """The base address of each engine."""
        return tuple(self._targets)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        *,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        seed: int | None = None,
        logprobs: bool | int | None = True,
        stop_token_ids: Sequence[int] = (),
        session_ids: Sequence[Any] | None = None,
        cache_versions: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Continue every prompt ``n`` times.

        Args:
            prompts: token ids, at least one per prompt; each a list, or an integer tensor of shape ``(T,)``.
            n: continuations per prompt.
            max_tokens: maximum new tokens per continuation.
            temperature: 0 takes the most probable token.
            seed: continuation j of prompt i is sampled with ``seed + i * n + j``; None leaves it to the engine.
            logprobs: whether to return the log-probability of each sampled token; any number means True (vLLM's 0
                too), None means False.
            stop_token_ids: token ids that end a continuation.
            session_ids: one per prompt; a router sends the prompts of one session to one engine.
            cache_versions: one per prompt: the newest weight version at the first turn of its conversation. A prompt
                then reuses only keys and values of prompts with the same number, so that no new conversation meets
                those of older weights, and a later turn finds those of its own. Needed where updates leave the
                engine's prefix cache (``keep_cache``); the embedded engine has none.
            timeout_s: deadline of this call in place of the client's.
            sampling: further fields of vLLM's ``sampling_params``.

        Returns:
            ``len(prompts) * n`` generations, grouped by prompt, in the order of ``prompts``.

        Raises:
            ConfigError: a prompt is empty or not a list of token ids, or there is not one session, or one version, per
                prompt.
            EngineUnreachableError, EngineRefusedError: every engine failed a request, or one refused it.
            DeadlineError: some generations did not finish in time; names the engines with requests in flight.
        """
        drawn = n if temperature > 0 else 1  # vLLM refuses n > 1 at temperature 0
        sessions = [None] * len(prompts) if session_ids is None else session_ids
        keys = [None] * len(prompts) if cache_versions is None else [f"weights-{one}" for one in cache_versions]
        for name, given in (("session_ids", sessions), ("cache_versions", keys)):
            if len(given) != len(prompts):
                raise ConfigError(f"{len(given)} {name} for {len(prompts)} prompts", expected="one per prompt")
        requests = [
            GenerationRequest(
                token_ids=checked_prompt(prompt, i),
                n=drawn,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=None if seed is None else seed + i * n,
                logprobs=logprobs is not None and logprobs is not False,
                stop_token_ids=tuple(stop_token_ids),
                more=sampling,
                adapter=self._adapter,
                cache_key=key,
                session_id=session,
            )
            for i, (prompt, session, key) in enumerate(zip(prompts, sessions, keys, strict=True))
        ]
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        found = run(self._requests.generations(requests, until))
        return found if drawn == n else [generation for generation in found for _ in range(n)]

    def close(self) -> None:
        """Close the connections; pending requests fail. May be called twice; a later request connects again."""
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(InferenceClient, **self._settings), (list(self.urls),)
