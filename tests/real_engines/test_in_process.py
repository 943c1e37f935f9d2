"""vLLM's own objects, and TorchRL's `AsyncVLLM` over them in Ray, switch weights in the process that owns them."""

import importlib.metadata
import os
import shutil
import subprocess
import tempfile

import pytest
import torch

from tests.models import tiny_checkpoint
from tests.processes import ROOT
from tests.real_engines.served import spec_of
from torchrl_ext.control.serving.processes import make_overlay, on_path

pytestmark = pytest.mark.engine

BESIDE = ("ray", "msgpack", "torchrl", "tensordict", "pyvers", "hoptorch", "importlib_metadata", "zipp", "orjson")


@pytest.fixture
def checkpoints(tmp_path):
    return [tiny_checkpoint(tmp_path / f"seed{seed}", seed) for seed in (0, 1)]


def run(tmp_path, *arguments, beside=ROOT, **environ):
    """Run a program of `tests.real_engines.in_process` in vLLM's environment."""
    spec, overlay = spec_of("vllm"), make_overlay(tmp_path / "overlay")
    path = os.pathsep.join([on_path(overlay), str(ROOT), str(beside)])
    done = subprocess.run(
        [spec.interpreter, "-m", "tests.real_engines.in_process", *arguments],
        cwd=ROOT,
        env={**os.environ, **spec.variables(), "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_in_process_llm_follows_disk_delta_ipc_and_path(tmp_path, checkpoints):
    run(tmp_path, "offline", *checkpoints, tmp_path / "root")


def test_async_llm_switches_weights_between_and_within_requests(tmp_path, checkpoints):
    run(tmp_path, "online", *checkpoints, tiny_checkpoint(tmp_path / "wide", 2, hidden_size=64))


def link_distributions(folder, names):
    """Link what this interpreter has of some distributions, for another one of the same version to import."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture
def rays():
    """A folder with a short path: sockets have 107 characters."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.exhaustive
def test_asyncvllm_says_what_the_trainer_says_by_each_transport(tmp_path, rays, checkpoints):
    pytest.importorskip("ray")
    beside = tmp_path / "beside"
    beside.mkdir()
    link_distributions(beside, BESIDE)
    run(tmp_path, "replicas", checkpoints[0], tmp_path / "root", rays, beside=beside, RAY_USAGE_STATS_ENABLED="0")


def test_engines_docs_page_runs_in_vllm_process(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)  # what vLLM computes in by default
    settings = {"VLLM_CPU_CI_ENV": "1"}  # vLLM's own, for tests: it captures graphs and leaves out their compiler
    run(tmp_path, "page", ROOT / "docs/engines.md", checkpoint, **settings)
