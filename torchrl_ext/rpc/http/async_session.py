"""JSON over HTTP from an event loop: many requests for tokens at a time, each with a deadline.

Connections are kept for two seconds, which is less than servers keep them (uvicorn: five), so that none is used that
the server is about to drop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import httpx

from torchrl_ext.errors import DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.rpc.http.session import Answer, bearers
from torchrl_ext.rpc.http.tls import authorities

__all__ = ["AsyncSession"]

_KEEP_S = 2.0


class AsyncSession:
    """Calls routes of any server; belongs to the event loop that first used it.

    Args:
        api_key: sent as a bearer token; of several, the first, which is for requests.
        max_body_bytes: answers above this size are refused.
        connect_timeout_s: how long one try to connect may take, in seconds.
    """

    def __init__(
        self,
        *,
        api_key: str | tuple[str, ...] | None = None,
        max_body_bytes: int = 256 << 20,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._max_body_bytes, self._connect_timeout_s = max_body_bytes, connect_timeout_s
        self._client = httpx.AsyncClient(
            headers=bearers(api_key)[0],
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_S),
            follow_redirects=False,
            trust_env=False,
            verify=authorities(),
        )

    async def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        until: float,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One call, whatever its status says.

        Args:
            url: of the route.
            until: deadline on the monotonic clock, in seconds.

        Raises:
            EngineUnreachableError: nobody listens, or the connection broke.
            EngineRefusedError: an answer above ``max_body_bytes``.
            DeadlineError: no complete answer in time.
        """
        left_s = max(0.001, until - time.monotonic())
        where = f"{method} {url}"
        try:
            return await asyncio.wait_for(self._send(where, method, url, body, query, headers, left_s), left_s)
        except httpx.ConnectTimeout as error:
            if left_s <= self._connect_timeout_s:
                raise self._late(where, left_s) from error
            raise EngineUnreachableError(
                f"{where}: no connection within {self._connect_timeout_s:g} s",
                hint="it may have more to accept than it can: try again, or send fewer requests at a time",
            ) from error
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise self._late(where, left_s) from error
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"{where}: {error or type(error).__name__}", hint="check that it runs, and the address"
            ) from error

    async def json(self, method: str, url: str, body: Any = None, **how: Any) -> Any:
        """One call that has to succeed; returns the JSON answer (``{}`` for an empty one).

        Raises:
            EngineUnreachableError, DeadlineError: as for `call`.
            EngineRefusedError: any status but 2xx, or an answer that is no JSON.
        """
        answer = await self.call(method, url, body, **how)
        if not answer.ok:
            raise EngineRefusedError(
                f"{method} {url} answered {answer.status}: {answer.message() or 'no reason given'}",
                status=answer.status,
            )
        try:
            return answer.json()
        except ValueError:
            raise EngineRefusedError(
                f"{method} {url} answered with something other than JSON: {answer.text[:120]!r}", status=answer.status
            ) from None

    @staticmethod
    def _late(where: str, left_s: float) -> DeadlineError:
        return DeadlineError(
            f"{where}: no complete answer within {left_s:.3g} s",
            hint="is the engine behind it paused? Resume it, or raise timeout_s",
        )

    async def close(self) -> None:
        """Drop all connections."""
        await self._client.aclose()

    async def _send(
        self, where: str, method: str, url: str, body: Any, query: Any, headers: Any, left_s: float
    ) -> Answer:
        timeout = httpx.Timeout(left_s, connect=min(left_s, self._connect_timeout_s))
        asked = self._client.stream(method, url, json=body, params=query, headers=headers, timeout=timeout)
        async with asked as response:
            chunks, size = [], 0
            async for chunk in response.aiter_bytes():
                size += len(chunk)
                if size > self._max_body_bytes:
                    raise EngineRefusedError(f"{where} answered with more than {self._max_body_bytes} bytes")
                chunks.append(chunk)
        return Answer(status=response.status_code, text=b"".join(chunks).decode("utf-8", "replace"))
