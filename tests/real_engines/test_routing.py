"""SkyRL's architecture: its client sends tokens through a router of either make, and control calls to each engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

import torchrl_ext as tx
from tests.control.requests.aborts import started, through_aborts
from tests.control.serving.test_membership import listed, report
from tests.models import PROMPT, greedy, tiny_model, tiny_tokenizer
from tests.pages import on_servers
from tests.real_engines.served import sending, until_met
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.routing import Routing
from torchrl_ext.control.serving.server import RouterProcess

pytestmark = pytest.mark.engine

TEXT = "the trainer sends weights"
LONG = 200  # tokens of a generation that still runs when something happens to its engine
GREEDY = {"temperature": 0, "ignore_eos": True}

VLLM, SGLANG = ("vllm", "vllm"), ("sglang", "sglang")
OTHERS = [pytest.param(("sglang", router), marks=pytest.mark.exhaustive, id=router) for router in ("given", "vllm's")]


@pytest.fixture(scope="module", params=[pytest.param(VLLM, id="vllm"), pytest.param(SGLANG, id="sglang"), *OTHERS])
def behind(request):
    """The make of the engines, and the router."""
    return request.param


@pytest.fixture(scope="module")
def fleet(request, behind):
    kind, _ = behind
    return [request.getfixturevalue(name) for name in (kind, f"second_{kind}")]


@pytest.fixture(scope="module")
def routing(behind, fleet):
    urls, (kind, router) = [served.url for served in fleet], behind
    if router == "given":
        with RouterProcess(kind=kind, health_route="/ping", **settings_for_router(kind)) as process:
            with Routing.over(*urls, router=process.url) as made:
                yield made
            assert process.alive()
        return
    make = router.removesuffix("'s")
    with Routing.over(*urls, make=make, **settings_for_router(make)) as made:
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
    made = RemoteInferenceClient.of(routing, timeout_s=120, control_timeout_s=60, model_name="policy")
    yield made
    made.run(made.resume())
    made.close()


def only(*behind):
    """Behind this router alone."""
    return pytest.mark.parametrize("behind", [pytest.param(behind, id=behind[0])], indirect=True)


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


def test_chats_and_completions_go_by_way_of_the_router(client, behind):
    messages = [{"role": "user", "content": TEXT}]
    chat = {"messages": messages, "max_tokens": 4, "session_id": "a"}
    answer = client.run(client.chat_completion({"json": chat}))
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["model"] == "policy"
    answer = client.run(client.completion({"json": {"prompt": TEXT, "max_tokens": 4, "temperature": 0}}))
    assert answer["usage"]["completion_tokens"] <= 4
    assert "session_id" in chat  # what the caller gave is not changed
    if behind == VLLM:
        rendered = client.run(client.render({"json": {"messages": messages}}))
        expected = tiny_tokenizer()(f"user: {TEXT}\nassistant: ", add_special_tokens=False)["input_ids"]
        assert rendered["token_ids"] == expected


def test_generations_go_on_after_aborts_with_the_same_tokens(client, fleet, now):
    call = through_aborts(client, lambda: client.generate(asked(6, length=150)), looking(fleet))
    found = client.run(call)
    assert found["response_ids"] == [greedy(now.model, [*PROMPT, i], 150) for i in range(6)]
    assert found["stop_reasons"] == ["length"] * 6 and found["weight_versions"] == [[now.version] * 150] * 6


@only(*VLLM)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_generation_has_the_tokens_of_one_without_a_pause(client, fleet, now, mode):
    async def paused():
        running = asyncio.ensure_future(client.generate(asked(1, LONG)))
        met = await started(running, looking(fleet))
        assert set(await client.pause(mode=mode)) == set(client.server_urls)
        assert all([await asyncio.to_thread(served.paused) for served in fleet])
        if mode == "wait":  # what runs has ended before anything is resumed
            await asyncio.wait_for(asyncio.shield(running), 120)
        met = met and running.done() is (mode == "wait")
        await client.resume()
        assert (await running)["response_ids"] == [greedy(now.model, [*PROMPT, 0], LONG)]
        return met

    until_met(lambda: client.run(paused()))


def test_control_calls_reach_every_server_but_not_the_router(client, routing, behind, fleet):
    """The router's address is refused for control calls, and the client's calls reach every server."""
    with pytest.raises(ConfigError, match="is a router"):
        tx.make_engine(behind[0], url=routing.url).pause()
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


@only(*SGLANG)
def test_least_lengths_reach_the_engine_through_sglangs_router(client, now):
    """Seeds take the same way; what they do shows only with deterministic kernels, which a CPU lacks."""
    sampling = {"ignore_eos": False, "stop_token_ids": greedy(now.model, [*PROMPT, 0], 1), "min_tokens": 4}
    (tokens,) = client.run(client.generate(asked(1, 6, **sampling)))["response_ids"]
    assert len(tokens) >= 4


@only(*VLLM)
def test_frozen_rollouts_go_on_after_update_with_versions(client, fleet, now):
    """Rollouts that are frozen during an update go on, and each token has its version."""
    sender = tx.WeightSender(tx.make_transport("collective"), client.fleet())
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


def test_rollouts_beside_syncs_have_a_version_per_token(client, routing, now, tmp_path):
    model, answers = tiny_model(1), []
    sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), client.fleet())
    sender.register_model(model)
    update = routing.following(sender.update_weights)
    first = update().version

    async def rollouts():
        over = asyncio.Event()

        async def ask(i):
            while not over.is_set() or i not in made:
                batch = {**asked(1, length=24), "session_ids": [f"session-{i % 16}"]}
                answers.append(await client.generate(batch))
                made.add(i)

        made: set[int] = set()
        requesters = [asyncio.ensure_future(ask(i)) for i in range(48)]
        for _ in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-2)
            last = (await asyncio.to_thread(update)).version
        over.set()
        await asyncio.gather(*requesters)
        return last

    last = asyncio.run(asyncio.wait_for(rollouts(), 400))
    sender.shutdown()
    now.model, now.version = model, last
    assert last == first + 4
    assert [info.weight_version for info in tx.discover(*client.server_urls)] == [str(last)] * 2
    seen = set()
    for answer in answers:
        (tokens,), (versions,) = answer["response_ids"], answer["weight_versions"]
        assert len(tokens) == len(versions) == 24
        assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
        seen |= set(versions)
    assert len(seen) > 2
    (tokens,) = client.run(client.generate(asked(1, length=32)))["response_ids"]
    assert tokens == greedy(model, [*PROMPT, 0], 32)


@only(*VLLM)
def test_requests_of_one_session_stay_on_one_engine(client, fleet, now, tmp_path):
    """Each engine gets a version of its own, which tells who answered."""
    for count, served in enumerate(fleet, 1):
        with sending("disk", tmp_path / str(count), served) as sender:
            for _ in range(count):
                now.version = sender.update_weights(now.model).version
    assert len({info.weight_version for info in tx.discover(*client.server_urls)}) == 2
    for session in range(4):
        batch = {**asked(4, 1), "session_ids": [f"trajectory-{session}"] * 4}
        versions = client.run(client.generate(batch))["weight_versions"]
        assert len({number for one in versions for number in one}) == 1


@only(*VLLM)
def test_the_page_about_routers(fleet, checkpoint):
    urls = [served.url for served in fleet]
    with RouterProcess(urls, **settings_for_router("vllm")) as router:
        on_servers("operations", checkpoint, *urls, router.url)
