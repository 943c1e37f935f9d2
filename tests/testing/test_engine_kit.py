"""The kit for running engines passes an engine that follows, and each way to follow wrongly fails the case for it."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.embedded import EmbeddedServer
from tests.fakes import FakeEngine
from tests.processes import finished
from tests.testing import KIT
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.sync.outputs import score
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.testing.engine import test_updates as cases
from torchrl_ext.testing.engine.subject import Subject
from torchrl_ext.testing.tiny import make_tiny_lm

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2}


def checkpoint(folder, tied=False):
    """A tiny model whose outputs depend on every tensor."""
    make_tiny_lm(folder, **SMALL, tie_word_embeddings=tied)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def run(folder, url, case, *more, model):
    """The rows of a run of the kit, by case, and what pytest printed."""
    results = folder / "results.jsonl"
    given = ["--url", url, "--model", model, "--root", folder / "root", "--results", results, "-k", case, *more]
    done = finished(KIT, folder, *given)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    assert rows, done.stdout + done.stderr
    assert done.returncode == any(row["outcome"] == "failed" for row in rows), done.stdout + done.stderr
    return {row["case"]: row for row in rows}, done.stdout


@contextlib.contextmanager
def acting(folder, make="stock-vllm", sabotage=lambda old, new, fake: new, change=lambda fake: None, untie=False):
    """A server of a make that computes with a real model, by what ``sabotage`` makes of each load.

    Args:
        sabotage: takes the tensors that it computed with, those that it holds now and itself; returns what it
            computes with from now on.
        change: changes the server before it serves.
        untie: the head is a copy of the embedding, which no load reaches.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = {"lm_head.weight": model.lm_head.weight.detach().clone()} if untie else {}
    if untie:
        model.lm_head.weight = torch.nn.Parameter(head["lm_head.weight"].clone())
    tensors = {name: tensor.clone() for name, tensor in CheckpointSource(folder)}
    used = {name: tensor.clone() for name, tensor in tensors.items()}
    receiver = WeightReceiver(model)

    def compute(prompts):
        held = {name: tensor.clone() for name, tensor in fake.tensors.items()}
        used.update(sabotage({**used}, held, fake))
        receiver.apply_weights(used | head)
        rows = score(model, prompts)
        return [[value if math.isfinite(value) else None for value in row] for row in rows]

    def vllm(asked):
        if fake.paused:
            return 503, {"error": "it is paused"}
        (row,) = compute([asked["token_ids"]])
        named = zip(asked["token_ids"][1:], row, strict=True)
        rows = [None, *({str(token): {"logprob": value}} for token, value in named)]
        return {"choices": [{"token_ids": [1]}], "prompt_logprobs": rows}

    with FakeEngine(make, tensors) as fake:
        fake.answers["POST /inference/v1/generate"] = vllm
        fake.answers["POST /prompt_logprobs"] = lambda asked: {"logprobs": compute(asked["prompts"])}
        change(fake)
        yield fake


def without(part):
    """What of a load never reaches what is computed with."""
    return lambda old, new, fake: {name: old[name] if part in name else tensor for name, tensor in new.items()}


def packed_again(old, new, fake):
    """A kernel that keeps rows in another order puts them so at the start only."""
    name = "model.layers.1.mlp.up_proj.weight"
    return {**new, name: new[name].roll(1, 0)} if fake.counts["POST /collective_rpc"] else new


def nan_as_zero(old, new, fake):
    return {name: tensor.nan_to_num() for name, tensor in new.items()}


def parts_lost(old, new, fake):
    changed = [name for name in new if not torch.equal(old[name], new[name])]
    return old if 0 < len(changed) < len(new) - 1 else new


def half_until_resumed(fake):
    """It serves in its pause, in which half of its weights are gone until it is resumed."""
    resume, second = fake._routes["POST /resume"], list(fake.tensors)[len(fake.tensors) // 2 :]
    loaded = {}

    def pause(asked):
        for name in second:
            fake.tensors[name].zero_()

    def load(asked):
        loaded.update(CheckpointSource(asked["kwargs"]["weights_path"]))
        for name in loaded.keys() - second:
            fake.tensors[name].copy_(loaded[name])

    def resumed(asked):
        for name in loaded.keys() & second:
            fake.tensors[name].copy_(loaded[name])
        return resume(asked)

    fake.answers |= {"POST /pause": pause, "POST /collective_rpc": load, "POST /resume": resumed}


def loads_what_fits(fake):

    def reload(asked):
        for name, tensor in CheckpointSource(asked["kwargs"]["weights_path"]):
            if name in fake.tensors and fake.tensors[name].shape == tensor.shape:
                fake.tensors[name].copy_(tensor)
        return {"results": [None]}

    fake.answers["POST /collective_rpc"] = reload


def asleep_lost(old, new, fake):
    """What is loaded in its sleep is lost."""
    return old if fake.counts["POST /wake_up"] else new


def one_trainer(fake):
    """It loads only what comes from where the last load came from."""
    reload, seen = fake._routes["POST /collective_rpc"], []

    def load(asked):
        root = asked["kwargs"]["weights_path"].rpartition("/")[0]
        known = root in seen[-1:] or not seen
        seen.append(root)
        return reload(asked) if known else {"results": [None]}

    fake.answers["POST /collective_rpc"] = load


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"dense": checkpoint(folder / "dense"), "tied": checkpoint(folder / "tied", tied=True)}


HONEST = {
    "identity": (cases.test_identity, {}),
    "destroy": (cases.test_destroy_and_restore, {}),
    "every tensor": (cases.test_every_tensor, {}),
    "tied": (cases.test_tied_weights, {"model": "tied"}),
    "partial": (cases.test_partial_update, {"make": "embedded"}),
    "nan": (cases.test_nan, {}),
    "sleep": (partial(cases.test_sleep, level=1), {"make": "vllm"}),
    "killed": (cases.test_killed_trainer, {}),
    "raises": (cases.test_trainer_that_raises, {}),
    "name": (partial(cases.test_tensor_that_does_not_fit, what="name"), {}),
    "shape": (partial(cases.test_tensor_that_does_not_fit, what="shape"), {}),
    "two trainers": (cases.test_two_trainers, {}),
}
SABOTEURS = {
    "packs a layer at its start only": ("identity", {"sabotage": packed_again}),
    "reports success and loads nothing": ("destroy", {"sabotage": lambda old, new, fake: old}),
    "drops one tensor": ("every tensor", {"sabotage": without("layers.1.self_attn.k_norm")}),
    "keeps the old head": ("tied", {"untie": True}),
    "loses parts": ("partial", {"sabotage": parts_lost}),
    "takes NaN for zero": ("nan", {"sabotage": nan_as_zero}),
    "loses what it loads asleep": ("sleep", {"sabotage": asleep_lost}),
    "serves half when its trainer is killed": ("killed", {"change": half_until_resumed}),
    "serves half when its trainer raises": ("raises", {"change": half_until_resumed}),
    "drops unknown names": ("name", {"change": loads_what_fits}),
    "obeys one trainer": ("two trainers", {"change": one_trainer}),
}


def chosen(names, often):
    """Parameters of a test: all but those of ``often`` are for the exhaustive tier."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.exhaustive) for name in names]


@contextlib.contextmanager
def judged(url, model, folder):
    """The server at an address, as the subject of a case: after its first update."""
    subject = Subject(url, "", str(model), "disk", str(folder))
    subject.look()
    with subject.trainer() as subject.sender:
        subject.sender.update_weights(subject.start)
        yield subject


@contextlib.contextmanager
def judging(models, folder, name, **more):
    """A case, and its subject: a server that acts as ``more`` says."""
    case, how = HONEST[name]
    model, how = models[how.get("model", "dense")], {key: one for key, one in how.items() if key != "model"} | more
    with acting(model, **how) as fake, judged(fake.url, model, folder) as subject:
        yield case, subject


def caught():
    return pytest.raises((AssertionError, pytest.fail.Exception), match=r"outputs?|tokens?|reports|version")


@pytest.mark.parametrize("what", SABOTEURS)
def test_a_saboteur_fails_the_case_for_it(what, models, tmp_path):
    name, how = SABOTEURS[what]
    with judging(models, tmp_path, name, **how) as (case, subject), caught():
        case(subject)


@pytest.mark.parametrize("name", chosen(HONEST, ["destroy"]))
def test_the_same_server_without_a_saboteur_passes(name, models, tmp_path):
    with judging(models, tmp_path, name) as (case, subject):
        assert not subject.why_not
        case(subject)
        with subject.trainer() as subject.sender:
            subject.restore()


def test_a_case_that_fails_fails_the_run_with_its_reason(models, tmp_path):
    with acting(models["dense"], sabotage=nan_as_zero) as fake:
        rows, said = run(tmp_path, fake.url, "nan or tied or identity", model=models["dense"])
    assert rows["test_nan"]["outcome"] == "failed" and "all outputs are finite" in rows["test_nan"]["reason"], said
    assert rows["test_tied_weights"]["outcome"] == "not applicable" and "stock disk" in said
    assert "passed         The start checkpoint, sent again, changes no log-probability." in said


def test_engine_at_another_trainers_version_ends_the_run(models, tmp_path):
    """An engine at another trainer's version ends the run with one sentence and no failed case."""

    def updated(fake):
        fake.label = "11"
        for tensor in fake.tensors.values():
            tensor.mul_(1.5)

    with acting(models["dense"], change=updated) as fake:
        done = finished(KIT, tmp_path, "--url", fake.url, "--model", models["dense"], "--root", tmp_path / "root")
    assert done.returncode == 2 and "at version 11 of another trainer" in done.stdout, done.stdout + done.stderr
    assert " failed" not in done.stdout and " error" not in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["disk", "delta", "collective"])
def test_an_engine_of_ours_passes(transport, models, tmp_path):
    with EmbeddedServer(models["tied"], dtype="float32") as server:
        rows, said = run(tmp_path, server.url, "test", "--transport", transport, model=models["tied"])
    assert {row["outcome"] for row in rows.values()} == {"passed"} and len(rows) == 13, said


def test_an_engine_that_refuses_is_no_failure(models, tmp_path):
    with acting(models["dense"]) as fake:
        rows, said = run(tmp_path, fake.url, "identity or nan", "--transport", "collective", model=models["dense"])
    assert {row["outcome"] for row in rows.values()} == {"refused"} and len(rows) == 2, said
    assert all("cannot follow by 'collective'" in row["reason"] for row in rows.values())


def test_run_without_an_engine_address_skips_every_case(tmp_path):
    """Without --url every case is skipped, with the reason."""
    done = finished(KIT, tmp_path, "-rs")
    assert done.returncode == 0 and " skipped" in done.stdout and "passed" not in done.stdout
    assert "there is no engine; give --url" in done.stdout


def test_other_runs_have_none_of_its_options(tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--url')\n")
    (tmp_path / "test_own.py").write_text("def test_own(request):\n    assert request.config.option.url == 'x'\n")
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    settings = ("-p", "torchrl_ext.testing.engine.plugin", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    done = finished(code, *settings, "--url", "x", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
