"""A real router in front of real engines: requests of an engine that is taken out go on at another."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.control.requests.aborts import started
from tests.control.serving.test_membership import listed, report
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, tiny_checkpoint
from tests.routers import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.routing import Routing

pytestmark = pytest.mark.engine

BATCH = {
    "prompt_token_ids": [[*PROMPT, i] for i in range(8)],
    "sampling_params": {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "logprobs": 0},
}


def test_requests_of_a_removed_engine_go_on_at_another(tmp_path):
    """One engine is paused by a failed update and stays so; nobody loses a token by it."""

    async def busy():
        async with httpx.AsyncClient() as http:
            return any([(await http.get(f"{url}/load")).json()["server_load"] for url in urls])

    async def through_a_loss():
        running = asyncio.ensure_future(client.generate({**BATCH, "session_ids": [f"s{i}" for i in range(8)]}))
        assert await started(running, busy)
        async with httpx.AsyncClient() as http:
            await http.post(f"{urls[0]}/pause", params={"mode": "keep"})
        await asyncio.to_thread(routing.follow, report((urls[0], "paused", 0), (urls[1], "serving", 1)))
        return await running

    model = tiny_checkpoint(tmp_path / "model")
    with EmbeddedServer(model, dtype="float32") as first, EmbeddedServer(model, dtype="float32") as second:
        urls = [first.url, second.url]
        how = {"server_urls": urls, "kind": "embedded", "timeout_s": 60}
        with Routing.over(*urls, **settings_for_router("vllm")) as routing:
            client = RemoteInferenceClient(proxy_url=routing.url, **how)
            found = client.run(through_a_loss())
            assert listed(routing.url) == {urls[1]}
            httpx.post(f"{urls[0]}/resume")
            routing.follow(report(*((url, "serving", 1) for url in urls)))
            assert found["response_ids"] == client.run(client.generate(BATCH))["response_ids"]
