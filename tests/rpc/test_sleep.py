"""What a client asks of a vLLM server that sleeps, whoever put it to sleep, and in which order an update wakes it."""

import pytest

import torchrl_ext as tx
from tests.rpc.servers import Resting, bare, running
from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.rpc.fleet import Fleet


@pytest.fixture
def resting():
    return Resting()


@pytest.fixture
def server(resting):
    with running(resting.answers) as server:
        yield server


def asked(server):
    """Routes that change something, with the query that matters."""
    found = []
    for call, query, body in server.calls:
        more = query.get("tags") or query.get("level")
        if call.startswith("POST") and (body or {}).get("init_info", {}).get("kind") not in ("state", "poll"):
            found.append(call.removeprefix("POST /") + (f" {more}" if more else ""))
    return found


def update(engine):
    with engine.updating(3):
        engine.load({"version": 3})


def client(server, **settings):
    return tx.make_engine("vllm", url=server.url, **settings)


def test_an_update_wakes_weights_before_it_starts_and_the_cache_when_it_has_its_number(server, resting):
    engine = client(server)
    engine.sleep(1)
    update(engine)
    assert asked(server) == [
        "sleep 1",
        "pause",
        "wake_up weights",
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "wake_up kv_cache",
        "resume",
    ]
    assert not resting.asleep and not resting.paused and engine.rows()[0].state == "serving"
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_the_colocated_order_works_with_a_client_of_its_own_for_every_step(server, resting, level):
    client(server).sleep(level)
    client(server).wake_up(["weights"])
    assert resting.asleep == {"kv_cache"} and resting.paused
    update(client(server))
    client(server).wake_up(["kv_cache"])
    assert not resting.asleep and not resting.paused and not resting.hollow and not resting.harmed


def test_an_engine_that_somebody_else_put_to_sleep_is_woken_in_the_same_order(server, resting):
    resting.sleep({"level": "2"})
    engine = client(server)
    engine.prefetch(3)
    assert resting.asleep == {"kv_cache"} and resting.hollow  # no delta builds on nothing
    update(engine)
    assert not resting.asleep and not resting.paused and not resting.hollow and not resting.harmed


def test_weights_are_awake_while_a_version_is_prefetched(server):
    engine = client(server)
    engine.sleep(1)
    engine.prefetch(3)
    assert asked(server) == ["sleep 1", "wake_up weights", "init_weight_transfer_engine"]
    engine.close()


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_is_awake_is_not_woken(server, resting, paused):
    resting.pause(paused)
    engine = client(server)
    update(engine)
    assert not [call for call in asked(server) if "wake" in call]
    engine.close()


def test_weights_that_wake_last_do_not_let_an_engine_generate_during_an_update(server, resting):
    engine = client(server)
    engine.sleep(1)
    engine.wake_up(["kv_cache"])
    seen = []
    server.answers["POST /start_weight_update"] = lambda _: (seen.append(resting.paused), (200, {}))[1]
    update(engine)
    assert seen == [True] and not resting.asleep


@pytest.mark.parametrize("stranger", [False, True])
def test_workers_that_lost_their_weights_are_told_and_nothing_resumes_them_but_an_update(server, resting, stranger):
    engine = client(server, pause_mode="abort")
    engine.sleep(2)
    assert server.calls[0] == ("POST /sleep", {"level": "2", "mode": "abort"}, None)
    assert bare(server.calls[1][2]["init_info"]) == {"kind": "reset", "weights": "gone"}
    other = client(server) if stranger else engine
    for refused in (other.resume, other.wake_up, lambda: other.wake_up(["kv_cache"])):
        with pytest.raises(EngineRefusedError, match="no weights to serve"):
            refused()
    assert resting.asleep and resting.paused
    update(other)
    other.resume()
    assert not resting.paused
    engine.close()


def test_the_cache_alone_is_dropped_in_a_pause(server, resting):
    engine = client(server)
    engine.sleep(tags=["kv_cache"])
    assert resting.asleep == {"kv_cache"}
    engine.wake_up()
    assert asked(server) == ["pause", "release_kv_cache_memory", "wake_up kv_cache", "resume"]
    assert not resting.asleep and not resting.paused
    engine.close()


def test_a_client_that_resumes_a_sleeping_engine_is_refused(server, resting):
    client(server).sleep(1)
    with pytest.raises(EngineRefusedError, match=r"is asleep.*wake_up"):
        client(server).resume()
    assert resting.paused


def test_a_fleet_sleeps_and_wakes_as_a_whole(server, resting):
    elsewhere = Resting()
    with running(elsewhere.answers) as other:
        fleet = Fleet([client(one) for one in (server, other)])
        for level in (0, 1):
            fleet.sleep(level)
            assert resting.paused and elsewhere.paused
            fleet.wake_up()
            assert not any((resting.paused, resting.asleep, elsewhere.paused, elsewhere.asleep))
        fleet.close()
