"""The SGLang client over real sockets, against both generations of its routes; the real server is in tests/engine."""

import json

import pytest

import torchrl_ext as tx
from tests.rpc.servers import bare, running
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.routes import CHANNEL
from torchrl_ext.rpc.makes.sglang import sglang_engine

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


CLEAR = "POST /hicache/storage-backend/clear"
OLDER_CLEAR = "POST /clear_hicache_storage_backend"


@pytest.mark.parametrize("setting", [{"hicache_storage_backend": "file"}, {"enable_lmcache": True}])
@pytest.mark.parametrize("route", [CLEAR, OLDER_CLEAR])
def test_a_store_of_keys_is_cleared_after_the_flush(setting, route):
    told = (200, {**STARTED_WITH, **setting})
    with running({**NEW, "GET /server_info": told, route: (200, "cleared")}) as server:
        update(sglang_engine(server.url))
        calls = said(server)
        assert calls.index({"kind": "flush"}) < calls.index(route) < calls.index("POST /begin_weight_update")


def test_a_store_of_keys_that_cannot_be_cleared_keeps_the_update_away():
    told = (200, {**STARTED_WITH, "hicache_storage_backend": "file"})
    with running({**NEW, "GET /server_info": told, CLEAR: (400, "busy")}) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)could not clear the store.*busy.*serves again"):
            update(sglang_engine(server.url))
        assert said(server)[-3:] == ["POST /continue_generation", {"kind": "state"}, "GET /ready"]


def test_earlier_releases_have_no_session_around_an_update():
    with running(OLD) as server:
        update(sglang_engine(server.url, pause_mode="abort"))
        assert {"kind": "start", "bracketed": False} in said(server)
        assert {"mode": "abort"} in [body for _, _, body in server.calls]


def test_replicas_take_no_part_in_a_group():
    with running(NEW) as server, pytest.raises(EngineRefusedError, match=r"3 data-parallel replicas.*--dp-size 1"):
        sglang_engine(server.url).connect({"transport": "collective", "params": []})


def test_a_cache_in_use_is_asked_for_again_until_it_is_free():
    answers = [(400, "Flush cache failed."), (400, "Flush cache failed."), (200, "Cache flushed.")]
    with running(NEW, post_weights_checker=STOCK, post_flush_cache=answers) as server:
        update(sglang_engine(server.url))
        assert server.routes().count("POST /flush_cache") == 3


@pytest.mark.parametrize("generation", [NEW, OLD], ids=["new", "old"])
def test_a_cache_that_is_never_free_reaches_the_deadline_and_the_server_serves_again(generation):
    with running(generation, post_weights_checker=plugin(flushed=False)) as server:
        engine = sglang_engine(server.url, flush_timeout_s=0.2)
        with pytest.raises(DeadlineError, match=r"(?s)within 0\.2 s \(2 running, 1 waiting\).*serves again"):
            update(engine)
        assert said(server)[-3:] == ["POST /continue_generation", {"kind": "state"}, "GET /ready"]
        assert {"kind": "finish", "version": 8} not in said(server) and engine.rows()[0].state == "serving"


def test_requests_that_are_paused_in_place_are_not_waited_for():
    with running(NEW, post_weights_checker=plugin(flushed=False)) as server:
        with pytest.raises(EngineRefusedError, match=r"(?s)paused in place.*2 running.*keep_cache=True"):
            update(sglang_engine(server.url, pause_mode="in_place"))
        assert said(server).count({"kind": "flush"}) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("setting", "mode"), [({}, "abort"), ({"pause_mode": "in_place"}, "in_place")])
def test_requests_between_two_pools_end_since_they_would_keep_the_cache(role, setting, mode):
    told = (200, {**STARTED_WITH, "disaggregation_mode": role})
    with running({**NEW, "GET /server_info": told}) as server:
        update(sglang_engine(server.url, **setting))
        assert [body for call, _, body in server.calls if call == "POST /pause_generation"] == [{"mode": mode}]


def test_a_server_that_puts_its_keys_into_a_store_must_not_keep_them():
    told = (200, {**STARTED_WITH, "hicache_storage_backend": "file"})
    with running({**NEW, "GET /server_info": told}) as server:
        with pytest.raises(ConfigError, match=r"in a store.*old weights"):
            update(sglang_engine(server.url, keep_cache=True))
        assert not [call for call in server.routes() if "pause" in call]


def test_a_label_that_did_not_take_keeps_the_engine_paused():
    with running(NEW, get_model_info=(200, SERVES | {"weight_version": "7"})) as server:
        engine = sglang_engine(server.url)
        with pytest.raises(EngineRefusedError, match=r"calls its weights '7'.*Expected: '8'"):
            update(engine)
        assert engine.rows()[0].state == "paused"


def test_a_step_that_goes_on_is_asked_after_until_its_deadline():
    answers = [plugin(), plugin(), plugin(working=True), plugin(working=True), plugin()]
    with running(NEW, post_weights_checker=answers) as server:
        sglang_engine(server.url).connect(JOIN)
        assert said(server).count({"kind": "poll", "pull": False}) == 3
    with (
        running(NEW, post_weights_checker=plugin(working=True)) as server,
        pytest.raises(DeadlineError, match=r"did not .* within 2 s"),
    ):
        sglang_engine(server.url, load_timeout_s=2.0).connect(JOIN)


def test_answers_of_data_parallel_ranks_are_taken_together():
    told = [json.dumps({"torchrl_ext": "0", "working": working, "flushed": flushed}) for working, flushed in
            ((False, True), (True, False))]  # fmt: skip
    with running(NEW, post_weights_checker=(200, {"success": True, "message": " | ".join(told)})) as server:
        engine = sglang_engine(server.url, load_timeout_s=2.0, flush_timeout_s=0.2)
        with pytest.raises(DeadlineError, match="stage"):
            engine.prefetch(1)
        with pytest.raises(DeadlineError, match="not dropped"):
            engine.begin(1)


def test_discovery_reads_what_sglang_says():
    with running(NEW) as server:
        (info,) = tx.discover(server.url)
        assert sglang_engine(server.url).info() == info
    assert (info.kind, info.version, info.worker_type, info.model) == ("sglang", "0.5.23", "regular", "/models/now")
    assert (info.tp_size, info.pp_size, info.dp_size, info.world_size, info.num_gpus) == (2, 1, 3, 6, 6)
    assert info.weight_version == "8" and {"disk", "collective", "delta"} <= set(info.transports)
    with running(NEW, post_weights_checker=STOCK) as server:
        assert tx.discover(server.url)[0].transports == ("disk",)  # it has replicas
        assert [engine.kind for engine in tx.connect(server.url).engines] == ["sglang"]


def test_an_older_name_of_the_route_will_do():
    with running(NEW, get_server_info=GONE, get_get_server_info=(200, STARTED_WITH)) as server:
        assert tx.discover(server.url)[0].kind == sglang_engine(server.url).info().kind == "sglang"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="abort, retract, in_place"):
        sglang_engine("host:1", pause_mode="wait")
    with pytest.raises(ConfigError, match="in_place"):
        sglang_engine("host:1", pause_mode="retract", keep_cache=True)
