"""Trying again: after which answers, and how long after."""

from __future__ import annotations

import asyncio
import time

from torchrl_ext.errors import DeadlineError, EngineError, EngineRefusedError

__all__ = ["Waits", "may_pass"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_PASSING = (429, 500, 502, 503, 504)  # too many requests, or something is broken; 501 and 505 say "never" (RFC 9110)


def may_pass(error: EngineRefusedError) -> bool:
    """Whether another engine, or the same one later, may answer otherwise; if not, the request is at fault."""
    return error.status in _PASSING


class Waits:
    """Longer and longer waits between attempts, within a deadline.

    Args:
        until: on the monotonic clock, in seconds.
    """

    def __init__(self, until: float) -> None:
        self._until, self._pause_s = until, _FIRST_PAUSE_S

    async def wait(self, why: EngineError) -> None:
        """Wait for the next attempt.

        Raises:
            DeadlineError: there is no time for one; has the reason.
        """
        left_s = self._until - time.monotonic()
        if left_s <= self._pause_s:
            raise DeadlineError(f"no answer until the deadline; the last one was: {why}") from why
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
