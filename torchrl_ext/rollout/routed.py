"""Requests by way of a router, in one event loop: a limit, retries, and generations that go on after an abort."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchrl_ext.errors import EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rollout.completions import Continuation
from torchrl_ext.rollout.dialects import dialects
from torchrl_ext.rollout.generation import Carried, Generation
from torchrl_ext.rollout.waits import Waits, may_pass
from torchrl_ext.rpc.http.async_session import AsyncSession

__all__ = ["Routed"]


class Routed:
    """Sends requests to one address; belongs to one event loop.

    A request that got no answer, or one that says that something is broken or busy (HTTP 500, 502 to 504, 429), is
    sent again until its deadline: tokens that nobody has seen were not made, and a router may have found another
    engine by then.

    Args:
        url: of the router, or of the only engine.
        kind: how engines behind it want to be asked.
        api_key: sent as a bearer token.
        limit: most requests in work; 0 for none.
        timeout_s: deadline of a request without one of its own, in seconds.
    """

    def __init__(self, url: str, *, kind: str, api_key: str | None, limit: int, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._dialect = dialects.make(kind)
        self.session = AsyncSession(api_key=api_key)
        self._slots = asyncio.Semaphore(limit) if limit else None

    async def post(self, route: str, body: Any, session_id: Any = None, until: float | None = None) -> Any:
        """The JSON answer of a route.

        Raises:
            EngineRefusedError: the request is at fault (any other HTTP status), or the answer is no JSON.
            EngineUnreachableError, DeadlineError: no good answer until the deadline; has the last reason.
        """
        until = time.monotonic() + self._timeout_s if until is None else until
        headers = None if session_id is None else {"x-session-id": str(session_id)}
        waits = Waits(until)
        async with self._slot():
            while True:
                try:
                    return await self.session.json("POST", self._url + route, body, headers=headers, until=until)
                except EngineRefusedError as error:
                    if not may_pass(error):
                        raise
                    await waits.wait(error)
                except EngineUnreachableError as error:
                    await waits.wait(error)

    async def generate(
        self,
        carried: Carried,
        session_id: Any,
        more: Mapping[str, Any],
        until: float,
        texts: Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]],
    ) -> Generation:
        """One prompt's continuation, over as many engines as it takes.

        Args:
            carried: what to ask for.
            session_id: picks the engine.
            more: further fields of the request's body.
            until: deadline on the monotonic clock, in seconds.
            texts: decodes token ids, for stop strings that straddle two engines.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: as for `post`.
        """
        waits = Waits(until)
        while not carried.done:
            asked = carried.remaining()
            answer = await self.post(self._dialect.route, {**self._dialect.body(asked), **more}, session_id, until)
            try:
                (found,) = self._dialect.read(answer)
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise EngineRefusedError(
                    f"{self._url}{self._dialect.route} gave an answer without one continuation: {error!r}"
                ) from None
            carried = carried.extended(found)
            if carried.may_straddle:
                seams = carried.seams()
                carried = carried.stopped(seams, await texts([ids for _, ids in seams]))
            if not carried.done and not found.token_ids:
                await waits.wait(EngineError(f"{self._url} aborts requests before they have a token"))
        return carried.made

    async def continued(self, route: str, request: Continuation, session_id: Any) -> Any:
        """An OpenAI-style answer, continued, or asked for again, for as long as engines abort it.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: as for `post`.
        """
        until = time.monotonic() + self._timeout_s
        waits = Waits(until)
        while True:
            answer = await self.post(route, request.body(), session_id, until)
            try:
                whole = request.take(answer)
            except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
                raise EngineRefusedError(f"{self._url}{route} gave no completion: {error!r}") from None
            if whole is not None:
                return whole
            await waits.wait(EngineError(f"{self._url} aborted the request"))

    async def finish_session(self, session_id: str) -> None:
        """See `torchrl_ext.rpc.router.RouterClient.finish_session`."""
        until = time.monotonic() + self._timeout_s
        await self.session.call("POST", f"{self._url}/finish_session", query={"session_id": session_id}, until=until)

    async def close(self) -> None:
        """Drop the connections."""
        await self.session.close()

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
        else:
            async with self._slots:
                yield
