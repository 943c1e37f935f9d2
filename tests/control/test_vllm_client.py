"""The vLLM client and what releases and settings of a server change; the real server is in tests/real_engines."""

import pytest

import torchrl_ext as tx
from tests.control.engines import Trainer, client
from tests.control.engines import running as fakes
from tests.control.servers import CONFIG, failed
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.base.routes import ANSWERS, escaped
from torchrl_ext.control.makes.vllm import vllm_engine

JOIN = {"transport": "disk", "params": [], "offer": {}}
GONE = (404, {"detail": "Not Found"})


@pytest.fixture
def fake():
    with fakes("vllm") as fake:
        yield fake


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(tmp_path_factory.mktemp("versions") / "trainer", (8,))


def test_prefix_cache_reset_is_retried_or_engine_stays_paused(fake, trainer):
    """A busy prefix cache is reset again until it is dropped; at the deadline the engine stays paused."""
    busy, reset = (200, {"success": False}), "POST /reset_prefix_cache"
    answers = [busy, busy, (200, {"success": True})]
    fake.answers[reset] = lambda asked: answers.pop(0)
    trainer.update(client(fake), 8)
    state = "POST /init_weight_transfer_engine"  # asked of the engine that resumed
    assert [call.route for call in fake.calls][-5:] == [*[reset] * 3, "POST /resume", state]
    assert fake.calls[-1].body["init_info"]["kind"] == "state"
    fake.answers[reset] = busy
    engine = client(fake, timeout_s=0.5)
    with pytest.raises(EngineRefusedError, match="could not drop"):
        trainer.update(engine, 8)
    assert engine.rows()[0].state == "paused" and not fake.serving


@pytest.mark.parametrize("seeing", [None, {"mm_processor_cache_gb": 4}])
def test_encoder_cache_is_reset_for_a_multimodal_model_only(seeing, fake, trainer):
    config = {**CONFIG, "model_config": {**CONFIG["model_config"], "multimodal_config": seeing}}
    fake.answers |= {"GET /server_info": (200, {"vllm_config": config}), "POST /reset_encoder_cache": (200, {})}
    trainer.update(client(fake), 8)
    assert fake.counts["POST /reset_encoder_cache"] == bool(seeing) and fake.serving


def test_a_server_that_hands_its_keys_on_must_not_keep_them(fake, trainer):
    connected = {**CONFIG, "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}
    fake.answers["GET /server_info"] = 200, {"vllm_config": connected}
    with pytest.raises(ConfigError, match=r"KV connector LMCacheConnectorV1.*old weights"):
        trainer.update(client(fake, keep_cache=True), 8)
    assert list(fake.counts) == ["GET /server_info"]
    trainer.update(client(fake), 8)


@pytest.mark.parametrize("given", [(3, None), (1, ["weights"]), (1, []), (0, ["cache"])])
def test_unknown_sleep_level_or_tag_is_refused_without_a_request(given):
    with pytest.raises(ConfigError, match=r"sleep|tags"):
        vllm_engine("host:1").sleep(*given)


def test_a_prefetch_is_asked_after_until_it_is_over_or_late(fake):
    working, route = failed(f'EngineError: {ANSWERS}{{"working": true}}.'), "POST /init_weight_transfer_engine"
    done = 200, {"message": "Weight transfer initialized"}
    answers = [done, working, working, done]
    fake.answers[route] = lambda asked: answers.pop(0)
    client(fake).prefetch(3)
    kinds = [call.body["init_info"]["kind"] for call in fake.calls if call.route == route]
    assert kinds == ["prefetch", "poll", "poll", "poll"]
    fake.answers[route] = working
    with pytest.raises(DeadlineError, match=r"did not .* within 2 s"):
        client(fake, load_timeout_s=2.0).prefetch(3)


FLAGS = r"""--weight-transfer-config '\{"backend": "torchrl_ext"\}'"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (escaped("StoreError: /root/a/weight_v31 is not there"), "^StoreError: /root/a/weight_v31 is not there"),
        ("Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.", FLAGS),
        ("Invalid init_info for NCCLWeightTransferEngine: unexpected keyword argument 'transport'", FLAGS),
    ],
)
def test_worker_error_is_quoted_whole_or_answered_with_flags(words, found, fake):
    """A worker's error is quoted whole; one about another weight transfer backend gets the exact flags."""
    fake.answers["POST /init_weight_transfer_engine"] = failed(words)
    with pytest.raises(EngineRefusedError, match=found):
        client(fake).connect(JOIN)


@pytest.mark.parametrize("route", ["POST /pause", "POST /start_weight_update", "POST /update_weights", "POST /resume"])
def test_answer_to_another_call_raises_out_of_step_error(route, fake, trainer):
    fake.answers[route] = failed(f'worker 0, 1: {ANSWERS}{{"whole": true}}')
    with pytest.raises(EngineRefusedError, match=r"out of step.*Next: restart the engine"):
        trainer.update(client(fake), 8)


def test_a_server_without_dev_routes_gets_the_hint(fake):
    fake.answers = {"GET /server_info": GONE, "POST /pause": GONE}
    for call in (client(fake).info, lambda: client(fake).begin(1)):
        with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
            call()


def test_connect_to_several_engines_gives_each_a_rank_offset(fake, trainer):
    """Several addresses give one client with a rank offset for each engine; settings reach the client."""
    with fakes("vllm") as other:
        fake.answers["GET /get_world_size"] = {"world_size": 6}
        fleet = tx.connect(fake.url, other.url)
        assert [engine.url for engine in fleet.engines] == [fake.url, other.url] and fleet.info().world_size == 7
        fleet.connect({**trainer.invitation(), "world_size": 8})
        inits = [call.body["init_info"] for one in (fake, other) for call in one.calls if call.body]
        assert [init["rank_offset"] for init in inits if init["kind"] == "join"] == [1, 7]
        trainer.update(tx.connect(other.url, keep_cache=True), 8)
        assert not other.counts["POST /reset_prefix_cache"]


def test_addresses_are_checked_before_anything_is_asked():
    with pytest.raises(ConfigError, match="given twice"):
        tx.discover("host:1", "http://host:1/")
    with pytest.raises(ConfigError, match="no engine address"):
        tx.connect()
