"""The clients of vLLM and SGLang servers that run nothing of ours: bodies, order, and what is sent after a failure."""

import json
import re
from contextlib import nullcontext

import pytest

import torchrl_ext as tx
from tests.rpc.servers import CONFIG, GOOD, Resting, failed, running
from tests.rpc.test_sglang_client import DONE, GONE, NEW, OLD, STARTED_WITH, STOCK, refused, said, update
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rpc.engines.sglang import SGLangEngine
from torchrl_ext.rpc.engines.vllm import VLLMEngine

OURS = re.compile(r"torchrl_ext:|\"kind\":")  # what marks a message of ours
PARAMS = [["a", "bfloat16", [2, 3]], ["none", "float32", [0, 4]], ["b", "float32", [5]]]
LOAD = {"transport": "native", "version": 8, "params": PARAMS, "calls": [[0, 1], [1, 2], [2, 3]]}
GROUP = {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 3}


def native(engine, info, load=LOAD):
    engine.connect({**info, "rank_offset": 2})
    engine.prefetch(8)
    with engine.updating(8):
        engine.load(load)


# SGLang

SOLE = {**STARTED_WITH, "dp_size": 1}
JOIN = {
    "transport": "native",
    "make": "sglang",
    "group": {**GROUP, "group_name": "torchrl_ext", "backend": "gloo"},
    "bucket_bytes": 4096,
    "params": [],
}
ROUTES = ("init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed")
BARE = {
    **{**NEW, "GET /server_info": (200, SOLE)},
    "POST /weights_checker": STOCK,
    **{f"POST /{route}": DONE for route in ROUTES},
}
BROKEN = refused("Failed to update parameter online: it broke")


def sent(server, route):
    return [body for call, _, body in server.calls if call == f"POST /{route}"]


@pytest.mark.parametrize("generation", [NEW, OLD], ids=["new", "old"])
def test_full_files_go_through_sglangs_own_route(generation):
    with running(generation, post_weights_checker=STOCK) as server:
        engine = SGLangEngine(server.url)
        update(engine)
        assert said(server) == [
            {"kind": "inspect", **dict.fromkeys(("root", "clear", "dial", "token"))},
            "GET /server_info",
            "GET /ready",
            "POST /pause_generation",
            "POST /flush_cache",
            "POST /update_weights_from_disk",
            "POST /update_weight_version",
            "GET /model_info",
            "POST /continue_generation",
        ]
        (body,) = [body for call, _, body in server.calls if call == "POST /update_weights_from_disk"]
        assert body == {
            "model_path": "/updates/weight_v000008",
            "load_format": "auto",
            "weight_version": "8",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        assert not engine.verifies
        with pytest.raises(ConfigError, match="cannot prove"):
            engine.verify({"w": "00"})


@pytest.mark.parametrize("checker", [STOCK, GONE])
def test_other_transports_are_refused_by_sglang_with_what_is_missing(checker):
    with running(NEW, post_weights_checker=checker) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)without our plugin.*'collective'.*sglang\.srt\.plugins"):
            SGLangEngine(server.url).connect({"transport": "collective", "params": []})
        assert "POST /pause_generation" not in server.routes()


@pytest.mark.parametrize("end", [DONE, refused("no weight-update session is open")], ids=["open", "restarted"])
def test_a_session_that_a_failed_broadcast_left_open_is_ended_before_an_update_by_files(end):
    with running(BARE, post_update_weights_from_distributed=BROKEN, post_end_weight_update=end) as server:
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineRefusedError, match="it broke"):
            native(engine, JOIN)
        update(engine)
        update(engine)
        calls = said(server)
        assert calls.count("POST /end_weight_update") == 1
        assert calls.index("POST /end_weight_update") < calls.index("POST /update_weights_from_disk")
        assert engine.rows()[0].state == "serving"


def test_an_update_of_a_stock_sglang_is_one_call_for_each_broadcast_in_a_session():
    with running(BARE) as server:
        engine = SGLangEngine(server.url)
        native(engine, JOIN)
        engine.close()
        calls = [call for call in said(server)[1:] if not isinstance(call, dict)]
        assert calls == [
            "GET /server_info",
            "POST /destroy_weights_update_group",
            "POST /init_weights_update_group",
            "GET /ready",
            "POST /pause_generation",
            "POST /flush_cache",
            "POST /begin_weight_update",
            "POST /update_weights_from_distributed",
            "POST /update_weights_from_distributed",
            "POST /end_weight_update",
            "POST /update_weight_version",
            "GET /model_info",
            "POST /continue_generation",
            "POST /destroy_weights_update_group",
        ]
        assert sent(server, "init_weights_update_group") == [{**JOIN["group"], "rank_offset": 2}]
        how = {"group_name": "torchrl_ext", "load_format": "flattened_bucket", "flush_cache": False}
        how |= {"abort_all_requests": False}
        assert sent(server, "update_weights_from_distributed") == [
            {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], **how},
            {"names": ["b"], "dtypes": ["float32"], "shapes": [[5]], **how},
        ]
        assert [bool(OURS.search(json.dumps(body))) for call, _, body in server.calls].count(True) == 1  # to discover
        (row,) = engine.rows()
        assert (row.state, row.version, row.proof, engine.verifies) == ("serving", 8, "sent", False)


def test_a_stock_sglang_leaves_its_group_after_a_load_that_failed_and_ends_the_session_before_the_next():
    answers = [BROKEN, DONE]
    sessions = [DONE, refused("a weight-update session is already open"), DONE]
    with running(BARE, post_update_weights_from_distributed=answers, post_begin_weight_update=sessions) as server:
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineRefusedError, match=r"it broke.*is paused.*part of an update"):
            native(engine, JOIN)
        assert server.routes()[-2:] == ["POST /update_weights_from_distributed", "POST /destroy_weights_update_group"]
        native(engine, {**JOIN, "group": {**JOIN["group"], "group_name": "torchrl_ext-1"}})
        names = [body["group_name"] for body in sent(server, "destroy_weights_update_group")]
        assert names == ["torchrl_ext", "torchrl_ext", "torchrl_ext-1"]
        routes = [call.split("/")[1] for call in server.routes() if call.endswith("weight_update")]
        assert [route.split("_")[0] for route in routes] == ["begin", "begin", "end", "begin", "end"]


@pytest.mark.parametrize(
    ("told", "join", "words"),
    [
        ({"pp_size": 2}, {}, "pp 2 x dp 1"),
        ({"dp_size": 2}, {}, "pp 1 x dp 2"),
        ({"weight_cache_mode": "cpu"}, {}, "keeps copies of its weights"),
        ({}, {"make": "vllm"}, "speaks to 'vllm'"),
    ],
)
def test_a_stock_sglang_that_could_not_take_broadcasts_is_refused_before_it_waits_for_any(told, join, words):
    with running(BARE, get_server_info=(200, {**SOLE, **told})) as server:
        with pytest.raises(EngineRefusedError, match=words):
            native(SGLangEngine(server.url), {**JOIN, **join})
        assert "POST /init_weights_update_group" not in server.routes()
        assert (tx.discover(server.url)[0].transports == ("disk",)) == bool(told)


def test_a_quantised_model_of_a_release_without_sessions_takes_no_broadcasts():
    answer = (200, {**SOLE, "quantization": "fp8"})
    with (
        running(BARE, get_server_info=answer) as server,  # it has no OPTIONS
        pytest.raises(EngineRefusedError, match=r"SGLang 0\.5\.21 or later"),
    ):
        native(SGLangEngine(server.url), JOIN)


# vLLM

ID = "QUJD"
VJOIN = {**JOIN, "make": "vllm", "group": {**GROUP, "nccl_unique_id_b64": ID}}
NCCL = {**CONFIG, "weight_transfer_config": {"backend": "nccl"}}
NONE = {**CONFIG, "weight_transfer_config": None}
MORE = ("collective_rpc", "update_weight_version", "shutdown_weight_transfer_engine", "init_weight_transfer_engine")


def bare_vllm(config=NCCL, **more):
    answers = {**Resting().answers, "GET /server_info": (200, {"vllm_config": config})}
    answers |= {f"POST /{route}": (200, {"message": "done"}) for route in MORE}
    return running(answers, **more)


def posts(server):
    return [(call.removeprefix("POST /"), body) for call, _, body in server.calls if call.startswith("POST")]


INIT = {
    "init_info": {
        "rank_offset": 2,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 4096,
        "packed_num_buffers": 2,
        "nccl_unique_id_b64": ID,
    }
}


@pytest.mark.parametrize(
    ("config", "transports"),
    [
        (NCCL, ("disk", "native")),
        (NONE, ("disk",)),
        ({**NONE, "weight_transfer_config": {"backend": "ipc"}}, ("disk",)),
        ({**NCCL, "load_config": {"load_format": "dummy"}}, ()),
        ({**NCCL, "load_config": {"load_format": "ipc_cache"}}, ()),
        ({**CONFIG, "load_config": {"load_format": "ipc_cache"}}, ()),
    ],
)
def test_discovery_says_how_a_stock_vllm_follows(config, transports):
    with bare_vllm(config) as server:
        (info,) = tx.discover(server.url)
        assert (info.transports, info.stock) == (transports, bool(transports))
    with running(GOOD) as server:
        assert not tx.discover(server.url)[0].stock


@pytest.mark.parametrize("config", [CONFIG, NCCL, NONE], ids=["our backend", "nccl", "no backend"])
def test_a_vllm_that_maps_the_weights_of_a_daemon_is_refused_before_anything_reaches_it(config):
    with bare_vllm({**config, "load_config": {"load_format": "ipc_cache"}}) as server:
        with pytest.raises(ConfigError, match=r"maps weights that a daemon owns.*--load-format"):
            VLLMEngine(server.url).connect({"transport": "disk", "params": [], "rank_offset": 1})
        assert not posts(server)


def test_an_update_of_a_stock_vllm_clears_what_an_earlier_one_left_and_labels_what_it_sent():
    with bare_vllm() as server:
        engine = VLLMEngine(server.url)
        native(engine, VJOIN)
        with engine.updating(9):
            engine.load({**LOAD, "version": 9})
        engine.close()
        update_info = [
            {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]},
            {"names": ["b"], "dtype_names": ["float32"], "shapes": [[5]]},
        ]
        loads = [("update_weights", {"update_info": info}) for info in update_info]
        assert posts(server) == [
            ("shutdown_weight_transfer_engine", None),
            ("init_weight_transfer_engine", INIT),
            ("pause", None),
            ("start_weight_update", {}),
            ("finish_weight_update", None),
            ("start_weight_update", {}),
            *loads,
            ("finish_weight_update", {"weight_version": "8"}),
            ("reset_prefix_cache", None),
            ("resume", None),
            ("pause", None),
            ("start_weight_update", {}),
            *loads,
            ("finish_weight_update", {"weight_version": "9"}),
            ("reset_prefix_cache", None),
            ("resume", None),
            ("shutdown_weight_transfer_engine", None),
        ]
        assert not OURS.search(json.dumps(server.calls))
        assert not engine.verifies
        with pytest.raises(ConfigError, match="cannot prove"):
            engine.verify({"w": "00"})


def test_a_stock_vllm_without_a_unique_id_meets_at_the_store():
    with bare_vllm() as server:
        native(VLLMEngine(server.url), {**VJOIN, "group": GROUP})
        (init,) = [body["init_info"] for route, body in posts(server) if route == "init_weight_transfer_engine"]
        expected = {name: value for name, value in INIT["init_info"].items() if "nccl" not in name}
        assert init == {**expected, "master_address": "10.0.0.1", "master_port": 29500}


def test_an_update_that_is_still_active_in_a_stock_vllm_is_ended_before_the_next():
    started = [failed("Weight update already active"), (200, {})]
    with bare_vllm(post_start_weight_update=started) as server:
        engine = VLLMEngine(server.url)
        native(engine, VJOIN)
        assert [route for route, _ in posts(server)][3:7] == [
            "start_weight_update",
            "finish_weight_update",
            "start_weight_update",
            "update_weights",
        ]


def test_a_stock_vllm_is_cleared_again_after_a_load_that_failed():
    with bare_vllm(post_update_weights=[failed("it broke"), (200, {})]) as server:
        engine = VLLMEngine(server.url)
        with pytest.raises(EngineRefusedError, match=r"it broke.*is paused.*part of an update"):
            native(engine, VJOIN)
        tried = len(server.calls)
        native(engine, VJOIN)
        again = [call.removeprefix("POST /") for call, _, _ in server.calls[tried:] if "weight" in call]
        assert again[:5] == [
            "shutdown_weight_transfer_engine",
            "shutdown_weight_transfer_engine",
            "init_weight_transfer_engine",
            "start_weight_update",
            "finish_weight_update",
        ]


@pytest.mark.parametrize("config", [NCCL, NONE])
def test_a_stock_vllm_reloads_files_by_its_own_method(config):
    with bare_vllm(config) as server:
        engine = VLLMEngine(server.url)
        engine.connect({"transport": "disk", "params": [], "rank_offset": 1})
        for version in (8, 9):
            with engine.updating(version):
                engine.load({"version": version, "path": f"/updates/{version}", "params": []})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": "/updates/8"}}
        again = {"method": "reload_weights", "kwargs": {"weights_path": "/updates/9"}}
        found = [(route, body) for route, body in posts(server) if "w" in route]
        assert found == [
            ("update_weight_version", {"new_version": "8"}),
            ("update_weight_version", {"new_version": "9"}),
        ]
        rpcs = [body for route, body in posts(server) if route == "collective_rpc"]
        assert rpcs == [reload, reload, again]  # twice where an earlier trainer may have failed half-way


@pytest.mark.parametrize(("status", "state"), [(404, "serving"), (500, "paused")])
def test_a_stock_vllm_of_a_release_without_labels_serves_what_it_loaded(status, state):
    with bare_vllm(NONE) as server:
        server.answers["POST /update_weight_version"] = (status, {"detail": "no"})
        engine = VLLMEngine(server.url)
        engine.connect({"transport": "disk", "params": [], "rank_offset": 1})
        refused = nullcontext() if status == 404 else pytest.raises(EngineRefusedError, match="finish version 8")
        with refused, engine.updating(8):
            engine.load({"version": 8, "path": "/updates/8", "params": []})
        assert engine.rows()[0].state == state


@pytest.mark.parametrize("joined", [False, True], ids=["before a connect", "after one"])
@pytest.mark.parametrize("stranger", [False, True])
def test_weights_that_a_stock_vllm_dropped_are_served_by_nobody_after_a_connect_that_failed(joined, stranger):
    disk = {"transport": "disk", "params": [], "rank_offset": 1}
    with bare_vllm(NONE) as server:
        engine = VLLMEngine(server.url)
        if joined:
            engine.connect(disk)
        (VLLMEngine(server.url) if stranger else engine).sleep(2)
        with pytest.raises(EngineRefusedError, match="backend None"):
            engine.connect({**VJOIN, "rank_offset": 1})
        with pytest.raises(EngineRefusedError, match="holds no weights"):
            engine.wake_up()
        engine.wake_up(["weights"])
        with pytest.raises(EngineRefusedError, match="holds no weights"):
            engine.wake_up(["kv_cache"])
        assert "POST /resume" not in server.routes()
        engine.connect(disk)
        with engine.updating(8):
            engine.load({"version": 8, "path": "/updates/8", "params": []})
        engine.wake_up()
        assert engine.rows()[0].state == "serving" and not engine.sleep_state().paused


@pytest.mark.parametrize(
    ("config", "join", "words"),
    [
        (NONE, VJOIN, "backend None"),
        (NCCL, JOIN, "speaks to 'sglang'"),
        (NONE, {**VJOIN, "transport": "collective"}, "cannot follow by 'collective'"),
    ],
)
def test_a_stock_vllm_that_cannot_follow_is_refused_with_the_exact_flags(config, join, words):
    with bare_vllm(config) as server:
        with pytest.raises(EngineRefusedError, match=rf"""(?s){words}.*--weight-transfer-config '\{{"backend"""):
            native(VLLMEngine(server.url), join)
        assert "POST /pause" not in server.routes()
