"""SkyRL's architecture on two vLLM servers: tokens through a router, control calls to every engine, by its client."""

import asyncio
import re
from types import SimpleNamespace

import httpx
import pytest

import torchrl_ext as tx
from tests.engine.served import until_met
from tests.models import PROMPT, greedy, tiny_model
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.serving.routing import Routing

pytestmark = pytest.mark.engine

LONG = 200  # tokens of a generation that still runs when something happens to its engine


@pytest.fixture(scope="module")
def routing(vllm, second_vllm):
    with Routing.over(vllm.url, second_vllm.url, **settings_for_router("vllm")) as made:
        yield made


@pytest.fixture
def client(routing):
    made = RemoteInferenceClient.of(routing, timeout_s=120)
    yield made
    made.run(made.resume())
    made.close()


@pytest.fixture
def now(client, tmp_path):
    model = tiny_model(81)
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "now"), client.fleet())
    version = sender.update_weights(model).version
    sender.shutdown()
    return SimpleNamespace(model=model, version=version)


async def asked(client, prompts, count, session="one"):
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    batch = {"prompt_token_ids": prompts, "sampling_params": sampling, "session_ids": [session] * len(prompts)}
    return await client.generate(batch)


async def busy(client, running):
    """Wait until an engine generates for ``running``; whether one did before it was over."""
    async with httpx.AsyncClient() as http:
        while not running.done():
            for url in client.server_urls:
                told = (await http.get(f"{url}/metrics")).text
                if any(map(float, re.findall(r"^vllm:num_requests_running\S* (\S+)", told, re.MULTILINE))):
                    return True
    return False


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_generation_has_the_tokens_of_one_without_a_pause(client, now, mode):
    async def paused():
        running = asyncio.ensure_future(asked(client, [PROMPT], LONG))
        met = await busy(client, running)
        await client.pause(mode=mode)
        if mode == "wait":  # what runs has ended before anything is resumed
            await asyncio.wait_for(asyncio.shield(running), 120)
        met = met and running.done() is (mode == "wait")
        await client.resume()
        assert (await running)["response_ids"] == [greedy(now.model, count=LONG)]
        return met

    until_met(lambda: client.run(paused()))


def test_rollouts_that_are_frozen_during_an_update_go_on_and_each_token_has_its_version(client, now):
    sender = tx.WeightSender(tx.make_transport("collective"), client.fleet())
    sender.update_weights(now.model)
    models = iter(tiny_model(seed) for seed in range(82, 200))

    async def updated():
        old, prompts = sender.version, [[*PROMPT, i] for i in range(4)]
        running = asyncio.ensure_future(asked(client, prompts, LONG))
        await busy(client, running)
        await client.pause(mode="keep")
        report = await asyncio.to_thread(sender.update_weights, next(models))
        await client.resume()
        versions = (await running)["weight_versions"]
        assert report.verified and [len(one) for one in versions] == [LONG] * 4
        assert all(one == sorted(one) and {*one} <= {old, report.version} for one in versions)
        assert {*(await client.weight_versions()).values()} == {str(report.version)}
        return any({*one} == {old, report.version} for one in versions)

    until_met(lambda: client.run(updated()))
    sender.shutdown()


def test_requests_of_one_session_stay_on_one_engine(client, tmp_path):
    """Each engine gets a version of its own, which tells who answered."""
    for count, url in enumerate(client.server_urls, 1):
        sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / str(count)), tx.connect(url))
        for _ in range(count):
            version = sender.update_weights(tiny_model(0)).version
        sender.shutdown()
    assert len({*client.run(client.weight_versions()).values()}) == 2, version
    for session in range(4):
        found = client.run(asked(client, [PROMPT] * 4, 1, f"trajectory-{session}"))
        assert len({number for one in found["weight_versions"] for number in one}) == 1
