"""``torchrl-ext bench gpu`` on a small model: what it says, not how fast this machine is."""

from __future__ import annotations

import json

import pytest
import torch

from torchrl_ext.cli.main import main

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
WAYS = {
    "copy on the device",
    "copy to the host",
    "baseline on the device",
    "baseline on the host",
    "coded on the host",
    "stage",
    "commit",
}


@pytest.mark.parametrize("device", DEVICES)
def test_every_comparison_is_in_the_document(device, capsys):
    settings = ["--size", "small", "--repeats", "1", "--densities", "0.01", "--device", device, "--json"]
    assert main(["bench", "gpu", *settings]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] == ("numba" if device == "cpu" else "triton")
    assert found["ipc"]["gb_per_s"]["ipc"] > 0 and found["ipc"]["gb_per_s"]["copy"] > 0
    (row,) = found["deltas"]
    assert set(row["gb_per_s"]) == WAYS and 0 < row["changed"] < found["bytes"] // 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "gpu", "--size", "small", "--repeats", "1"]) != 0
    assert "CUDA device" in capsys.readouterr().err
