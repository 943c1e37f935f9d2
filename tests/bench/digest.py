"""``python -m tests.bench digest``: digests of weights on a device, beside a plain read of the same memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import xxhash

from tests.bench.data import say
from torchrl_ext.base.devices import settle
from torchrl_ext.cli.bench import ratio, rounds
from torchrl_ext.data.deltas.bits import Piece
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.weights.digests import byte_view

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def measure(*, repeats: int = 7, mib: int = 64, device: str = "cpu") -> dict[str, Any]:
    """Digests of --mib of weights: whole, as 1,024 small tensors, and transposed; on the host by one thread.

    ``"x read"`` is how many plain reads (a sum of the same bytes as int64) a way takes, ``"x copy"`` how many copies of
    the same pieces into contiguous memory, ``"/ xxh3"`` how much faster it is than xxh3-128 of a pageable copy on the
    host.
    """
    where, found = torch.device(device), {}
    kernels = kernels_on(where)
    torch.set_num_threads(1)
    for dtype in _DTYPES:
        say(str(dtype))
        side = math.isqrt((mib << 20) // dtype.itemsize) // 32 * 32
        count = side * side
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        bits = raw.to(where).view(dtype)
        turned = bits.reshape(side, side).t()
        pieces = {
            "whole": [Piece(destination=bits, offset=0, strides=(1,))],
            "small": [Piece(destination=one, offset=0, strides=(1,)) for one in bits.split(count // 1024)],
            "transposed": [Piece(destination=turned, offset=0, strides=(side, 1))],
        }
        words = raw.to(where).view(torch.int64)
        ways: dict[str, Callable[[], object]] = {
            "read": words.sum,
            "xxh3-128": lambda bits=bits: xxhash.xxh3_128_digest(byte_view(bits).cpu().numpy().data),
        }
        room = torch.empty_like(bits)
        for shape, own in pieces.items():
            ways[f"digest, {shape}"] = partial(kernels.words, own)
            ways[f"copy, {shape}"] = partial(_copy, own, room)
        taken = rounds({name: partial(_done, way, where) for name, way in ways.items()}, repeats)
        found[str(dtype).removeprefix("torch.")] = {
            way: {
                "GB/s": count * dtype.itemsize / min(spent) / 1e9,
                "x read": ratio(taken["read"], spent),
                "/ xxh3": ratio(spent, taken["xxh3-128"]),
                **({"x copy": ratio(taken[way.replace("digest", "copy")], spent)} if "digest" in way else {}),
            }
            for way, spent in taken.items()
        }
    return found


def _copy(pieces: Sequence[Piece], room: torch.Tensor) -> None:
    at = 0
    for one in pieces:
        size = one.destination.numel()
        room[at : at + size].view(one.destination.shape).copy_(one.destination)
        at += size


def _done(way: Callable[[], object], device: torch.device) -> None:
    way()
    settle([device])
