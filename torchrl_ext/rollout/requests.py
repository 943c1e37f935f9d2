"""Send requests for tokens, in one event loop: choose an engine, try again after failures, continue after aborts.

The rules are the same for every client, whether it asks several engines itself or a router in front of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.registry import engines
from torchrl_ext.rollout.dialects import Dialect
from torchrl_ext.rollout.generation import Generation, GenerationRequest, PartialGeneration
from torchrl_ext.rpc.connections import each
from torchrl_ext.rpc.health import Health
from torchrl_ext.rpc.http import AsyncSession, Keys, normalise_urls

__all__ = ["Backoff", "Requests", "RoutedRequest", "Target", "targets"]

log = logging.getLogger("torchrl_ext")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SILENCE_S = 0.05, 2.0, 60.0  # the last one between two warnings
_PASSING = (429, 500, 502, 503, 504)  # too many requests, or something is broken; 501 and 505 are final (RFC 9110)
_PARTY = "requests"  # that complains of engines
_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")  # by which vLLM's router knows a session, and SGLang's
_UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError)

_T = TypeVar("_T")
Texts = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """One address that requests go to, and the dialect of the engine or router that answers there."""

    url: str
    dialect: Dialect


def targets(urls: Sequence[str], kinds: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets at these addresses, given the kind of engine at each.

    Raises:
        ConfigError: no address, one twice or one that cannot work, or an unknown kind.
    """
    if len(kinds) != len(urls):
        raise ConfigError(f"{len(kinds)} kinds for {len(urls)} addresses", expected="one kind, or one per address")
    return tuple(
        Target(url=url, dialect=engines.part(kind, "dialect")())
        for url, kind in zip(normalise_urls(urls), kinds, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """One request for tokens, and how its HTTP calls are routed.

    Attributes:
        request: the prompt and how to continue it.
        session_id: requests of one session stay on one engine behind a router; None for none.
        more: further fields of the body.
        route: takes the place of the dialect's route.
        texts: decodes token ids, to find stop strings that straddle two engines' answers; with None, an aborted request
            that has stop strings is asked from the start again.
    """

    request: GenerationRequest
    session_id: Any = None
    more: Mapping[str, Any] | None = None
    route: str | None = None
    texts: Texts | None = None


class Requests:
    """Gives each request to the target with the fewest in work; belongs to the event loop that first asks.

    If a target cannot be reached, or says that it is broken or busy (HTTP 500, 502 to 504, 429), the request goes to
    another target, from the start, and the failed one is left alone for a while. Once all targets have failed, the
    request fails; or, with ``persistent``, it is asked again until its deadline (a warning each minute says so): an
    answer that was lost can be sampled anew, and a router may have found another engine by then. Any other refusal is
    raised at once. A request that an engine aborts (pause mode ``abort``) goes on with its tokens, on any target.

    Args:
        targets: at least one.
        limit: most requests in work at one target; 0 for no limit.
        api_key: sent as a bearer token; see `AsyncSession` for several.
        retire_s: seconds for which a target that failed is left alone while others answer.
        persistent: ask again until the deadline where every target has failed.
        health: which engines are well; targets that others complain of are left alone, too. None for one of its own.
        connection_limit: most connections at a time; 0 for as many as there are calls.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        limit: int,
        api_key: Keys,
        retire_s: float = 0.0,
        persistent: bool = False,
        health: Health | None = None,
        connection_limit: int = 0,
    ) -> None:
        self._targets, self._limit = tuple(targets), limit or float("inf")
        self._retire_s, self._persistent = retire_s, persistent
        self._health = Health() if health is None else health
        self._in_work = dict.fromkeys(self._targets, 0)
        self._freed, self._warned = asyncio.Condition(), float("-inf")
        self.session = AsyncSession(api_key=api_key, connection_limit=connection_limit)

    async def generations(self, requests: Sequence[RoutedRequest], until: float) -> list[list[Generation]]:
        """Return every prompt's continuations, in order, each complete; the first error cancels the other requests.

        Args:
            requests: the prompts.
            until: deadline of all together on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError, EngineRefusedError: an engine's answer to the first request that none took.
            DeadlineError: not every generation came in time; names the engines that still had work.
        """
        found: dict[int, list[Generation]] = {}
        waiting = iter(enumerate(requests))

        async def serve() -> None:
            for i, one in waiting:
                found[i] = await self._whole(one, until)

        count = int(min(self._limit * len(self._targets), len(requests)))
        serving = asyncio.ensure_future(each([serve() for _ in range(count)]))  # noqa: RUF006 - it is kept
        try:
            await asyncio.wait([serving], timeout=max(0.0, until - time.monotonic()))
            late = [target.url for target in self._targets if self._in_work[target]]
            if serving.done():
                serving.result()
                return [found[i] for i in range(len(requests))]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        raise DeadlineError(
            f"{', '.join(late) or self._names} answered too late: {len(found)} of {len(requests)} prompts are done",
            hint="is the engine paused? Resume it, ask for fewer tokens, or raise timeout_s",
        )

    async def post(self, route: str, body: Any, session_id: Any, until: float) -> Any:
        """Call a route, of any target, and return the JSON answer.

        Raises:
            EngineRefusedError: the request is at fault, or the answer is no JSON.
            EngineUnreachableError, DeadlineError: no good answer in time; names each target with its reason.
        """
        return await self._of_any(lambda target: self._post(target, route, body, session_id, until), until)

    async def close(self) -> None:
        """Drop the connections."""
        await self.session.close()

    @property
    def _names(self) -> str:
        return ", ".join(target.url for target in self._targets)

    async def _whole(self, routed: RoutedRequest, until: float) -> list[Generation]:
        """Return the continuations of one prompt, each complete."""
        answers = await self._ask(routed.request, routed, until)
        if all(one.finish_reason != "abort" for one in answers):
            return answers
        parts = zip(routed.request.split(), answers, strict=True)
        return await each([self._to_its_end(one, answer, routed, until) for one, answer in parts])

    async def _to_its_end(
        self, request: GenerationRequest, answer: Generation, routed: RoutedRequest, until: float
    ) -> Generation:
        """Return the whole continuation that ``answer`` begins."""
        partial, backoff = PartialGeneration(request=request), Backoff(until)
        unread = routed.texts is None and bool(partial.stops)  # stop strings that nobody here can find
        while True:
            if answer.finish_reason != "abort" or not unread:
                partial = partial.extended(answer)
            if routed.texts is not None and (candidates := partial.stop_candidates()):
                partial = partial.stopped(candidates, await routed.texts([ids for _, ids in candidates]))
            if partial.done:
                return partial.so_far
            if unread or not answer.token_ids:
                await backoff.wait(EngineError(f"{self._names}: requests are aborted before they have a token"))
            (answer,) = await self._ask(partial.remaining(), routed, until)

    async def _ask(self, request: GenerationRequest, routed: RoutedRequest, until: float) -> list[Generation]:
        async def ask(target: Target) -> list[Generation]:
            route, body = routed.route or target.dialect.route, {**target.dialect.body(request), **(routed.more or {})}
            answer = await self._post(target, route, body, routed.session_id, until)
            try:
                found = target.dialect.read(answer)
            except _UNREADABLE as error:
                what = f"{target.url}{route} gave no tokens: {error!r}"
                raise EngineRefusedError(what, expected="tokens as this kind of engine gives them") from None
            if len(found) != request.n:
                what = f"{target.url}{route} gave {len(found)} continuations"
                raise EngineRefusedError(what, expected=str(request.n))
            return found

        return await self._of_any(ask, until)

    async def _post(self, target: Target, route: str, body: Any, session_id: Any, until: float) -> Any:
        headers = None if session_id is None else dict.fromkeys(_SESSION_HEADERS, str(session_id))
        return await self.session.json("POST", target.url + route, body, headers=headers, until=until)

    async def _of_any(self, call: Callable[[Target], Awaitable[_T]], until: float) -> _T:
        """Return what ``call`` returns for the first target where it succeeds."""
        failed, backoff = dict[Target, EngineError](), Backoff(until)
        while True:
            async with self._turn(failed, until) as target:
                try:
                    found = await call(target)
                except (EngineUnreachableError, EngineRefusedError) as error:
                    if isinstance(error, EngineRefusedError) and error.status not in _PASSING:
                        raise  # another engine would say the same
                    failed[target] = error
                    self._health.fail(target.url, error, by=_PARTY, for_s=self._retire_s)
                else:
                    self._health.mend(target.url, by=_PARTY)
                    return found
            if len(failed) == len(self._targets):
                why = self._joined(failed)
                if not self._persistent:
                    raise why
                if time.monotonic() - self._warned >= _SILENCE_S:
                    self._warned = time.monotonic()
                    log.warning("requests get no answer, and are sent again: %s", why)
                await backoff.wait(why)
                failed.clear()

    @asynccontextmanager
    async def _turn(self, failed: Mapping[Target, EngineError], until: float) -> AsyncIterator[Target]:
        """Wait until a target that has not failed has room for a request, and count the request while it is there."""
        left = [target for target in self._targets if target not in failed]
        async with self._freed:
            while True:
                well = [target for target in left if self._health.why(target.url) is None] or left
                target = min(well, key=self._in_work.__getitem__)  # ties go to the first in order
                if self._in_work[target] < self._limit:
                    break
                try:
                    await asyncio.wait_for(self._freed.wait(), until - time.monotonic())
                except asyncio.TimeoutError:
                    names = ", ".join(target.url for target in well)
                    raise DeadlineError(f"{names} had {self._limit} requests in work until the deadline") from None
            self._in_work[target] += 1
        try:
            yield target
        finally:
            self._in_work[target] -= 1
            async with self._freed:
                self._freed.notify_all()

    def _joined(self, failed: Mapping[Target, EngineError]) -> EngineError:
        errors = list(failed.values())
        if len(errors) == 1:
            return errors[0]
        lines = "; ".join(f"{target.url}: {failed[target].what}" for target in self._targets)
        joined = EngineUnreachableError(
            f"none of {len(errors)} engines answers: {lines}", hint="start them again, or give other addresses"
        )
        joined.__cause__ = errors[-1]
        return joined


class Backoff:
    """Waits longer and longer between attempts, until a deadline on the monotonic clock."""

    def __init__(self, until: float) -> None:
        self._until, self._pause_s = until, _FIRST_PAUSE_S

    async def wait(self, why: EngineError) -> None:
        """Wait for the next attempt.

        Args:
            why: the reason of the last failure.

        Raises:
            DeadlineError: there is no time for another attempt; has the reason.
        """
        if self._until - time.monotonic() <= self._pause_s:
            raise DeadlineError(f"no answer until the deadline; the last one was: {why}") from why
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
