"""`AsyncSession` over real sockets: what is late, and what is only slow to accept."""

import asyncio
import contextlib
import gc
import socket
import time

import pytest

from torchrl_ext.errors import DeadlineError, EngineUnreachableError
from torchrl_ext.rollout.requests import Requests, targets
from torchrl_ext.rpc.http import AsyncSession

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n" + b'{"a": 1}\n'


@pytest.fixture
def full():
    """A listener whose queue is full: the system drops whoever else wants to connect."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener


def url(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def ask(address, seconds, **settings):
    session = AsyncSession(**settings)
    try:
        return await session.json("POST", f"{address}/x", {}, until=time.monotonic() + seconds)
    finally:
        await session.close()


def test_a_connection_that_is_not_accepted_is_no_missed_deadline(full):
    with pytest.raises(EngineUnreachableError, match=r"no connection within 0\.3 s"):
        asyncio.run(ask(url(full), 60.0, connect_timeout_s=0.3))


def test_a_deadline_before_that_is_one(full):
    with pytest.raises(DeadlineError, match=r"no complete answer within 0\.\d+ s"):
        asyncio.run(ask(url(full), 0.3))


def test_a_session_that_nobody_closes_leaves_without_a_word(caplog):
    async def served():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            left = AsyncSession()
            until = time.monotonic() + 10
            return await left.json("POST", url(server.sockets[0]) + "/x", {}, until=until)

    assert asyncio.run(served()) == {"a": 1}
    gc.collect()
    assert not caplog.records


def test_a_request_by_way_of_a_router_is_tried_again_until_it_is_accepted(full):
    async def through_a_router():
        requests = Requests(targets([url(full)], ["vllm"]), limit=0, api_key=None, persistent=True)
        requests.session = AsyncSession(connect_timeout_s=0.3)
        asked = asyncio.ensure_future(requests.post("/x", {}, None, time.monotonic() + 60.0))
        await asyncio.sleep(1.0)
        assert not asked.done()
        serving = asyncio.ensure_future(accept(full))
        try:
            return await asked
        finally:
            serving.cancel()
            await requests.close()

    async def accept(listener):
        async def answer(reader, writer):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER)
                await writer.drain()
                writer.close()

        async with await asyncio.start_server(answer, sock=listener.dup()) as server:
            await server.serve_forever()

    assert asyncio.run(through_a_router()) == {"a": 1}
