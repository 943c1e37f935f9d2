"""Every implementation of the kernels, each on the kind of device that it can be tried on here."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager

import pytest
import torch

from torchrl_ext.kernels.fused import TritonKernels
from torchrl_ext.kernels.select import kernels

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WAYS = [
    "numba",
    "torch",
    "triton interpreted",
    pytest.param("torch on cuda", marks=[pytest.mark.gpu, CUDA]),
    pytest.param("triton on cuda", marks=[pytest.mark.gpu, CUDA]),
]


@pytest.fixture(scope="session")
def interpreted():
    """Triton's programs, run with numpy on the host."""
    pytest.importorskip("triton", reason="triton is not installed (it is in the extra 'test' on Linux)")
    with _interpreter() as loops:
        yield TritonKernels(loops)


@pytest.fixture(scope="session", params=WAYS)
def way(request):
    """An implementation, and the device that it is tried on."""
    if request.param == "triton interpreted":
        return request.getfixturevalue("interpreted"), torch.device("cpu")
    name, _, kind = request.param.partition(" on ")
    return kernels.make(name), torch.device(kind or "cpu")


@contextmanager
def _interpreter():
    """Whether a program is compiled or interpreted is decided when its module is imported, so ours is imported once
    more under another name, and before it the part of Triton's own library that is written in Triton."""
    import triton
    import triton.language as tl

    methods = dict(vars(tl.tensor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        standard = _again("triton.language.standard")
        patch.setattr(tl.standard, "_sum_combine", standard._sum_combine)  # by which numpy's own sums are chosen
        for name in ("sum", "cumsum", "zeros_like"):
            patch.setattr(tl, name, vars(standard)[name])
        loops = _again("torchrl_ext.kernels.triton_loops")
        patch.setattr(triton.knobs.runtime, "interpret", False)
        yield loops
    for name, value in methods.items():
        if vars(tl.tensor).get(name) is not value:
            setattr(tl.tensor, name, value)


def _again(name):
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    kept = sys.modules.get(name)
    sys.modules[name] = module  # decorators look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        if kept is None:
            del sys.modules[name]
        else:
            sys.modules[name] = kept
    return module
