"""Real servers with an API key: what they tell strangers, and what a trainer that has the key does with them."""

import json

import httpx
import pytest

import torchrl_ext as tx
from tests.engine.served import ServedSGLang, ServedVLLM, serving
from tests.models import tiny_model
from torchrl_ext.cli.main import main
from torchrl_ext.routes import ADAPTERS_ROUTE

pytestmark = pytest.mark.engine

KEY = "sesame"


def told_by_doctor(capsys, monkeypatch, url):
    monkeypatch.setenv("TORCHRL_EXT_API_KEY", KEY)
    assert main(["doctor", url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [row for row in rows if row["check"] == "key"]
    return found


def assert_follows(url, root):
    sender = tx.WeightSender(tx.make_transport("disk", root=root), tx.connect(url, api_key=KEY))
    assert sender.update_weights(tiny_model(1)).verified
    sender.shutdown()


def test_vllm_guards_our_routes_by_its_key_and_doctor_names_those_that_it_leaves_open(
    checkpoint, tmp_path, capsys, monkeypatch
):
    ours = [("POST", "/update_weights_from_disk"), ("GET", ADAPTERS_ROUTE)]
    ours += [("POST", ADAPTERS_ROUTE)]
    settings = {"dtype": "float32", "max_model_len": 256, "log_path": tmp_path / "log"}
    with serving(ServedVLLM, checkpoint, environ={"VLLM_API_KEY": KEY}, **settings) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for headers, status in (({}, {401}), ({"authorization": f"Bearer {KEY}"}, {200, 400})):
                for method, route in ours:
                    assert http.request(method, route, json={}, headers=headers).status_code in status, route
        found = told_by_doctor(capsys, monkeypatch, server.url)
        assert found["level"] == "warning" and "/pause, " in found["found"] and "/collective_rpc" in found["found"]
        assert "torchrl_ext" not in found["found"] and "from_disk" not in found["found"]
        assert_follows(server.url, tmp_path / "updates")


def test_sglang_guards_every_route_that_an_update_takes(checkpoint, tmp_path, capsys, monkeypatch):
    settings = {"dtype": "float32", "max_model_len": 256, "log_path": tmp_path / "log"}
    routes = ["/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"]
    with serving(ServedSGLang, checkpoint, extra_args=["--api-key", KEY], **settings) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert {route: http.post(route, json={}).status_code for route in routes} == dict.fromkeys(routes, 401)
        found = told_by_doctor(capsys, monkeypatch, server.url)
        assert found["level"] == "ok"
        assert_follows(server.url, tmp_path / "updates")
