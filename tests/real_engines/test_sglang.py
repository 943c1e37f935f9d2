"""Requests that SGLang holds frozen in place, and the format that it keeps of the last call."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import torchrl_ext as tx
from tests.models import tiny_model
from tests.real_engines.served import at_work, by_route, sending, until_met

pytestmark = pytest.mark.engine


@pytest.fixture
def serving(sglang, tmp_path):
    """The server with known weights in service, and a look at its process afterwards."""
    pid, sglang.model = sglang.server.pid, tiny_model(51)
    with sending("disk", tmp_path / "before", sglang) as sender:
        sglang.report = sender.update_weights(sglang.model)
    yield sglang
    last = tiny_model(53)
    with sending("disk", tmp_path / "after", sglang) as sender:
        sglang.assert_serves(last, sender.update_weights(last))
    assert sglang.server.pid == pid and sglang.server.alive()


def assert_untouched(served):
    assert served.says(served.model) and served.version() == str(served.report.version)


def test_in_place_pause_refuses_update_unless_cache_is_kept(serving, tmp_path):
    model, root = tiny_model(57), tmp_path / "updates"
    with ThreadPoolExecutor(1) as pool, sending("disk", root, serving, pause_mode="in_place") as sender:

        def refused():
            (future,) = at_work(serving, pool, 1)
            try:
                sender.update_weights(model)
            except tx.WeightSyncError as error:
                assert re.search(r"(?s)paused in place.*in use.*serves again.*keep_cache=True", str(error))
                assert future.result()["weight_versions"][0]["version"] == str(serving.report.version)
                return True
            future.result()  # it was over before the pause
            serving.report = sender.update_weights(serving.model)
            return False

        until_met(refused)
        assert_untouched(serving)
    with ThreadPoolExecutor(1) as pool, sending("disk", root, serving, keep_cache=True) as sender:

        def accepted():
            (future,) = at_work(serving, pool, 1)
            report = sender.update_weights(model)
            choice = future.result()
            assert choice["finish_reason"] == "length" and choice["retractions"] == 0
            return choice["weight_versions"][-1]["version"] == str(report.version)  # else it was over before

        until_met(accepted)


def test_requests_that_are_frozen_in_place_can_be_ended(serving):
    with ThreadPoolExecutor(1) as pool:

        def ended():
            (future,) = at_work(serving, pool, 1)
            tx.make_engine("sglang", url=serving.url, pause_mode="in_place").pause()
            engine = tx.make_engine("sglang", url=serving.url, pause_mode="abort", load_timeout_s=30.0)
            engine.pause()
            engine.resume()
            return future.result()["finish_reason"] == "abort"  # else it was over before

        until_met(ended)
    assert_untouched(serving)


def test_a_paused_server_is_healthy_for_its_router(serving):
    """Its own check of health generates a token, for which it would wait until it is resumed."""
    httpx.post(f"{serving.url}/pause_generation", json={"mode": "retract"}).raise_for_status()
    for route, status in {"/health": 200, "/ping": 200, "/ready": 503}.items():
        assert httpx.get(serving.url + route, timeout=5.0).status_code == status
    httpx.post(f"{serving.url}/continue_generation", json={}).raise_for_status()
    assert_untouched(serving)


def test_delta_update_leaves_sglang_load_format_unchanged(serving, tmp_path):
    """SGLang keeps the format of the last call for calls that name none; a delta of ours is no format of its own."""
    transport, model = tx.make_transport("delta", root=tmp_path / "chain"), tiny_model(58)
    format_before = serving.http.get("/model_info")["load_format"]
    transport.send_weights(model)
    by_route(serving, tmp_path / "chain", load_format="delta", weight_version="delta")
    assert serving.http.get("/model_info")["load_format"] == format_before and serving.says(model)
    folder = tmp_path / "checkpoint"
    tiny_model(59).save_pretrained(folder)
    by_route(serving, folder, weight_version="x")
    assert serving.says(tiny_model(59))
    transport.shutdown()
