"""vLLM's own objects switch weights in the process that owns them."""

import os
import subprocess

import pytest
import torch

from tests.models import tiny_checkpoint
from tests.processes import ROOT
from tests.real_engines.served import spec_of
from torchrl_ext.control.serving.processes import make_overlay, on_path

pytestmark = pytest.mark.engine


@pytest.fixture
def checkpoints(tmp_path):
    return [tiny_checkpoint(tmp_path / f"seed{seed}", seed) for seed in (0, 1)]


def run(tmp_path, *arguments, module="in_process", **environ):
    """Run a program of `tests.real_engines.in_process`, or of another module, in vLLM's environment."""
    spec, overlay = spec_of("vllm"), make_overlay(tmp_path / "overlay")
    path = os.pathsep.join([on_path(overlay), str(ROOT)])
    done = subprocess.run(
        [spec.interpreter, "-m", f"tests.real_engines.{module}", *arguments],
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
    run(tmp_path, "online", *checkpoints)


def test_start_engine_page_runs_in_vllm_process(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)  # what vLLM computes in by default
    settings = {"VLLM_CPU_CI_ENV": "1"}  # vLLM's own, for tests: it captures graphs and leaves out their compiler
    run(tmp_path, "page", ROOT / "docs/start_engine.md", checkpoint, **settings)


@pytest.mark.parametrize("program", ["labels", "failures", "namespaces"])
def test_a_core_takes_versions_while_batches_are_in_flight(tmp_path, checkpoints, program):
    run(tmp_path, program, checkpoints[0], module="in_core")
