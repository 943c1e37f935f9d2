"""``/update_weights_from_disk`` over every kind of engine: one suite."""

import json
import random
import threading
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from starlette.testclient import TestClient

import torchrl_ext as tx
from tests.data.transports.chains import folder
from tests.engines.stand_ins import VLLM, SGLang, add_sglang
from tests.hostile import worse_json
from tests.models import tiny_model
from tests.processes import WAIT_S
from tests.sync.ends import digests
from torchrl_ext.base.routes import MAX_BODY_BYTES
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.embedded.server import make_app

LOAD = "/update_weights_from_disk"
JSON = {"content-type": "application/json"}


class Embedded:
    """The embedded engine, looked at like the stand-ins."""

    def __init__(self, engine):
        self.engine, self.scheduler, self.digests = engine, engine.scheduler, engine.digests
        self.app = lambda: make_app(engine)

    def _hold(self, paused):
        self.engine.pause("keep", 0.0) if paused else self.engine.resume()

    label = property(lambda self: self.scheduler.version)
    paused = property(lambda self: self.scheduler.paused, _hold)
    dropped = property(lambda self: self.scheduler.forget.call_count)


@pytest.fixture(params=["embedded", "vllm", "sglang"])
def engine(request, checkpoint, monkeypatch):
    """An engine that holds the checkpoint, with a client of its server as ``http``."""
    add_sglang(monkeypatch)
    held = load_file(f"{checkpoint}/model.safetensors")
    if request.param == "embedded":
        made = Embedded(EmbeddedEngine(str(checkpoint), dtype="float32"))
        monkeypatch.setattr(made.scheduler, "forget", Mock(wraps=made.scheduler.forget))
    else:
        made = {"vllm": VLLM, "sglang": SGLang}[request.param](held, checkpoint)
    made.kind = request.param
    with TestClient(made.app(), raise_server_exceptions=False) as made.http:
        yield made
    if request.param != "embedded":
        made.let_go.set()
        made.end.close()


only = pytest.mark.parametrize


def ask(engine, route, body=None, expected=200):
    answer = engine.http.post(route, json=body or {})
    assert answer.status_code == expected, answer.text
    told = answer.json()
    assert told["success"] == (expected == 200)
    return told["message"]


def serves(engine, named):
    """Whether the engine holds these tensors."""
    return digests(named).items() <= engine.digests().items()


@pytest.fixture(scope="module")
def history(checkpoint, tmp_path_factory):
    """Two deltas on the checkpoint, each of which leads to another model, by number; the checkpoint's is 0."""
    held, root = load_file(f"{checkpoint}/model.safetensors"), tmp_path_factory.mktemp("root")
    models = {0: held, "root": root}
    with tx.DeltaTransport(root, base=checkpoint, encoding="deltas_zstd", keyframe_every=0) as trainer:
        for version in (1, 2):
            named = tiny_model(10 + version).state_dict()
            models[version] = {name: named[name].detach().clone() for name in held}
            trainer.send_weights(models[version])
    return models


def delta(history, version, **more):
    return {"load_format": "delta", "model_path": str(folder(history["root"], version)), **more}


def test_a_delta_lands_and_the_callers_pause_stays(engine, history):
    said = ask(engine, LOAD, delta(history, 1, weight_version="one"))
    assert "version 1 of" in said and serves(engine, history[1]) and engine.label == "one" and not engine.paused
    engine.paused = True
    ask(engine, LOAD, {"load_format": "delta", "model_path": str(history["root"]), "weight_version": "two"})
    assert serves(engine, history[2]) and engine.label == "two" and engine.paused


def test_a_load_drops_what_was_cached_with_older_weights(engine, history):
    ask(engine, LOAD, delta(history, 1))
    assert engine.dropped == 1 and serves(engine, history[1]) and engine.label == "1"


def test_invalid_load_request_gets_400_and_changes_no_weights(engine, history):
    for body, words in (
        (delta(history, 9), "no version 9"),
        (delta(history, 1, model_path=7), "model_path"),
        (delta(history, 1, model_path="relative"), "does not open relative"),
        (delta(history, 1, weight_version=[]), "weight_version"),
        *(((delta(history, 1, load_format="auto"), "load_format"),) if engine.kind != "sglang" else ()),
    ):
        assert words in ask(engine, LOAD, body, expected=400)
    assert serves(engine, history[0]) and engine.label in ("0", "default") and not engine.paused


def test_no_web_page_makes_an_engine_load(engine, history):
    content = json.dumps(delta(history, 1))
    found = [engine.http.post(LOAD, content=content, headers={**JSON, "origin": "https://page.example"})]
    if engine.kind != "sglang":  # whose own route takes JSON alone
        found.append(engine.http.post(LOAD, content=content, headers={"content-type": "text/plain"}))
        found.append(engine.http.post(LOAD, content=" " * MAX_BODY_BYTES + content, headers=JSON))
    assert {answer.status_code for answer in found} <= {400, 403, 415}, [answer.text for answer in found]
    assert serves(engine, history[0]) and not engine.paused


def test_broken_load_pauses_the_engine_until_load_and_resume(engine, history, tmp_path, monkeypatch):
    root = tmp_path / "full"
    with tx.DeltaTransport(root) as trainer:
        trainer.send_weights(history[1])
    body = {"load_format": "delta", "model_path": str(root), "weight_version": "1"}
    with monkeypatch.context() as patch:
        patch.setattr("torchrl_ext.data.landing.loader.TensorsLoader.load", lambda loader, pairs: 1 / 0)
        assert "is paused" in ask(engine, LOAD, body, expected=400) and engine.paused
    ask(engine, LOAD, body)
    assert serves(engine, history[1]) and engine.label == "1" and engine.paused
    engine.paused = False


@only("engine", ["vllm", "sglang"], indirect=True)
class TestStandIns:
    """What only a stand-in can be made to do."""

    def test_an_update_that_was_not_begun_leaves_the_engine_serving(self, engine, history):
        engine.fails = "start"
        assert "still serves its previous weights" in ask(engine, LOAD, delta(history, 1), expected=400)
        assert not engine.paused and serves(engine, history[0])

    def test_every_call_has_a_deadline(self, engine, history, monkeypatch):
        engine.hangs = "start"
        load = threading.Thread(target=ask, args=(engine, LOAD, delta(history, 1)))
        load.start()
        assert engine.hanging.wait(WAIT_S)
        monkeypatch.setattr("torchrl_ext.engines.update_from_disk._BUSY_S", 0.01)
        assert "another load" in ask(engine, LOAD, delta(history, 1), expected=400)
        engine.let_go.set()
        load.join()
        assert serves(engine, history[1])
        engine.hangs = "finish"
        engine.let_go.clear()
        monkeypatch.setattr("torchrl_ext.control.port.Port.timeout_s", 0.3)
        monkeypatch.setattr("torchrl_ext.engines.sglang.routes._STEP_S", 0.3)
        assert "did not answer within" in ask(engine, LOAD, delta(history, 2), expected=400)


@only("engine", ["vllm"], indirect=True)
class TestVLLM:
    def test_the_route_wants_the_servers_key(self, engine):
        with TestClient(engine.app(key="sesame")) as http:
            assert http.post(LOAD).status_code == 401

    def test_a_thousand_damaged_bodies_get_an_answer(self, engine, history):
        chance = random.Random(3)
        for body in (worse_json(delta(history, 9, weight_version="1"), chance) for _ in range(1000)):
            answer = engine.http.post(LOAD, content=json.dumps(body), headers=JSON)
            assert answer.status_code == 400 and answer.json(), body
        for text in (b"", b"{", b"\xff", b"[" * 100_000):
            assert engine.http.post(LOAD, content=text, headers=JSON).status_code == 400
        assert serves(engine, history[0]) and not engine.paused
