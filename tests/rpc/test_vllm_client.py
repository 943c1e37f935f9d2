"""The vLLM client and discovery over real sockets; what the real server does is in tests/engine."""

import socket

import pytest

import torchrl_ext as tx
from tests.rpc.servers import CONFIG, GOOD, Resting, bare, failed, running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.routes import ANSWERS, escaped
from torchrl_ext.rpc.makes.vllm import vllm_engine

WORKING = failed(f'EngineError: {ANSWERS}{{"working": true}}.')
JOIN = {"transport": "disk", "params": []}
GONE = (404, {"detail": "Not Found"})


def test_a_release_without_labels_follows_and_its_label_is_not_known():
    with running(Resting().answers, get_weight_info=GONE) as server:
        (found,) = tx.discover(server.url)
        engine = vllm_engine(server.url)
        assert found.weight_version == engine.info().weight_version == ""
        engine.connect(JOIN)
        with engine.updating(8):
            engine.load({"version": 8, "params": []})
        (row,) = engine.rows()
        assert (row.state, row.version, row.error) == ("serving", 8, None)


def test_a_label_that_a_server_refuses_to_say_is_an_error_and_not_an_unknown_one():
    answer = (500, {"detail": "boom"})
    with running(get_weight_info=answer) as server, pytest.raises(EngineRefusedError, match="boom"):
        vllm_engine(server.url).info()


def test_caches_that_cannot_be_dropped_keep_the_engine_paused():
    with running(post_reset_prefix_cache=(200, {"success": False})) as server:
        engine = vllm_engine(server.url, timeout_s=0.5)
        with pytest.raises(EngineRefusedError, match="could not drop"), engine.updating(8):
            pass
        assert engine.rows()[0].state == "paused" and "POST /resume" not in server.routes()


def test_keys_that_are_copied_away_are_dropped_when_the_copies_are_made():
    answers = [(200, {"success": False}), (200, {"success": False}), (200, {"success": True})]
    with running(post_reset_prefix_cache=answers) as server:
        with vllm_engine(server.url).updating(8):
            pass
        assert server.routes()[-4:] == ["POST /reset_prefix_cache"] * 3 + ["POST /resume"]


@pytest.mark.parametrize("seeing", [None, {"mm_processor_cache_gb": 4}])
def test_embeddings_of_images_are_dropped_where_the_model_takes_images(seeing):
    config = {**CONFIG, "model_config": {**CONFIG["model_config"], "multimodal_config": seeing}}
    told = (200, {"vllm_config": config})
    with running(get_server_info=told, post_reset_encoder_cache=(200, {})) as server:
        engine = vllm_engine(server.url)
        engine.connect(JOIN)
        with engine.updating(8):
            pass
        assert ("POST /reset_encoder_cache" in server.routes()) == bool(seeing)
        assert server.routes()[-1] == "POST /resume"


ALONE = {name: value for name, value in CONFIG.items() if name != "kv_transfer_config"}
CONNECTED = {**CONFIG, "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}


def test_a_fleet_hands_the_wish_to_keep_caches_to_engines_of_each_kind():
    with running(get_server_info=(200, {"vllm_config": ALONE})) as server:
        (engine,) = tx.connect(server.url, keep_cache=True).engines
        with engine.updating(8):
            pass
        assert not [call for call in server.routes() if "reset" in call]


def test_a_server_that_hands_its_keys_on_must_not_keep_them():
    with running(get_server_info=(200, {"vllm_config": CONNECTED})) as server:
        with pytest.raises(ConfigError, match=r"KV connector LMCacheConnectorV1.*old weights"):
            vllm_engine(server.url, keep_cache=True).connect(JOIN)
        assert server.routes() == ["GET /server_info"]
        vllm_engine(server.url).connect(JOIN)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_cache_is_kept_with_the_requests_that_are_frozen_alone(mode):
    with pytest.raises(ConfigError, match=f"keep_cache means nothing with pause mode '{mode}'"):
        vllm_engine("host:1", pause_mode=mode, keep_cache=True)


def test_a_prefetch_is_asked_for_until_it_is_over():
    answers = [(200, {}), WORKING, WORKING, (200, {})]
    with running(post_init_weight_transfer_engine=answers) as server:
        vllm_engine(server.url).prefetch(3)
        bodies = [bare(body["init_info"]) for call, _, body in server.calls if call.startswith("POST")]
        assert bodies == [
            {"kind": "prefetch", "version": 3, "part": None, "files": None, "label": None},
            *3 * [{"kind": "poll", "pull": False}],
        ]


def test_a_prefetch_that_never_ends_reaches_its_deadline():
    with (
        running(post_init_weight_transfer_engine=WORKING) as server,
        pytest.raises(DeadlineError, match=r"did not .* within 2 s"),
    ):
        vllm_engine(server.url, load_timeout_s=2.0).prefetch(3)


def test_a_path_in_the_words_of_a_worker_is_whole():
    words = escaped("StoreError: /root/a/weight_v000031 is not there")
    told = "^StoreError: /root/a/weight_v000031 is not there"
    answers = {"POST /init_weight_transfer_engine": failed(words)}
    with running({**Resting().answers, **answers}) as server, pytest.raises(EngineRefusedError, match=told):
        vllm_engine(server.url).connect(JOIN)


def test_a_server_without_dev_routes_gets_the_hint():
    with running(get_server_info=GONE, post_pause=GONE) as server:
        for call in (vllm_engine(server.url).info, lambda: vllm_engine(server.url).begin(1)):
            with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
                call()


@pytest.mark.parametrize(
    "words",
    [
        "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.",
        "Invalid init_info for NCCLWeightTransferEngine: unexpected keyword argument 'transport'",
    ],
)
def test_a_server_without_our_backend_gets_the_exact_flags(words):
    with (
        running(post_init_weight_transfer_engine=failed(words)) as server,
        pytest.raises(EngineRefusedError, match=r"""--weight-transfer-config '\{"backend": "torchrl_ext"\}'"""),
    ):
        vllm_engine(server.url).connect(JOIN)


def test_nobody_there_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    engine = vllm_engine(url)
    with pytest.raises(EngineUnreachableError, match=url):
        engine.begin(1)
    assert engine.rows()[0].state == "unreachable"


def test_an_unknown_pause_mode_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="abort, wait, keep"):
        vllm_engine("host:1", pause_mode="freeze")


def test_discovery_reads_what_vllm_says():
    with running() as server:
        (info,) = tx.discover(server.url)
        assert vllm_engine(server.url).info() == info
    assert (info.kind, info.version, info.worker_type, info.model) == ("vllm", "0.32.0", "prefill", "/models/policy")
    assert (info.tp_size, info.pp_size, info.dp_size, info.world_size, info.num_gpus) == (2, 1, 3, 6, 6)
    assert info.weight_version == "7" and {"disk", "collective"} <= set(info.transports)
    assert "memory" not in info.transports


def test_discovery_keeps_the_order_and_asks_the_other_route():
    told = GOOD["GET /server_info"]
    with running() as first, running(get_server_info=GONE, get_get_server_info=told) as second:
        urls = [second.url, first.url]
        assert [info.url for info in tx.discover(*urls)] == urls
        assert second.routes()[:2] == ["GET /server_info", "GET /get_server_info"]


def test_one_error_names_the_answers_of_both_routes():
    with (
        running(get_server_info=(500, {"error": "broken"})) as server,
        pytest.raises(EngineRefusedError, match=r"(?s)/server_info answered 500: broken.*/get_server_info.*404"),
    ):
        tx.discover(server.url)


@pytest.mark.parametrize("told", [[], {"vllm_config": "text"}, {"something": 1}, "hello"])
def test_what_is_no_engine_is_refused(told):
    with (
        running(get_server_info=(200, told)) as server,
        pytest.raises(EngineRefusedError, match="describes no engine"),
    ):
        tx.discover(server.url)


def test_connect_makes_one_client_that_names_every_engine():
    with running() as first, running() as second:
        fleet = tx.connect(first.url, second.url, pause_mode="abort")
        assert [engine.url for engine in fleet.engines] == [first.url, second.url]
        assert fleet.world_size == 12
        fleet.connect(JOIN)
        offsets = [
            body["init_info"]["rank_offset"]
            for server in (first, second)
            for call, _, body in server.calls
            if call == "POST /init_weight_transfer_engine" and body["init_info"]["kind"] == "join"
        ]
        assert offsets == [1, 7]


def test_addresses_are_checked_before_anything_is_asked():
    with pytest.raises(ConfigError, match="given twice"):
        tx.discover("host:1", "http://host:1/")
    with pytest.raises(ConfigError, match="no address"):
        tx.connect()
