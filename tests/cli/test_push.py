"""``torchrl-ext push``: a checkpoint into running engines, and what happens when it does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.control.servers import running
from tests.engines.embedded import EmbeddedServer
from tests.fakes import FakeEngine
from tests.models import greedy, tiny_checkpoint, tiny_model
from torchrl_ext.cli.main import main
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.requests.client import InferenceClient
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
    (found,) = client.generate([PROMPT], max_tokens=count, temperature=0.0)
    return list(found.token_ids)


def holds(engine, directory):
    digests = HTTPSession(engine.url).get("/weights_digest")["digests"]
    return all(
        digests[name] == position_digest(tensor).hex()
        for name, tensor in load_file(directory / "model.safetensors").items()
    )


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_every_engine_serves_the_checkpoint_afterwards(transport, engines, start, other, capsys):
    before = pushed(capsys, start, engines)["report"]["version"]
    document = pushed(capsys, other, engines, "--transport", transport)
    report = document["report"]
    assert document["pushed"] and report["version"] == before + 1 and report["verified"]
    assert report["transport"] == transport and [row["state"] for row in report["engines"]] == ["serving"] * 2
    for engine in engines:
        assert holds(engine, other)
    assert says(engines[0], 8) == greedy(tiny_model(1), PROMPT, 8)


def test_weights_that_do_not_fit_are_refused_before_the_pause(fresh, start, tmp_path, capsys):
    strange, before = tiny_checkpoint(tmp_path / "strange", hidden_size=64), says(fresh)
    document = pushed(capsys, strange, [fresh], status=3)
    assert document["type"] == "UpdateError" and "lm_head.weight" in document["error"] and not document["pushed"]
    (row,) = document["report"]["engines"]
    assert row["state"] == "serving" and row["pause_s"] == 0
    assert says(fresh) == before and holds(fresh, start)


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
        ("dir --transport collective --root x --engines 127.0.0.1:9", 2, "ConfigError", "--transport disk"),
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
    info = {"engine": "embedded", "version": "1", "model": "/m", "parallel_config": {}, "transports": []}
    with running(get_server_info=(200, info), get_get_world_size=(404, {})) as served:
        assert "doctor" in pushed(capsys, start, [served], status=2)["error"]
