"""The vLLM client and discovery over real sockets; what the real server does is in tests/engine."""

import socket
import threading

import pytest

import torchrl_ext as tx
from tests.rpc.servers import CONFIG, GOOD, Resting, bare, failed, running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.routes import ANSWERS, OPEN_UPDATE, escaped
from torchrl_ext.rpc.engines.vllm import VLLMEngine
from torchrl_ext.rpc.fleet import Fleet

WORKING = failed(f'EngineError: {ANSWERS}{{"working": true}}.')
JOIN = {"transport": "disk", "params": []}
GONE = (404, {"detail": "Not Found"})


def test_an_update_calls_the_routes_in_the_order_of_the_protocol():
    with running(Resting().answers) as server:
        engine = VLLMEngine(server.url, pause_mode="wait")
        engine.connect({**JOIN, "rank_offset": 3})
        engine.prefetch(8)
        with engine.updating(8):
            engine.load({"version": 8, "params": []})
            engine.verify({"w": "00"})
        assert [
            (call, query, body if "info" not in str(body) else bare(next(iter(body.values()))))
            for call, query, body in server.calls
        ] == [
            ("GET /server_info", {"config_format": "json"}, None),
            ("POST /init_weight_transfer_engine", {}, {"kind": "join", "rank_offset": 3, "transport": "disk"}),
            ("POST /init_weight_transfer_engine", {}, {"kind": "poll", "pull": False}),
            ("GET /is_sleeping", {}, None),
            (
                "POST /init_weight_transfer_engine",
                {},
                {"kind": "prefetch", "version": 8, "part": None, "files": None, "label": None},
            ),
            ("POST /init_weight_transfer_engine", {}, {"kind": "poll", "pull": False}),
            ("GET /is_sleeping", {}, None),
            ("POST /pause", {"mode": "wait", "clear_cache": "false"}, None),
            ("POST /start_weight_update", {}, None),
            ("POST /update_weights", {}, {"kind": "load", "version": 8, "handoff": {"params": []}}),
            ("POST /update_weights", {}, {"kind": "verify", "digests": {"w": "00"}}),
            ("POST /update_weights", {}, {"kind": "seal"}),
            ("POST /finish_weight_update", {}, {"weight_version": "8"}),
            ("POST /reset_prefix_cache", {"reset_running_requests": "true", "reset_external": "true"}, None),
            ("POST /resume", {}, None),
        ]
        (row,) = engine.rows()
        assert (row.state, row.version, row.error) == ("serving", 8, None) and row.pause_s > 0


def test_a_part_of_a_version_is_resumed_only_where_the_workers_say_that_somebody_sent_the_rest():
    with running(Resting().answers, post_update_weights=failed("the digest of layer 7 differs")) as server:
        engine = VLLMEngine(server.url)
        engine.connect(JOIN)
        engine.begin(8)
        with pytest.raises(EngineRefusedError, match="layer 7"):
            engine.load({"version": 8, "params": []})
        with pytest.raises(EngineRefusedError, match="a part of a version"):
            engine.resume()
        assert engine.rows()[0].state == "paused" and "POST /resume" not in server.routes()
        server.answers["POST /init_weight_transfer_engine"] = failed(f'EngineError: {ANSWERS}{{"whole": true}}.')
        engine.resume()
        assert engine.rows()[0].state == "serving"


def test_a_release_without_labels_follows_and_its_label_is_not_known():
    with running(Resting().answers, get_weight_info=GONE) as server:
        (found,) = tx.discover(server.url)
        engine = VLLMEngine(server.url)
        assert found.weight_version == engine.info().weight_version == ""
        engine.connect(JOIN)
        with engine.updating(8):
            engine.load({"version": 8, "params": []})
        (row,) = engine.rows()
        assert (row.state, row.version, row.error) == ("serving", 8, None)


def test_a_label_that_a_server_refuses_to_say_is_an_error_and_not_an_unknown_one():
    answer = (500, {"detail": "boom"})
    with running(get_weight_info=answer) as server, pytest.raises(EngineRefusedError, match="boom"):
        VLLMEngine(server.url).info()


@pytest.mark.parametrize(
    ("route", "holding"),
    [
        ("update_weights", "part of an update"),
        ("finish_weight_update", "part of an update"),
        ("reset_prefix_cache", "version 8, whole"),
        ("resume", "version 8, whole"),
    ],
)
def test_a_failure_after_the_pause_leaves_the_engine_paused_and_says_what_it_holds(route, holding):
    with running(**{f"post_{route}": failed("the worker's reason")}) as server:
        engine = VLLMEngine(server.url)
        words = f"(?s)the worker's reason.*is paused.*{holding}"
        with pytest.raises(EngineRefusedError, match=words) as error, engine.updating(8):
            engine.load({"version": 8})
        assert "stack trace" not in str(error.value) and server.url in str(error.value)
        (row,) = engine.rows()
        assert row.state == "paused" and "the worker's reason" in row.error
        if route != "resume":
            assert "POST /resume" not in server.routes()


@pytest.mark.parametrize("paused", [False, True])
def test_workers_that_do_not_start_leave_the_engine_as_it_was_before_the_pause(paused):
    resting = Resting()
    resting.pause(paused)
    with running(resting.answers, post_start_weight_update=failed("the worker's reason")) as server:
        engine = VLLMEngine(server.url)
        words = "is paused" if paused else f"nothing was changed, and it serves again: {server.url} says so"
        with pytest.raises(EngineRefusedError, match=f"(?s)the worker's reason.*{words}"):
            engine.begin(8)
        (row,) = engine.rows()
        assert resting.paused == paused and row.state == ("paused" if paused else "serving")
        assert "the worker's reason" in row.error
        assert "POST /finish_weight_update" in server.routes()  # some workers may have started


def test_an_engine_that_says_that_it_is_still_paused_is_not_said_to_serve():
    resting = Resting()
    stuck = {"post_start_weight_update": failed("no"), "post_resume": (200, {"status": "resumed"})}
    with running(resting.answers, **stuck) as server:
        engine = VLLMEngine(server.url)
        with pytest.raises(EngineRefusedError, match="was told to resume, and says that it is paused"):
            engine.begin(8)
        assert engine.rows()[0].state == "paused"
        with pytest.raises(EngineRefusedError, match="says that it is paused"):
            engine.resume()
        assert engine.rows()[0].state == "paused"


def test_a_pause_that_comes_too_late_is_taken_back_and_the_row_says_what_the_engine_says():
    resting, gone = Resting(), threading.Event()

    def late(_):
        resting.pause(True)
        gone.wait(20)
        return 200, {}

    with running(resting.answers, post_pause=late) as server:
        engine = VLLMEngine(server.url, timeout_s=10.0, load_timeout_s=0.3)
        for call in (engine.pause, lambda: engine.begin(8)):
            with pytest.raises(DeadlineError, match=r"0\.\d+ s.*did not pause.*serves again"):
                call()
            assert not resting.paused and engine.rows()[0].state == "serving"
        server.answers["POST /resume"] = (500, {"error": "it cannot"})
        with pytest.raises(DeadlineError, match=r"not known whether .* serves again"):
            engine.pause()
        assert engine.rows()[0].state == "paused"
        gone.set()


@pytest.mark.parametrize("served", [True, False])
def test_a_fleet_pauses_as_a_whole_or_not_at_all_and_says_who_serves(served):
    one, other = Resting(), Resting()
    one.pause(not served)
    with running(one.answers) as first, running(other.answers, post_pause=failed("it cannot")) as second:
        fleet = Fleet([VLLMEngine(first.url), VLLMEngine(second.url)])
        with pytest.raises(EngineError, match=r"it cannot.*; 1 of 2 engines did not pause") as caught:
            fleet.pause()
        assert one.paused != served and not other.paused
        rows = caught.value.rows
        assert [row.engine for row in rows] == [first.url, second.url]
        assert [row.state for row in rows] == ["serving" if served else "paused", "serving"]
        assert rows[0].error is None and "it cannot" in rows[1].error
        fleet.close()


def test_caches_that_cannot_be_dropped_keep_the_engine_paused():
    with running(post_reset_prefix_cache=(200, {"success": False})) as server:
        engine = VLLMEngine(server.url, timeout_s=0.5)
        with pytest.raises(EngineRefusedError, match="could not drop"), engine.updating(8):
            pass
        assert engine.rows()[0].state == "paused" and "POST /resume" not in server.routes()


def test_keys_that_are_copied_away_are_dropped_when_the_copies_are_made():
    answers = [(200, {"success": False}), (200, {"success": False}), (200, {"success": True})]
    with running(post_reset_prefix_cache=answers) as server:
        with VLLMEngine(server.url).updating(8):
            pass
        assert server.routes()[-4:] == ["POST /reset_prefix_cache"] * 3 + ["POST /resume"]


@pytest.mark.parametrize("seeing", [None, {"mm_processor_cache_gb": 4}])
def test_embeddings_of_images_are_dropped_where_the_model_takes_images(seeing):
    config = {**CONFIG, "model_config": {**CONFIG["model_config"], "multimodal_config": seeing}}
    told = (200, {"vllm_config": config})
    with running(get_server_info=told, post_reset_encoder_cache=(200, {})) as server:
        engine = VLLMEngine(server.url)
        engine.connect(JOIN)
        with engine.updating(8):
            pass
        assert ("POST /reset_encoder_cache" in server.routes()) == bool(seeing)
        assert server.routes()[-1] == "POST /resume"


ALONE = {name: value for name, value in CONFIG.items() if name != "kv_transfer_config"}
CONNECTED = {**CONFIG, "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}


def test_caches_that_are_to_be_kept_are_not_dropped():
    seeing = {**ALONE, "model_config": {**CONFIG["model_config"], "multimodal_config": {"mm_processor_cache_gb": 4}}}
    with running(get_server_info=(200, {"vllm_config": seeing})) as server:
        engine = VLLMEngine(server.url, keep_cache=True)
        engine.connect(JOIN)
        with engine.updating(8):
            pass
        assert not [call for call in server.routes() if "reset" in call]
        assert ("POST /pause", {"mode": "keep", "clear_cache": "false"}, None) in server.calls
        assert ("POST /finish_weight_update", {}, {"weight_version": "8"}) in server.calls
        assert server.routes()[-1] == "POST /resume"


def test_a_fleet_hands_the_wish_to_keep_caches_to_engines_of_each_kind():
    with running(get_server_info=(200, {"vllm_config": ALONE})) as server:
        (engine,) = tx.connect(server.url, keep_cache=True).engines
        with engine.updating(8):
            pass
        assert not [call for call in server.routes() if "reset" in call]


def test_a_server_that_hands_its_keys_on_must_not_keep_them():
    with running(get_server_info=(200, {"vllm_config": CONNECTED})) as server:
        with pytest.raises(ConfigError, match=r"KV connector LMCacheConnectorV1.*old weights"):
            VLLMEngine(server.url, keep_cache=True).connect(JOIN)
        assert server.routes() == ["GET /server_info"]
        VLLMEngine(server.url).connect(JOIN)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_cache_is_kept_with_the_requests_that_are_frozen_alone(mode):
    with pytest.raises(ConfigError, match=f"keep_cache means nothing with pause mode '{mode}'"):
        VLLMEngine("host:1", pause_mode=mode, keep_cache=True)


def test_an_abandoned_update_is_ended_before_joining():
    refusals = [failed(f"worker 0, 1: EngineError: {OPEN_UPDATE}."), (200, {})]
    with running(post_init_weight_transfer_engine=refusals) as server:
        VLLMEngine(server.url).connect(JOIN)
        assert server.routes() == [
            "GET /server_info",
            "POST /init_weight_transfer_engine",
            "POST /finish_weight_update",
            "POST /init_weight_transfer_engine",
            "POST /init_weight_transfer_engine",
        ]


def test_a_prefetch_is_asked_for_until_it_is_over():
    answers = [(200, {}), WORKING, WORKING, (200, {})]
    with running(post_init_weight_transfer_engine=answers) as server:
        VLLMEngine(server.url).prefetch(3)
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
        VLLMEngine(server.url, load_timeout_s=2.0).prefetch(3)


def test_a_path_in_the_words_of_a_worker_is_whole():
    words = escaped("StoreError: /root/a/weight_v000031 is not there")
    told = "^StoreError: /root/a/weight_v000031 is not there"
    answers = {"POST /init_weight_transfer_engine": failed(words)}
    with running({**Resting().answers, **answers}) as server, pytest.raises(EngineRefusedError, match=told):
        VLLMEngine(server.url).connect(JOIN)


def test_a_server_without_dev_routes_gets_the_hint():
    with running(get_server_info=GONE, post_pause=GONE) as server:
        for call in (VLLMEngine(server.url).info, lambda: VLLMEngine(server.url).begin(1)):
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
        VLLMEngine(server.url).connect(JOIN)


def test_nobody_there_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    engine = VLLMEngine(url)
    with pytest.raises(EngineUnreachableError, match=url):
        engine.begin(1)
    assert engine.rows()[0].state == "unreachable"


def test_a_silent_engine_reaches_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = VLLMEngine(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3, load_timeout_s=0.3)
        with pytest.raises(DeadlineError, match=r"0\.\d+ s.*did not pause"):
            engine.begin(1)


def test_an_unknown_pause_mode_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="abort, wait, keep"):
        VLLMEngine("host:1", pause_mode="freeze")


def test_discovery_reads_what_vllm_says():
    with running() as server:
        (info,) = tx.discover(server.url)
        assert VLLMEngine(server.url).info() == info
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


def test_engines_that_decode_serve_again_after_those_that_prefill():
    """Else they could take keys and values of the old weights from them."""

    def described(role):
        return {"get_server_info": (200, {"vllm_config": CONFIG | {"kv_transfer_config": {"kv_role": role}}})}

    with running(**described("kv_consumer")) as decode, running(**described("kv_producer")) as prefill:
        order = []

        class Noting(VLLMEngine):
            def commit(self, version):
                if self.url == prefill.url:
                    threading.Event().wait(0.2)  # the other one has every chance to be first
                super().commit(version)
                order.append(self.url)

        fleet = Fleet([Noting(decode.url), Noting(prefill.url)])
        fleet.connect(JOIN)
        with fleet.updating(8):
            fleet.load({"version": 8, "params": []})
        assert order == [prefill.url, decode.url]
        assert [row.version for row in fleet.rows()] == [8, 8]
