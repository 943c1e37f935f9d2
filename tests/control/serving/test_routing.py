"""The membership of a real router in front of real engines, and requests through it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
import torch

import torchrl_ext as tx
from tests.control.requests.aborts import started
from tests.control.serving.test_membership import listed, report
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.routing import Routing

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines with the same weights; the folder that each was started from tells their answers apart."""
    folders = [tiny_checkpoint(tmp_path_factory.mktemp("model") / name) for name in ("first", "second")]
    with (
        EmbeddedServer(folders[0], dtype="float32", threads=1) as first,
        EmbeddedServer(folders[1], dtype="float32", threads=1) as second,
    ):
        yield first, second


@pytest.fixture
def urls(engines):
    for engine in engines:  # an earlier test may have left one paused, or with other weights
        httpx.post(f"{engine.url}/resume")
    return [engine.url for engine in engines]


@pytest.fixture
def routing(urls):
    with Routing.over(*urls, **settings_for_router("vllm")) as made:
        yield made


@pytest.fixture
def client(routing):
    made = RemoteInferenceClient.of(routing, timeout_s=60, control_timeout_s=30)
    yield made
    made.close()


def batch(count, length=8, **sampling):
    prompts = [[*PROMPT, i] for i in range(count)]
    return {"prompt_token_ids": prompts, "sampling_params": {"max_tokens": length, **GREEDY, **sampling}}


async def busy(client):
    """Whether some engine generates."""
    async with httpx.AsyncClient() as http:
        return any([(await http.get(f"{url}/load")).json()["server_load"] for url in client.server_urls])


def test_control_calls_to_a_router_reach_no_engine(routing, urls):
    client = RemoteInferenceClient(proxy_url=routing.url, server_urls=[routing.url], kind="embedded")
    for call in (
        *(tx.make_engine(kind, url=routing.url).pause for kind in ("vllm", "sglang", "embedded")),
        lambda: tx.discover(routing.url),
        lambda: client.run(client.pause()),
    ):
        with pytest.raises(ConfigError, match=f"{routing.url} is a router"):
            call()
    client.close()
    assert not any(httpx.get(f"{url}/is_paused").json()["is_paused"] for url in urls)


def test_requests_of_a_removed_engine_go_on_at_another(routing, client, urls):
    """One engine is paused by a failed update and stays so; nobody loses a token by it."""

    async def through_a_loss():
        whole = batch(8, length=100)
        running = asyncio.ensure_future(client.generate({**whole, "session_ids": [f"s{i}" for i in range(8)]}))
        assert await started(running, lambda: busy(client))
        async with httpx.AsyncClient() as http:
            await http.post(f"{urls[0]}/pause", params={"mode": "keep"})
        await asyncio.to_thread(routing.follow, report((urls[0], "paused", 0), (urls[1], "serving", 1)))
        return await running

    found = client.run(through_a_loss())
    assert listed(routing.url) == {urls[1]}
    httpx.post(f"{urls[0]}/resume")
    routing.follow(report(*((url, "serving", 1) for url in urls)))
    assert found["response_ids"] == client.run(client.generate(batch(8, length=100)))["response_ids"]


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=pytest.mark.exhaustive)])
def test_tokens_keep_versions_while_weights_change_ten_times(routing, tmp_path, mode):
    """256 requests in flight at a time, from before the first sync to after the last."""
    model, over, answers = tiny_model(1), threading.Event(), []
    prompts = [[*PROMPT[:4], i] for i in range(64)]
    sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), routing.fleet(pause_mode=mode))
    sender.register_model(model)
    update = routing.following(sender.update_weights)
    last = first = update().version

    def ask():
        with routing.client(timeout_s=WAIT_S) as client:
            while not over.is_set():
                answers.extend(client.generate(prompts, max_tokens=20, ignore_eos=True))

    def seen(version):
        return any(version in one.token_versions() for one in answers[-256:])

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for _ in range(10):
                Deadline(WAIT_S).poll(partial(seen, last), longest_s=0.02)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=1e-3)
                last = update().version
        finally:
            over.set()
        for one in asking:
            one.result(WAIT_S)
    sender.shutdown()
    assert last == first + 10 and len(answers) >= 256
    for answer in answers:
        versions = answer.token_versions()
        assert len(answer.token_ids) == len(versions) == len(answer.logprobs) == 20
        assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
