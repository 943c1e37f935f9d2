"""The vLLM client and what releases and settings of a server change; the real server is in tests/real_engines."""

import pytest

import torchrl_ext as tx
from tests.control.engines import Trainer, client
from tests.control.engines import running as fakes
from tests.control.servers import CONFIG, asked_of
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.base.messages import Inspect
from torchrl_ext.control.makes.vllm import vllm_engine

JOIN = {"transport": "disk", "params": [], "offer": {}}
SOLE = {**CONFIG, "parallel_config": {}}
GONE = (404, {"detail": "Not Found"})


@pytest.fixture
def fake():
    with fakes("vllm") as fake:
        yield fake


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(tmp_path_factory.mktemp("versions") / "trainer", (8,))


def test_prefix_cache_reset_is_retried_until_it_is_dropped(fake, trainer):
    """A busy prefix cache is reset again until it is dropped; at the deadline the engine serves as before."""
    busy, reset = (200, {"success": False}), "POST /reset_prefix_cache"
    answers = [busy, busy, (200, {"success": True})]
    fake.answers[reset] = lambda asked: answers.pop(0)
    trainer.update(client(fake), 8)
    kinds = [call.kind or call.route for call in fake.calls]
    assert kinds[kinds.index("start") :][:5] == ["start", *[reset] * 3, "load"]
    fake.answers[reset] = busy
    engine = client(fake, timeout_s=0.5)
    with pytest.raises(EngineRefusedError, match=r"could not drop.*serves again"):
        trainer.update(engine, 8)
    assert fake.serving


@pytest.mark.parametrize("seeing", [None, {"mm_processor_cache_gb": 4}])
def test_encoder_cache_is_reset_for_a_multimodal_model_only(seeing, fake, trainer):
    config = {**SOLE, "model_config": {**CONFIG["model_config"], "multimodal_config": seeing}}
    fake.answers |= {"GET /server_info": (200, {"vllm_config": config}), "POST /reset_encoder_cache": (200, {})}
    trainer.update(client(fake), 8)
    assert fake.counts["POST /reset_encoder_cache"] == bool(seeing) and fake.serving


def test_a_server_that_hands_its_keys_on_must_not_keep_them(fake, trainer):
    connected = {**SOLE, "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}
    fake.answers["GET /server_info"] = 200, {"vllm_config": connected}
    with pytest.raises(ConfigError, match=r"KV connector LMCacheConnectorV1.*old weights"):
        trainer.update(client(fake, keep_cache=True), 8)
    assert "join" not in [call.kind for call in fake.calls]
    trainer.update(client(fake), 8)


@pytest.mark.parametrize("given", [(3, None), (1, ["weights"]), (1, []), (0, ["cache"])])
def test_unknown_sleep_level_or_tag_is_refused_without_a_request(given):
    with pytest.raises(ConfigError, match=r"sleep|tags"):
        vllm_engine("host:1").sleep(*given)


def test_a_prefetch_is_asked_after_until_it_is_over_or_late(fake):
    working, done = {"results": [{}, {"working": True}]}, {"results": [{}, {}]}
    answers = [done, working, working, done]
    fake.answers |= {kind: lambda asked: answers.pop(0) for kind in ("prefetch", "poll")}
    client(fake).update(3).stage()
    kinds = [call.kind for call in fake.calls if call.kind not in ("", "state")]
    assert kinds == ["prefetch", "poll", "poll", "poll"]
    fake.answers |= {"prefetch": done, "poll": working}
    with pytest.raises(DeadlineError, match=r"did not .* within 2 s"):
        client(fake, load_timeout_s=2.0).update(3).stage()


def test_worker_error_is_quoted_whole(fake):
    path = {"what": "StoreError: /root/a/weight_v31 is not there", "hint": "look"}
    fake.answers["join"] = {"results": [{"error": path}, {"error": path}]}
    with pytest.raises(EngineRefusedError, match=r"^StoreError: /root/a/weight_v31 is not there.*Next: look"):
        client(fake).join(JOIN)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_version_is_confirmed_by_the_workers_of_all_replicas(fake, trainer, lost):
    """Two replicas of two workers stand behind the address; vLLM's own client hands on the first one's answers."""
    parallel = {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1}
    fake.answers["GET /server_info"] = {"vllm_config": {**CONFIG, "parallel_config": parallel}}
    rows = [{"version": 8, "digest": trainer.digest(8), "workers": 2}] * 4
    fake.answers["finish"] = {"results": rows[lost:]}
    with pytest.raises(EngineRefusedError, match=f"{4 - lost} worker.*Expected: 4, of 2 engine"):
        trainer.update(client(fake), 8)
    fake.answers["finish"] = {"results": rows}
    with pytest.raises(EngineRefusedError, match="did not resume"):  # one got further than this one, which refuses
        trainer.update(client(fake), 8)


def test_workers_without_the_plugin_are_asked_nothing(trainer):
    """Each would raise, and vLLM take one's reply for another's from then on."""
    with fakes("stock-vllm") as fake:
        engine = client(fake)
        assert engine.pause() and engine.paused()
        engine.resume()
        with pytest.raises(EngineRefusedError, match=r"without our plugin.*install torchrl_ext"):
            engine.inspect(Inspect())
        with pytest.raises(EngineRefusedError, match="does not say what sleeps"):
            engine.sleep(1)
        trainer.update(engine, 8)
        assert not any(call.kind for call in fake.calls) and fake.serving


def test_a_server_without_dev_routes_gets_the_hint(fake):
    fake.answers = {"GET /server_info": GONE, "POST /pause": GONE}
    for call in (client(fake).info, lambda: client(fake).pause()):
        with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
            call()


def test_connect_to_several_engines_gives_each_a_rank_offset(fake, trainer):
    """Several addresses give one client with a rank offset for each engine; settings reach the client."""
    with fakes("vllm") as other:
        fake.answers["GET /get_world_size"] = {"world_size": 6}
        fleet = tx.connect(fake.url, other.url)
        assert [engine.url for engine in fleet.engines] == [fake.url, other.url] and fleet.info().world_size == 7
        fleet.join({**trainer.invitation(), "world_size": 8})
        joins = [asked_of(call.body) for one in (fake, other) for call in one.calls if call.kind == "join"]
        assert [join["rank_offset"] for join in joins] == [1, 7]
        trainer.update(tx.connect(other.url, keep_cache=True), 8)
        assert not other.counts["POST /reset_prefix_cache"]


def test_addresses_are_checked_before_anything_is_asked():
    with pytest.raises(ConfigError, match="given twice"):
        tx.discover("host:1", "http://host:1/")
    with pytest.raises(ConfigError, match="no engine address"):
        tx.connect()
