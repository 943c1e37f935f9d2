"""A stock vLLM server on the trainer's machine takes weights from shared memory, and sleeps while the trainer works."""

import os
import signal
from pathlib import Path

import pytest

import torchrl_ext as tx
from tests.models import greedy, tiny_model
from tests.processes import family, finished, maps_of
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import EngineError, EngineRefusedError

pytestmark = pytest.mark.engine

BUCKET_BYTES = 256 << 10


def sender_to(*served):
    engine = tx.make_engine("vllm", url=served[0].url) if len(served) == 1 else tx.connect(*(one.url for one in served))
    return tx.WeightSender(tx.make_transport("ipc", bucket_bytes=BUCKET_BYTES), engine), engine


def mapped(served):
    return [pid for pid in family(served.server.pid) if "memfd:torchrl_ext" in maps_of(pid)]


def test_fifty_syncs_leave_the_engine_at_the_trainers_weights_and_map_nothing(vllm):
    sender, _ = sender_to(vllm)
    model = tiny_model(0)
    for seed in range(1, 51):
        model.load_state_dict(tiny_model(seed).state_dict())
        report = sender.update_weights(model)
        assert report.verified and vllm.version() == str(report.version)
        assert mapped(vllm) == []
        if seed % 10 == 0:
            assert vllm.tokens() == greedy(model)
    sender.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_wakes_a_sleeping_engine(vllm, level):
    sender, engine = sender_to(vllm)
    sender.update_weights(tiny_model(11))
    engine.sleep(level)
    assert vllm.http.get("/is_sleeping")["is_sleeping"]
    if level == 2:
        with pytest.raises(EngineRefusedError, match="no weights to serve"):
            engine.resume()
    model = tiny_model(12)
    report = sender.update_weights(model)
    assert not vllm.http.get("/is_sleeping")["is_sleeping"] and not vllm.paused()
    choice = vllm.generate()
    assert choice["token_ids"] == greedy(model)
    assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
    sender.shutdown()


def test_weights_wake_first_and_the_cache_last(vllm):
    sender, engine = sender_to(vllm)
    sender.update_weights(tiny_model(13))
    log = Path(vllm.server.log_path)
    begin = log.stat().st_size
    engine.sleep(2)
    sender.update_weights(tiny_model(14))
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    routes = ("/sleep", "/wake_up?tags=weights", "/start_weight", "/finish_weight", "/wake_up?tags=kv_cache", "/resume")
    seen = [route for line in lines for route in routes if f"POST {route}" in line]
    assert list(dict.fromkeys(seen)) == list(
        routes
    )  # weights may be woken twice: vLLM does not say that they are awake
    sender.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_each_step_of_the_colocated_order_may_come_from_a_client_of_its_own(vllm, level):
    client = RemoteInferenceClient(proxy_url=vllm.url, server_urls=[vllm.url], kind="vllm")
    sender, _ = sender_to(vllm)
    for seed in (31, 32):
        model = tiny_model(seed)
        client.run(client.sleep(level=level))
        client.run(client.wake_up(tags=["weights"]))
        assert vllm.paused() and vllm.http.get("/is_sleeping")["is_sleeping"]
        if level == 2:
            with pytest.raises(EngineError, match="holds no weights"):
                client.run(client.wake_up())
        assert sender.update_weights(model).verified
        client.run(client.wake_up(tags=["kv_cache"]))
        assert not vllm.http.get("/is_sleeping")["is_sleeping"]
        assert vllm.tokens() == greedy(model)
    client.close()
    sender.shutdown()


def test_an_engine_that_was_put_to_sleep_by_hand_is_woken_and_no_delta_builds_on_what_it_lost(vllm, tmp_path):
    sender = tx.WeightSender(tx.make_transport("delta", root=tmp_path), tx.make_engine("vllm", url=vllm.url))
    for seed in (33, 34):
        model = tiny_model(seed)
        sender.update_weights(model)
        vllm.http.post("/sleep", query={"level": 2})
        assert sender.update_weights(model).verified
        assert not vllm.http.get("/is_sleeping")["is_sleeping"] and vllm.tokens() == greedy(model)
    sender.shutdown()


def test_a_trainer_that_is_killed_while_it_sends_leaves_nothing_and_the_next_one_goes_on(vllm):
    code = """
import os, signal, sys
import torchrl_ext as tx
from tests.models import tiny_model
from torchrl_ext.weights.source import MappingSource
class Fatal(MappingSource):
    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == 15:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair
sender = tx.WeightSender(tx.make_transport("ipc", bucket_bytes=65536), tx.make_engine("vllm", url=sys.argv[1]))
sender.update_weights(Fatal(dict(tiny_model(1).named_parameters())))
"""
    done = finished(code, vllm.url)
    assert done.returncode == -signal.SIGKILL, done.stderr
    sender, _ = sender_to(vllm)
    model = tiny_model(15)
    sender.update_weights(model)
    assert vllm.tokens() == greedy(model) and mapped(vllm) == []
    sender.shutdown()
    assert not [name for name in os.listdir("/dev/shm") if "torchrl_ext-ipc" in name]


def test_every_worker_of_a_tensor_parallel_engine_maps_the_same_buffer(tensor_parallel_vllm):
    sender, engine = sender_to(tensor_parallel_vllm)
    for seed in (21, 22, 23):
        model = tiny_model(seed)
        assert sender.update_weights(model).verified
        assert tensor_parallel_vllm.tokens() == greedy(model)
    engine.sleep(2)
    model = tiny_model(24)
    sender.update_weights(model)
    assert tensor_parallel_vllm.tokens() == greedy(model)
    sender.shutdown()
    assert mapped(tensor_parallel_vllm) == []
