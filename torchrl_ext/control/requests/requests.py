"""Send generation requests: choose an engine, retry after failures, continue after aborts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    RouteAbsent,
)
from torchrl_ext.base.registry import engines
from torchrl_ext.control.http import HTTPSession, Keys, begin, each, normalise_urls
from torchrl_ext.control.requests.dialects import Dialect
from torchrl_ext.control.requests.generation import Generation, GenerationRequest

__all__ = ["Requests", "targets"]

log = logging.getLogger("torchrl_ext")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SILENCE_S = 0.05, 2.0, 60.0  # the last one between two warnings
_PASSING = (429, 500, 502, 503, 504)  # too many requests or a server fault; 501 and 505 are final (RFC 9110)
_MAX_BODY_BYTES, _KEEP_S = 256 << 20, 2.0
_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")  # of vLLM's router and of SGLang's
_UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError)

_T = TypeVar("_T")


def targets(urls: Sequence[str], kinds: str | Sequence[str]) -> dict[str, Dialect]:
    """Return the dialect of the engine or router at each base address.

    Args:
        urls: addresses, as `torchrl_ext.control.http.normalise_url` takes them.
        kinds: kind of engine per address, or one for all.

    Raises:
        ConfigError: no address, a duplicate or invalid one, an unknown kind, or not one kind per address.
    """
    kinds = [kinds] * len(urls) if isinstance(kinds, str) else list(kinds)
    if len(kinds) != len(urls):
        raise ConfigError(f"{len(kinds)} kinds for {len(urls)} addresses", expected="one kind, or one per address")
    return {url: engines.part(kind, "dialect") for url, kind in zip(normalise_urls(urls), kinds, strict=True)}


class Requests:
    """Sends each request to the target with the fewest in flight; works from any event loop, and after a fork.

    Failover and aborts are as for `InferenceClient`. A refusal other than HTTP 429, 500 and 502 to 504 is raised at
    once. Once all targets have failed, the request fails, unless ``persistent``: a lost answer can be sampled again.

    Args:
        targets: at least one dialect, by base address.
        limit: maximum requests in flight per target; 0 for no limit.
        api_key, retire_s, persistent: as for `InferenceClient`.
    """

    def __init__(
        self,
        targets: Mapping[str, Dialect],
        *,
        limit: int,
        api_key: Keys,
        retire_s: float = 0.0,
        persistent: bool = False,
    ) -> None:
        self._targets, self._limit = targets, limit or float("inf")
        self._retire_s, self._persistent = retire_s, persistent
        self._retired: dict[str, float] = {}  # targets that failed, and until when they are avoided
        self._in_work, self._freed = dict.fromkeys(self._targets, 0), asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[Future[Any]] = set()  # until they end, or `close` takes and cancels them
        self._warned = float("-inf")
        how: dict[str, Any] = {"api_key": api_key, "max_body_bytes": _MAX_BODY_BYTES, "keep_s": _KEEP_S}
        self._sessions = {url: HTTPSession(url, **how) for url in self._targets}

    async def generations(self, requests: Sequence[GenerationRequest], until: float) -> list[Generation]:
        """Return the complete continuations of every prompt, in order; the first error cancels the other requests.

        Args:
            requests: the prompts; continuation j of one with a seed is sampled with ``seed + j``.
            until: deadline for all of them on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError, EngineRefusedError: every target failed a request, or one refused it.
            DeadlineError: some generations did not finish in time; names the engines with requests in flight.
            EngineError: `close` was called meanwhile.
        """
        return await self._until_closed(self._generations(requests, until))

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

    async def post(self, route: str, body: Any, session_id: Any, until: float) -> Any:
        """Call a route of any target, and return the JSON answer.

        Raises:
            EngineRefusedError: a target refused the request, or its answer is not JSON.
            EngineUnreachableError, DeadlineError: no target answered in time; names each target with its reason.
            EngineError: `close` was called meanwhile.
        """
        asked = self._of_any(lambda url: self._post(url, route, body, session_id, until), until)
        return await self._until_closed(asked)

    def close(self) -> None:
        """Close the connections; pending requests fail with an EngineError. A later request connects again."""
        while self._calls:
            self._calls.pop().cancel()
        for session in self._sessions.values():
            session.close()

    async def _until_closed(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Run ``call`` on the loop that all clients share."""
        begun = begin(call)
        self._calls.add(begun)
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            if begun in self._calls:  # the caller was cancelled, and not by `close`
                raise
            raise EngineError(
                f"{', '.join(self._targets)}: the client was closed before its requests had their answers",
                state="the requests are cancelled",
                hint="close a client after its last request; a later call opens it again",
            ) from None
        finally:
            self._calls.discard(begun)

    async def _whole(self, request: GenerationRequest, until: float) -> list[Generation]:
        """Return the complete continuations of one prompt."""
        alike = any(dialect.one_seed_per_request for dialect in self._targets.values())
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
                error = EngineError(f"{names}: requests were aborted before their first token")
                await _back_off(next(attempts), until, error)
            (answer,) = await self._ask(request.after(so_far), until)

    async def _ask(self, request: GenerationRequest, until: float) -> list[Generation]:
        async def ask(url: str) -> list[Generation]:
            dialect = self._targets[url]
            answer = await self._post(url, dialect.route, dialect.ask(request), request.session_id, until)
            where = url + dialect.route
            try:
                found = dialect.read(answer)
            except _UNREADABLE as error:
                expected = "tokens as this kind of engine gives them"
                raise EngineRefusedError(f"{where} gave no tokens: {error!r}", expected=expected) from None
            if len(found) != request.n:
                raise EngineRefusedError(f"{where} gave {len(found)} continuations", expected=str(request.n))
            return found

        return await self._of_any(ask, until)

    async def _post(self, url: str, route: str, body: Any, session_id: Any, until: float) -> Any:
        headers = {} if session_id in (None, "") else dict.fromkeys(_SESSION_HEADERS, str(session_id))
        left_s = until - time.monotonic()
        answer = await self._sessions[url].exchange("POST", route, body, headers=headers, timeout_s=left_s)
        try:
            return answer.checked_json()
        except RouteAbsent as error:
            hint = "let InferenceClient.connect find the kinds of engines, or name them with kind="
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
                    if isinstance(error, EngineRefusedError) and error.status not in _PASSING:
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
            self._loop, self._freed = loop, asyncio.Condition()
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
                    raise DeadlineError(f"{names} had {self._limit} requests running until the deadline") from None
            self._in_work[found] += 1
        try:
            yield found
        finally:
            self._in_work[found] -= 1
            async with self._freed:
                self._freed.notify_all()

    def _joined(self, failed: Mapping[str, EngineError]) -> EngineError:
        """Return the error for a request that failed on every target."""
        errors = list(failed.values())
        if len(errors) == 1:
            return errors[0]
        lines = "; ".join(f"{url}: {failed[url].what}" for url in self._targets)
        what, hint = f"none of {len(errors)} engines answers: {lines}", "start them again, or pass other addresses"
        joined = EngineUnreachableError(what, hint=hint)
        joined.__cause__ = errors[-1]
        return joined


async def _back_off(attempt: int, until: float, why: EngineError) -> None:
    """Wait before another attempt, longer after each.

    Args:
        attempt: number of waits before this one.
        until: deadline on the monotonic clock, in seconds.
        why: the last failure.

    Raises:
        DeadlineError: no time is left for another attempt; the message has the last failure.
    """
    pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 16))
    if until - time.monotonic() <= pause_s:
        raise DeadlineError(f"no answer until the deadline; the last one was: {why}") from why
    await asyncio.sleep(pause_s)
