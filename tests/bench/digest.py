"""``python -m tests.bench digest``: digests of weights on the host, beside a copy of the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.bench.frame import say
from torchrl_ext.cli.bench.runner import ratio, rounds
from torchrl_ext.data.deltas.host import HostKernels
from torchrl_ext.data.deltas.kernels import Piece
from torchrl_ext.data.weights.digests import tensor_digest

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def measure(*, repeats: int = 7, mib: int = 64) -> dict[str, Any]:
    """Digests of tensors of --mib by one thread: whole tensors, a transposed one, and a change of 1 %."""
    host, found = HostKernels(), {}
    torch.set_num_threads(1)
    for dtype in _DTYPES:
        say(str(dtype))
        side = math.isqrt((mib << 20) // dtype.itemsize)
        count = side * side
        bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        target, turned = bits.clone(), bits.reshape(side, side)
        pieces = {
            "whole": Piece(destination=bits, offset=0, strides=(1,)),
            "transposed": Piece(destination=turned.t(), offset=0, strides=(side, 1)),
        }
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda bits=bits, target=target: target.copy_(bits),
            "xxh3-128": lambda bits=bits: tensor_digest(bits),
        }
        for shape, piece in pieces.items():
            ways[f"digest, {shape}"] = lambda piece=piece: host.words(piece)
        taken = rounds(ways, repeats)
        found[str(dtype).removeprefix("torch.")] = {
            way: {"ns": min(spent) / count * 1e9, **ratio(spent, taken["copy"])} for way, spent in taken.items()
        }
    return found
