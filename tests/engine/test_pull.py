"""Real servers pull versions into a local checkpoint and load them from there, as slime's and vime's trainers ask."""

import shutil

import pytest
from safetensors.torch import load_file

from tests.compat.test_slime_chains import write_slime
from tests.models import tiny_model
from tests.transports.chains import folder
from torchrl_ext.codecs.patch import diff
from torchrl_ext.compat.slime.first import build_flush, flush_name
from torchrl_ext.types import ParamMeta

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]


@pytest.fixture
def root(served, tmp_path):
    """Two versions on the checkpoint that the server was started with."""
    held = load_file(f"{served.checkpoint}/model.safetensors")
    for version in (1, 2):
        named = tiny_model(10 + version).state_dict()
        new = {name: named[name].detach().clone() for name in held}
        write_slime(folder(tmp_path / "root", version), version, held, new, "xor", "xxh3-128")
        held = new
    return tmp_path / "root"


def call(served, method, route, body=None, expected=200):
    answer = served.http.call(method, route, body)
    assert answer.status == expected, answer.json()
    return answer.json()


def pull(served, root, local, version, expected=200):
    body = {"local_checkpoint_dir": str(local), "source_dir": str(root), "target_version": version}
    return call(served, "POST", "/pull_weights", body, expected)


def test_slimes_calls_bring_a_stock_server_from_version_to_version_and_back(served, root, tmp_path):
    local = tmp_path / "local"
    for version in (0, 1, 2, 0):
        told = pull(served, root, local, version)
        assert told["success"] and told["message"] == "Success."
        if served.kind == "sglang":
            call(served, "POST", "/pause_generation", {})
            assert served.http.call("GET", "/flush_cache").status == 200
        call(served, "POST", "/update_weights_from_disk", {"model_path": str(local), "weight_version": str(version)})
        if served.kind == "sglang":
            call(served, "POST", "/continue_generation", {})
            assert call(served, "GET", "/get_weight_version") == {"weight_version": str(version)}
        model = tiny_model(10 + version) if version else tiny_model(0)
        assert served.would_say(model, served.tokens()) and served.version() == str(version)


def test_what_cannot_be_pulled_is_told_in_words_and_nothing_changes(served, root, tmp_path):
    said = served.tokens()
    told = pull(served, root, tmp_path / "local", 7, expected=400)
    assert not told["success"] and "weight_v000007" in told["message"]
    told = pull(served, root, served.checkpoint, 1, expected=400)
    assert "local checkpoint" in told["message"]
    assert served.tokens() == said and served.server.alive()


def test_a_version_lands_in_parts_whose_folder_goes_before_the_engine_serves_again(served, tmp_path):
    """As slime's first trainer sends a model with experts: a call per file, within its own pause."""
    held = load_file(f"{served.checkpoint}/model.safetensors")
    call(served, "POST", "/update_weights_from_disk", {"model_path": str(served.checkpoint), "weight_version": "0"})
    pause, resume = ("/pause_generation", "/continue_generation") if served.kind == "sglang" else ("/pause", "/resume")
    for version in (1, 2):
        named = tiny_model(20 + version).state_dict()
        patches = [diff(ParamMeta.of(name, old), old, named[name].detach()) for name, old in held.items()]
        held = {name: named[name].detach().clone() for name in held}
        path = folder(tmp_path, version)
        path.mkdir()
        served.http.call("POST", pause, {})
        for number in range(2):
            data = build_flush(patches[number::2], "deltas_zstd", current_version=str(version))
            (path / flush_name(0, number)).write_bytes(data)
            body = {"model_path": str(path), "load_format": "delta", "files": [flush_name(0, number)]}
            call(served, "POST", "/update_weights_from_disk", {**body, "weight_version": str(version)})
            if served.kind == "vllm":
                assert served.paused()
        shutil.rmtree(path)
        served.http.call("POST", resume, {})
        assert served.would_say(tiny_model(20 + version), served.tokens()) and served.version() == str(version)


@pytest.mark.parametrize("served", ["vllm"], indirect=True)
def test_vimes_calls_do_the_same(served, root, tmp_path):
    local = str(tmp_path / "local")
    for version in (1, 2, 0):
        told = {"local_checkpoint_dir": local, "source_dir": str(root), "target_version": version}
        found = call(served, "POST", "/collective_rpc", {"method": "pull_weights", "kwargs": told})
        assert found == {"results": [{"success": True, "weight_version": str(version)}]}
        served.http.call("POST", "/pause?mode=abort&clear_cache=false")
        served.http.call("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        load = {"weights_path": local, "is_checkpoint_format": True}
        call(served, "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": load})
        call(served, "POST", "/update_weight_version", {"new_version": str(version)})
        served.http.call("POST", "/resume")
        assert served.would_say(tiny_model(10 + version) if version else tiny_model(0), served.tokens())
        assert served.version() == str(version)
