"""The routes by which slime's and vime's trainers drive an engine, here the embedded one, in their order of calls."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.models import PROMPT, greedy, tiny_model
from tests.transports.chains import folder
from tests.versions.test_slime_chains import write_slime


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
        ("/pull_weights", told, "has no version"),
        ("/pull_weights", {**told, "target_version": "2"}, "version of a 'pull' message"),
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
    import fcntl

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
