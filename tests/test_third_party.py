"""A transport and a make of engine of other packages, installed as packages are, and known by their names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import ROOT, python
from tests.real_engines.served import ServedVLLM, serving

TRAINER = """
import sys
sys.path.insert(0, sys.argv[1])
import torchrl_ext as tx
from tests.models import tiny_model

engine = tx.connect(sys.argv[2])
sender = tx.WeightSender(tx.make_transport("courier"), engine)
for seed in (3, 4):
    report = sender.update_weights(tiny_model(seed))
    assert report.transport == "courier" and report.verified and report.proof in ("in place", "rehearsed"), report
    assert report.engines[0].state == "serving" and report.version == seed - 2, report
print(sorted(engine.info().transports))
sender.shutdown()
"""


FLIGHT = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
import torch
import torchrl_ext as tx
from dove import Dovecote

module, policy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
with Dovecote(module) as cote:
    engine = tx.make_engine("dove", url=cote.url)
    with tempfile.TemporaryDirectory() as root:
        sender = tx.WeightSender(tx.DiskTransport(root), engine)
        for _ in range(2):
            torch.nn.init.normal_(policy.weight)
            report = sender.update_weights(policy)
            assert report.verified and report.engines[0].state == "serving", report
            assert torch.equal(policy.weight, module.weight) and torch.equal(policy.bias, module.bias)
        assert engine.info().weight_version == str(report.version) and engine.pause() and not cote.flies
        engine.resume()
        assert cote.flies and engine.look()[0].state == "serving"
        sender.shutdown()
    cote.shutdown()
print("it followed")
"""


CONTRACT = """
import os, sys
import pytest
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """The packages' files, away from ours."""
    return shutil.copytree(ROOT / "tests/third_party", tmp_path_factory.mktemp("third") / "party")


@pytest.fixture(scope="session")
def site(packages, tmp_path_factory):
    """A directory into which both are installed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", folder, packages, packages / "dove"], check=True, timeout=300)
    return folder


def test_they_are_as_short_as_the_pages_say():
    for name, count in {"courier.py": 100, "dove/dove.py": 150}.items():
        lines = (ROOT / "tests/third_party" / name).read_text().splitlines()
        assert len(list(filter(str.strip, lines))) <= count


def test_it_passes_the_contract_that_is_shipped(packages, site):
    assert " passed" in python(CONTRACT, site, packages)


def test_a_make_of_engine_by_somebody_else_follows_a_trainer(site):
    assert "it followed" in python(FLIGHT, site)


def test_it_carries_weights_into_an_embedded_engine(site, tmp_path):
    with EmbeddedServer(tiny_checkpoint(tmp_path / "model"), dtype="float32", site=site) as server:
        names = {"collective", "delta", "disk", "ipc", "native", "courier", "sharded"}
        assert python(TRAINER, site, server.url).split("\n")[-2] == str(sorted(names))
        served = tx.connect(server.url).info()
        assert served.weight_version == "2"


@pytest.mark.engine
def test_it_carries_weights_into_vllm(site, monkeypatch, tmp_path):
    for folder in (ROOT, site):  # of the engine
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    settings = {"dtype": "float32", "max_model_len": 256, "log_path": tmp_path / "log"}
    with serving(ServedVLLM, tiny_checkpoint(tmp_path / "model"), **settings) as engine:
        python(TRAINER, site, engine.url)
        assert engine.says(tiny_model(4)) and engine.version() == "2"
