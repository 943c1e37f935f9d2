"""``torchrl-ext demo --seed NAME``: what a system promises, acted out on engines, and the verdict when it is not so."""

import argparse
import json
from contextlib import ExitStack

import httpx
import pytest

import torchrl_ext as tx
from tests.models import tiny_checkpoint
from tests.rpc.test_router import Earlier, serving
from torchrl_ext.cli.demo import command, stage
from torchrl_ext.cli.demo.stories import external
from torchrl_ext.cli.main import main
from torchrl_ext.serving import routing
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import SyncReport


@pytest.fixture(autouse=True)
def _loggers_keep_their_streams(monkeypatch):
    """The demo runs in this process here, whose captured streams are closed after each test."""
    monkeypatch.setattr(command, "_quiet", lambda: None)


def told(capsys, *args):
    code = main(["demo", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def seen(document):
    return [check["what"] for check in document["checks"]]


def parsed(*args):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *args])


@pytest.mark.parametrize(
    ("args", "number", "story"),
    [
        ([], 0, None),
        (["--seed", "7"], 7, None),
        (["--seed", "vime"], 0, "vime"),
        (["--seed", "3", "--seed", "skyrl"], 3, "skyrl"),
        (["--seed", "slime", "--random-seed", "-1"], -1, "slime"),
    ],
)
def test_seed_is_a_number_or_the_name_of_a_system(args, number, story):
    found = parsed(*args)
    assert (found.seed, found.story) == (number, story)


@pytest.mark.parametrize("value", ["pigeon", "7.5", ""])
def test_any_other_seed_is_refused_with_the_names(value, capsys):
    with pytest.raises(SystemExit):
        parsed("--seed", value)
    assert "neither a number nor one of vime, slime, torchrl, skyrl, switching" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seed", "vime", "--transport", "disk"], "--transport is of the training"),
        (["--seed", "vime", "--engine", "sglang"], "about vllm"),
        (["--seed", "switching", "--engines", "127.0.0.1:9"], "of its own process"),
    ],
)
def test_what_a_systems_demo_does_not_take_is_refused(args, words, capsys):
    code, document = told(capsys, *args)
    assert code == 1 and words in document["error"]


def test_online_switching_is_acted_out_and_every_check_holds(capsys):
    code, document = told(capsys, "--seed", "switching", "--engine", "embedded")
    assert code == 0 and document["verified"] and document["demo"] == "switching", document["checks"]
    found = seen(document)
    for words in ("by path", "by state dict", "one layer", "Megatron", "refused", "four switches", "queue"):
        assert any(words in what for what in found), words


def test_an_engine_that_reports_and_switches_nothing_is_found_out(capsys, monkeypatch):
    versions = iter(range(1, 100))

    async def lie(*_, **__):
        return SyncReport(version=next(versions), transport="ipc", verified=True)

    monkeypatch.setattr(InProcessEngine, "update_model_weights", lie)
    code, document = told(capsys, "--seed", "switching", "--engine", "embedded")
    assert code == 1 and not document["verified"]
    assert {check["what"].partition(":")[0] for check in document["checks"] if not check["held"]} >= {"by path"}


class Forwarding(Earlier):
    """Hands each request to the first engine that it lists."""

    def __init__(self, urls):
        self.urls = list(urls)

    def answer(self, method, path, query, body):
        if not path.endswith("/generate"):
            return super().answer(method, path, query, body)
        answer = httpx.post(f"{self.urls[0]}{path}", json=body, timeout=60)
        return answer.status_code, answer.json()


class Router:
    """Stands in for the process of a router, which this tier does not install."""

    def __init__(self, workers, **_):
        self._ends = ExitStack()
        self.url = self._ends.enter_context(serving(Forwarding(workers))).url

    def alive(self):
        return True

    def stop(self):
        self._ends.close()


def test_engines_that_a_story_starts_from_a_yaml_follow_and_its_frozen_model_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(routing, "RouterProcess", Router)
    monkeypatch.setattr(external, "settings_for_router", lambda *_: {})
    with stage.Stage(kind="embedded", urls=(), model=None, seed=0, folder=tmp_path) as own:
        external._owned(own)
    assert own.verified and own.syncs, own.checks


STORIES = {
    "vime": {
        "engines of others and engines of the job's own exclude each other",
        "the router that was started uses the engines that were named",
        "files: weight_v000004 loads with from_pretrained, bit-equal to the policy",
        "deltas over files: a hundredth of the elements costs less than a fifth of the bytes",
        "deltas over a group: tokens through the router are the policy's",
        "engines of others are not started again by the job",
        "a change of one element from 0.0 to -0.0 is one position",
        "the frozen model says what it said before",
    },
    "torchrl": {
        "a transport alone: rank 1, another process, holds the bits of rank 0",
        "workers hold the trainer's bits after update_policy_weights_",
        "every token of a rollout has the version that sampled it",
    },
    "skyrl": {
        "each of their tokens has its version, the old one first",
        "some of them began with the old version and ended with the new one",
        "pause 'abort': it has the tokens of a generation without a pause",
        "after sleep and wake_up tokens are the policy's",
        "requests of one session stay on one engine",
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_systems_promises_are_acted_out_on_embedded_engines(name, capsys):
    code, document = told(capsys, "--seed", name, "--engine", "embedded")
    assert code == 0 and document["verified"], [check for check in document["checks"] if not check["held"]]
    assert STORIES[name] <= {*seen(document)} and document["syncs"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(STORIES))
def test_an_update_of_other_weights_than_the_policys_is_found_out(name, capsys, monkeypatch, tmp_path):
    stale, send = str(tiny_checkpoint(tmp_path / "stale", 5)), tx.WeightSender.update_weights
    monkeypatch.setattr(tx.WeightSender, "update_weights", lambda self, *_, **__: send(self, stale))
    code, document = told(capsys, "--seed", name, "--engine", "embedded")
    assert code == 1 and any("tokens" in check["what"] for check in document["checks"] if not check["held"])


def test_a_demo_that_checked_nothing_proves_nothing(tmp_path):
    with stage.Stage(kind="embedded", urls=(), model=None, seed=0, folder=tmp_path) as empty:
        assert not empty.verified
