"""Generations that engines end in the middle, as an update with the pause mode ``abort`` ends them."""

import asyncio
import time

from tests.processes import WAIT_S


async def through_aborts(client, call, busy, times=2):
    """What ``call()`` returns although everything that runs is aborted, up to ``times`` times.

    How fast an engine is, and how late an abort comes, is luck: a call that no abort met is made again.

    Args:
        client: of the engines.
        call: returns an awaitable, the generation.
        busy: a coroutine function that tells whether some engine generates.
    """
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        running, aborts = asyncio.ensure_future(call()), 0
        while aborts < times and await started(running, busy):
            await client.pause(mode="abort")
            aborts += not running.done()
            await client.resume()
        found = await running
        if aborts:
            return found
    raise AssertionError("no abort came before the end of what was to be aborted")


async def started(running, busy):
    """Wait until some engine generates; whether one did before ``running`` was over."""
    while not running.done():
        if await busy():
            return True
        await asyncio.sleep(0.005)
    return False
