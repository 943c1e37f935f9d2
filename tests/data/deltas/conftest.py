"""Every implementation of the kernels, each on the kind of device that it can be tried on here."""

from contextlib import nullcontext

import pytest
import torch

from torchrl_ext.data.deltas import loops, torch_ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WAYS = {
    "numba": (loops, "cpu"),
    "torch": (torch_ops, "cpu"),
    "torch on lag": (torch_ops, "lag:0"),
    "torch on cuda": (torch_ops, "cuda"),
}


@pytest.fixture(params=["numba", "torch", "torch on lag", pytest.param("torch on cuda", marks=[pytest.mark.gpu, CUDA])])
def way(request):
    """An implementation, and the device that it is tried on, on a stream that nothing else waits for."""
    kernels, device = WAYS[request.param]
    if request.param == "torch on lag":
        request.getfixturevalue("lag")
    with torch.Stream(device) if device != "cpu" else nullcontext():
        yield kernels, torch.device(device)
