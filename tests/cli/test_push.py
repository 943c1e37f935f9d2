"""``torchrl-ext push``: a checkpoint into running engines, and what happens when it does not fit."""

from __future__ import annotations

import json
import shutil
import uuid

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.control.servers import running
from tests.engines.embedded import EmbeddedServer
from tests.fakes import FakeEngine
from tests.models import greedy, tiny_checkpoint, tiny_model
from torchrl_ext.cli.main import main
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.weights.digests import position_digest

PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed1", seed=1)


@pytest.fixture(scope="module")
def engines(start):
    with EmbeddedServer(start, threads=1) as one, EmbeddedServer(start, threads=1) as two:
        yield one, two


@pytest.fixture
def fresh(engines, start, capsys):
    """An engine that holds the checkpoint that it was started with."""
    assert pushed(capsys, start, engines[:1])["pushed"]
    return engines[0]


def pushed(capsys, directory, engines, *argv, status=0):
    urls = [engine.url for engine in engines]
    assert main(["push", str(directory), "--engines", *urls, *map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def says(engine, count=16):
    client = InferenceClient(engine.url, kind="embedded")
    try:
        (found,) = client.generate([PROMPT], max_tokens=count, temperature=0.0)
        return list(found.token_ids)
    finally:
        client.close()


def holds(engine, directory):
    digests = HTTPSession(engine.url).get("/weights_digest")["digests"]
    return all(
        digests[name] == position_digest(tensor).hex()
        for name, tensor in load_file(directory / "model.safetensors").items()
    )


@pytest.mark.parametrize("transport", ["disk", "delta", "collective"])
def test_every_engine_serves_the_checkpoint_afterwards(transport, engines, start, other, capsys):
    extra = ["--base", start] if transport == "delta" else []
    before = pushed(capsys, start, engines)["report"]["version"]
    document = pushed(capsys, other, engines, "--transport", transport, *extra)
    report = document["report"]
    assert document["pushed"] and report["version"] == before + 1 and report["verified"]
    assert report["transport"] == transport and [row["state"] for row in report["engines"]] == ["serving"] * 2
    for engine in engines:
        assert holds(engine, other)
    assert says(engines[0], 8) == greedy(tiny_model(1), PROMPT, 8)


def test_delta_push_carries_changes_against_running_weights(fresh, start, tmp_path, capsys):
    step, second = tmp_path / "step", tmp_path / "second"
    for source, target in ((start, step), (step, second)):
        shutil.copytree(source, target)
        weights = load_file(source / "model.safetensors")
        weights["model.norm.weight"][:3] += 1.0
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    document = pushed(capsys, step, [fresh], "--transport", "delta")["report"]
    assert 0 < document["density"] < 1e-4 and document["bytes"] < document["model_bytes"] / 50
    assert holds(fresh, step) and document["encoding"] == "ulp"
    document = pushed(capsys, second, [fresh], "--transport", "delta", "--base", step, "--encoding", "deltas")["report"]
    assert document["density"] < 1e-4 and holds(fresh, second) and document["encoding"] == "deltas"


def test_weights_that_do_not_fit_are_refused_before_the_pause(fresh, start, other, tmp_path, capsys):
    strange, before = tiny_checkpoint(tmp_path / "strange", hidden_size=64), says(fresh)
    document = pushed(capsys, strange, [fresh], status=3)
    assert document["type"] == "UpdateError" and "lm_head.weight" in document["error"] and not document["pushed"]
    (row,) = document["report"]["engines"]
    assert row["state"] == "serving" and row["pause_s"] == 0
    assert says(fresh) == before and holds(fresh, start)
    assert pushed(capsys, start, [fresh], "--transport", "delta", "--base", other)["pushed"]  # which it reads
    assert holds(fresh, start)


def test_a_cast_on_the_way_and_a_row_per_engine(start, capsys):
    with EmbeddedServer(start, threads=1, dtype="bfloat16") as server:
        assert main(["push", str(start), "--engines", server.url, "--dtype", "bfloat16"]) == 0
        out, err = capsys.readouterr()
        assert server.url in out and "serving" in out and "proved: in place" in out
        assert "1 engine(s) by disk" in err
        digests = HTTPSession(server.url).get("/weights_digest")["digests"]
    weights = load_file(start / "model.safetensors")
    assert digests["model.norm.weight"] == position_digest(weights["model.norm.weight"].to(torch.bfloat16)).hex()


@pytest.mark.parametrize("keep", [False, True])
def test_a_root_is_left_as_it_was_unless_files_are_to_stay(keep, engines, start, tmp_path, capsys):
    pushed(capsys, start, engines, "--root", tmp_path, *(["--keep-files"] if keep else []))
    kept = [path.relative_to(tmp_path).parts[1:] for path in tmp_path.rglob("model*.safetensors")]
    assert len(kept) == (1 if keep else 0)
    if not keep:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "status", "kind", "word"),
    [
        ("dir --engines 127.0.0.1:9 --base x", 2, "ConfigError", "--transport delta"),
        ("dir --transport collective --root x --engines 127.0.0.1:9", 2, "ConfigError", "--transport disk or delta"),
        ("--engines 127.0.0.1:9 127.0.0.1:8 dir --keep-files", 2, "ConfigError", "--root"),
        ("--engines 127.0.0.1:9 dir --dtype float99", 2, "ConfigError", "'float99'"),
        ("nowhere --engines 127.0.0.1:9", 2, "ConfigError", "no checkpoint"),
        ("START --engines 127.0.0.1:9", 3, "EngineUnreachableError", "127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_refused_at_once(argv, status, kind, word, start, capsys):
    assert main(["push", *argv.replace("START", str(start)).split(), "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["type"] == kind and word in document["error"]


def test_engines_of_two_makes_are_refused_before_broadcast(start, capsys):
    with FakeEngine("stock-vllm") as vllm, FakeEngine("stock-sglang") as sglang:
        document = pushed(capsys, start, [sglang, vllm], "--transport", "native", "--timeout-s", "5", status=2)
        assert document["type"] == "ConfigError" and "sglang and vllm share no broadcast" in document["error"]
        assert not any("init_weight" in route for route in (*vllm.counts, *sglang.counts))


def test_engines_that_cannot_follow_are_refused(start, capsys):
    server = {"engine": "embedded", "version": "1", "model": "/m", "parallel_config": {}, "transports": ["delta"]}
    for info, words in ((server, ("/m", "--base")), (server | {"transports": []}, ("doctor",))):
        with running(get_server_info=(200, info), get_get_world_size=(404, {})) as served:
            document = pushed(capsys, start, [served], "--transport", "delta", status=2)
        assert all(word in document["error"] for word in words)


def test_files_under_a_url_are_removed(s3, start, other, capsys):
    root = f"s3://bucket/{uuid.uuid4().hex}"
    with EmbeddedServer(start, threads=1) as engine:
        assert pushed(capsys, other, [engine], "--transport", "delta", "--root", root)["pushed"]
    assert not open_store(root).list()
