"""The routes by which slime's and vime's trainers drive an engine, here the embedded one, in their order of calls."""

import fcntl
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient

import torchrl_ext as tx
from tests.compat.test_slime_chains import write_slime
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.transports.chains import folder
from torchrl_ext.codecs.patch import diff
from torchrl_ext.compat.slime.embedded import routes
from torchrl_ext.compat.slime.first import build_flush, flush_name
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.server import make_app
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(str(checkpoint), dtype="float32")


@pytest.fixture(scope="module")
def http(engine):
    with TestClient(make_app(engine, routes=routes(engine)), raise_server_exceptions=False) as client:
        yield client


def tensors(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def publish(root, version, old, new, encoding="xor"):
    write_slime(folder(root, version), version, old, new, encoding, "xxh3-128")


def says(http, count=16):
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True}}
    return http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]


def asked(http, route, body=None, expected=200):
    answer = http.post(route, json=body or {})
    assert answer.status_code == expected, answer.text
    return answer.json()


@pytest.fixture
def history(checkpoint, tmp_path):
    """Two versions on the engine's checkpoint, in a root, each another model; returns the models."""
    models = {version: tiny_model(10 + version) for version in (1, 2)}
    held = load_file(f"{checkpoint}/model.safetensors")
    for version, model in models.items():
        new = {name: tensors(model)[name] for name in held}
        publish(tmp_path / "root", version, held, new)
        held = new
    return models


def drive(http, tmp_path, version):
    """slime's order of calls."""
    told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
    assert asked(http, "/pull_weights", {**told, "target_version": version}) == {"success": True, "message": "Success."}
    asked(http, "/pause_generation")
    assert http.get("/flush_cache").status_code == 200
    body = {"model_path": str(tmp_path / "local"), "weight_version": str(version)}
    assert asked(http, "/update_weights_from_disk", body)["success"]
    assert http.get("/is_paused").json() == {"is_paused": True}
    asked(http, "/continue_generation")
    assert http.get("/get_weight_version").json() == {"weight_version": str(version)}


def test_versions_are_pulled_then_loaded_from_the_local_checkpoint(http, history, tmp_path, checkpoint):
    for version in (1, 2, 1, 0):
        drive(http, tmp_path, version)
        with torch.no_grad():
            assert says(http) == greedy(history[version] if version else tiny_model(0), count=16)


def test_vimes_calls_do_the_same(http, history, tmp_path):
    local = str(tmp_path / "local")
    told = {"local_checkpoint_dir": local, "source_dir": str(tmp_path / "root"), "target_version": 2}
    found = asked(http, "/collective_rpc", {"method": "pull_weights", "kwargs": told})
    assert found["results"] == [{"success": True, "weight_version": "2"}]
    asked(http, "/pause?mode=abort")
    asked(http, "/reset_prefix_cache?reset_running_requests=true")
    load = {"weights_path": local, "is_checkpoint_format": True}
    asked(http, "/collective_rpc", {"method": "reload_weights", "kwargs": load})
    asked(http, "/update_weight_version", {"new_version": "2"})
    asked(http, "/resume")
    assert http.get("/weight_info").json() == {"weight_version": "2", "paused": False}
    assert says(http) == greedy(history[2], count=16)


def test_what_cannot_be_is_answered_with_400_and_the_engine_serves_what_it_served(http, history, tmp_path):
    drive(http, tmp_path, 1)
    label, said = http.get("/get_weight_version").json(), says(http)
    told = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "root")}
    for route, body, words in (
        ("/pull_weights", {**told, "target_version": 9}, "weight_v000009"),
        ("/pull_weights", told, "missing required field `version`"),
        ("/pull_weights", {**told, "target_version": "2"}, "Expected `int`, got `str` - at `$.version`"),
        ("/pull_weights", {**told, "target_version": 1, "local_checkpoint_dir": "relative"}, "does not open relative"),
        ("/update_weights_from_disk", {"model_path": str(tmp_path / "nothing")}, "nothing"),
        ("/update_weights_from_disk", {"model_path": str(tmp_path), "load_format": "strange"}, "strange"),
        ("/update_weights_from_disk", {"load_format": "delta"}, "model_path"),
        ("/update_weight_version", {}, "new_version"),
        ("/collective_rpc", {"method": "os.system"}, "there is no method"),
    ):
        found = asked(http, route, body, expected=400)
        assert not found["success"] and words in found["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert (http.get("/get_weight_version").json(), says(http)) == (label, said)


def test_tokens_are_made_while_a_version_is_pulled(http, history, tmp_path):
    local = tmp_path / "local"
    (local / ".weight_sync").mkdir(parents=True)
    told = {"local_checkpoint_dir": str(local), "source_dir": str(tmp_path / "root"), "target_version": 2}
    with open(local / ".weight_sync" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the pull cannot end before this is given up
        puller = threading.Thread(target=asked, args=(http, "/pull_weights", told))
        puller.start()
        assert len(says(http, 32)) == 32
        assert puller.is_alive()
    puller.join()
    assert (local / "model.safetensors").exists()


def test_a_version_that_lands_without_a_local_checkpoint_leaves_the_callers_pause_alone(http, history, tmp_path):
    asked(http, "/pause_generation")
    body = {"load_format": "delta", "model_path": str(folder(tmp_path / "root", 1)), "weight_version": "1"}
    asked(http, "/update_weights_from_disk", body)
    assert http.get("/is_paused").json() == {"is_paused": True}
    asked(http, "/continue_generation")
    assert says(http) == greedy(history[1], count=16)


def test_an_engine_that_a_failed_load_left_paused_serves_again_with_the_next_good_one(
    http, engine, checkpoint, tmp_path, monkeypatch
):
    held, new = load_file(f"{checkpoint}/model.safetensors"), tensors(tiny_model(11))
    trainer = tx.make_transport("delta", root=tmp_path / "root")
    trainer.send_weights({name: new[name] for name in held})
    trainer.shutdown()
    body = {"load_format": "delta", "model_path": str(folder(tmp_path / "root", 1)), "weight_version": "1"}
    with monkeypatch.context() as patch:
        patch.setattr("torchrl_ext.landing.loader.TensorsLoader.load", lambda loader, pairs: 1 / 0)
        assert "is paused" in asked(http, "/update_weights_from_disk", body, expected=400)["message"]
    assert engine.scheduler.paused
    asked(http, "/update_weights_from_disk", body)
    assert http.get("/weight_info").json() == {"weight_version": "1", "paused": False}
    found = engine.digests()
    assert {name: found[name] for name in held} == {name: tensor_digest(new[name]) for name in held}
    asked(http, "/pause_generation")  # a caller's own
    asked(http, "/update_weights_from_disk", {"model_path": str(checkpoint)})
    assert http.get("/is_paused").json() == {"is_paused": True}
    asked(http, "/continue_generation")


class TestVersionsInParts:
    """As slime's first trainer sends a model with experts: a call per file, in a pause, and no folder afterwards."""

    @pytest.fixture
    def held(self, http, checkpoint):
        """The engine serves what it was started with."""
        asked(http, "/pause")
        asked(http, "/update_weights_from_disk", {"model_path": str(checkpoint), "weight_version": "0"})
        asked(http, "/resume")
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

    def send(self, http, root, version, names, at_once=False):
        asked(http, "/pause_generation")
        for files in [names] if at_once else [[name] for name in names]:
            body = {"load_format": "delta", "model_path": str(folder(root, version)), "files": files}
            asked(http, "/update_weights_from_disk", {**body, "weight_version": str(version)})
            assert http.get("/is_paused").json() == {"is_paused": True}
        shutil.rmtree(folder(root, version))
        asked(http, "/continue_generation")

    def serves(self, http, held):
        found = http.get("/weights_digest").json()["digests"]
        return {name: found[name] for name in held} == {name: tensor_digest(new) for name, new in held.items()}

    @pytest.mark.parametrize("encoding", ["indices", "deltas_zstd"])
    def test_every_part_lands_and_each_version_builds_on_the_one_before(self, http, held, tmp_path, encoding):
        root = tmp_path / "parts"
        for version in (1, 2, 4, 5):
            names = self.write(root, version, held, version, encoding, parts=1 if version == 5 else 3)
            if version == 4:  # version 3 changed nothing: no file, and no call but this one
                asked(http, "/update_weight_version", {"new_version": "3"})
            self.send(http, root, version, names)
            assert self.serves(http, held)
        assert http.get("/get_weight_version").json() == {"weight_version": "5"}

    def test_a_part_that_came_twice_or_out_of_order_changes_nothing(self, http, held, tmp_path):
        names = self.write(tmp_path, 1, held, 7)
        self.send(http, tmp_path, 1, [names[2], names[0], names[2], names[1]])
        assert self.serves(http, held)

    def test_a_part_is_refused_while_the_engine_serves_or_where_a_version_is_skipped(self, http, held, tmp_path):
        old = dict(held)
        names = self.write(tmp_path, 1, held, 8)
        body = {"load_format": "delta", "model_path": str(folder(tmp_path, 1)), "files": names[:1]}
        assert "only a part" in asked(http, "/update_weights_from_disk", body, expected=400)["message"]
        assert self.serves(http, old)
        self.send(http, tmp_path, 1, names, at_once=True)
        assert self.serves(http, held)
        before = dict(held)
        self.write(tmp_path, 2, held, 9)
        names = self.write(tmp_path, 3, held, 10)
        shutil.rmtree(folder(tmp_path, 2))
        asked(http, "/pause_generation")
        body = {"load_format": "delta", "model_path": str(folder(tmp_path, 3)), "files": names}
        assert "weight_v000002" in asked(http, "/update_weights_from_disk", body, expected=400)["message"]
        asked(http, "/continue_generation")
        assert self.serves(http, before)
