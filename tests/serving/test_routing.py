"""The inference client and the membership of a real router, in front of real engines."""

from __future__ import annotations

import asyncio
import pickle

import httpx
import pytest

import torchrl_ext as tx
from tests.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.processes import python
from tests.rollout.aborts import started
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError
from torchrl_ext.rpc.makes.vllm import embedded_engine, vllm_engine
from torchrl_ext.rpc.router import RouterClient
from torchrl_ext.serving.processes import free_port
from torchrl_ext.serving.router import RouterProcess
from torchrl_ext.serving.routing import Routing
from torchrl_ext.types import EngineRow, SyncReport

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
    made = RemoteInferenceClient.of(routing, timeout_s=60, control_timeout_s=30, tokenizer=tiny_tokenizer())
    yield made
    made.close()


def listed(routing):
    return {worker.url for worker in routing.router.workers()}


def report(*rows, version=1):
    engines = [EngineRow(engine=url, kind="embedded", state=state, version=number) for url, state, number in rows]
    return SyncReport(version=version, transport="disk", engines=tuple(engines))


def batch(count, length=8, **sampling):
    prompts = [[*PROMPT, i] for i in range(count)]
    return {"prompt_token_ids": prompts, "sampling_params": {"max_tokens": length, **GREEDY, **sampling}}


# the client


def test_prompts_come_back_in_order_with_tokens_log_probabilities_text_and_versions(client):
    found = client.run(client.generate(batch(5)))
    own = tiny_model(0)
    assert found["response_ids"] == [greedy(own, [*PROMPT, i], 8) for i in range(5)]
    assert found["stop_reasons"] == ["length"] * 5
    assert [len(row) for row in found["response_logprobs"]] == [8] * 5
    assert found["weight_versions"] == [[0] * 8] * 5
    assert found["responses"] == tiny_tokenizer().batch_decode(found["response_ids"], skip_special_tokens=True)


def test_samples_of_one_prompt_differ_by_their_seeds_and_repeat(client):
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "num_samples": 4}
    body["sampling_params"] = {"max_tokens": 8, "seed": 3}
    first, again = (client.run(client.sample({"json": body}))["sequences"] for _ in range(2))
    assert [one["tokens"] for one in first] == [one["tokens"] for one in again]
    assert len({tuple(one["tokens"]) for one in first}) == 4 and len(first[0]["logprobs"]) == 8


def test_it_can_be_sent_to_another_process_while_it_is_used(client, tmp_path):
    async def beside_a_generation():
        running = asyncio.ensure_future(client.generate(batch(4, length=100)))
        assert await started(running, lambda: busy(client))
        (tmp_path / "client").write_bytes(pickle.dumps(client))
        return await running

    client.run(beside_a_generation())
    assert pickle.loads((tmp_path / "client").read_bytes()) == client
    (tmp_path / "batch").write_bytes(pickle.dumps(batch(1)))
    told = python(
        "import pathlib, pickle, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "client, asked = (pickle.loads((folder / name).read_bytes()) for name in ('client', 'batch'))\n"
        "print(client.run(client.generate(asked))['response_ids'])",
        tmp_path,
    )
    assert told.strip() == str([greedy(tiny_model(0), [*PROMPT, 0], 8)])


def test_it_serves_several_event_loops_one_after_the_other(client):
    async def once():
        async with client:
            return await client.generate(batch(2))

    first, second = asyncio.run(once()), asyncio.run(once())
    for mine, theirs in zip(first.pop("response_logprobs"), second.pop("response_logprobs"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)  # sums depend on which requests are computed together
    assert first == second


def test_engines_sleep_and_wake_up_together(client, urls):
    client.run(client.sleep(level=1))
    assert all(httpx.get(f"{url}/is_sleeping").json()["is_sleeping"] for url in urls)
    client.run(client.wake_up(tags=["weights"]))
    assert all(httpx.get(f"{url}/is_sleeping").json()["is_sleeping"] for url in urls)
    client.run(client.wake_up())
    assert not any(httpx.get(f"{url}/is_sleeping").json()["is_sleeping"] for url in urls)
    assert client.run(client.generate(batch(1)))["response_ids"] == [greedy(tiny_model(0), [*PROMPT, 0], 8)]


async def busy(client):
    """Whether some engine generates."""
    async with httpx.AsyncClient() as http:
        return any([(await http.get(f"{url}/load")).json()["server_load"] for url in client.server_urls])


def test_a_control_call_that_one_engine_refuses_has_a_row_for_each(client, urls):
    with pytest.raises(EngineError, match=r"programs of others send.*; 2 of 2 engines did not load") as caught:
        client.run(client.update_named_weights({"names": []}))
    assert [row.engine for row in caught.value.rows] == urls and all(row.error for row in caught.value.rows)


def test_what_an_engine_refuses_comes_back_in_its_words(client):
    with pytest.raises(EngineRefusedError, match="no token 99999"):
        client.run(client.generate({"prompt_token_ids": [PROMPT, [99_999]], "sampling_params": {"max_tokens": 4}}))


def test_input_that_cannot_work_is_refused_before_anything_is_sent(client, urls):
    for bad, words in (
        ({"prompts": ["text"]}, "no prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt 0 has no token"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"n": 2}}, "one continuation"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "2 session_ids for 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            client.run(client.generate(bad))
    with pytest.raises(ConfigError, match="one of 2 servers"):
        RemoteInferenceClient(proxy_url=urls[0], server_urls=urls)
    with pytest.raises(ConfigError, match="groups of data_parallel_size"):
        RemoteInferenceClient(proxy_url="host:1", server_urls=urls, data_parallel_size=3)


# control calls and routers


def test_control_calls_to_a_router_are_refused_and_reach_no_engine(routing, urls):
    for call in (
        lambda: vllm_engine(routing.url).pause(),
        lambda: embedded_engine(routing.url).connect({"transport": "disk", "params": []}),
        lambda: tx.make_engine("sglang", url=routing.url).pause(),
    ):
        with pytest.raises(ConfigError, match=f"{routing.url} is a router"):
            call()
    client = RemoteInferenceClient(proxy_url=routing.url, server_urls=[routing.url], kind="embedded")
    with pytest.raises(ConfigError, match="is a router"):
        client.run(client.pause())
    client.close()
    assert not any(httpx.get(f"{url}/is_paused").json()["is_paused"] for url in urls)


def test_discovery_does_not_take_a_router_for_the_engine_behind_it(routing):
    with pytest.raises(ConfigError, match="is a router"):
        tx.discover(routing.url)


# membership


def test_every_engine_is_registered_with_a_router_of_ours_or_with_a_given_one(urls):
    with RouterProcess(**settings_for_router("vllm")) as process, Routing.over(*urls, router=process.url) as routing:
        assert routing.url == process.url and listed(routing) == set(urls)
        routing.close()
        assert process.alive()
        with Routing.over(*urls, router=process.url) as again:  # registering twice is fine
            assert listed(again) == set(urls)


def test_requests_of_an_engine_that_is_taken_out_go_on_at_another(routing, client, urls):
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
    assert listed(routing) == {urls[1]}
    httpx.post(f"{urls[0]}/resume")
    routing.follow(report(*((url, "serving", 1) for url in urls)))
    assert found["response_ids"] == client.run(client.generate(batch(8, length=100)))["response_ids"]


def test_an_engine_that_is_gone_is_a_problem_of_the_change_and_not_an_error(routing, tmp_path):
    with EmbeddedServer(tiny_checkpoint(tmp_path), dtype="float32", threads=1) as extra:
        (info,) = tx.discover(extra.url)
        routing.adopt(info)
        rows = [(url, "serving", 1) for url in (*listed(routing), extra.url)]
        assert routing.follow(report(*rows)).added == (extra.url,)
        assert routing.follow(report(*rows[:-1], (extra.url, "lost", None))).removed == (extra.url,)
    (problem,) = routing.follow(report(*rows)).problems
    assert problem[0] == extra.url and extra.url in problem[1]


def test_a_dead_engine_is_refused_at_once_and_not_after_the_routers_minutes(routing):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=url):
        routing.router.add(url)
    assert url not in listed(routing)


def test_a_router_without_pools_takes_no_prefill_engine(routing, urls):
    with RouterProcess(**settings_for_router("vllm")) as process:
        with pytest.raises(ConfigError, match="as a regular worker"):
            RouterClient(process.url).add(urls[0], "prefill")
        assert RouterClient(process.url).workers() == ()


def test_a_router_with_pools_has_them_from_its_start_and_takes_no_more(urls):
    with RouterProcess(prefill=[urls[0]], decode=[urls[1]], **settings_for_router("vllm")) as process:
        router = RouterClient(process.url)
        types = {worker.url: worker.worker_type for worker in router.workers()}
        assert types == {urls[0]: "prefill", urls[1]: "decode"}
    with pytest.raises(ConfigError, match="prefill engines alone"):
        RouterProcess(prefill=[urls[0]])
    with pytest.raises(ConfigError, match="pools and regular engines"):
        RouterProcess(urls, prefill=[urls[0]], decode=[urls[1]])
