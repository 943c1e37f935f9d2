"""Every implementation of the kernels, each on the kind of device that it can be tried on here."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from torchrl_ext.kernels.base import kernels
from torchrl_ext.kernels.cuda import TritonKernels

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
    """Triton's programs, run with numpy on the host.

    Whether a program is compiled or interpreted is decided when its module is imported, so ours is imported once more
    under another name, and before it the part of Triton's own library that is written in Triton.
    """
    triton = pytest.importorskip("triton", reason="triton is not installed (it is in the extra 'test' on Linux)")
    with _restored(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        library, loops = _again("triton.language.standard"), _again("torchrl_ext.kernels.cuda_programs")
    return TritonKernels(SimpleNamespace(**{name: _Program(vars(loops)[name], library) for name in loops.__all__}))


class _Program:
    """A program that finds the interpreted library for as long as it runs: compiled ones beside it need the other."""

    def __init__(self, program, library):
        self._program, self._library = program, library

    def __getitem__(self, grid):
        return lambda *args, **settings: self._run(grid, args, settings)

    def _run(self, grid, args, settings):
        import triton.language as tl

        with _restored():
            tl.standard._sum_combine = self._library._sum_combine  # by which the interpreter knows what numpy can add
            tl.sum, tl.cumsum, tl.zeros_like = self._library.sum, self._library.cumsum, self._library.zeros_like
            self._program[grid](*args, **settings)


@contextmanager
def _restored():
    """The interpreter leaves its own functions behind in Triton's language where one program calls another."""
    import triton.language as tl

    homes = (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    before = [dict(vars(home)) for home in homes]
    try:
        yield
    finally:
        for home, kept in zip(homes, before, strict=True):
            for name, value in dict(vars(home)).items():
                if name not in kept:
                    delattr(home, name)
                elif value is not kept[name]:
                    setattr(home, name, kept[name])


@pytest.fixture(scope="session", params=WAYS)
def way(request):
    """An implementation, and the device that it is tried on."""
    if request.param == "triton interpreted":
        return request.getfixturevalue("interpreted"), torch.device("cpu")
    name, _, kind = request.param.partition(" on ")
    return kernels.make(name), torch.device(kind or "cpu")


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
