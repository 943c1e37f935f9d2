"""This package joins an engine's environment as any other does: pip changes no version of what was there."""

import json
import subprocess

import pytest

from tests.processes import ROOT
from torchrl_ext.cli.environments import settings_for

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_installation_beside_an_engine_replaces_nothing(kind, tmp_path):
    python = settings_for(kind).get("python")
    if python is None:
        pytest.skip(f"{kind} is in this environment, which has the package already")
    names = "from importlib.metadata import distributions as d; print(*(one.name for one in d()))"
    listed = subprocess.run([python, "-c", names], capture_output=True, check=True, timeout=300, text=True)
    there = {name.lower().replace("_", "-") for name in listed.stdout.split()}
    assert "torch" in there
    report = tmp_path / "report.json"
    command = [python, "-m", "pip", "install", "--dry-run", "--no-input", "--quiet", "--report", report, ROOT]
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
    new = {one["metadata"]["name"].lower().replace("_", "-") for one in json.loads(report.read_text())["install"]}
    assert "torchrl-ext" in new and not new & there - {"torchrl-ext"}
