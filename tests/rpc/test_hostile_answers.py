"""Whatever a server answers, its client raises an error of ours or goes on; never Python's own words."""

import json
import random

import pytest

import torchrl_ext as tx
from tests.rpc.servers import Resting, running
from tests.rpc.test_sglang_rest import Resting as RestingSGLang
from torchrl_ext.errors import WeightSyncError

JUNK = [
    None,
    5,
    "words",
    [],
    [[3]],
    {},
    {"message": 3},
    {"message": "[]"},
    {"message": "5 | {}"},
    {"message": "{}"},
    {"message": json.dumps({"needed": 3, "proof": "none that is known", "working": [], "flushed": None})},
    {"message": json.dumps({"proof": "sent"})},
    {"message": json.dumps({"torchrl_ext": 1, "asleep": 5, "empty": "x", "paused": []})},
    {"loads": 3},
    {"loads": [3, {"num_waiting_reqs": "many"}]},
    {"world_size": "many"},
    {"weight_version": []},
    {"is_sleeping": True, "tags": 7},
    {"is_sleeping": "maybe", "tags": [[1], None]},
    {"is_paused": {}},
    {"vllm_config": {"model_config": 3, "kv_transfer_config": {"kv_connector_extra_config": 4}}},
    {"prompt_logprobs": [None, {"4": 3}]},
    {"answer": {"needed": 1}},
    {"status": []},
    {"success": "?"},
]


def calls(engine):
    more = [engine.loads] if engine.kind == "sglang" else []
    return [
        engine.info,
        lambda: engine.world_size,
        lambda: engine.connect({"transport": "disk", "params": []}),
        lambda: engine.rehearse("always"),
        lambda: engine.prefetch(3),
        lambda: engine.begin(3),
        lambda: engine.load({"version": 3, "path": "/v"}),
        lambda: engine.commit(3),
        lambda: engine.logprobs([[3, 4]]),
        engine.pause,
        engine.resume,
        lambda: engine.sleep(2),
        engine.wake_up,
        engine.look,
        *more,
    ]


@pytest.mark.parametrize(("kind", "resting"), [("vllm", Resting), ("sglang", RestingSGLang)])
def test_junk_from_one_route_is_refused_in_words_of_ours(kind, resting):
    rng, routes = random.Random(7), sorted(resting().answers)
    for route in [*routes, *rng.choices(routes, k=40)]:
        junk = rng.choice(JUNK)
        with running({**resting().answers, route: (200, junk)}) as server:
            limits = {"timeout_s": 2.0, "load_timeout_s": 0.05}
            more = {"flush_timeout_s": 0.05} if kind == "sglang" else {}
            engine = tx.make_engine(kind, url=server.url, **limits, **more)
            for number, call in enumerate(calls(engine)):
                try:
                    call()
                except WeightSyncError:
                    continue
                except Exception as error:
                    raise AssertionError(f"call {number} of {kind} after {route} answered {junk!r}") from error
            engine.close()
