"""Giving up the memory of a module's tensors, and allocating it again."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch
from torch import Tensor, nn

from torchrl_ext.weights.source import named_tensors

__all__ = ["Dormant"]


class Dormant:
    """Gives up the memory of a module's parameters and persistent buffers; names, shapes and dtypes stay.

    `nn.Parameter` objects stay too, tied ones tied; other views of the old memory are on their own.

    Args:
        module: whose tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._strides: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    @torch.no_grad()
    def drop(self) -> None:
        """Give the memory up; values are lost. May be called twice."""
        for _, tensor in named_tensors(self._module):
            if id(tensor) not in self._strides:
                self._strides[id(tensor)] = (tensor, tensor.stride())
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what is freed unless it is asked
            ctypes.CDLL(None).malloc_trim(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory again, with undefined content."""
        for tensor, strides in self._strides.values():
            tensor.data = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        self._strides.clear()
