"""The recipe "GRPO on vLLM in an hour", as it is printed: a server follows GRPOTrainer, and the reward rises."""

import runpy
import sys

import pytest
import torch

import torchrl_ext as tx
from tests.processes import ROOT
from tests.real_engines.conftest import starting
from tests.real_engines.served import ServedVLLM
from torchrl_ext.sync.outputs import gaps, score
from torchrl_ext.testing.tiny import make_tiny_lm

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")]

STEPS, RISE = 9, 0.25
NEAR, FAR = 0.1, 1.0  # nats; in bfloat16
PROMPTS = [list(range(20, 36)), [40, 300, 17, 200, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_lm(tmp_path_factory.mktemp("recipe") / "policy")


@pytest.fixture(scope="module")
def served(policy, tmp_path_factory):
    with starting(ServedVLLM, policy, tmp_path_factory, dtype="bfloat16") as found:
        yield found


@pytest.fixture
def threads():
    """The script chooses how many threads its process has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("transport", ["delta", "disk", "collective"])
def test_the_reward_rises_whatever_brings_the_weights(transport, policy, served, threads, monkeypatch, capsys):
    address = served.url.removeprefix("http://")
    given = {"--model": policy, "--engine": address, "--transport": transport, "--steps": STEPS, "--seed": 1}
    monkeypatch.setattr(sys, "argv", ["grpo.py", *(str(word) for pair in given.items() for word in pair)])
    ended = runpy.run_path(str(ROOT / "tutorials/grpo.py"), run_name="__main__")
    model, rewards, reports = (ended[name] for name in ("model", "rewards", "reports"))

    assert len(rewards) == STEPS and rewards[-1] > rewards[0] + RISE, rewards
    assert [report.version for report in reports] == [reports[0].version + i for i in range(STEPS + 1)]
    assert all(report.verified and report.proof == "outputs" for report in reports)
    said = [line for line in capsys.readouterr().out.splitlines() if " | version " in line]
    assert len(said) == STEPS + 1 and said[-1].startswith(f"reward {rewards[-1]:.3f} | version {reports[-1].version}: ")
    assert all((report.bytes < report.model_bytes) == (transport == "delta") for report in reports[1:])

    assert served.is_called(str(reports[-1].version)) and not served.paused()
    found = tx.make_engine("vllm", url=served.url).logprobs(PROMPTS)
    assert gaps(score(model, PROMPTS), found)[0] < NEAR
    start = type(model).from_pretrained(policy)
    assert gaps(score(start, PROMPTS), found)[0] > FAR
