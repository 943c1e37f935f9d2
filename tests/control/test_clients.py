"""The clients of vLLM and SGLang, and what settings of a server change; the real ones are in tests/real_engines."""

import json
import math
from contextlib import ExitStack, nullcontext

import pytest

import torchrl_ext as tx
from tests.control import servers
from tests.control.engines import Trainer, client, running
from tests.control.servers import CONFIG, asked_of, in_turn
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Commit, Inspect, Undo
from torchrl_ext.base.routes import CHANNEL
from torchrl_ext.control.client import NullEngine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.makes.vllm import vllm_engine

VLLM = {**CONFIG, "parallel_config": {}}
SGLANG = {"model_path": "/models/start", "tp_size": 1, "disaggregation_mode": "null", "version": "0.5.23"}
STORES = ({"hicache_storage_backend": "file"}, {"enable_lmcache": True})
CONNECTED = {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}
RESET, FLUSH = "POST /reset_prefix_cache", "POST /flush_cache"
HELD, BUSY = (200, {"success": False}), (400, "Flush cache failed.")
GONE = (404, {"detail": "Not Found"})
ASK, PAUSE, RESUME = "rehearse", "POST /pause", "POST /resume"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(tmp_path_factory.mktemp("versions") / "trainer", (8,))


@pytest.fixture
def started():
    """Makes fakes that were started with these settings."""
    with ExitStack() as ends:

        def start(port, **settings):
            fake = ends.enter_context(running(port))
            if settings:
                facts = {**SGLANG, **settings} if fake.kind == "sglang" else {"vllm_config": {**VLLM, **settings}}
                fake.answers["GET /server_info"] = 200, facts
            return fake

        yield start


def order(fake):
    """Messages by their kinds, and routes, in order."""
    return [call.kind or call.route for call in fake.calls]


# keys and values of old weights


@pytest.mark.parametrize(
    ("port", "route", "busy", "free"),
    [("vllm", RESET, HELD, {"success": True}), ("stock-sglang", FLUSH, BUSY, b"Cache flushed.")],
    ids=["vllm", "sglang"],
)
def test_a_cache_in_use_is_dropped_as_soon_as_it_is_free(port, route, busy, free, started, trainer):
    fake = started(port)
    fake.answers[route] = in_turn(busy, busy, (200, free))
    trainer.update(client(fake), 8)
    assert fake.counts[route] == 3 and fake.serving


@pytest.mark.parametrize(
    ("port", "settings", "answers", "how", "words"),
    [
        ("vllm", {}, {RESET: HELD}, {"timeout_s": 0.5}, "could not drop.*serves again"),
        ("stock-sglang", {}, {FLUSH: BUSY}, {"flush_timeout_s": 0.2}, "not dropped within 0.2 s.*Flush cache failed"),
        ("sglang", {}, {}, {"pause_mode": "in_place"}, "paused in place.*keep_cache=True"),
        *(("sglang", store, {}, {}, "in a store.*old weights") for store in STORES),
        ("vllm", CONNECTED, {}, {"keep_cache": True}, "KV connector LMCacheConnectorV1.*old weights"),
    ],
)
def test_an_engine_that_keeps_old_keys_serves_its_old_weights(port, settings, answers, how, words, started, trainer):
    fake = started(port, **settings)
    fake.answers |= answers
    with pytest.raises(WeightSyncError, match=f"(?s){words}"):
        trainer.update(client(fake, **how), 8)
    assert fake.serving and set(fake.versions.values()) == {0}
    assert "keep_cache" not in how or not {"POST /pause", "POST /pause_generation"} & {*order(fake)}


@pytest.mark.parametrize("seeing", [None, {"mm_processor_cache_gb": 4}])
def test_encoder_cache_is_reset_for_a_multimodal_model_only(seeing, started, trainer):
    fake = started("vllm", model_config={**CONFIG["model_config"], "multimodal_config": seeing})
    fake.answers["POST /reset_encoder_cache"] = 200, {}
    trainer.update(client(fake), 8)
    assert fake.counts["POST /reset_encoder_cache"] == bool(seeing) and fake.serving


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_pools_pause_by_aborting_requests(role, started, trainer):
    """Running requests would keep the cache in use."""
    fake = started("sglang", disaggregation_mode=role)
    trainer.update(client(fake), 8)
    assert [call.body for call in fake.calls if call.route == "POST /pause_generation"] == [{"mode": "abort"}]


# rehearsals


@pytest.mark.parametrize(
    ("script", "calls", "proof"),
    [
        ({}, [ASK, PAUSE, ASK, RESUME], "in place"),
        ({"needed": False}, [ASK], "in place"),
        ({"refused": True}, [ASK, PAUSE, ASK, ASK, RESUME], None),
        ({"refused": True, "restored": False}, [ASK, PAUSE, ASK, ASK], None),
    ],
)
def test_rehearsal_pauses_only_if_needed_and_resumes_if_whole(script, calls, proof, caplog):
    with servers.running(post_collective_rpc=servers.rehearsing(**script)) as fake, client(fake) as engine:
        with nullcontext() if proof else pytest.raises(EngineRefusedError, match=r"layer.0 \(Experts\)"):
            assert engine.rehearse() == proof  # the least of its workers
        assert [call for call in order(fake) if call in (ASK, PAUSE, RESUME)] == calls
        assert [told["worker"] for told in engine.rehearsed] == ([0, 1] if proof else [])
    announced = [one for one in caplog.records if one.getMessage().startswith(f"{fake.url} rehearses an update")]
    assert [one.levelname for one in announced] == (["WARNING"] if PAUSE in calls else [])


def test_fleet_proof_is_the_weakest_proof_of_its_engines():
    with servers.running(post_collective_rpc=servers.rehearsing()) as one, servers.running() as other:
        fleet = Fleet([client(fake) for fake in (one, other)])
        assert fleet.rehearse() == "sent"
        assert [engine.update(1).rows()[0].proof for engine in fleet.engines] == ["in place", "sent"]
        assert [call for call in order(other) if call in (ASK, PAUSE, RESUME)] == [ASK]


# what workers answer


@pytest.mark.parametrize(
    ("port", "route", "answer", "words"),
    [
        ("sglang", "GET /model_info", {"weight_version": "7"}, "calls its weights '7'.*Expected: '8'"),
        ("stock-vllm", "POST /update_weight_version", (500, {"detail": "no"}), "finish version 8"),
    ],
)
def test_a_label_that_did_not_take_keeps_the_engine_paused(port, route, answer, words, started, trainer):
    fake = started(port)
    fake.answers[route] = answer
    with pytest.raises(EngineRefusedError, match=words):
        trainer.update(client(fake), 8)
    assert not fake.serving


@pytest.mark.parametrize(
    ("settings", "live"),
    [({}, True), ({"keep_cache": True}, True), ({"pause_mode": "retract"}, False), ({"pause_mode": "in_place"}, False)],
)
def test_sglang_labels_what_it_takes_while_it_serves_and_what_it_takes_back(started, settings, live):
    fake, told = started("sglang"), []

    def held(version):
        def answer(asked):
            told.append(json.loads(asked["action"].removeprefix(CHANNEL)))
            return {"success": True, "message": json.dumps({"version": version})}

        return answer

    fake.answers |= {"commit": held(8), "undo": held(0)}
    port = client(fake, **settings).port
    assert port.live == live
    port.call(Commit(version=8))
    assert fake.label == "8" and told[-1]["keep_cache"] == settings.get("keep_cache", False)
    port.call(Undo(version=8))
    assert fake.label == "default" and fake.serving
    assert not {"POST /pause_generation", "POST /end_weight_update"} & fake.counts.keys()


@pytest.mark.parametrize("end", ["undo", "resume"])
def test_sglang_continues_after_an_update_that_only_began(end, started, trainer):
    """With an open session for an update it refuses to."""
    fake = started("sglang")
    fake.answers["undo"] = {"success": True, "message": json.dumps({"version": 0})}
    engine = client(fake)
    engine.join(trainer.invitation())
    for count in (1, 2):
        engine.update(8).begin()
        engine.port.call(Undo(version=8)) if end == "undo" else engine.resume()
        assert fake.counts["POST /end_weight_update"] == count


def test_replicas_take_no_part_in_a_group(started):
    with pytest.raises(EngineRefusedError, match=r"3 data-parallel replicas.*--dp-size 1"):
        client(started("sglang", dp_size=3)).join({"transport": "collective", "params": [], "offer": {}})


def test_answers_of_data_parallel_ranks_are_taken_together(started):
    ranks = ((False, True), (True, False))
    words = " | ".join(json.dumps({"torchrl_ext": "0", "working": one, "flushed": two}) for one, two in ranks)
    fake = started("sglang")
    fake.answers["POST /weights_checker"] = 200, {"success": True, "message": words}
    engine = client(fake, load_timeout_s=2.0, flush_timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"did not stage version 1 within 2 s"):
        engine.update(1).stage()
    with pytest.raises(DeadlineError, match="not dropped"):
        engine.update(1).begin()


def test_a_prefetch_is_asked_after_until_it_is_over_or_late(started):
    fake, working, done = started("vllm"), {"results": [{}, {"working": True}]}, {"results": [{}, {}]}
    answers = [done, working, working, done]
    fake.answers |= {kind: lambda asked: answers.pop(0) for kind in ("prefetch", "poll")}
    client(fake).update(3).stage()
    assert [kind for kind in order(fake) if kind in ("prefetch", "poll")] == ["prefetch", "poll", "poll", "poll"]
    fake.answers |= {"prefetch": done, "poll": working}
    with pytest.raises(DeadlineError, match=r"did not .* within 2 s"):
        client(fake, load_timeout_s=2.0).update(3).stage()


def test_worker_error_is_quoted_whole(started):
    fake, path = started("vllm"), {"what": "StoreError: /root/a/weight_v31 is not there", "hint": "look"}
    fake.answers["join"] = {"results": [{"error": path}, {"error": path}]}
    with pytest.raises(EngineRefusedError, match=r"^StoreError: /root/a/weight_v31 is not there.*Next: look"):
        client(fake).join({"transport": "disk", "params": [], "offer": {}})


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_version_is_confirmed_by_the_workers_of_all_replicas(started, trainer, lost):
    """Two replicas of two workers stand behind the address; vLLM's own client hands on the first one's answers."""
    parallel = {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1}
    fake = started("vllm", parallel_config=parallel)
    rows = [{"version": 8, "digest": trainer.digest(8), "workers": 2}] * 4
    fake.answers["finish"] = {"results": rows[lost:]}
    with pytest.raises(EngineRefusedError, match=f"{4 - lost} worker.*Expected: 4, of 2 engine"):
        trainer.update(client(fake), 8)
    fake.answers["finish"] = {"results": rows}
    with pytest.raises(EngineRefusedError, match="did not resume"):  # one got further than this one, which refuses
        trainer.update(client(fake), 8)


def test_workers_without_the_plugin_are_asked_nothing(started, trainer):
    """Each would raise, and vLLM take one's reply for another's from then on."""
    fake = started("stock-vllm")
    engine = client(fake)
    assert engine.pause() and engine.paused()
    engine.resume()
    with pytest.raises(EngineRefusedError, match=r"without our plugin.*install torchrl_ext"):
        engine.inspect(Inspect())
    with pytest.raises(EngineRefusedError, match="does not say what sleeps"):
        engine.sleep(1)
    trainer.update(engine, 8)
    assert not any(call.kind for call in fake.calls) and fake.serving


# log-probabilities of given tokens

PROMPTS = ((17, 3, 42), (5, 17))
ROUTES = {
    "vllm": "POST /inference/v1/generate",
    "sglang": "POST /generate",
    "embedded": "POST /prompt_logprobs",
}
UNKNOWN = {  # what JSON has no number for
    "vllm": {"prompt_logprobs": [None, {"3": {"logprob": None, "rank": 9}}, {"42": {"logprob": None}}]},
    "sglang": {"meta_info": {"input_token_logprobs": [[None, 17, None], [None, 3, None], [None, 42, None]]}},
    "embedded": {"logprobs": [[None, None]]},
}


@pytest.mark.parametrize("make", ROUTES)
def test_each_token_after_the_first_has_its_own_or_none(make):
    with FakeEngine(make) as fake:
        engine = client(fake)
        assert engine.logprobs(()) == [] and not fake.counts[ROUTES[make]]
        assert engine.logprobs(PROMPTS) == [[-4.0, -1.0], [-4.0]]  # a fake one says minus one less the token modulo 7
        fake.answers[ROUTES[make]] = UNKNOWN[make]
        assert all(math.isnan(one) for row in engine.logprobs(PROMPTS[:1]) for one in row)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        ("vllm", {"choices": []}),
        ("vllm", {"prompt_logprobs": None}),
        ("vllm", {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}),
        ("vllm", {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}),
        ("vllm", {"prompt_logprobs": [None, None, {"42": {"logprob": -1.0}}]}),
        ("sglang", {"meta_info": {}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None]]}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 17, None], [-1.0, 3, None], [-1.0, 7, None]]}}),
        ("embedded", {}),
        ("embedded", {"logprobs": [["much"]]}),
        *((make, [1]) for make in ROUTES),
    ],
)
def test_an_answer_without_one_for_each_token_is_refused(make, answer):
    with FakeEngine(make) as fake:
        fake.answers[ROUTES[make]] = answer
        engine, words = client(fake), "without the log-probabilities of the prompt"
        with pytest.raises(EngineRefusedError, match=f"{fake.url}.*{words}") as caught:
            engine.logprobs(PROMPTS[:1])
        assert words in caught.value.rows[0].error


@pytest.mark.parametrize("make", ROUTES)
def test_a_server_that_is_paused_or_full_has_as_long_as_a_load(make):
    with FakeEngine(make) as fake:
        fake.inject("hang", ROUTES[make])
        with pytest.raises(DeadlineError, match=r"within 0\.\d+ s"):
            client(fake, load_timeout_s=0.3).logprobs(PROMPTS)


def test_a_fleet_is_asked_one_by_one_and_no_engine_not_at_all():
    engines = [tx.make_engine(make, url=f"127.0.0.1:{port}") for port, make in enumerate(ROUTES, 1)]
    fleet = Fleet(engines)
    assert fleet.each() == tuple(engines)
    assert engines[0].each() == (engines[0],)
    assert NullEngine().each() == ()
    with pytest.raises(ConfigError, match=r"fleet.*computes no log-probabilities.*each\(\)"):
        fleet.logprobs(PROMPTS)
    with FakeEngine("embedded") as fake:  # a fleet of one engine answers as it does
        assert tx.connect(fake.url).logprobs(PROMPTS) == [[-4.0, -1.0], [-4.0]]


# addresses and settings


def test_a_server_without_dev_routes_gets_the_hint(started):
    fake = started("vllm")
    fake.answers = {"GET /server_info": GONE, "POST /pause": GONE}
    for call in (client(fake).info, client(fake).pause):
        with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
            call()


def test_connect_to_several_engines_gives_each_a_rank_offset(started, trainer):
    fake, other = started("vllm"), started("vllm")
    fake.answers["GET /get_world_size"] = {"world_size": 6}
    fleet = tx.connect(fake.url, other.url)
    assert [engine.url for engine in fleet.engines] == [fake.url, other.url] and fleet.info().world_size == 7
    fleet.join({**trainer.invitation(), "world_size": 8})
    joins = [asked_of(call.body) for one in (fake, other) for call in one.calls if call.kind == "join"]
    assert [join["rank_offset"] for join in joins] == [1, 7]
    trainer.update(tx.connect(other.url, keep_cache=True), 8)
    assert not other.counts[RESET]


def test_what_cannot_work_is_refused_without_a_request():
    for given in ((3, None), (1, ["weights"]), (1, []), (0, ["cache"])):
        with pytest.raises(ConfigError, match=r"sleep|tags"):
            vllm_engine("host:1").sleep(*given)
    with pytest.raises(ConfigError, match="given twice"):
        tx.discover("host:1", "http://host:1/")
    with pytest.raises(ConfigError, match="no engine address"):
        tx.connect()
