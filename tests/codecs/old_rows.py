"""Pairs of tensors whose changes a release before format 4 coded: `rows_before_4.zip` has the payloads, by name."""

from __future__ import annotations

import numpy as np
import torch

from torchrl_ext.types import ParamMeta, dtype_name

CASES = [
    *((torch.bfloat16, size, share) for size, share in ((1, 1), (9000, 1), (9000, 9), (20_000, 2))),
    *((torch.uint8, size, share) for size, share in ((5000, 1), (9000, 40))),
    *((torch.float32, size, share) for size, share in ((5000, 1), (9000, 40))),
    (torch.int64, 100, 0),
    *((dtype, size, share) for dtype in (torch.int64, torch.complex128) for size, share in ((300, 1), (9000, 90))),
]


def pair(dtype: torch.dtype, size: int, share: int) -> tuple[str, ParamMeta, torch.Tensor, torch.Tensor]:
    """The name of a case, a parameter, and its tensors; about one unit in ``share`` changes by a small step,
    or where it is 0 every one by any step.
    """
    width = min(8, dtype.itemsize)
    count = size * (dtype.itemsize // width)
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    old = (mixed >> np.uint64(64 - 8 * width)).astype(f"<u{width}")
    if dtype.is_floating_point and width < 8:  # a few exponents, as of weights
        old = np.float32(0.02) * (old.astype(np.float32) / np.float32(2 ** (8 * width - 1)) - np.float32(1))
        old = torch.from_numpy(old).to(dtype).view(torch.uint8).numpy().view(f"<u{width}")
    new, where = old.copy(), mixed % np.uint64(max(1, share)) == 0
    steps = np.array([1, 2, 255, 77], old.dtype)[(mixed >> np.uint64(20)).astype(np.int64) % 4]
    new[where] += steps[where] if share else steps[where] * mixed[::-1][where].astype(old.dtype)
    tensors = (torch.from_numpy(bits.view(np.uint8)).view(dtype) for bits in (old, new))
    return f"{dtype_name(dtype)}.{size}.{share}", ParamMeta("w", dtype, (size,)), *tensors
