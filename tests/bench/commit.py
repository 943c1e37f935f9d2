"""``python -m tests.bench commit``: the pause of a delta, beside a bare scatter and a load of everything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tests.bench.frame import say
from torchrl_ext.bench.runner import rounds
from torchrl_ext.codecs.streams import BLOCK_UNITS, StreamPatch
from torchrl_ext.kernels.base import flat_bits, unsigned
from torchrl_ext.landing.loader import Changes, TensorsLoader
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import as_source

_DENSITIES = (0.001, 0.01)
_OTHER = torch.zeros(1 << 26)  # 256 MiB: more than caches hold


def measure(
    *,
    repeats: int = 7,
    elements: int = 50_000_000,
    tensors: list[int] = [24, 5000],  # noqa: B006 - read only
) -> dict[str, Any]:
    """Commits of one thread, beside a loop that writes the same elements and one that also reads them back.

    A bfloat16 model of --elements has --tensors tensors of one size; repeat it for several.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for count in tensors:
            for density in _DENSITIES:
                say(f"{count} tensors, {density:.1%} changed")
                rows.append(_measured(elements // count, count, density, repeats))
        return {"elements": elements, "rows": rows}
    finally:
        torch.set_num_threads(threads)


def _measured(size: int, count: int, density: float, repeats: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    live = {f"layer{i}": torch.randn(size).to(torch.bfloat16) for i in range(count)}
    new = {name: tensor.clone() for name, tensor in live.items()}
    changes: dict[str, np.ndarray] = {}
    for name in live:
        changes[name] = np.sort(generator.choice(size, max(1, int(density * size)), replace=False)).astype(np.int32)
    loader, source = TensorsLoader(live), as_source(new)
    loader.check(source.params())

    def commit() -> float:
        loader.stage(_flipped(live, changes))
        _forget_caches()
        began = time.perf_counter()
        loader.commit()
        return time.perf_counter() - began

    def scatter(loop: Any) -> Callable[[], float]:
        def once() -> float:
            patches = [(unsigned(flat_bits(live[name])), index) for name, index in changes.items()]
            writes = [(target, index, target[index] ^ 1) for target, index in patches]
            _forget_caches()
            began = time.perf_counter()
            for write in writes:
                loop(*write)
            return time.perf_counter() - began

        return once

    def load() -> float:
        _forget_caches()
        began = time.perf_counter()
        loader.start()
        loader.load(source)
        loader.finish()
        return time.perf_counter() - began

    ways = {"commit": commit, "bare": scatter(_write), "checked": scatter(_write_and_check), "load": load}
    seconds = rounds(ways, repeats)
    shares = {}
    for way in ("bare", "checked", "load"):
        found = statistics.median(own / other for own, other in zip(seconds["commit"], seconds[way], strict=True))
        shares[way] = {"median": found, "quickest": min(seconds["commit"]) / min(seconds[way])}
    return {
        "tensors": count,
        "density": density,
        "commit_s": statistics.median(seconds["commit"]),
        "of": shares,
    }


def _forget_caches() -> None:
    """A pause comes long after the staging: what is written lies in no cache then."""
    _OTHER.add_(1)


def _flipped(live: dict[str, Tensor], changes: dict[str, np.ndarray]) -> Changes:
    """The lowest bit of the elements at some indices flipped, as blocks of one stream."""
    table = ParamTable.of(ParamMeta.of(name, tensor) for name, tensor in live.items())
    (stream,) = table.streams
    positions = np.concatenate(
        [first + index for first, index in zip(stream.first[:-1], changes.values(), strict=True)]
    )
    values = np.concatenate([unsigned(flat_bits(live[name]))[index] ^ 1 for name, index in changes.items()])

    def patches(wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        assert all(map(wanted, live))
        for start in range(0, stream.size, BLOCK_UNITS):
            size = min(BLOCK_UNITS, stream.size - start)
            own = slice(*np.searchsorted(positions, (start, start + size)).tolist())
            yield StreamPatch(
                table, 0, start, size, (positions[own] - start).astype(np.int32), values[own], steps=False
            )

    return Changes(patches=patches, digests={}, whole=lambda names: iter(()))


@numba.njit(nogil=True)
def _write(target, index, values):
    for k in range(index.size):
        target[np.uint64(index[k])] = values[k]


@numba.njit(nogil=True)
def _write_and_check(target, index, values):
    wrong = target.dtype.type(0)
    for k in range(index.size):
        target[np.uint64(index[k])] = values[k]
    for k in range(index.size):
        wrong |= target[np.uint64(index[k])] ^ values[k]
    return wrong == 0
