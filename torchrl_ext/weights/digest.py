"""Fingerprints of tensors, for proving that two sides hold the same bytes."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

__all__ = ["byte_view", "tensor_digest"]


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in C order: uint8, shape ``(nbytes,)``; shares memory where ``tensor`` is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-128 of the bytes of ``tensor`` in C order, as 32 hex digits.

    Equal for equal bytes whatever the strides; -0.0 and 0.0 differ, and so do NaN payloads.
    """
    return xxhash.xxh3_128_hexdigest(byte_view(tensor).cpu().numpy())
