"""Pause and sleep of every make, whoever put the engine to sleep, and the order in which an update wakes it."""

import httpx
import pytest

from tests.control.engines import Trainer, client, running
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.control.fleet import Fleet

SLEEPERS = ("vllm", "embedded", "sglang")
WAKE = {"vllm": "POST /wake_up", "embedded": "POST /wake_up", "sglang": "POST /resume_memory_occupation"}
ALL = {
    "vllm": {"weights", "kv_cache"},
    "embedded": {"weights", "kv_cache"},
    "sglang": {"weights", "kv_cache", "cuda_graph"},
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(tmp_path_factory.mktemp("versions") / "trainer", (1, 2))


@pytest.fixture(params=SLEEPERS)
def fake(request, trainer):
    with running(request.param) as fake:
        trainer.update(client(fake), 1)
        yield fake
        assert not fake.wrongs


def changes(fake):
    """Routes that put the engine to sleep, wake it, or land weights, with their tags."""
    words = ("sleep", "memory", "wake", "begin_weight", "update_weights", "start", "load")
    found = [call for call in fake.calls if any(word in (call.kind or call.route) for word in words)]
    return [(call.route, call.query.get("tags") or (call.body or {}).get("tags")) for call in found]


@pytest.mark.parametrize("level", [1, 2])
def test_update_wakes_weights_first_and_kv_cache_last(fake, trainer, level):
    engine = client(fake)
    steps = trainer.steps(engine, 2)
    steps.pop("connect")()
    engine.sleep(level)
    assert fake.asleep == ALL[fake.kind] and fake.paused
    del fake.calls[:]
    steps.pop("prefetch")()
    assert fake.asleep == ALL[fake.kind] - {"weights"} and fake.paused
    for step in steps.values():
        step()
    routes, tags = zip(*changes(fake), strict=True)
    woken = [one for one in tags if one]
    assert routes[0] == routes[-1] == WAKE[fake.kind] and "weights" in woken[0] and "kv_cache" in woken[-1]
    assert not any("kv_cache" in one for one in woken[:-1])
    assert fake.serving


@pytest.mark.parametrize("stranger", [False, True])
def test_sleeping_engine_without_weights_serves_after_update(fake, trainer, stranger):
    engine = client(fake)
    other = client(fake) if stranger else engine
    engine.sleep(1)
    with pytest.raises(EngineRefusedError, match=r"is asleep.*wake_up"):
        other.resume()
    engine.sleep(2)
    for refused in (other.resume, other.wake_up, lambda: other.wake_up(["kv_cache"])):
        with pytest.raises(EngineRefusedError, match=r"no weights to serve|is asleep"):
            refused()
    assert fake.paused and "kv_cache" in fake.asleep
    trainer.update(other, 2)
    assert fake.serving and fake.whole


def test_the_cache_alone_is_dropped_in_a_pause(fake):
    engine = client(fake)
    engine.sleep(tags=["kv_cache"])
    assert fake.paused and fake.asleep == ALL[fake.kind] - {"weights"}
    engine.sleep(tags=["kv_cache"])
    engine.wake_up()
    assert fake.serving


@pytest.mark.parametrize("level", [0, 1])
def test_rehearsal_keeps_engine_paused_by_other_client(fake, trainer, level):
    client(fake).sleep(level)
    fake.unrehearsed = True
    engine = client(fake)
    trainer.steps(engine, 2)["connect"]()
    assert engine.rehearse() == "rehearsed" and not fake.unrehearsed
    assert fake.paused and fake.asleep == (ALL[fake.kind] - {"weights"} if level else set())


def test_engines_sleep_and_wake_as_a_whole():
    with running("vllm") as one, running("embedded") as other:
        fleet = Fleet([client(one), client(other)])
        fleet.sleep(1)
        assert one.paused and other.paused and one.asleep == other.asleep == ALL["vllm"]
        fleet.wake_up()
        assert one.serving and other.serving
        fleet.close()


# vLLM


def test_vllm_sleeps_in_the_clients_pause_mode(trainer):
    with running("vllm") as fake:
        httpx.post(f"{fake.url}/sleep?level=2&mode=abort")
        trainer.update(client(fake, pause_mode="wait"), 1)
        assert fake.serving
        client(fake, pause_mode="abort").sleep(2)
        (sleep,) = [call.query for call in fake.calls[1:] if call.route == "POST /sleep"]
        assert sleep == {"level": "2", "mode": "abort"}


# SGLang


def test_unsupported_sglang_sleep_level_is_refused_before_pause():
    for port, words in (("sglang", "enable-weights-cpu-backup"), ("stock-sglang", "without our plugin")):
        with running(port) as fake:
            told = {"model_path": "/m", "disaggregation_mode": "null"}
            fake.answers["GET /server_info"] = 200, told
            with pytest.raises((EngineRefusedError, ConfigError), match=words):
                client(fake).sleep(1)
            assert fake.serving


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_sglang_releases_memory_once_and_not_while_frozen(mode):
    """Its scheduler would end."""
    with running("sglang") as fake:
        client(fake, pause_mode="in_place").pause()
        for level, tags in ((1, ["kv_cache"]), (1, None), (1, None), (2, None)):
            client(fake, pause_mode=mode).sleep(level, tags)
        modes = [call.body["mode"] for call in fake.calls if call.route == "POST /pause_generation"]
        assert modes[0] == "in_place" and "retract" in modes and ("abort" in modes) == (mode == "abort")
        assert fake.asleep == ALL["sglang"] and not fake.wrongs
