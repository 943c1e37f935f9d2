"""A real SGLang server follows by delta, one worker and two.

The servers are started one after the other; the tests of one run in the order of this file, and the first one needs an
engine that still holds the checkpoint that it was started with.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.engine.conftest import ServedSGLang, serve_sglang
from tests.engine.test_vllm_delta import nudged
from tests.models import greedy, tiny_model, tiny_tokenizer
from torchrl_ext.weights.position_digest import position_digest

pytestmark = pytest.mark.engine

SERVERS = {
    "one worker": {"dtype": "float32"},
    "two workers": {"dtype": "float32", "tensor_parallel_size": 2},
    "two workers, tied": {"dtype": "float32", "tensor_parallel_size": 2},
    "bfloat16": {"dtype": "bfloat16"},
}


USUAL = ("one worker", "two workers, tied")
PARAMS = [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in SERVERS]


@pytest.fixture(scope="module", params=PARAMS)
def served(request, tmp_path_factory):
    settings = SERVERS[request.param]
    dtype, tied = getattr(torch, settings["dtype"]), "tied" in request.param

    def model(seed):  # in bfloat16 two implementations agree only where one token leads by far
        return tiny_model(seed, dtype, decided=dtype == torch.bfloat16, tie_word_embeddings=tied)

    start = tmp_path_factory.mktemp("model") / "start"
    model(0).save_pretrained(start)
    tiny_tokenizer().save_pretrained(start)
    with serve_sglang(start, tmp_path_factory, **settings) as server:
        found = ServedSGLang(server)
        found.start, found.model, found.exact = start, model, dtype == torch.float32
        yield found


@contextmanager
def following(served, root, **settings):
    transport = tx.make_transport("delta", root=root, **settings)
    sender = tx.WeightSender(transport, tx.make_engine("sglang", url=served.url))
    try:
        yield sender
    finally:
        sender.shutdown()


def assert_serves(served, model, report):
    choice = served.generate()
    if served.exact:  # else near-ties of a changed model may fall either way; the digests have proven the weights
        assert choice["token_ids"] == greedy(model)
    assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
    assert served.version() == str(report.version)
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
    with following(served, tmp_path, encoding=encoding) as sender:
        assert_serves(served, model, sender.update_weights(model))
        for seed, density in ((4, 0.01), (5, 0.01), (6, 1.0), (7, 0.01)):
            model = nudged(model, density, seed) if density < 1 else served.model(seed)
            report = sender.update_weights(model)
            assert (report.density < 0.05) == (density < 1)
            assert_serves(served, model, report)
    assert served.server.pid == pid and served.server.alive()


def test_requests_in_flight_complete_while_versions_are_staged_and_land(served, tmp_path):
    model = served.model(8)
    with following(served, tmp_path) as sender, ThreadPoolExecutor(4) as pool:
        versions = [sender.update_weights(model).version]
        going = True

        def stream():
            choices = []
            while going or not choices:
                choices.append(served.generate(100, temperature=1.0))
            return choices

        futures = [pool.submit(stream) for _ in range(3)]
        try:
            for seed in (9, 10, 11):
                model = nudged(model, 0.01, seed)
                report = sender.update_weights(model)
                versions.append(report.version)
        finally:
            going = False
        choices = [choice for future in futures for choice in future.result()]
    for choice in choices:
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 100
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 100
        seen = [int(span["version"]) for span in spans]
        assert set(seen) <= set(versions) and seen == sorted(seen)
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)  # else nothing was in flight
    assert_serves(served, model, report)


def test_a_delta_on_another_base_is_refused_before_the_pause_and_the_next_update_recovers(served, tmp_path):
    good = served.model(12)
    with following(served, tmp_path, encoding="ulp") as sender:
        before = sender.update_weights(good).version
        said = served.tokens()
        name = "model.layers.1.mlp.down_proj.weight"
        copies = sender._transport._publisher._baseline  # a trainer whose copy is not what the engines hold
        copies.tensor(name).view(-1)[7:9].add_(1.0)
        copies._digests[name] = position_digest(copies.tensor(name))
        other = nudged(good, 0.01, 13)
        with pytest.raises(tx.WeightSyncError, match=rf"did not prefetch version(.|\n)*{name}"):
            sender.update_weights(other)
        assert served.version() == str(before) and served.tokens() == said
        report = sender.update_weights(other)
        assert list(tmp_path.glob(f"weight_v{report.version:06d}/*.safetensors"))  # a full version
        assert_serves(served, other, report)
        last = nudged(other, 0.01, 14)
        assert_serves(served, last, sender.update_weights(last))


def by_route(served, path, expected=200, load_format="delta", **body):
    body = {"model_path": str(path), "load_format": load_format, **body}
    answer = served.http.call("POST", "/update_weights_from_disk", body)
    told = answer.json()
    assert answer.status == expected, told
    assert told["success"] == (expected == 200)
    return told["message"]


def test_the_route_that_slimes_trainers_call_lands_versions_without_a_trainer(served, tmp_path):
    """The trainer only publishes; somebody else tells the engine."""
    transport, model = tx.make_transport("delta", root=tmp_path / "chain", encoding="deltas_zstd"), served.model(16)
    for version, density in ((1, 1.0), (2, 0.01), (3, 0.01)):
        model = nudged(model, density, 50 + version) if version > 1 else model
        transport.send_weights(model)
        path = tmp_path / "chain" / f"weight_v{version:06d}" if version != 2 else tmp_path / "chain"
        by_route(served, path, weight_version=f"run-{version}", flush_cache=True)
        assert served.version() == f"run-{version}" and (not served.exact or served.tokens() == greedy(model))
    label, said = served.version(), served.tokens()
    transport.send_weights(nudged(model, 0.01, 60))
    for file in (tmp_path / "chain" / "weight_v000004").iterdir():
        if file.suffix in (".safetensors", ".bin"):
            file.write_bytes(file.read_bytes()[:-9])
    assert "weight_v000004" in by_route(served, tmp_path / "chain", 400, weight_version="bad")
    assert "holds no version" in by_route(served, tmp_path / "chain" / "weight_v000009", 400, weight_version="bad")
    assert served.tokens() == said and served.version() == label
    transport.shutdown()


def test_a_checkpoint_loaded_past_us_is_no_base_of_later_deltas(served, tmp_path):
    model = served.model(17)
    with following(served, tmp_path / "chain") as sender:
        sender.update_weights(model)
        other = served.model(18)
        other.save_pretrained(tmp_path / "other")
        by_route(served, tmp_path / "other", load_format="auto", weight_version="other")
        assert served.version() == "other" and (not served.exact or served.tokens() == greedy(other))
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
            tx.make_transport("disk", root=tmp_path / f"disk{turn}"), tx.make_engine("sglang", url=served.url)
        )
        assert_serves(served, model, sender.update_weights(model))
        sender.shutdown()
