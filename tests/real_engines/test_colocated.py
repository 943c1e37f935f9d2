"""Engines on the trainer's machine sleep while the trainer works, and take weights from shared memory."""

import pytest

from tests.models import tiny_model
from tests.pages import on_servers
from tests.real_engines.served import sending
from torchrl_ext.base.errors import EngineError

pytestmark = pytest.mark.engine

NO_WEIGHTS = "no weights to serve|holds no weights"


@pytest.mark.parametrize(("kind", "level"), [("vllm", 1), ("vllm", 2), ("sglang", 2)])
def test_an_update_wakes_a_sleeping_engine(request, kind, level, tmp_path):
    served, model = request.getfixturevalue(kind), tiny_model(12)
    with sending("ipc", tmp_path, served) as sender:
        sender.update_weights(tiny_model(11))
        sender.engine.sleep(level)
        assert served.kind != "vllm" or served.http.get("/is_sleeping")["is_sleeping"]
        if level == 2:
            with pytest.raises(EngineError, match=NO_WEIGHTS):
                sender.engine.resume()
        served.assert_serves(model, sender.update_weights(model))
    assert served.kind != "vllm" or not served.http.get("/is_sleeping")["is_sleeping"]
    assert not served.paused() and served.mapping() == []


def test_update_after_manual_sleep_wakes_engine_and_sends_all(vllm, tmp_path):
    with sending("delta", tmp_path, vllm) as sender:
        for seed in (33, 34):
            model = tiny_model(seed)
            sender.update_weights(model)
            vllm.http.post("/sleep", query={"level": 2})
            assert sender.update_weights(model).verified
            assert not vllm.http.get("/is_sleeping")["is_sleeping"] and vllm.says(model)


def test_the_page_about_engines_of_the_trainers_machine(vllm, checkpoint):
    on_servers("start_engine", checkpoint, vllm.url, what="vllm")
