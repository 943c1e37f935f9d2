"""Servers that run nothing of ours: which follow and by what, and what they are sent after a failure."""

from contextlib import nullcontext

import pytest

import torchrl_ext as tx
from tests.rpc.servers import CONFIG, GOOD, Resting, failed, running
from tests.rpc.test_exchanges import GROUP, GROUPS, LOAD, NATIVE
from tests.rpc.test_sglang_client import DONE, GONE, NEW, STARTED_WITH, STOCK, refused
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rpc.makes.sglang import sglang_engine
from torchrl_ext.rpc.makes.vllm import vllm_engine


def native(engine, info):
    engine.connect(info)
    engine.prefetch(8)
    with engine.updating(8):
        engine.load(LOAD)


# SGLang

SOLE = {**STARTED_WITH, "dp_size": 1}
JOIN = {**NATIVE, **GROUPS["sglang"]}
ROUTES = ("init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed")
BARE = {
    **{**NEW, "GET /server_info": (200, SOLE)},
    "POST /weights_checker": STOCK,
    **{f"POST /{route}": DONE for route in ROUTES},
}
BROKEN = refused("Failed to update parameter online: it broke")


def sent(server, route):
    return [body for call, _, body in server.calls if call == f"POST /{route}"]


@pytest.mark.parametrize("checker", [STOCK, GONE])
def test_other_transports_are_refused_by_sglang_with_what_is_missing(checker):
    with running(NEW, post_weights_checker=checker) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)without our plugin.*'collective'.*sglang\.srt\.plugins"):
            sglang_engine(server.url).connect({"transport": "collective", "params": []})
        assert "POST /pause_generation" not in server.routes()


def test_a_stock_sglang_leaves_its_group_after_a_load_that_failed_and_ends_the_session_before_the_next():
    answers = [BROKEN, DONE]
    sessions = [DONE, refused("a weight-update session is already open"), DONE]
    with running(BARE, post_update_weights_from_distributed=answers, post_begin_weight_update=sessions) as server:
        engine = sglang_engine(server.url)
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
            native(sglang_engine(server.url), {**JOIN, **join})
        assert "POST /init_weights_update_group" not in server.routes()
        assert (tx.discover(server.url)[0].transports == ("disk",)) == bool(told)


def test_a_quantised_model_of_a_release_without_sessions_takes_no_broadcasts():
    answer = (200, {**SOLE, "quantization": "fp8"})
    with (
        running(BARE, get_server_info=answer) as server,  # it has no OPTIONS
        pytest.raises(EngineRefusedError, match=r"SGLang 0\.5\.21 or later"),
    ):
        native(sglang_engine(server.url), JOIN)


# vLLM

VJOIN = {**NATIVE, **GROUPS["vllm"]}
NCCL = {**CONFIG, "weight_transfer_config": {"backend": "nccl"}}
NONE = {**CONFIG, "weight_transfer_config": None}
MORE = ("collective_rpc", "update_weight_version", "shutdown_weight_transfer_engine", "init_weight_transfer_engine")


def bare_vllm(config=NCCL, **more):
    answers = {**Resting().answers, "GET /server_info": (200, {"vllm_config": config})}
    answers |= {f"POST /{route}": (200, {"message": "done"}) for route in MORE}
    return running(answers, **more)


def posts(server):
    return [(call.removeprefix("POST /"), body) for call, _, body in server.calls if call.startswith("POST")]


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
            vllm_engine(server.url).connect({"transport": "disk", "params": [], "rank_offset": 1})
        assert not posts(server)


def test_a_stock_vllm_without_a_unique_id_meets_at_the_store():
    with bare_vllm() as server:
        native(vllm_engine(server.url), {**VJOIN, "group": GROUP})
        (init,) = [body["init_info"] for route, body in posts(server) if route == "init_weight_transfer_engine"]
        assert {"rank_offset", "world_size", "packed", *GROUP} <= init.keys() and "nccl_unique_id_b64" not in init


def test_an_update_that_is_still_active_in_a_stock_vllm_is_ended_before_the_next():
    started = [failed("Weight update already active"), (200, {})]
    with bare_vllm(post_start_weight_update=started) as server:
        engine = vllm_engine(server.url)
        native(engine, VJOIN)
        assert [route for route, _ in posts(server)][3:7] == [
            "start_weight_update",
            "finish_weight_update",
            "start_weight_update",
            "update_weights",
        ]


def test_a_stock_vllm_is_cleared_again_after_a_load_that_failed():
    with bare_vllm(post_update_weights=[failed("it broke"), (200, {})]) as server:
        engine = vllm_engine(server.url)
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


@pytest.mark.parametrize(("status", "state"), [(404, "serving"), (500, "paused")])
def test_a_stock_vllm_of_a_release_without_labels_serves_what_it_loaded(status, state):
    with bare_vllm(NONE) as server:
        server.answers["POST /update_weight_version"] = (status, {"detail": "no"})
        engine = vllm_engine(server.url)
        engine.connect({"transport": "disk", "params": [], "rank_offset": 1})
        refused = nullcontext() if status == 404 else pytest.raises(EngineRefusedError, match="finish version 8")
        with refused, engine.updating(8):
            engine.load({"version": 8, "path": "/updates/8", "params": []})
        assert engine.rows()[0].state == state


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
            native(vllm_engine(server.url), join)
        assert "POST /pause" not in server.routes()
