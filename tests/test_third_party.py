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
import os, sys, tempfile, threading
sys.path.insert(0, sys.argv[1])
import pytest, torch
from transformers import AutoModelForCausalLM
import torchrl_ext as tx
from dovecote import Dovecote

policy = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
with Dovecote(sys.argv[2]) as cote, tempfile.TemporaryDirectory() as root:
    threading.Thread(target=cote.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{cote.server_port}"
    os.chdir(root)
    kit = ["-q", "-p", "no:cacheprovider", "--pyargs", "torchrl_ext.testing.engine", "--url", url]
    assert pytest.main([*kit, "-k", "destroy or raises or shape"]) == 0
    engine = tx.make_engine("dove", url=url)
    [found] = tx.discover(url)
    assert (found.kind, found.model) == ("dove", sys.argv[2]), found
    for transport in (tx.DiskTransport("full"), tx.make_transport("delta", root="changes")):
        with tx.WeightSender(transport, engine, verify="outputs") as sender:
            for _ in range(2):
                for weight in policy.parameters():
                    torch.nn.init.normal_(weight, std=0.02)
                report = sender.update_weights(policy)
                assert report.verified and report.proof == "outputs", report
                served = dict(cote.model.named_parameters())
                assert all(torch.equal(weight, served[name]) for name, weight in policy.named_parameters())
    assert report.engines[0].commit == "live", report
    assert engine.info().weight_version == str(report.version) and engine.pause() and not cote.running
    engine.resume()
    assert cote.running and engine.look()[0].state == "serving"
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
    for name, count in {"courier.py": 100, "dove/dove.py": 50, "dove/dovecote.py": 80}.items():
        lines = (ROOT / "tests/third_party" / name).read_text().splitlines()
        assert len(list(filter(str.strip, lines))) <= count


def test_it_passes_the_contract_that_is_shipped(packages, site):
    assert " passed" in python(CONTRACT, site, packages)


def test_a_make_of_engine_by_somebody_else_follows_a_trainer_and_passes_the_kit(site, tmp_path):
    assert "it followed" in python(FLIGHT, site, tiny_checkpoint(tmp_path / "model"))


def test_it_carries_weights_into_an_embedded_engine(site, tmp_path):
    with EmbeddedServer(tiny_checkpoint(tmp_path / "model"), dtype="float32", site=site) as server:
        names = {"collective", "delta", "disk", "ipc", "courier", "sharded"}
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
