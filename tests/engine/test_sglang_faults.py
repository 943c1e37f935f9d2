"""What goes wrong on SGLang is refused before the pause, or leaves it paused and able to take the next update."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchrl_ext as tx
from tests.engine.following import Recovers
from tests.engine.served import until_met
from tests.engine.test_sglang_sync import running
from tests.models import tiny_model
from torchrl_ext.deadline import Deadline
from torchrl_ext.serving.processes import free_port
from torchrl_ext.types import ParamMeta

pytestmark = pytest.mark.engine


class TestRecovering(Recovers):
    """Without a check ahead SGLang skips an unknown name, and keeps old values under a missing one, in silence."""

    kind = "sglang"


def sender_to(served, transport, engine=None, **settings):
    engine = engine or tx.make_engine("sglang", url=served.url)
    return tx.WeightSender(tx.make_transport(transport, **settings), engine)


@pytest.fixture
def serving(sglang, tmp_path):
    """The server with known weights in service, and a look at its process afterwards."""
    pid, model = sglang.server.pid, tiny_model(51)
    sglang.report = sender_to(sglang, "disk", root=tmp_path / "before").update_weights(model)
    sglang.model = model
    yield sglang
    assert sglang.server.pid == pid and sglang.server.alive()


def assert_untouched(served):
    assert served.says(served.model) and served.version() == str(served.report.version)


def assert_recovers(served, tmp_path, seed=53):
    last = tiny_model(seed)
    report = sender_to(served, "disk", root=tmp_path / "after").update_weights(last)
    assert served.says(last) and served.version() == str(report.version)


def load_from_disk(served, path, expected=200, **body):
    answer = served.http.call("POST", "/update_weights_from_disk", {"model_path": str(path), **body})
    assert answer.status == expected, answer
    return answer.json()["message"]


def test_sglang_itself_accepts_unknown_names_in_silence(serving, tmp_path):
    """Why parameters are checked ahead of an update; should this ever fail, the docs have a line to lose."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "strange"
    tiny_model(54).save_pretrained(folder)
    shard = folder / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.strange.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, shard, {"format": "pt"})
    load_from_disk(serving, folder, load_format="auto", weight_version="strange")
    assert serving.says(tiny_model(54))


def test_a_load_format_that_nobody_knows_does_not_end_the_server(serving, tmp_path):
    message = load_from_disk(serving, tmp_path, 400, load_format="strange", weight_version="x")
    assert "strange" in message
    assert_untouched(serving)


def test_a_checkpoint_that_sglang_cannot_load_does_not_end_the_server(serving, tmp_path):
    folder = tmp_path / "broken"
    tiny_model(55).save_pretrained(folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    load_from_disk(serving, folder, 400, load_format="auto", weight_version="broken")
    load_from_disk(serving, tmp_path / "nothing", 400, load_format="auto", weight_version="nothing")
    assert_recovers(serving, tmp_path)


def checksum(engine):
    """SGLang's own, over the runtime parameters of all workers."""
    return engine.port.post("/weights_checker", {"action": "checksum"})["body"]["per_engine_checksum"]


def test_a_400_can_mean_that_the_weights_did_change(serving, tmp_path):
    """Loading and flushing in one call, as SGLang offers it: the reason why the client flushes first."""
    engine, folder = tx.make_engine("sglang", url=serving.url, pause_mode="in_place"), tmp_path / "other"
    tiny_model(56).save_pretrained(folder)
    before = checksum(engine)
    asked = {"load_format": "auto", "weight_version": "half", "flush_cache": True, "abort_all_requests": False}
    with ThreadPoolExecutor(1) as pool:

        def loaded_beside_a_request():
            (future,) = running(serving, pool, 1)
            engine.pause()
            met = any(row["running"] for row in engine.port.loads())
            if met:
                assert "not flushed" in load_from_disk(serving, folder, 400, **asked) and checksum(engine) != before
            engine.resume()
            future.result()
            return met

        until_met(loaded_beside_a_request)
    assert_recovers(serving, tmp_path)


def test_requests_that_are_paused_in_place_keep_the_update_away_unless_the_old_cache_is_accepted(serving, tmp_path):
    engine = tx.make_engine("sglang", url=serving.url, pause_mode="in_place")
    sender, model = sender_to(serving, "disk", engine, root=tmp_path / "refused"), tiny_model(57)
    with ThreadPoolExecutor(1) as pool:

        def refused():
            (future,) = running(serving, pool, 1)
            try:
                sender.update_weights(model)
            except tx.WeightSyncError as error:
                assert re.search(r"(?s)paused in place.*1 running.*serves again.*keep_cache=True", str(error))
                assert future.result()["weight_versions"][0]["version"] == str(serving.report.version)
                return True
            future.result()  # it was over before the pause
            serving.report = sender.update_weights(serving.model)
            return False

        until_met(refused)
        assert_untouched(serving)
    engine = tx.make_engine("sglang", url=serving.url, pause_mode="in_place", keep_cache=True)
    sender = sender_to(serving, "disk", engine, root=tmp_path / "accepted")
    with ThreadPoolExecutor(1) as pool:

        def accepted():
            (future,) = running(serving, pool, 1)
            report = sender.update_weights(model)
            choice = future.result()
            assert choice["finish_reason"] == "length" and choice["retractions"] == 0
            return choice["weight_versions"][-1]["version"] == str(report.version)  # else it was over before

        until_met(accepted)
    assert_recovers(serving, tmp_path)


def test_a_delta_leaves_the_load_format_as_it_was_for_those_who_name_none(serving, tmp_path):
    """SGLang keeps the format of the last call for calls that name none; a delta of ours is no format of its own."""
    transport, model = tx.make_transport("delta", root=tmp_path / "chain"), tiny_model(58)
    format_before = serving.http.get("/model_info")["load_format"]
    transport.send_weights(model)
    load_from_disk(serving, tmp_path / "chain", load_format="delta", weight_version="delta")
    assert serving.http.get("/model_info")["load_format"] == format_before and serving.says(model)
    folder = tmp_path / "checkpoint"
    tiny_model(59).save_pretrained(folder)
    load_from_disk(serving, folder, weight_version="x")
    assert serving.says(tiny_model(59))
    transport.shutdown()


def test_the_label_is_sticky_and_ours_is_always_sent(serving, tmp_path):
    folder = tmp_path / "checkpoint"
    tiny_model(60).save_pretrained(folder)
    load_from_disk(serving, folder, load_format="auto")
    assert serving.says(tiny_model(60)) and serving.version() == str(serving.report.version)
    assert_recovers(serving, tmp_path)


def test_a_master_that_cannot_be_reached_ends_in_an_error_and_meanwhile_the_server_serves(serving):
    model = tiny_model(51)
    params = tuple(ParamMeta.of(name, tensor) for name, tensor in model.state_dict().items())
    transport = tx.make_transport("collective", timeout_s=5)
    offer = transport.open(1, params, Deadline(5)).info
    offer = {key: free_port() if key.endswith("_port") else value for key, value in offer.items()}
    info = {**offer, "transport": "collective", "params": [meta.to_json() for meta in params], "world_size": 2}
    engine, told = tx.make_engine("sglang", url=serving.url, load_timeout_s=60), []

    def joining():
        try:
            engine.connect(info)
        except tx.WeightSyncError as error:
            told.append(error)

    thread = threading.Thread(target=joining)
    thread.start()
    generated = 0
    while thread.is_alive():
        assert_untouched(serving)
        generated += 1
    thread.join()
    transport.shutdown()
    assert generated and "did not join the transport" in str(told[0])
    assert_untouched(serving)


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_each_step_of_the_colocated_order_may_come_from_a_client_of_its_own(serving, tmp_path, pause_mode):
    sender = sender_to(serving, "delta", root=tmp_path)

    def client():
        return tx.make_engine("sglang", url=serving.url, pause_mode=pause_mode)

    with ThreadPoolExecutor(1) as pool:
        for seed in (61, 62):
            model = tiny_model(seed)
            (future,) = running(serving, pool, 1)
            client().sleep(2)
            with pytest.raises(tx.WeightSyncError, match="holds no weights"):
                client().resume()
            client().wake_up(["weights"])
            assert serving.http.call("GET", "/ready").status == 503
            assert sender.update_weights(model).verified
            client().wake_up(["kv_cache"])
            client().wake_up()
            assert future.result()["finish_reason"] == "length" and serving.says(model)
    sender.shutdown()


def test_requests_that_are_frozen_in_place_can_be_ended(serving):
    with ThreadPoolExecutor(1) as pool:

        def ended():
            (future,) = running(serving, pool, 1)
            tx.make_engine("sglang", url=serving.url, pause_mode="in_place").pause()
            engine = tx.make_engine("sglang", url=serving.url, pause_mode="abort", load_timeout_s=30.0)
            engine.pause()
            engine.resume()
            return future.result()["finish_reason"] == "abort"  # else it was over before

        until_met(ended)
    assert_untouched(serving)
