"""Control calls and updates by SkyRL's names, held against servers that write down what they are asked."""

import pickle

import pytest

from tests.compat.skyrl_client import made, routes, sent
from tests.fakes import FakeEngine
from tests.rpc.servers import running
from torchrl_ext.compat.skyrl import PauseMode
from torchrl_ext.errors import ConfigError


def echo(asked):
    return 200, {"asked": asked, "status": "done"}


@pytest.fixture
def server():
    with running() as found:
        yield found


@pytest.fixture
def client(server):
    client = made(server)
    yield client
    client.close()


def test_each_engine_is_told_the_rank_of_its_first_worker():
    with running() as first, running() as second:
        client = made(first, second)
        client.run(client.init_weight_update_communicator({"master_port": 1, "rank_offset": 1}))
        told = [sent(server, "init_weight_transfer_engine")[-1][1]["init_info"] for server in (first, second)]
        assert told == [{"master_port": 1, "rank_offset": rank} for rank in (1, 7)]
        client.close()


def test_pauses_and_sleeps_return_what_the_server_answers(server, client):
    for route in ("pause", "resume", "sleep", "wake_up"):
        server.answers[f"POST /{route}"] = echo
    server.answers["GET /is_sleeping"] = 404, {}
    for mode in (PauseMode.KEEP, "KEEP", "keep"):
        (told,) = client.run(client.pause(mode)).values()
        assert told == {"status": 200, "body": {"asked": {"mode": "keep", "clear_cache": "false"}, "status": "paused"}}
    (told,) = client.run(client.resume()).values()
    assert told["body"]["status"] == "serving"
    (told,) = client.run(client.sleep(1, ["weights", "kv_cache"])).values()
    assert told["body"]["asked"] == {"level": "1", "mode": "keep", "tags": ["weights", "kv_cache"]}
    (told,) = client.run(client.wake_up()).values()
    assert told["body"] == {"asked": {}, "status": "serving"}
    (told,) = client.run(client.wake_up(["weights"])).values()
    assert told["body"]["asked"] == {"tags": "weights"}


def test_an_address_is_looked_at_once_and_refused_where_it_is_a_routers():
    with FakeEngine("vllm") as server, FakeEngine("vllm") as other:
        looks = []
        server.answers = {"GET /workers": lambda asked: looks.append(asked) or (404, {"detail": "Not Found"})}
        other.answers = {"GET /workers": (200, {"workers": [{"url": "http://a:1"}]})}
        client = made(server)
        for call in (client.pause("abort"), client.sleep(1), client.wake_up(), client.world_sizes(), client.resume()):
            client.run(call)
        assert len(looks) == 1
        client.close()
        client = made(other)
        with pytest.raises(ConfigError, match="is a router"):
            client.run(client.pause())
        assert not routes(other, "POST")
        client.close()


def test_the_cache_is_dropped_by_the_query_that_vllm_reads(server, client):
    client.run(client.reset_prefix_cache(True))
    assert sent(server, "reset_prefix_cache") == [({"reset_running_requests": "true"}, None)]


def test_the_steps_of_an_update_reach_the_server_as_they_are_given(server, client):
    client.run(client.start_weight_update())
    client.run(client.update_named_weights({"names": ["w"]}))
    client.run(client.finish_weight_update(3))
    posted = [call for call in server.calls if call.route.startswith("POST")]
    assert [(call.route, call.body) for call in posted] == [
        ("POST /start_weight_update", None),
        ("POST /update_weights", {"update_info": {"names": ["w"]}}),
        ("POST /finish_weight_update", {"weight_version": "3"}),
    ]


def test_single_steps_are_refused_at_sglang_whose_cache_has_a_route_of_its_own():
    with running({"POST /flush_cache": (200, b"dropped")}) as server:
        client = made(server, kind="sglang")
        for call in (client.start_weight_update(), client.finish_weight_update()):
            with pytest.raises(ConfigError, match="SGLang's weight routes"):
                client.run(call)
        assert client.run(client.reset_prefix_cache()) == {server.url: {"status": 200, "body": "dropped"}}
        assert routes(server, "POST") == ["POST /flush_cache"]
        client.close()


def test_a_pickled_client_controls_the_same_engines(server, client):
    there = pickle.loads(pickle.dumps(client))
    assert (there.proxy_url, there.server_urls) == (client.proxy_url, client.server_urls)
    there.run(there.finish_weight_update())
    assert sent(server, "finish_weight_update") == [({}, {})]
    there.close()
