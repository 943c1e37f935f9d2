"""What a client asks of a vLLM server when it puts it to sleep, and in which order an update wakes it."""

import pytest

import torchrl_ext as tx
from tests.rpc.servers import running
from torchrl_ext.errors import EngineRefusedError

AWAKE, ASLEEP = (200, {"status": "awake"}), (200, {"status": "sleeping"})


@pytest.fixture
def server():
    answers = {"post_sleep": ASLEEP, "post_wake_up": [ASLEEP, AWAKE], "post_release_kv_cache_memory": ASLEEP}
    with running(**answers) as server:
        yield server


def asked(server):
    """Routes with the query that matters."""
    found = []
    for call, query, _ in server.calls:
        more = query.get("tags") or query.get("level")
        found.append(call.removeprefix("POST /") + (f" {more}" if more else ""))
    return found


def update(engine):
    with engine.updating(3):
        engine.load({})


def test_an_update_wakes_weights_before_it_starts_and_the_cache_when_it_has_its_number(server):
    engine = tx.make_engine("vllm", url=server.url)
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
    engine.close()


def test_weights_are_awake_while_a_version_is_prefetched(server):
    engine = tx.make_engine("vllm", url=server.url)
    engine.sleep(1)
    engine.prefetch(3)
    assert asked(server) == ["sleep 1", "wake_up weights", "init_weight_transfer_engine"]
    engine.close()


def test_an_engine_that_is_awake_is_not_woken(server):
    engine = tx.make_engine("vllm", url=server.url)
    update(engine)
    assert not [call for call in asked(server) if "wake" in call]
    engine.close()


def test_workers_that_lost_their_weights_are_told_and_nothing_resumes_them_but_an_update(server):
    engine = tx.make_engine("vllm", url=server.url, pause_mode="abort")
    engine.sleep(2)
    assert server.calls[0] == ("POST /sleep", {"level": "2", "mode": "abort"}, None)
    assert server.calls[1][2] == {"init_info": {"doubt": True}}
    for refused in (engine.resume, engine.wake_up):
        with pytest.raises(EngineRefusedError, match="no weights to serve"):
            refused()
    assert len(server.calls) == 2
    update(engine)
    engine.resume()
    engine.close()


def test_the_cache_alone_is_dropped_in_a_pause(server):
    server.answers["POST /wake_up"] = AWAKE
    engine = tx.make_engine("vllm", url=server.url)
    engine.sleep(tags=["kv_cache"])
    engine.wake_up()
    assert asked(server) == ["pause", "release_kv_cache_memory", "wake_up", "resume"]
    engine.close()


def test_a_fleet_sleeps_and_wakes_as_a_whole(server):
    with running(post_sleep=ASLEEP, post_wake_up=AWAKE) as other:
        fleet = tx.Fleet([tx.make_engine("vllm", url=one.url) for one in (server, other)])
        fleet.sleep(0)
        fleet.wake_up()
        assert asked(other) == ["sleep 0", "wake_up", "resume"]
        assert asked(server) == ["sleep 0", "wake_up"]  # which says that it still sleeps
        fleet.close()
