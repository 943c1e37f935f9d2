"""The routes that trainers of slime and vime call, over every kind of engine: one suite."""

import fcntl
import json
import random
import shutil
import threading
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient

import torchrl_ext as tx
from tests.compat.test_slime_chains import write_slime
from tests.hostile import HOSTILE, worse_json
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.plugins.stand_ins import VLLM, SGLang, add_sglang
from tests.processes import WAIT_S
from tests.transports.chains import folder
from torchrl_ext.codecs.patch import diff
from torchrl_ext.compat.slime.embedded import routes
from torchrl_ext.compat.slime.first import build_flush, flush_name
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.server import make_app
from torchrl_ext.routes import MAX_BODY_BYTES
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest

LOAD, PULL = "/update_weights_from_disk", "/pull_weights"
JSON = {"content-type": "application/json"}
FAILS = "torchrl_ext.landing.loader.TensorsLoader.load"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


class Embedded:
    """The embedded engine, looked at like the stand-ins."""

    def __init__(self, engine):
        self.engine, self.scheduler, self.digests = engine, engine.scheduler, engine.digests
        self.app = lambda: make_app(engine, routes=routes(engine))

    @property
    def label(self):
        return self.scheduler.version

    @label.setter
    def label(self, label):
        self.scheduler.version = label

    @property
    def paused(self):
        return self.scheduler.paused

    @paused.setter
    def paused(self, paused):
        self.engine.pause("keep", 0.0) if paused else self.engine.resume()

    @property
    def dropped(self):
        return self.scheduler.forget.call_count


@pytest.fixture(params=["embedded", "vllm", "sglang"])
def engine(request, checkpoint, monkeypatch):
    """An engine that holds the checkpoint, with a client of its server as ``http``."""
    add_sglang(monkeypatch)
    held = load_file(f"{checkpoint}/model.safetensors")
    if request.param == "embedded":
        made = Embedded(Engine(str(checkpoint), dtype="float32"))
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
embedded_only = only("engine", ["embedded"], indirect=True)
loads_checkpoints = only("engine", ["embedded", "vllm"], indirect=True)  # SGLang does that by itself


def ask(engine, route, body=None, expected=200):
    answer = engine.http.post(route, json=body or {})
    assert answer.status_code == expected, answer.text
    told = answer.json()
    assert told["success"] == (expected == 200)
    return told["message"]


def serves(engine, named):
    """Whether the engine holds these tensors."""
    found = engine.digests()
    return {name: found[name] for name in named} == {name: tensor_digest(tensor) for name, tensor in named.items()}


@pytest.fixture
def history(checkpoint, tmp_path):
    """Two versions of slime's on the checkpoint, each another model, by number; with the checkpoint's as 0."""
    held = load_file(f"{checkpoint}/model.safetensors")
    models = {0: held}
    for version in (1, 2):
        named = tiny_model(10 + version).state_dict()
        models[version] = {name: named[name].detach().clone() for name in held}
        write_slime(
            folder(tmp_path / "root", version), version, models[version - 1], models[version], "xor", "xxh3-128"
        )
    return models


def delta(tmp_path, version, **more):
    return {"load_format": "delta", "model_path": str(folder(tmp_path / "root", version)), **more}


@pytest.mark.parametrize("version", [2, 0])
def test_a_version_is_pulled_while_the_engine_serves_what_it_served(engine, history, tmp_path, version):
    local = tmp_path / "local"
    told = {"local_checkpoint_dir": str(local), "source_dir": str(tmp_path / "root"), "target_version": version}
    assert engine.http.post(PULL, json=told).json() == {
        "success": True, "message": "Success.", "num_paused_requests": 0,
    }  # fmt: skip
    pulled = load_file(local / "model.safetensors")
    assert all(torch.equal(pulled[name], tensor) for name, tensor in history[version].items())
    assert serves(engine, history[0]) and not engine.paused


@loads_checkpoints
def test_a_checkpoint_is_loaded_in_the_callers_pause(engine, history, tmp_path, checkpoint):
    engine.paused = True
    other = tiny_checkpoint(tmp_path / "other", seed=11)
    ask(engine, LOAD, {"model_path": str(other), "weight_version": "5"})
    assert engine.paused and engine.label == "5"
    assert engine.loaded == [str(other)] if engine.kind == "vllm" else serves(engine, history[1])


def test_a_delta_lands_and_the_callers_pause_stays(engine, history, tmp_path):
    said = ask(engine, LOAD, delta(tmp_path, 1, weight_version="one"))
    assert "version 1 of" in said and serves(engine, history[1]) and engine.label == "one" and not engine.paused
    engine.paused = True
    ask(engine, LOAD, {"load_format": "delta", "model_path": str(tmp_path / "root"), "weight_version": "two"})
    assert serves(engine, history[2]) and engine.label == "two" and engine.paused


@pytest.mark.parametrize("flush", [True, False])
def test_what_was_cached_with_older_weights_goes_unless_the_caller_keeps_it(engine, history, tmp_path, flush):
    ask(engine, LOAD, delta(tmp_path, 1, flush_cache=flush))
    assert engine.dropped == flush and serves(engine, history[1])


def test_what_cannot_be_is_answered_with_400_and_the_engine_serves_what_it_served(engine, history, tmp_path):
    told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
    for route, body, words in (
        (PULL, {**told, "target_version": 9}, "weight_v000009"),
        (PULL, told, "`version`"),
        (PULL, {**told, "target_version": "2"}, "`int`"),
        (PULL, {**told, "target_version": 1, "local_checkpoint_dir": "relative"}, "does not open relative"),
        (LOAD, delta(tmp_path, 9), "no version 9"),
        (LOAD, delta(tmp_path, 1, model_path=7), "model_path"),
        (LOAD, delta(tmp_path, 1, weight_version=[]), "weight_version"),
    ):
        assert words in ask(engine, route, body, expected=400)
    assert serves(engine, history[0]) and engine.label in ("0", "default") and not engine.paused


def test_no_web_page_makes_an_engine_load_or_fetch(engine, history, tmp_path):
    pull = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root"), "target_version": 1}
    for route, body in ((PULL, pull), (LOAD, delta(tmp_path, 1))):
        content = json.dumps(body)
        found = [engine.http.post(route, content=content, headers={**JSON, "origin": "https://page.example"})]
        if route == PULL or engine.kind != "sglang":  # whose own route takes JSON alone
            found.append(engine.http.post(route, content=content, headers={"content-type": "text/plain"}))
            found.append(engine.http.post(route, content=" " * MAX_BODY_BYTES + content, headers=JSON))
        assert {answer.status_code for answer in found} <= {400, 403, 415}, [answer.text for answer in found]
    assert not (tmp_path / "local").exists() and serves(engine, history[0]) and not engine.paused


def test_an_engine_that_a_failed_load_left_paused_serves_again_with_the_next_good_one(
    engine, history, tmp_path, monkeypatch
):
    root = tmp_path / "full"
    trainer = tx.make_transport("delta", root=root)
    trainer.send_weights(history[1])
    trainer.shutdown()
    body = {"load_format": "delta", "model_path": str(root), "weight_version": "1"}
    with monkeypatch.context() as patch:
        patch.setattr(FAILS, lambda loader, pairs: 1 / 0)
        assert "is paused" in ask(engine, LOAD, body, expected=400) and engine.paused
    ask(engine, LOAD, body)
    assert serves(engine, history[1]) and engine.label == "1" and not engine.paused


@only("engine", ["vllm", "sglang"], indirect=True)  # the embedded engine lets nobody resume it then
@pytest.mark.parametrize("by", ["a caller that resumes", "another trainer"])
def test_a_failure_is_forgotten_once_somebody_else_had_the_engine_serve(engine, history, tmp_path, by, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torchrl_ext.landing.loader.TensorsLoader.commit", lambda *_: 1 / 0)
        assert "is paused" in ask(engine, LOAD, delta(tmp_path, 1), expected=400)
    if by == "another trainer":
        engine.label = "17"
    else:
        engine.paused = False
        ask(engine, LOAD, delta(tmp_path, 9), expected=400)
    engine.paused = True
    ask(engine, LOAD, {"load_format": "delta", "model_path": str(tmp_path / "root")})
    assert engine.paused


@only("engine", ["vllm", "sglang"], indirect=True)
class TestStandIns:
    """What only a stand-in can be made to do."""

    def test_an_update_that_was_not_begun_leaves_the_engine_serving(self, engine, history, tmp_path):
        engine.fails = "start"
        assert "still serves its previous weights" in ask(engine, LOAD, delta(tmp_path, 1), expected=400)
        assert not engine.paused and serves(engine, history[0])

    def test_a_pull_waits_for_no_load_and_every_call_has_a_deadline(self, engine, history, tmp_path, monkeypatch):
        engine.hangs = "start"
        told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
        load = threading.Thread(target=ask, args=(engine, LOAD, delta(tmp_path, 1)))
        load.start()
        assert engine.hanging.wait(WAIT_S)
        ask(engine, PULL, {**told, "target_version": 1})
        monkeypatch.setattr("torchrl_ext.sync.published._BUSY_S", 0.01)
        assert "another load" in ask(engine, LOAD, delta(tmp_path, 1), expected=400)
        engine.let_go.set()
        load.join()
        assert serves(engine, history[1])
        engine.hangs = "finish_weight_update" if engine.kind == "vllm" else "finish"
        engine.let_go.clear()
        monkeypatch.setattr("torchrl_ext.rpc.port.Port.timeout_s", 0.3)
        monkeypatch.setattr("torchrl_ext.plugins.sglang.routes._STEP_S", 0.3)
        assert "did not answer within" in ask(engine, LOAD, delta(tmp_path, 2), expected=400)

    def test_a_thousand_damaged_bodies_get_an_answer(self, engine, history, tmp_path):
        chance = random.Random(3)
        told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
        bodies = {
            LOAD: delta(tmp_path, 9, files=["a"], weight_version="1"),
            PULL: {**told, "target_version": 9},
        }
        for route, good in bodies.items():
            for body in (worse_json(good, chance) for _ in range(1000 // len(bodies))):
                if engine.kind == "sglang" and route == LOAD:  # SGLang itself has read these fields
                    body = {**good, "files": chance.choice(HOSTILE)}
                answer = engine.http.post(route, content=json.dumps(body), headers=JSON)
                right = (200, 400) if route == PULL else (400,)  # another version than 9 may be there
                assert answer.status_code in right and answer.json(), (route, body)
            for text in (b"", b"{", b"\xff", b"[" * 100_000):
                if not (engine.kind == "sglang" and route == LOAD):
                    assert engine.http.post(route, content=text, headers=JSON).status_code == 400
        assert serves(engine, history[0]) and not engine.paused


@only("engine", ["vllm"], indirect=True)
class TestVLLM:
    def test_workers_are_told_of_a_checkpoint_that_was_loaded_past_them(self, engine, history, tmp_path, checkpoint):
        ask(engine, LOAD, delta(tmp_path, 1))
        ask(engine, LOAD, {"model_path": str(checkpoint), "weight_version": "3"})
        assert engine.loaded == [str(checkpoint)] and engine.label == "3" and not engine.paused
        assert engine.end.receiver.version is None or "2" not in str(engine.end.receiver.version)
        assert "version 2" in ask(engine, LOAD, delta(tmp_path, 2)) and serves(engine, history[2])

    def test_each_route_wants_the_servers_key(self, engine, checkpoint):
        with TestClient(engine.app(key="sesame")) as http:
            for path in (LOAD, PULL):
                assert http.post(path).status_code == 401
            told = http.get("/is_sleeping").json()
            assert told["is_paused"] is False and told["whole"] and told["tags"] == []


class TestVersionsInParts:
    """As slime's first trainer sends a model with experts: a call per file, in a pause, and no folder afterwards."""

    @pytest.fixture
    def held(self, checkpoint):
        return load_file(f"{checkpoint}/model.safetensors")

    def write(self, root, version, held, seed, encoding="deltas_zstd", parts=3):
        """Change some of each tensor of ``held``; returns the files' names in order."""
        generator, patches, path = torch.Generator().manual_seed(seed), [], folder(root, version)
        path.mkdir(parents=True)
        for name, old in held.items():
            new = old.clone()
            where = torch.rand(new.numel(), generator=generator) < 0.02
            new.view(-1)[where] += 0.5
            patches.append(diff(ParamMeta.of(name, old), old, new))
            held[name] = new
        names = [flush_name(0, number) for number in range(parts)]
        for number, name in enumerate(names):
            data = build_flush([p for p in patches[number::parts] if p.changed], encoding, current_version=str(version))
            (path / name).write_bytes(data)
        return names

    def send(self, engine, root, version, names, at_once=False):
        engine.paused = True
        for files in [names] if at_once else [[name] for name in names]:
            body = {"load_format": "delta", "model_path": str(folder(root, version)), "files": files}
            ask(engine, LOAD, {**body, "weight_version": str(version)})
            assert engine.paused
        shutil.rmtree(folder(root, version))
        engine.paused = False

    @pytest.mark.parametrize("encoding", ["indices", "deltas_zstd"])
    def test_every_part_lands_and_each_version_builds_on_the_one_before(self, engine, held, tmp_path, encoding):
        engine.label = "0"
        for version in (1, 2, 4, 5):
            names = self.write(tmp_path, version, held, version, encoding, parts=1 if version == 5 else 3)
            if version == 4:  # version 3 changed nothing: no file, and no call but this one
                engine.label = "3"
            self.send(engine, tmp_path, version, names)
            assert serves(engine, held)
        assert engine.label == "5"

    def test_a_part_that_came_twice_or_out_of_order_changes_nothing(self, engine, held, tmp_path):
        engine.label = "0"
        names = self.write(tmp_path, 1, held, 7)
        self.send(engine, tmp_path, 1, [names[2], names[0], names[2], names[1]])
        assert serves(engine, held)

    def test_a_part_is_refused_while_the_engine_serves_or_where_a_version_is_skipped(self, engine, held, tmp_path):
        engine.label, old = "0", dict(held)
        names = self.write(tmp_path, 1, held, 8)
        body = {"load_format": "delta", "model_path": str(folder(tmp_path, 1)), "files": names[:1]}
        assert "only a part" in ask(engine, LOAD, body, expected=400) and serves(engine, old)
        self.send(engine, tmp_path, 1, names, at_once=True)
        assert serves(engine, held)
        before = dict(held)
        self.write(tmp_path, 2, held, 9)
        names = self.write(tmp_path, 3, held, 10)
        shutil.rmtree(folder(tmp_path, 2))
        engine.paused = True
        body = {"load_format": "delta", "model_path": str(folder(tmp_path, 3)), "files": names}
        assert "weight_v000002" in ask(engine, LOAD, body, expected=400)
        assert serves(engine, before)

    def test_an_engine_that_a_failed_load_left_paused_takes_no_part(self, engine, held, tmp_path, monkeypatch):
        engine.label = "0"
        names = self.write(tmp_path, 1, held, 11)
        body = {"load_format": "delta", "model_path": str(folder(tmp_path, 1)), "weight_version": "1"}
        with monkeypatch.context() as patch:
            patch.setattr("torchrl_ext.landing.loader.TensorsLoader.commit", lambda *_: 1 / 0)
            assert "is paused" in ask(engine, LOAD, body, expected=400)
        for name in names:
            assert "all of its files" in ask(engine, LOAD, {**body, "files": [name]}, expected=400) and engine.paused
        ask(engine, LOAD, {**body, "files": names})
        assert serves(engine, held) and engine.label == "1" and not engine.paused


@embedded_only
class TestEmbedded:
    """Calls of slime and vime that only the embedded engine gets from us, with the tokens that it then makes."""

    def says(self, engine, count=16):
        body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True}}
        return engine.http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]

    def test_slimes_order_of_calls(self, engine, history, tmp_path):
        told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
        for version in (1, 2, 1, 0):
            ask(engine, PULL, {**told, "target_version": version})
            ask(engine, "/pause_generation")
            assert engine.http.get("/flush_cache").status_code == 200
            ask(engine, LOAD, {"model_path": str(tmp_path / "local"), "weight_version": str(version)})
            assert engine.paused
            ask(engine, "/continue_generation")
            assert engine.http.get("/get_weight_version").json() == {"weight_version": str(version)}
            assert self.says(engine) == greedy(tiny_model(10 + version if version else 0), count=16)

    def test_vimes_order_of_calls(self, engine, history, tmp_path, monkeypatch):
        local = str(tmp_path / "local")
        told = {"local_checkpoint_dir": local, "source_dir": str(tmp_path / "root"), "target_version": 2}
        call = {"method": "pull_weights", "kwargs": told}
        assert engine.http.post("/collective_rpc", json=call).json()["results"] == [
            {"success": True, "weight_version": "2"}
        ]
        assert engine.http.post("/pause?mode=abort").status_code == 200
        load = {"weights_path": local, "is_checkpoint_format": True}
        ask(engine, "/collective_rpc", {"method": "reload_weights", "kwargs": load})
        ask(engine, "/update_weight_version", {"new_version": "2"})
        assert engine.http.post("/resume").status_code == 200
        assert engine.http.get("/weight_info").json() == {"weight_version": "2", "paused": False}
        assert self.says(engine) == greedy(tiny_model(12), count=16)
        for route, body in (("/update_weight_version", {}), ("/collective_rpc", {"method": "os.system"})):
            ask(engine, route, body, expected=400)

    def test_tokens_are_made_while_a_version_is_pulled(self, engine, history, tmp_path):
        local = tmp_path / "local"
        (local / ".weight_sync").mkdir(parents=True)
        told = {"local_checkpoint_dir": str(local), "source_dir": str(tmp_path / "root"), "target_version": 2}
        with open(local / ".weight_sync" / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the pull cannot end before this is given up
            puller = threading.Thread(target=ask, args=(engine, PULL, told))
            puller.start()
            assert len(self.says(engine, 32)) == 32
            assert puller.is_alive()
        puller.join()
        assert (local / "model.safetensors").exists()
