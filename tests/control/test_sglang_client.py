"""The SGLang client and what releases and settings of a server change; the real server is in tests/real_engines."""

import json

import pytest

from tests.control.engines import Trainer, client, running
from tests.control.test_exchanges import told
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError

SERVED = {"model_path": "/models/start", "tp_size": 1, "disaggregation_mode": "null", "version": "0.5.23"}
CLEAR = "POST /hicache/storage-backend/clear"
STORE = {"hicache_storage_backend": "file"}


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("versions") / "trainer", (8,))
    return lambda engine: trainer.update(engine, 8)


@pytest.fixture
def started():
    """Makes fakes that were started with these settings."""
    fakes = []

    def start(port="sglang", **settings):
        fakes.append(running(port))
        fake = fakes[-1].__enter__()
        fake.answers["GET /server_info"] = 200, {**SERVED, **settings}
        return fake

    yield start
    for one in fakes:
        one.__exit__(None, None, None)


def sent(fake):
    """Messages and routes that change something, in order."""
    rows = [told(call) for call in fake.calls]
    return [row[1].get("kind", row[0]) if isinstance(row[1], dict) else row[0] for row in rows if row]


@pytest.mark.parametrize("setting", [STORE, {"enable_lmcache": True}])
def test_a_store_of_keys_is_cleared_after_the_flush(setting, started, update):
    fake = started(**setting)
    fake.answers[CLEAR] = 200, b"cleared"
    update(client(fake))
    calls = sent(fake)
    assert calls.index("flush") < calls.index(CLEAR) < calls.index("POST /begin_weight_update")


def test_failed_clear_of_the_key_store_prevents_the_update(started, update):
    """If the external KV store cannot be cleared, the update is refused and the server serves again."""
    fake = started(**STORE)
    fake.answers[CLEAR] = 400, "busy"
    with pytest.raises(EngineRefusedError, match=r"(?s)could not clear the store.*busy.*serves again"):
        update(client(fake))
    assert fake.serving and fake.versions["a"] == 0


def test_keep_cache_is_refused_for_a_server_with_a_key_store(started, update):
    """A server that stores its KV cache externally refuses keep_cache=True before any pause."""
    fake = started(**STORE)
    with pytest.raises(ConfigError, match=r"in a store.*old weights"):
        update(client(fake, keep_cache=True))
    assert not fake.counts["POST /pause_generation"]


def test_replicas_take_no_part_in_a_group(started):
    with pytest.raises(EngineRefusedError, match=r"3 data-parallel replicas.*--dp-size 1"):
        client(started(dp_size=3)).join({"transport": "collective", "params": [], "offer": {}})


BUSY = (400, "Flush cache failed.")


def test_a_cache_in_use_is_asked_for_again_until_it_is_free(started, update):
    fake, answers = started("stock-sglang"), [BUSY, BUSY, (200, b"Cache flushed.")]
    fake.answers["POST /flush_cache"] = lambda asked: answers.pop(0)
    update(client(fake))
    assert fake.counts["POST /flush_cache"] == 3 and fake.serving


def test_cache_never_free_ends_at_the_deadline_and_resumes(started, update):
    """A cache that stays in use raises a DeadlineError, and the server serves its old weights again."""
    fake, row = started("stock-sglang"), {"dp_rank": 0, "num_waiting_reqs": 1, "num_running_reqs": 2}
    fake.answers["POST /flush_cache"] = BUSY
    fake.answers["GET /v1/loads"] = 200, {"loads": [row]}
    with pytest.raises(DeadlineError, match=r"(?s)within 0\.2 s \(2 running, 1 waiting\).*serves again"):
        update(client(fake, flush_timeout_s=0.2))
    assert fake.serving and not fake.counts["POST /update_weights_from_disk"]


def test_requests_that_are_paused_in_place_are_not_waited_for(started, update):
    fake = started()
    with pytest.raises(EngineRefusedError, match=r"(?s)paused in place.*0 running.*keep_cache=True"):
        update(client(fake, pause_mode="in_place"))
    assert sent(fake).count("flush") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_pools_pause_by_aborting_requests(role, started, update):
    """Pools for prefill and decode pause with mode abort, as running requests would keep the cache in use."""
    fake = started(disaggregation_mode=role)
    update(client(fake))
    assert [call.body for call in fake.calls if call.route == "POST /pause_generation"] == [{"mode": "abort"}]


def test_a_label_that_did_not_take_keeps_the_engine_paused(started, update):
    fake = started()
    fake.answers["GET /model_info"] = 200, {"weight_version": "7"}
    with pytest.raises(EngineRefusedError, match=r"calls its weights '7'.*Expected: '8'"):
        update(client(fake))
    assert not fake.serving


def test_answers_of_data_parallel_ranks_are_taken_together(started):
    ranks = ((False, True), (True, False))
    words = " | ".join(json.dumps({"torchrl_ext": "0", "working": one, "flushed": two}) for one, two in ranks)
    fake = started()
    fake.answers["POST /weights_checker"] = 200, {"success": True, "message": words}
    engine = client(fake, load_timeout_s=2.0, flush_timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"did not stage version 1 within 2 s"):
        engine.update(1).stage()
    with pytest.raises(DeadlineError, match="not dropped"):
        engine.update(1).begin()
