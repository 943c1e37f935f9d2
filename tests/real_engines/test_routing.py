"""SkyRL's architecture: its client sends tokens through a router of either make, and control calls to each engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import torchrl_ext as tx
from tests.control.requests.aborts import started, through_aborts
from tests.control.serving.test_membership import listed, report
from tests.models import PROMPT, greedy, tiny_model, tiny_tokenizer
from tests.pages import on_servers
from tests.real_engines.served import sending, until_met
from tests.routers import settings_for_router
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.routing import Routing

pytestmark = pytest.mark.engine

TEXT = "the trainer sends weights"
LONG = 200  # tokens of a generation that still runs when something happens to its engine
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def behind(request):
    """The make of the engines, and of their router."""
    return request.param


@pytest.fixture(scope="module")
def fleet(request, behind):
    return [request.getfixturevalue(name) for name in (behind, f"second_{behind}")]


@pytest.fixture(scope="module")
def routing(behind, fleet):
    urls = [served.url for served in fleet]
    with Routing.over(*urls, **settings_for_router(behind)) as made:
        yield made


@pytest.fixture(scope="module")
def now(fleet, routing, tmp_path_factory):
    """What all engines serve."""
    model = tiny_model(81)
    with sending("disk", tmp_path_factory.mktemp("now"), *fleet) as sender:
        yield SimpleNamespace(model=model, version=sender.update_weights(model).version)


@pytest.fixture
def client(routing, now):
    # SGLang's router wants a name of completions; the servers take any
    urls, kind = [info.url for info in routing.engines], routing.engines[0].kind
    made = RemoteInferenceClient(
        proxy_url=routing.url, server_urls=urls, kind=kind, timeout_s=120, control_timeout_s=60, model_name="policy"
    )
    yield made
    made.run(made.resume())


behind_vllm = pytest.mark.parametrize("behind", ["vllm"], indirect=True)


def asked(count, length=8, **sampling):
    """A batch of greedy requests, each of a session of its own."""
    return {
        "prompt_token_ids": [[*PROMPT, i] for i in range(count)],
        "sampling_params": {"max_tokens": length, "logprobs": 0, **GREEDY, **sampling},
        "session_ids": [f"session-{i}" for i in range(count)],
    }


def looking(fleet):
    """A coroutine function that tells whether some engine generates."""

    async def busy():
        return any(await asyncio.gather(*(asyncio.to_thread(served.running) for served in fleet)))

    return busy


def test_text_and_tokens_go_by_way_of_the_router(client, now):
    (ids,) = client.run(client.tokenize([TEXT], add_special_tokens=False))
    assert ids == tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    assert client.run(client.detokenize([ids])) == [TEXT]
    found = client.run(client.generate(asked(3)))
    assert found["response_ids"] == [greedy(now.model, [*PROMPT, i], 8) for i in range(3)]
    assert found["responses"] == client.run(client.detokenize(found["response_ids"]))
    assert found["weight_versions"] == [[now.version] * 8] * 3
    assert all(len(row) == 8 and max(row) <= 0 for row in found["response_logprobs"])


def test_generations_go_on_after_aborts_with_the_same_tokens(client, fleet, now):
    call = through_aborts(client, lambda: client.generate(asked(6, length=150)), looking(fleet))
    found = client.run(call)
    assert found["response_ids"] == [greedy(now.model, [*PROMPT, i], 150) for i in range(6)]
    assert found["stop_reasons"] == ["length"] * 6 and found["weight_versions"] == [[now.version] * 150] * 6


def test_control_calls_reach_every_server_but_not_the_router(client, routing, behind, fleet):
    with pytest.raises(ConfigError, match="is a router"):
        tx.make_engine(behind, url=routing.url).pause()
    with pytest.raises(ConfigError, match="is a router"):
        tx.discover(routing.url)
    assert set(client.run(client.pause(mode="abort"))) == set(client.server_urls)
    assert all(served.paused() for served in fleet)
    client.run(client.resume())
    assert not any(served.paused() for served in fleet)


def test_an_engine_that_fell_behind_is_out_until_it_caught_up(routing, client):
    first, second = client.server_urls
    routing.follow(report((first, "serving", 9), (second, "serving", 8)))
    assert listed(routing.url) == {first}
    assert len(client.run(client.generate(asked(8)))["response_ids"]) == 8
    routing.follow(report((first, "serving", 9), (second, "serving", 9)))
    assert listed(routing.url) == {first, second}


@behind_vllm
def test_frozen_rollouts_go_on_after_update_with_versions(client, fleet, now):
    sender = tx.WeightSender(tx.make_transport("collective"), tx.connect(*client.server_urls))
    sender.update_weights(now.model)
    models = iter(tiny_model(seed) for seed in range(82, 200))

    async def updated():
        old = sender.version
        running = asyncio.ensure_future(client.generate(asked(4, LONG)))
        await started(running, looking(fleet))
        await client.pause(mode="keep")
        now.model = next(models)
        report = await asyncio.to_thread(sender.update_weights, now.model)
        await client.resume()
        now.version, versions = report.version, (await running)["weight_versions"]
        assert report.verified and [len(one) for one in versions] == [LONG] * 4
        assert all(one == sorted(one) and {*one} <= {old, report.version} for one in versions)
        return any({*one} == {old, report.version} for one in versions)

    until_met(lambda: client.run(updated()))
    sender.shutdown()


@behind_vllm
def test_the_page_about_routers(fleet, checkpoint):
    on_servers("start_engine", checkpoint, *(served.url for served in fleet), what="router")
