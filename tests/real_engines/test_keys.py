"""Real servers with an API key: what they tell strangers, and what a trainer that has the key does with them."""

import httpx
import pytest

import torchrl_ext as tx
from tests.models import tiny_model
from tests.real_engines.served import ServedSGLang, ServedVLLM, serving

pytestmark = pytest.mark.engine

KEY = "sesame"
UPDATE = ("/update_weights_from_disk",)
STARTS = {
    "vllm": (ServedVLLM, {"environ": {"VLLM_API_KEY": KEY}}, UPDATE),
    "sglang": (
        ServedSGLang,
        {"extra_args": ["--api-key", KEY]},
        (*UPDATE, "/pause_generation", "/weights_checker", "/continue_generation"),
    ),
}


@pytest.mark.parametrize("kind", STARTS)
def test_api_key_guards_update_routes_and_admits_sender(kind, checkpoint, tmp_path):
    make, settings, guarded = STARTS[kind]
    settings = {**settings, "dtype": "float32", "max_model_len": 256, "log_path": tmp_path / "log"}
    with serving(make, checkpoint, **settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert {http.post(route, json={}).status_code for route in guarded} == {401}
        http.headers["authorization"] = f"Bearer {KEY}"
        if kind == "vllm":
            assert {http.post(route, json={}).status_code for route in guarded} <= {200, 400}
        sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path), tx.connect(server.url, api_key=KEY))
        assert sender.update_weights(tiny_model(1)).verified
        sender.shutdown()
