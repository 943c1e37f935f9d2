"""The SGLang client over real sockets, against both generations of its routes; the real server is in tests/engine."""

import json

import pytest

import torchrl_ext as tx
from tests.rpc.servers import bare, running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.routes import CHANNEL
from torchrl_ext.rpc.engines.sglang import SGLangEngine

JOIN = {"transport": "disk", "params": []}
GONE = (404, {"detail": "Not Found"})
DONE = (200, {"success": True, "message": "Success"})
STARTED_WITH = {
    "model_path": "/models/start",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 3,
    "disaggregation_mode": "null",
    "version": "0.5.23",
}
SERVES = {"model_path": "/models/now", "weight_version": "8", "load_format": "auto"}


def plugin(**more):
    """What the plugin answers, whatever is asked."""
    told = {
        "torchrl_ext": "0",
        "host": "here",
        "workers": 2,
        "transports": ["collective", "delta", "disk"],
        "working": False,
        "flushed": True,
        "paused": False,
        **more,
    }
    return 200, {"success": True, "message": json.dumps(told)}


def refused(words):
    return 400, {"success": False, "message": words}


NEW = {  # 0.5.21 and later
    "GET /server_info": (200, STARTED_WITH),
    "GET /model_info": (200, SERVES),
    "GET /v1/loads": (200, {"loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1}]}),
    "POST /weights_checker": plugin(),
    "POST /flush_cache": (200, "Cache flushed."),
    **{
        f"POST /{route}": DONE
        for route in (
            "begin_weight_update",
            "end_weight_update",
            "pause_generation",
            "continue_generation",
            "update_weight_version",
            "update_weights_from_disk",
        )
    },
}
OLD = {
    **{call: answer for call, answer in NEW.items() if "weight_update" not in call and "v1/loads" not in call},
    "GET /get_load": (200, [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 9}]),
}
STOCK = refused("Unsupported action='torchrl_ext:{\"hello\": true}'")


def update(engine, version=8):
    engine.connect(JOIN)
    engine.prefetch(version)
    with engine.updating(version):
        engine.load({"version": version, "path": "/updates/weight_v000008", "params": []})


def said(server):
    """Calls in order; for ours what they say."""
    found = []
    for call, _, body in server.calls:
        action = str((body or {}).get("action", ""))
        found.append(bare(json.loads(action.removeprefix(CHANNEL))) if action.startswith(CHANNEL) else call)
    return found


def test_an_update_pauses_flushes_transfers_and_resumes():
    with running(NEW) as server:
        engine = SGLangEngine(server.url)
        update(engine)
        engine.verify({"w": "00"})
        assert said(server) == [
            {"kind": "inspect", **dict.fromkeys(("root", "clear", "dial", "token"))},
            "GET /server_info",
            {"kind": "join", "transport": "disk"},
            {"kind": "poll", "pull": False},
            {"kind": "state"},
            "GET /ready",
            {"kind": "prefetch", "version": 8, "part": None, "files": None, "label": None},
            {"kind": "poll", "pull": False},
            {"kind": "state"},
            "GET /ready",
            "POST /pause_generation",
            {"kind": "flush"},
            "POST /begin_weight_update",
            {"kind": "start", "bracketed": True},
            {"kind": "load", "version": 8, "handoff": {"path": "/updates/weight_v000008", "params": []}},
            {"kind": "finish", "version": 8},
            "POST /end_weight_update",
            "POST /update_weight_version",
            "GET /model_info",
            "POST /continue_generation",
            {"kind": "verify", "digests": {"w": "00"}},
        ]
        bodies = {call: body for call, _, body in server.calls}
        assert bodies["POST /pause_generation"] == {"mode": "retract"}
        assert bodies["POST /update_weight_version"] == {"new_version": "8", "abort_all_requests": False}
        assert bodies["POST /continue_generation"] == {}  # a missing body is a 400
        (row,) = engine.rows()
        assert (row.kind, row.state, row.version, row.error) == ("sglang", "serving", 8, None) and row.pause_s > 0


CLEAR = "POST /hicache/storage-backend/clear"
OLDER_CLEAR = "POST /clear_hicache_storage_backend"


@pytest.mark.parametrize("setting", [{"hicache_storage_backend": "file"}, {"enable_lmcache": True}])
@pytest.mark.parametrize("route", [CLEAR, OLDER_CLEAR])
def test_a_store_of_keys_is_cleared_after_the_flush(setting, route):
    told = (200, {**STARTED_WITH, **setting})
    with running({**NEW, "GET /server_info": told, route: (200, "cleared")}) as server:
        update(SGLangEngine(server.url))
        calls = said(server)
        assert calls.index({"kind": "flush"}) < calls.index(route) < calls.index("POST /begin_weight_update")


def test_a_store_of_keys_that_cannot_be_cleared_keeps_the_update_away():
    told = (200, {**STARTED_WITH, "hicache_storage_backend": "file"})
    with running({**NEW, "GET /server_info": told, CLEAR: (400, "busy")}) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)could not clear the store.*busy.*serves again"):
            update(SGLangEngine(server.url))
        assert said(server)[-3:] == ["POST /continue_generation", {"kind": "state"}, "GET /ready"]


def test_earlier_releases_have_no_session_around_an_update():
    with running(OLD) as server:
        update(SGLangEngine(server.url, pause_mode="abort"))
        assert {"kind": "start", "bracketed": False} in said(server)
        assert "POST /end_weight_update" not in said(server)
        assert {"mode": "abort"} in [body for _, _, body in server.calls]


def test_replicas_take_no_part_in_a_group():
    with running(NEW) as server, pytest.raises(EngineRefusedError, match=r"3 data-parallel replicas.*--dp-size 1"):
        SGLangEngine(server.url).connect({"transport": "collective", "params": []})


def test_a_session_that_a_trainer_left_open_is_closed_first():
    answers = [refused("a weight-update session is already open; call end_weight_update() first"), DONE]
    with running(NEW, post_begin_weight_update=answers) as server:
        update(SGLangEngine(server.url))
        routes = [call for call in server.routes() if call.endswith("weight_update")]
        assert [route.split("/")[1].split("_")[0] for route in routes] == ["begin", "end", "begin", "end"]


def test_a_cache_in_use_is_asked_for_again_until_it_is_free():
    answers = [(400, "Flush cache failed."), (400, "Flush cache failed."), (200, "Cache flushed.")]
    with running(NEW, post_weights_checker=STOCK, post_flush_cache=answers) as server:
        update(SGLangEngine(server.url))
        assert server.routes().count("POST /flush_cache") == 3


@pytest.mark.parametrize("generation", [NEW, OLD], ids=["new", "old"])
def test_a_cache_that_is_never_free_reaches_the_deadline_and_the_server_serves_again(generation):
    with running(generation, post_weights_checker=plugin(flushed=False)) as server:
        engine = SGLangEngine(server.url, flush_timeout_s=0.2)
        with pytest.raises(DeadlineError, match=r"(?s)within 0\.2 s \(2 running, 1 waiting\).*serves again"):
            update(engine)
        assert said(server)[-3:] == ["POST /continue_generation", {"kind": "state"}, "GET /ready"]
        assert {"kind": "finish", "version": 8} not in said(server) and engine.rows()[0].state == "serving"


def test_requests_that_are_paused_in_place_are_not_waited_for():
    with running(NEW, post_weights_checker=plugin(flushed=False)) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)paused in place.*2 running.*keep_cache=True"):
            update(SGLangEngine(server.url, pause_mode="in_place"))
        assert said(server).count({"kind": "flush"}) == 1


@pytest.mark.parametrize("setting", [{}, {"pause_mode": "keep"}, {"pause_mode": "in_place"}])
def test_a_cache_that_is_to_be_kept_is_frozen_in_place_and_never_flushed(setting):
    with running(NEW) as server:
        engine = SGLangEngine(server.url, keep_cache=True, **setting)
        update(engine)
        bodies = {call: body for call, _, body in server.calls}
        assert bodies["POST /pause_generation"] == {"mode": "in_place"}
        assert bodies["POST /update_weight_version"]["new_version"] == "8"
        assert server.routes()[-1] == "POST /continue_generation" and {"kind": "flush"} not in said(server)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("setting", "mode"), [({}, "abort"), ({"pause_mode": "in_place"}, "in_place")])
def test_requests_between_two_pools_end_since_they_would_keep_the_cache(role, setting, mode):
    told = (200, {**STARTED_WITH, "disaggregation_mode": role})
    with running({**NEW, "GET /server_info": told}) as server:
        update(SGLangEngine(server.url, **setting))
        assert [body for call, _, body in server.calls if call == "POST /pause_generation"] == [{"mode": mode}]


def test_a_server_that_puts_its_keys_into_a_store_must_not_keep_them():
    told = (200, {**STARTED_WITH, "hicache_storage_backend": "file"})
    with running({**NEW, "GET /server_info": told}) as server:
        with pytest.raises(ConfigError, match=r"in a store.*old weights"):
            update(SGLangEngine(server.url, keep_cache=True))
        assert not [call for call in server.routes() if "pause" in call]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_cache_that_sleeps_is_dropped_whether_it_is_to_be_kept_or_not(keep_cache):
    answers = [plugin(), plugin(flushed=False), plugin(flushed=False), plugin(flushed=True)]
    with running(NEW, post_weights_checker=answers, post_release_memory_occupation=DONE) as server:
        SGLangEngine(server.url, pause_mode="in_place", keep_cache=keep_cache).sleep(tags=["kv_cache"])
        modes = [body["mode"] for call, _, body in server.calls if call == "POST /pause_generation"]
        assert modes == ["in_place", "retract"]
        assert server.routes()[-1] == "POST /release_memory_occupation"


@pytest.mark.parametrize(
    ("route", "holding"),
    [
        ("begin_weight_update", "untouched"),
        ("end_weight_update", "part of an update"),
        ("update_weight_version", "version 8, whole"),
        ("continue_generation", "version 8, whole"),
    ],
)
def test_a_failure_after_the_pause_leaves_the_engine_paused_and_says_what_it_holds(route, holding):
    with running(NEW, **{f"post_{route}": refused("its reason")}) as server:
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineRefusedError, match=f"(?s)its reason.*is paused.*{holding}"):
            update(engine)
        (row,) = engine.rows()
        assert row.state == "paused" and "its reason" in row.error
        assert "POST /continue_generation" not in server.routes() or route == "continue_generation"


def test_a_label_that_did_not_take_keeps_the_engine_paused():
    with running(NEW, get_model_info=(200, SERVES | {"weight_version": "7"})) as server:
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineRefusedError, match=r"calls its weights '7'.*Expected: '8'"):
            update(engine)
        assert engine.rows()[0].state == "paused"


def test_a_step_that_goes_on_is_asked_after_until_its_deadline():
    answers = [plugin(), plugin(), plugin(working=True), plugin(working=True), plugin()]
    with running(NEW, post_weights_checker=answers) as server:
        SGLangEngine(server.url).connect(JOIN)
        assert said(server).count({"kind": "poll", "pull": False}) == 3
    with (
        running(NEW, post_weights_checker=plugin(working=True)) as server,
        pytest.raises(DeadlineError, match=r"did not .* within 2 s"),
    ):
        SGLangEngine(server.url, load_timeout_s=2.0).connect(JOIN)


def test_answers_of_data_parallel_ranks_are_taken_together():
    told = [json.dumps({"torchrl_ext": "0", "working": working, "flushed": flushed}) for working, flushed in
            ((False, True), (True, False))]  # fmt: skip
    with running(NEW, post_weights_checker=(200, {"success": True, "message": " | ".join(told)})) as server:
        engine = SGLangEngine(server.url, load_timeout_s=2.0, flush_timeout_s=0.2)
        with pytest.raises(DeadlineError, match="stage"):
            engine.prefetch(1)
        with pytest.raises(DeadlineError, match="not dropped"):
            engine.begin(1)


@pytest.mark.parametrize("generation", [NEW, OLD], ids=["new", "old"])
def test_loads_of_both_generations_say_the_same(generation):
    with running(generation) as server:
        assert SGLangEngine(server.url).loads() == [{"dp_rank": 0, "running": 2, "waiting": 1}]


def test_discovery_reads_what_sglang_says():
    with running(NEW) as server:
        (info,) = tx.discover(server.url)
        assert SGLangEngine(server.url).info() == info
    assert (info.kind, info.version, info.worker_type, info.model) == ("sglang", "0.5.23", "regular", "/models/now")
    assert (info.tp_size, info.pp_size, info.dp_size, info.world_size, info.num_gpus) == (2, 1, 3, 6, 6)
    assert info.weight_version == "8" and {"disk", "collective", "delta"} <= set(info.transports)
    with running(NEW, post_weights_checker=STOCK) as server:
        assert tx.discover(server.url)[0].transports == ("disk",)  # it has replicas
        assert [engine.kind for engine in tx.connect(server.url).engines] == ["sglang"]


def test_an_older_name_of_the_route_will_do():
    with running(NEW, get_server_info=GONE, get_get_server_info=(200, STARTED_WITH)) as server:
        assert tx.discover(server.url)[0].kind == SGLangEngine(server.url).info().kind == "sglang"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="abort, retract, in_place"):
        SGLangEngine("host:1", pause_mode="wait")
    with pytest.raises(ConfigError, match="in_place"):
        SGLangEngine("host:1", pause_mode="retract", keep_cache=True)
