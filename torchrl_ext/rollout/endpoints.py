"""Several engines behind one client: who gets the next request, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rollout.dialects import dialects
from torchrl_ext.rollout.generation import Generation, GenerationRequest
from torchrl_ext.rollout.waits import may_pass
from torchrl_ext.rpc.http.async_session import AsyncSession
from torchrl_ext.rpc.http.session import normalise_url

__all__ = ["Endpoints"]


class _Endpoint:
    """One engine: its address, its dialect, and what it has in work."""

    def __init__(self, url: str, kind: str) -> None:
        self.url, self.dialect = normalise_url(url), dialects.make(kind)
        self.in_work = 0
        self.retired_until = 0.0

    async def ask(self, session: AsyncSession, request: GenerationRequest, until: float) -> list[Generation]:
        route = self.dialect.route
        answer = await session.json("POST", self.url + route, self.dialect.body(request), until=until)
        try:
            found = self.dialect.read(answer)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise EngineRefusedError(
                f"{self.url}{route} gave no tokens: {error!r}", expected="tokens as this kind of engine gives them"
            ) from None
        if len(found) != request.n:
            raise EngineRefusedError(f"{self.url}{route} gave {len(found)} continuations", expected=str(request.n))
        return found


class Endpoints:
    """Gives each request to the engine with the fewest in work, and to another one where that fails.

    Belongs to the event loop that first asks.

    Args:
        urls: at least one.
        kinds: the dialect of each.
        cap: most requests in work at one engine.
        api_key: sent as a bearer token.
        retire_s: seconds for which an engine that failed is left alone while others answer.

    Raises:
        ConfigError: no address, one twice or one that cannot work, or a kind that nobody knows.
    """

    def __init__(
        self,
        urls: Sequence[str],
        kinds: Sequence[str],
        *,
        cap: int,
        api_key: str | None,
        retire_s: float,
    ) -> None:
        if len(kinds) != len(urls):
            raise ConfigError(f"{len(kinds)} kinds for {len(urls)} addresses", expected="one kind, or one per address")
        if cap < 1:
            raise ConfigError(f"max_concurrency is {cap}", expected="at least 1")
        self._engines = [_Endpoint(url, kind) for url, kind in zip(urls, kinds, strict=True)]
        self.urls = tuple(engine.url for engine in self._engines)
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if not urls or twice:
            raise ConfigError(f"address {twice[0]} is given twice" if twice else "there is no engine to ask")
        self._cap, self._retire_s, self._api_key = cap, retire_s, api_key
        self._session: AsyncSession | None = None
        self._freed = asyncio.Condition()

    @property
    def one_seed_per_request(self) -> bool:
        """Whether some engine draws the same for all continuations of a request that has a seed."""
        return any(engine.dialect.one_seed_per_request for engine in self._engines)

    @property
    def capacity(self) -> int:
        """Most requests in work at all engines together."""
        return self._cap * len(self._engines)

    def busy(self) -> tuple[str, ...]:
        """Addresses of the engines that have requests in work."""
        return tuple(engine.url for engine in self._engines if engine.in_work)

    async def ask(self, request: GenerationRequest, until: float) -> list[Generation]:
        """The continuations of one prompt.

        Args:
            request: what to ask.
            until: deadline on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError, EngineRefusedError: no engine took it; the message names each with its reason.
            DeadlineError: no answer in time.
        """
        failed: dict[str, EngineError] = {}
        if self._session is None:
            self._session = AsyncSession(api_key=self._api_key)
        while True:
            engine = await self._acquire(failed, until)
            try:
                return await engine.ask(self._session, request, until)
            except EngineUnreachableError as error:
                failed[engine.url] = error
            except EngineRefusedError as error:
                if not may_pass(error):
                    raise  # another engine would say the same
                failed[engine.url] = error
            finally:
                await self._release(engine, failed=engine.url in failed)

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()

    async def _acquire(self, failed: dict[str, EngineError], until: float) -> _Endpoint:
        left = [engine for engine in self._engines if engine.url not in failed]
        if not left:
            self._give_up(failed)
        async with self._freed:
            while True:
                now = time.monotonic()
                well = [engine for engine in left if engine.retired_until <= now] or left
                engine = min(well, key=lambda engine: engine.in_work)  # ties go to the first in order
                if engine.in_work < self._cap:
                    engine.in_work += 1
                    return engine
                try:
                    await asyncio.wait_for(self._freed.wait(), until - now)
                except asyncio.TimeoutError:
                    names = ", ".join(engine.url for engine in well)
                    raise DeadlineError(f"{names} had {self._cap} requests in work until the deadline") from None

    async def _release(self, engine: _Endpoint, *, failed: bool) -> None:
        engine.in_work -= 1
        engine.retired_until = time.monotonic() + self._retire_s if failed else 0.0
        async with self._freed:
            self._freed.notify_all()

    def _give_up(self, failed: dict[str, EngineError]) -> None:
        errors = list(failed.values())
        if len(errors) == 1:
            raise errors[0]
        lines = "; ".join(f"{url}: {failed[url].what}" for url in self.urls)
        raise EngineUnreachableError(
            f"none of {len(errors)} engines answers: {lines}", hint="start them again, or give other addresses"
        ) from errors[-1]
