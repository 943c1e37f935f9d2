"""`InferenceClient`: token ids in; tokens with log-probabilities and weight versions out (the data plane)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    RouteAbsent,
)
from torchrl_ext.base.registry import engines
from torchrl_ext.control.discovery import PASSING, discover, kind_of
from torchrl_ext.control.http import HTTPSession, Keys, begin, each, normalise_urls, run
from torchrl_ext.control.requests.dialects import Dialect
from torchrl_ext.control.requests.generation import Generation, GenerationRequest, VersionSpan, checked_prompt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Generation", "InferenceClient", "VersionSpan"]

log = logging.getLogger("torchrl_ext")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SILENCE_S = 0.05, 2.0, 60.0  # the last one between two warnings
_MAX_BODY_BYTES = 256 << 20
_DEFAULT = "vllm"  # it describes itself only in its development mode
_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")  # of vLLM's router and of SGLang's
_UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError)

_T = TypeVar("_T")


class InferenceClient:
    """Sends prompts to one engine, or to several that serve the same policy.

    Each prompt goes to the engine with the fewest requests in flight. If an engine is unreachable, or answers HTTP 429,
    500 or 502 to 504, its prompts start again on another engine, and the client avoids the failed one for ``retire_s``.
    If an engine aborts a generation (an update with pause mode ``abort``), the client continues it from its tokens on
    any engine; with stop strings it starts again, because one may span two answers. Once all engines have failed, the
    request fails, unless ``persistent``: a lost answer can be sampled again.

    Thread-safe and picklable; it holds nothing open, and its coroutines work in any event loop. Making one sends
    nothing.

    Args:
        url: base address of an engine or of a router, or a list of addresses.
        kind: ``"vllm"``, ``"embedded"`` or ``"sglang"``; one for all, or one per address. None asks each address before
            its first request, through a router one of its engines; one that does not say gets vLLM's requests.
        timeout_s: deadline of one `generate` call, for all its prompts together, in seconds.
        max_concurrency: maximum requests in flight per engine, over all calls of this client; 0 for no limit.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        retire_s: seconds for which a failed engine is avoided while others answer.
        persistent: once every address has failed, retry until the deadline and log a warning every minute, because a
            router may find another engine meanwhile.
        adapter: name of the LoRA adapter to generate with (`torchrl_ext.LoraPublisher`); None for the base weights.

    Raises:
        ConfigError: no address, a duplicate or invalid one, an unknown kind, not one kind per address, or a negative
            ``max_concurrency``.

    Example:
        >>> client = tx.InferenceClient(address)
        >>> [answer] = client.generate([[1, 2, 3]], max_tokens=4, temperature=0.0)
        >>> len(answer.token_ids), answer.finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        kind: str | Sequence[str] | None = None,
        timeout_s: float = 120.0,
        max_concurrency: int = 64,
        api_key: Keys = None,
        retire_s: float = 30.0,
        persistent: bool = False,
        adapter: str | None = None,
    ) -> None:
        if max_concurrency < 0:
            raise ConfigError(f"max_concurrency is {max_concurrency}", expected="at least 1, or 0 for no limit")
        urls = normalise_urls([url] if isinstance(url, str) else url)
        kinds = [kind] * len(urls) if isinstance(kind, str | None) else list(kind)
        if len(kinds) != len(urls):
            raise ConfigError(f"{len(kinds)} kinds for {len(urls)} addresses", expected="one kind, or one per address")
        self._targets: dict[str, Dialect | None] = {  # None until the address has said its kind
            url: None if kind is None else engines.part(kind, "dialect") for url, kind in zip(urls, kinds, strict=True)
        }
        self._asked: dict[str, concurrent.futures.Future[Dialect]] = {}
        self._settings: dict[str, Any] = {"kind": kind, "timeout_s": timeout_s, "max_concurrency": max_concurrency}
        self._settings |= {"api_key": api_key, "retire_s": retire_s, "persistent": persistent, "adapter": adapter}
        self._timeout_s, self._limit, self._adapter = timeout_s, max_concurrency or float("inf"), adapter
        self._retire_s, self._persistent = retire_s, persistent
        self._retired: dict[str, float] = {}  # targets that failed, and until when they are avoided
        self._in_work, self._freed = dict.fromkeys(self._targets, 0), asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warned = float("-inf")
        how: dict[str, Any] = {"api_key": api_key, "max_body_bytes": _MAX_BODY_BYTES}
        self._sessions = {url: HTTPSession(url, **how) for url in self._targets}

    @classmethod
    def connect(cls, *addresses: str, api_key: Keys = None, **settings: Any) -> InferenceClient:
        """Return a client for the engines at ``addresses``; ask their kinds now, and not before the first request.

        Args:
            addresses: engines, not routers, as for `torchrl_ext.discover`.
            api_key: sent as a bearer token; see `HTTPSession` for several.
            settings: further arguments of the class.

        Raises:
            ConfigError, EngineError, DeadlineError: as `torchrl_ext.discover`.
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
        found = run(self.generations(requests, until))
        return found if drawn == n else [generation for generation in found for _ in range(n)]

    async def generations(self, requests: Sequence[GenerationRequest], until: float) -> list[Generation]:
        """Return the complete continuations of every prompt, in order; the first error cancels the other requests.

        Args:
            requests: the prompts; continuation j of one with a seed is sampled with ``seed + j``.
            until: deadline for all of them on the monotonic clock, in seconds.

        Raises:
            EngineError, DeadlineError: as for `generate`.
        """
        return await _on_the_loop(self._generations(requests, until))

    async def post(self, route: str, body: Any, session_id: Any, until: float) -> Any:
        """Call a route of any target, and return the JSON answer.

        Raises:
            EngineRefusedError: a target refused the request, or its answer is not JSON.
            EngineUnreachableError, DeadlineError: no target answered in time; names each target with its reason.
        """
        asked = self._of_any(lambda url: self._post(url, route, body, session_id, until), until)
        return await _on_the_loop(asked)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(InferenceClient, **self._settings), (list(self.urls),)

    async def _generations(self, requests: Sequence[GenerationRequest], until: float) -> list[Generation]:
        found: dict[int, list[Generation]] = {}
        waiting = iter(enumerate(requests))

        async def serve() -> None:
            for i, one in waiting:
                found[i] = await self._whole(one, until)

        count = int(min(self._limit * len(self._targets), len(requests)))
        serving = asyncio.ensure_future(each([serve() for _ in range(count)]))  # noqa: RUF006 - it is kept
        try:
            await asyncio.wait([serving], timeout=max(0.0, until - time.monotonic()))
            late = [url for url in self._targets if self._in_work[url]]
            if serving.done():
                serving.result()
                return [generation for i in range(len(requests)) for generation in found[i]]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        raise DeadlineError(
            f"{', '.join(late or self._targets)} answered too late: {len(found)} of {len(requests)} prompts are done",
            hint="check whether the engine is paused and resume it, request fewer tokens, or raise timeout_s",
        )

    async def _whole(self, request: GenerationRequest, until: float) -> list[Generation]:
        """Return the complete continuations of one prompt."""
        known = self._targets.values()
        alike = any(dialect is None or dialect.one_seed_per_request for dialect in known)
        if request.n > 1 and request.seed is not None and alike:
            parts = await each([self._whole(one, until) for one in request.split()])
            return [one for (one,) in parts]
        answers = await self._ask(request, until)
        if all(one.finish_reason != "abort" for one in answers):
            return answers
        begun = zip(request.split(), answers, strict=True)
        return await each([self._to_its_end(one, answer, until) for one, answer in begun])

    async def _to_its_end(self, request: GenerationRequest, answer: Generation, until: float) -> Generation:
        """Continue the generation that ``answer`` begins until it is complete."""
        so_far, attempts = Generation(token_ids=(), finish_reason="abort"), itertools.count()
        anew = bool(request.more.get("stop"))  # nothing here could find a stop string across two answers
        while True:
            if answer.finish_reason != "abort" or not anew:
                so_far = so_far.extended(answer, request.max_tokens)
            if so_far.finish_reason != "abort":
                return so_far
            if anew or not answer.token_ids:
                names = ", ".join(self._targets)
                hint = "check whether somebody keeps pausing the engine in a mode that aborts requests"
                error = EngineError(f"{names} aborted requests before their first token", hint=hint)
                await _back_off(next(attempts), until, error)
            (answer,) = await self._ask(request.after(so_far), until)

    async def _ask(self, request: GenerationRequest, until: float) -> list[Generation]:
        async def ask(url: str) -> list[Generation]:
            dialect = self._targets[url] or await self._dialect(url, until)
            try:
                answer = await self._post(url, dialect.route, dialect.ask(request), request.session_id, until)
            except RouteAbsent:
                if self._settings["kind"] is None:  # another engine may listen there by now
                    self._targets[url] = None
                raise
            where = url + dialect.route
            try:
                found = dialect.read(answer)
            except _UNREADABLE as error:
                expected = "tokens as this kind of engine gives them"
                hint = "check that kind= is the engine's"
                raise EngineRefusedError(f"{where} gave no tokens: {error!r}", expected=expected, hint=hint) from None
            if len(found) != request.n:
                raise EngineRefusedError(f"{where} gave {len(found)} continuations", expected=str(request.n))
            return found

        return await self._of_any(ask, until)

    async def _dialect(self, url: str, until: float) -> Dialect:
        """Ask a target for its kind, once for all requests that wait for it; after a failure the next one asks anew."""

        def ask() -> Dialect:
            left_s = until - time.monotonic()
            kind = kind_of(HTTPSession(url, api_key=self._sessions[url].api_key, timeout_s=left_s))
            found: Dialect = engines.part(kind or _DEFAULT, "dialect")
            self._targets[url] = found
            return found

        job = self._asked.get(url)
        if job is None:
            job = self._asked[url] = in_thread(ask, f"ask {url}")
            job.add_done_callback(lambda job: self._asked.pop(url, None))
        return await asyncio.wrap_future(job)

    async def _post(self, url: str, route: str, body: Any, session_id: Any, until: float) -> Any:
        headers = {} if session_id in (None, "") else dict.fromkeys(_SESSION_HEADERS, str(session_id))
        left_s = until - time.monotonic()
        answer = await self._sessions[url].exchange("POST", route, body, headers=headers, timeout_s=left_s)
        try:
            return answer.checked_json()
        except RouteAbsent as error:
            hint = "give the address of an engine or its router; if it does not say its kind, name it with kind="
            expected, status = f"an engine with the route {route}", error.status
            raise RouteAbsent(error.what, expected=expected, hint=hint, status=status, reason=error.reason) from None

    async def _of_any(self, call: Callable[[str], Awaitable[_T]], until: float) -> _T:
        """Return the result of ``call`` for the first target where it succeeds."""
        failed, attempts = dict[str, EngineError](), itertools.count()
        while True:
            async with self._turn(failed, until) as url:
                try:
                    found = await call(url)
                except (EngineUnreachableError, EngineRefusedError) as error:
                    if isinstance(error, EngineRefusedError) and error.status not in PASSING:
                        raise  # another engine would refuse it too
                    failed[url] = error
                    self._retired[url] = time.monotonic() + self._retire_s
                else:
                    self._retired.pop(url, None)
                    return found
            if len(failed) == len(self._targets):
                why, attempt = self._joined(failed), next(attempts)
                if not self._persistent:
                    raise why
                if time.monotonic() - self._warned >= _SILENCE_S:
                    self._warned = time.monotonic()
                    log.warning("requests got no answer and are sent again: %s", why)
                await _back_off(attempt, until, why)
                failed.clear()

    @asynccontextmanager
    async def _turn(self, failed: Mapping[str, EngineError], until: float) -> AsyncIterator[str]:
        """Wait for a free place at a target that has not failed, and hold it during the block."""
        if (loop := asyncio.get_running_loop()) is not self._loop:  # the first request, or the first after a fork
            self._loop, self._freed, self._asked = loop, asyncio.Condition(), {}
            self._in_work = dict.fromkeys(self._targets, 0)
        left = [url for url in self._targets if url not in failed]
        async with self._freed:
            while True:
                now = time.monotonic()
                well = [url for url in left if self._retired.get(url, now) <= now] or left
                found = min(well, key=self._in_work.__getitem__)  # ties go to the first in order
                if self._in_work[found] < self._limit:
                    break
                try:
                    await asyncio.wait_for(self._freed.wait(), until - time.monotonic())
                except asyncio.TimeoutError:
                    names = ", ".join(well)
                    raise DeadlineError(
                        f"{names} had {self._limit} requests running until the deadline",
                        hint="raise timeout_s, or max_concurrency if the engine can take more at once",
                    ) from None
            self._in_work[found] += 1
        try:
            yield found
        finally:
            self._in_work[found] -= 1
            async with self._freed:
                self._freed.notify_all()

    def _joined(self, failed: Mapping[str, EngineError]) -> EngineError:
        errors = list(failed.values())
        if len(errors) == 1:
            return errors[0]
        lines = "; ".join(f"{url}: {failed[url].what}" for url in self._targets)
        what, hint = f"none of {len(errors)} engines answers: {lines}", "start them again, or pass other addresses"
        joined = EngineUnreachableError(what, hint=hint)
        joined.__cause__ = errors[-1]
        return joined


async def _on_the_loop(call: Coroutine[Any, Any, _T]) -> _T:
    """Run ``call`` on the loop that all clients of the process share."""
    return await asyncio.wrap_future(begin(call))


async def _back_off(attempt: int, until: float, why: EngineError) -> None:
    """Wait before another attempt, longer after each; raise DeadlineError with the last failure if no time is left."""
    pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 16))
    if until - time.monotonic() <= pause_s:
        raise DeadlineError(f"no answer until the deadline; the last one was: {why}") from why
    await asyncio.sleep(pause_s)
