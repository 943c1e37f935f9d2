"""Send requests for tokens, in one event loop: choose an engine, try again after failures, continue after aborts.

The rules are the same for every client, whether it asks several engines itself or a router in front of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.registry import engines
from torchrl_ext.rollout.dialects import Dialect
from torchrl_ext.rollout.generation import Carried, Generation, GenerationRequest
from torchrl_ext.rpc.connections import each, number_from
from torchrl_ext.rpc.http import AsyncSession, Keys, normalise_urls

if TYPE_CHECKING:
    from torchrl_ext.compat.skyrl.completions import Continuation

__all__ = ["Asked", "Requests", "Target", "targets"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SILENCE_S = 0.05, 2.0, 60.0  # the last one between two warnings
_PASSING = (429, 500, 502, 503, 504)  # too many requests, or something is broken; 501 and 505 are final (RFC 9110)
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
class Asked:
    """One request for tokens with what its HTTP calls need besides.

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
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        limit: int,
        api_key: Keys,
        retire_s: float = 0.0,
        persistent: bool = False,
    ) -> None:
        self._targets, self._limit = tuple(targets), limit or float("inf")
        self._retire_s, self._persistent = retire_s, persistent
        self._in_work = dict.fromkeys(self._targets, 0)
        self._retired_until = dict.fromkeys(self._targets, 0.0)
        self._freed, self._warned = asyncio.Condition(), float("-inf")
        self.session = AsyncSession(api_key=api_key, connection_limit=number_from("SKYRL_HTTP_CONNECTION_LIMIT", 0))

    async def generations(self, asked: Sequence[Asked], until: float) -> list[list[Generation]]:
        """Return every prompt's continuations, in order, each complete; the first error cancels the other requests.

        Args:
            asked: the prompts.
            until: deadline of all together on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError, EngineRefusedError: an engine's answer to the first request that none took.
            DeadlineError: not every generation came in time; names the engines that still had work.
        """
        work, found = deque(enumerate(asked)), dict[int, list[Generation]]()

        async def serve() -> None:
            while work:
                i, one = work.popleft()
                found[i] = await self._whole(one, until)

        count = int(min(self._limit * len(self._targets), len(asked)))
        serving = [asyncio.ensure_future(serve()) for _ in range(count)]
        if not serving:
            return []
        try:
            left_s = max(0.0, until - time.monotonic())
            done, pending = await asyncio.wait(serving, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
            owing = [target.url for target in self._targets if self._in_work[target]]
        finally:
            for one in serving:
                one.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
        for one in done:
            one.result()
        if pending:
            raise DeadlineError(
                f"{', '.join(owing) or self._names} answered too late: {len(found)} of {len(asked)} prompts are done",
                hint="is the engine paused? Resume it, ask for fewer tokens, or raise timeout_s",
            )
        return [found[i] for i in range(len(asked))]

    async def completion(self, route: str, request: Continuation, session_id: Any, until: float) -> Any:
        """Return an OpenAI-style answer, continued, or asked for again, for as long as engines abort it.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: as for `post`.
        """
        pauses = _Pauses(until)
        while True:
            answer = await self.post(route, request.body(), session_id, until)
            try:
                whole = request.take(answer)
            except _UNREADABLE as error:
                raise EngineRefusedError(f"{self._names}{route} gave no completion: {error!r}") from None
            if whole is not None:
                return whole
            await pauses.wait(EngineError(f"{self._names} aborted the request"))

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

    async def _whole(self, asked: Asked, until: float) -> list[Generation]:
        """Return the continuations of one prompt, each complete."""
        found = await self._ask(asked.request, asked, until)
        if all(one.finish_reason != "abort" for one in found):
            return found
        parts = zip(asked.request.split(), found, strict=True)
        return await each([self._to_its_end(Carried(request=one), part, asked, until) for one, part in parts])

    async def _to_its_end(self, carried: Carried, found: Generation, asked: Asked, until: float) -> Generation:
        pauses, unread = _Pauses(until), asked.texts is None and bool(carried.stops)
        while True:
            if found.finish_reason != "abort" or not unread:
                carried = carried.extended(found)
            if asked.texts is not None and carried.may_straddle:
                seams = carried.seams()
                carried = carried.stopped(seams, await asked.texts([ids for _, ids in seams]))
            if carried.done:
                return carried.made
            if unread or not found.token_ids:
                await pauses.wait(EngineError(f"{self._names}: requests are aborted before they have a token"))
            (found,) = await self._ask(carried.remaining(), asked, until)

    async def _ask(self, request: GenerationRequest, asked: Asked, until: float) -> list[Generation]:
        async def ask(target: Target) -> list[Generation]:
            where, body = asked.route or target.dialect.route, {**target.dialect.body(request), **(asked.more or {})}
            answer = await self._post(target, where, body, asked.session_id, until)
            try:
                found = target.dialect.read(answer)
            except _UNREADABLE as error:
                raise EngineRefusedError(
                    f"{target.url}{where} gave no tokens: {error!r}",
                    expected="tokens as this kind of engine gives them",
                ) from None
            if len(found) != request.n:
                raise EngineRefusedError(
                    f"{target.url}{where} gave {len(found)} continuations", expected=str(request.n)
                )
            return found

        return await self._of_any(ask, until)

    async def _post(self, target: Target, route: str, body: Any, session_id: Any, until: float) -> Any:
        headers = None if session_id is None else dict.fromkeys(_SESSION_HEADERS, str(session_id))
        return await self.session.json("POST", target.url + route, body, headers=headers, until=until)

    async def _of_any(self, call: Callable[[Target], Awaitable[_T]], until: float) -> _T:
        """Return what ``call`` returns for the first target where it succeeds."""
        failed, pauses = dict[Target, EngineError](), _Pauses(until)
        while True:
            target = await self._acquire(failed, until)
            try:
                return await call(target)
            except EngineUnreachableError as error:
                failed[target] = error
            except EngineRefusedError as error:
                if error.status not in _PASSING:
                    raise  # another engine would say the same
                failed[target] = error
            finally:
                await self._release(target, failed=target in failed)
            if len(failed) == len(self._targets):
                why = self._joined(failed)
                if not self._persistent:
                    raise why
                if time.monotonic() - self._warned >= _SILENCE_S:
                    self._warned = time.monotonic()
                    logging.getLogger("torchrl_ext").warning("requests get no answer, and are sent again: %s", why)
                await pauses.wait(why)
                failed.clear()

    async def _acquire(self, failed: Mapping[Target, EngineError], until: float) -> Target:
        left = [target for target in self._targets if target not in failed]
        async with self._freed:
            while True:
                now = time.monotonic()
                well = [target for target in left if self._retired_until[target] <= now] or left
                target = min(well, key=self._in_work.__getitem__)  # ties go to the first in order
                if self._in_work[target] < self._limit:
                    self._in_work[target] += 1
                    return target
                try:
                    await asyncio.wait_for(self._freed.wait(), until - now)
                except asyncio.TimeoutError:
                    names = ", ".join(target.url for target in well)
                    raise DeadlineError(f"{names} had {self._limit} requests in work until the deadline") from None

    async def _release(self, target: Target, *, failed: bool) -> None:
        self._in_work[target] -= 1
        self._retired_until[target] = time.monotonic() + self._retire_s if failed else 0.0
        async with self._freed:
            self._freed.notify_all()

    def _joined(self, failed: Mapping[Target, EngineError]) -> EngineError:
        errors = list(failed.values())
        if len(errors) == 1:
            return errors[0]
        lines = "; ".join(f"{target.url}: {failed[target].what}" for target in self._targets)
        found = EngineUnreachableError(
            f"none of {len(errors)} engines answers: {lines}", hint="start them again, or give other addresses"
        )
        found.__cause__ = errors[-1]
        return found


class _Pauses:
    """Waits longer and longer between attempts, within a deadline on the monotonic clock."""

    def __init__(self, until: float) -> None:
        self._until, self._pause_s = until, _FIRST_PAUSE_S

    async def wait(self, why: EngineError) -> None:
        """Wait for the next attempt.

        Raises:
            DeadlineError: there is no time for another attempt; has the reason of the last failure.
        """
        if self._until - time.monotonic() <= self._pause_s:
            raise DeadlineError(f"no answer until the deadline; the last one was: {why}") from why
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
