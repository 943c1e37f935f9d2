"""A real vLLM server follows by delta: packed and plain linears, one and two workers, and never a wrong word.

The servers are started one after the other; the tests of one run in the order of this file, and the first one needs an
engine that still holds the checkpoint that it was started with.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
import torch

import torchrl_ext as tx
from tests.engine.conftest import Served
from tests.models import doubtful, tiny_model, tiny_tokenizer
from torchrl_ext.launch.vllm import VLLMServer
from torchrl_ext.weights.position_digest import position_digest

pytestmark = pytest.mark.engine

SERVERS = {
    "packed": {"dtype": "float32"},
    "plain": {"dtype": "float32", "plain_linears": True},
    "packed and tied, two workers": {"dtype": "float32", "tensor_parallel_size": 2},
    "plain, two workers, bfloat16": {"dtype": "bfloat16", "plain_linears": True, "tensor_parallel_size": 2},
}


USUAL = ("plain", "packed and tied, two workers")
PARAMS = [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in SERVERS]


@pytest.fixture(scope="module", params=PARAMS)
def served(request, tmp_path_factory):
    settings = SERVERS[request.param]
    dtype, tied = getattr(torch, settings["dtype"]), "tied" in request.param

    def model(seed):
        return tiny_model(seed, dtype, decided=dtype == torch.bfloat16, tie_word_embeddings=tied)

    start = tmp_path_factory.mktemp("model") / "start"
    model(0).save_pretrained(start)
    tiny_tokenizer().save_pretrained(start)
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with VLLMServer(start, max_model_len=256, log_path=log, **settings) as server:
        found = Served(server)
        found.start, found.model = start, model
        yield found


def nudged(model, density, seed):
    """A copy in which about ``density`` of each parameter's elements moved, enough to change what it says."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            step = torch.randn(parameter.shape, generator=generator) * parameter.float().std() * 3
            chosen = torch.rand(parameter.shape, generator=generator) < density
            parameter.add_((step * chosen).to(parameter.dtype))
    return moved


@contextmanager
def following(served, root, **settings):
    transport = tx.make_transport("delta", root=root, **settings)
    sender = tx.WeightSender(transport, tx.make_engine("vllm", url=served.url))
    try:
        yield sender
    finally:
        sender.shutdown()


def assert_serves(served, model, report):
    choice = served.generate()
    assert not doubtful(model, choice["token_ids"])
    assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
    assert served.version() == str(report.version) and not served.paused()
    assert report.verified and [row.state for row in report.engines] == ["serving"]


def test_with_the_engines_checkpoint_as_base_the_first_version_is_a_delta_already(served, tmp_path):
    model = served.model(0)
    with following(served, tmp_path, base=served.start) as sender:
        for seed in (1, 2):
            model = nudged(model, 0.01, seed)
            report = sender.update_weights(model)
            assert report.density < 0.05 and report.bytes < report.model_bytes / 4
            assert_serves(served, model, report)
    assert not list(tmp_path.glob("weight_v*/*.safetensors"))


@pytest.mark.parametrize("encoding", ["auto", "ulp", "context", "deltas_zstd"])
def test_sparse_and_dense_steps_land_and_the_engine_says_what_the_trainer_would(served, tmp_path, encoding):
    pid = served.server.pid
    model = served.model(3)
    copies = {"local_dir": tmp_path / "local"} if encoding == "ulp" else {}
    with following(served, tmp_path / "root", encoding=encoding, **copies) as sender:
        assert_serves(served, model, sender.update_weights(model))
        for seed, density in ((4, 0.01), (5, 0.01), (6, 1.0), (7, 0.01)):
            model = nudged(model, density, seed) if density < 1 else served.model(seed)
            report = sender.update_weights(model)
            assert (report.density < 0.05) == (density < 1)
            assert_serves(served, model, report)
    assert served.server.pid == pid and served.server.alive()


def test_requests_in_flight_complete_while_versions_are_staged_and_land(served, tmp_path):
    model, over = served.model(8), Event()

    def requests(seed):
        choices = []
        while not over.is_set():
            choices.append(served.generate(200, seed=seed, temperature=1.0))
        return choices

    with following(served, tmp_path) as sender, ThreadPoolExecutor(4) as pool:
        versions = [sender.update_weights(model).version]
        running = [pool.submit(requests, seed) for seed in range(4)]
        try:
            for seed in (9, 10, 11):
                model = nudged(model, 0.01, seed)
                report = sender.update_weights(model)
                versions.append(report.version)
        finally:
            over.set()
        choices = [choice for future in running for choice in future.result()]
    for choice in choices:
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 200
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 200
        seen = [int(span["version"]) for span in spans]
        assert set(seen) <= set(versions) and seen == sorted(seen)
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)  # else nothing was in flight
    assert_serves(served, model, report)


def test_a_delta_on_another_base_is_refused_before_the_pause_and_the_next_update_recovers(served, tmp_path):
    good = served.model(12)
    with following(served, tmp_path, encoding="ulp") as sender:
        before = sender.update_weights(good).version
        name = "model.layers.1.mlp.down_proj.weight"
        copies = sender._transport._publisher._baseline  # a trainer whose copy is not what the engines hold
        copies.tensor(name).view(-1)[7:9].add_(1.0)
        copies._digests[name] = position_digest(copies.tensor(name))
        other = nudged(good, 0.01, 13)
        with pytest.raises(tx.WeightSyncError, match=rf"did not prefetch version(.|\n)*{name}"):
            sender.update_weights(other)
        assert not served.paused() and served.version() == str(before)
        assert not doubtful(good, served.tokens())
        report = sender.update_weights(other)
        assert list(tmp_path.glob(f"weight_v{report.version:06d}/*.safetensors"))  # a full version
        assert_serves(served, other, report)
        last = nudged(other, 0.01, 14)
        assert_serves(served, last, sender.update_weights(last))


def by_route(served, path, expected=200, **body):
    answer = served.http.call("POST", "/update_weights_from_disk", {"model_path": str(path), **body})
    told = answer.json()
    assert answer.status == expected, told
    assert told["success"] == (expected == 200) and told["num_paused_requests"] == 0
    return told["message"]


def test_the_route_that_slimes_trainers_call_lands_versions_without_a_trainer(served, tmp_path):
    """The trainer only publishes; somebody else tells the engine."""
    transport, model = tx.make_transport("delta", root=tmp_path / "chain", encoding="deltas_zstd"), served.model(16)
    for version, density in ((1, 1.0), (2, 0.01), (3, 0.01)):
        model = nudged(model, density, 50 + version) if version > 1 else model
        transport.send_weights(model)
        path = tmp_path / "chain" / f"weight_v{version:06d}" if version != 2 else tmp_path / "chain"
        by_route(served, path, load_format="delta", weight_version=f"run-{version}", flush_cache=True)
        assert not doubtful(model, served.tokens()) and served.version() == f"run-{version}"
    label = served.version()
    transport.send_weights(nudged(model, 0.01, 60))
    for file in (tmp_path / "chain" / "weight_v000004").iterdir():
        if file.suffix in (".safetensors", ".bin"):
            file.write_bytes(file.read_bytes()[:-9])
    assert "weight_v000004" in by_route(served, tmp_path / "chain", 400, load_format="delta")
    assert "holds no version" in by_route(served, tmp_path / "chain" / "weight_v000009", 400, load_format="delta")
    assert "no load_format" in by_route(served, tmp_path / "chain", 400, load_format="strange")
    assert not doubtful(model, served.tokens()) and served.version() == label and not served.paused()
    transport.shutdown()


def test_the_route_loads_a_checkpoint_and_later_deltas_do_not_build_on_what_was_before(served, tmp_path):
    model = served.model(17)
    with following(served, tmp_path / "chain") as sender:
        sender.update_weights(model)
        other = served.model(18)
        other.save_pretrained(tmp_path / "other")
        by_route(served, tmp_path / "other", weight_version="other")
        assert not doubtful(other, served.tokens()) and served.version() == "other"
        model = nudged(model, 0.01, 61)
        assert_serves(served, model, sender.update_weights(model))


def test_full_and_delta_updates_of_different_trainers_take_turns(served, tmp_path):
    model = served.model(15)
    for turn in range(2):
        with following(served, tmp_path / f"delta{turn}") as sender:
            model = nudged(model, 0.02, 20 + turn)
            sender.update_weights(model)
            model = nudged(model, 0.02, 30 + turn)
            assert_serves(served, model, sender.update_weights(model))
        model = nudged(model, 0.02, 40 + turn)
        sender = tx.WeightSender(
            tx.make_transport("disk", root=tmp_path / f"disk{turn}"), tx.make_engine("vllm", url=served.url)
        )
        assert_serves(served, model, sender.update_weights(model))
        sender.shutdown()
