"""Which implementation works on which device: the only place that asks."""

from __future__ import annotations

import functools
import logging

import torch

from torchrl_ext.kernels.base import Kernels, Place
from torchrl_ext.registry import Registry

__all__ = ["kernels", "kernels_on"]

log = logging.getLogger(__name__)

kernels = Registry("implementation of the kernels")
kernels.register("numba", "torchrl_ext.kernels.host:HostKernels", "compiled loops on the host")
kernels.register("torch", "torchrl_ext.kernels.torch_ops:TorchKernels", "torch's operators on any device")
kernels.register("triton", "torchrl_ext.kernels.cuda:TritonKernels", "Triton programs on a CUDA device")


def kernels_on(device: torch.device) -> Kernels:
    """The implementation for tensors on ``device``: numba's on the host, Triton's on CUDA where it works, else torch's.

    Raises:
        ConfigError: ``device`` is the host, and numba cannot be imported.
    """
    return _made("numba") if device.type == "cpu" else _for_accelerator(device.type)


@functools.cache
def _made(name: str) -> Kernels:
    return kernels.make(name)


@functools.cache
def _for_accelerator(kind: str) -> Kernels:
    if kind == "cuda":
        try:
            found = _made("triton")
            probe = torch.zeros(1, dtype=torch.int32, device=kind)
            found.words(probe, Place(shape=(1,), offset=0, strides=(1,), to=(1,)))  # it needs a C compiler, and more
            return found
        except Exception:  # whatever is amiss with a compiler, torch's operators do the same
            log.warning("Triton does not work here; torch's own operators take its place, slower", exc_info=True)
    return _made("torch")
