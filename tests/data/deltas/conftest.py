"""Every implementation of the kernels, each on the kind of device that it can be tried on here."""

from __future__ import annotations

import pytest
import torch

from torchrl_ext.data.deltas.host import HostKernels, TorchKernels

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WAYS = {
    "numba": (HostKernels, "cpu"),
    "torch": (TorchKernels, "cpu"),
    "torch on cuda": (TorchKernels, "cuda"),
}


@pytest.fixture(
    scope="session",
    params=["numba", "torch", pytest.param("torch on cuda", marks=[pytest.mark.gpu, CUDA])],
)
def way(request):
    """An implementation, and the device that it is tried on."""
    kernels, device = WAYS[request.param]
    return kernels(), torch.device(device)
