"""What every engine does that follows by delta: packed and plain linears, one and two workers, never a wrong word.

The servers are started one after the other; the tests of one run in the order of this file, and the first one needs an
engine that still holds the checkpoint that it was started with.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

import torchrl_ext as tx
from tests.bench.models import plain_linears
from tests.models import tiny_checkpoint, tiny_model
from tests.real_engines.served import ServedSGLang, ServedVLLM, by_route, sending, serving
from torchrl_ext.data.weights.digests import position_digest

pytestmark = pytest.mark.engine

SERVERS = {
    "vllm, packed": (ServedVLLM, {}),
    "vllm, plain": (ServedVLLM, {}),
    "vllm, packed and tied, two workers": (ServedVLLM, {"tensor_parallel_size": 2}),
    "vllm, plain, two workers, bfloat16": (ServedVLLM, {"tensor_parallel_size": 2}),
    "sglang": (ServedSGLang, {}),
    "sglang, two workers": (ServedSGLang, {"tensor_parallel_size": 2}),
    "sglang, tied, two workers": (ServedSGLang, {"tensor_parallel_size": 2}),
    "sglang, bfloat16": (ServedSGLang, {}),
}
"""How servers are started, by a name that also says which form the weights have: tied embeddings, linears as a GPU
keeps them (plain), and bfloat16."""
USUAL = ("vllm, packed and tied, two workers", "sglang, tied, two workers")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in SERVERS],
)
def served(request, tmp_path_factory):
    name = request.param
    make, settings = SERVERS[name]
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    form = {"dtype": getattr(torch, dtype), "tie_word_embeddings": "tied" in name}
    form["decided"] = dtype == "bfloat16"  # in which two implementations agree only where one token leads by far
    start = tiny_checkpoint(tmp_path_factory.mktemp("model") / "start", **form)
    settings = {"max_model_len": 256, "dtype": dtype, "log_path": start.parent / "log", **settings}
    with plain_linears() if "plain" in name else nullcontext(), serving(make, start, **settings) as found:
        found.model = lambda seed: tiny_model(seed, **form)
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


def test_first_version_on_checkpoint_base_is_a_delta(served, tmp_path):
    model = served.model(0)
    with sending("delta", tmp_path, served, settings={"base": served.checkpoint}) as sender:
        for seed in (1, 2):
            model = nudged(model, 0.01, seed)
            report = sender.update_weights(model)
            assert report.density < 0.05 and report.bytes < report.model_bytes / 4
            served.assert_serves(model, report)
    assert not list(tmp_path.glob("weight_v*/model*.safetensors"))


@pytest.mark.parametrize(
    "encoding", ["auto", "ulp", "deltas_zstd", pytest.param("context", marks=pytest.mark.exhaustive)]
)
def test_sparse_and_dense_deltas_give_trainer_outputs(served, tmp_path, encoding):
    pid, model = served.server.pid, served.model(3)
    with sending("delta", tmp_path / "root", served, settings={"encoding": encoding}) as sender:
        served.assert_serves(model, sender.update_weights(model))
        for seed, density in ((4, 0.01), (5, 0.01), (6, 1.0), (7, 0.01)):
            model = nudged(model, density, seed) if density < 1 else served.model(seed)
            report = sender.update_weights(model)
            assert (report.density < 0.05) == (density < 1)
            served.assert_serves(model, report)
    assert served.server.pid == pid and served.server.alive()


def test_delta_on_wrong_base_is_refused_and_next_update_recovers(served, tmp_path):
    good = served.model(12)
    with sending("delta", tmp_path, served, settings={"encoding": "ulp"}) as sender:
        before = sender.update_weights(good).version
        said = served.tokens()
        name = "model.layers.1.mlp.down_proj.weight"
        own = sender._transport._own  # a trainer whose copy is not what the engines hold
        copy = own._copies.by_name()[name]
        copy.view(-1)[7:9].add_(1.0)
        own.digests[own.table.number[name]] = position_digest(copy)
        other = nudged(good, 0.01, 13)
        with pytest.raises(tx.WeightSyncError, match=rf"{name}(.|\n)*did not prefetch version"):
            sender.update_weights(other)
        assert served.is_called(str(before)) and served.tokens() == said and not served.paused()
        report = sender.update_weights(other)
        assert list(tmp_path.glob(f"weight_v{report.version:06d}/model*.safetensors"))  # a full version
        served.assert_serves(other, report)
        last = nudged(other, 0.01, 14)
        served.assert_serves(last, sender.update_weights(last))


def test_slime_update_route_lands_versions_without_trainer(served, tmp_path):
    """The trainer only publishes; somebody else tells the engine."""
    chain, model = tmp_path / "chain", served.model(16)
    transport = tx.make_transport("delta", root=chain, encoding="deltas_zstd")
    for version, density in ((1, 1.0), (2, 0.01), (3, 0.01)):
        model = nudged(model, density, 50 + version) if version > 1 else model
        transport.send_weights(model)
        path = chain / f"weight_v{version:06d}" if version != 2 else chain
        by_route(served, path, load_format="delta", weight_version=f"run-{version}", flush_cache=True)
        assert served.would_say(model, served.tokens()) and served.is_called(f"run-{version}")
    label, said = served.version(), served.tokens()
    transport.send_weights(nudged(model, 0.01, 60))
    for file in (chain / "weight_v000004").iterdir():
        if file.suffix == ".safetensors":
            file.write_bytes(file.read_bytes()[:-9])
    bad = {"expected": 400, "weight_version": "bad"}
    assert "weight_v000004" in by_route(served, chain, load_format="delta", **bad)
    assert "holds no version" in by_route(served, chain / "weight_v000009", load_format="delta", **bad)
    assert served.tokens() == said and served.version() == label and not served.paused()
    transport.shutdown()


def load_past_us(served, folder):
    """Have an engine load a checkpoint by a route of its own."""
    if served.kind == "sglang":
        by_route(served, folder, load_format="auto")
        return
    everywhere = {"reset_running_requests": "true", "reset_external": "true"}
    served.http.post("/pause", query={"mode": "keep"})
    served.http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    served.http.post("/reset_prefix_cache", query=everywhere)
    served.http.post("/resume")


def test_a_checkpoint_loaded_past_us_is_no_base_of_later_deltas(served, tmp_path):
    model, other = served.model(17), served.model(18)
    with sending("delta", tmp_path / "chain", served) as sender:
        sender.update_weights(model)
        other.save_pretrained(tmp_path / "other")
        load_past_us(served, tmp_path / "other")
        assert served.would_say(other, served.tokens())
        model = nudged(model, 0.01, 61)
        served.assert_serves(model, sender.update_weights(model))
