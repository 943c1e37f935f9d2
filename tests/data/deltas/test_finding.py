"""What every implementation lists of a model is what the host finds, block for block, and the copies follow."""

import numpy as np
import pytest
import torch

from tests.data.deltas.data import DTYPES, bytes_of, pairs, random_bits
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas import streams
from torchrl_ext.data.deltas.bits import flat_bits
from torchrl_ext.data.deltas.streams import find
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.weights.digests import position_digest


@pytest.fixture
def device(way, monkeypatch):
    """The device of the implementation under test, which is chosen for it."""
    own, device = way
    monkeypatch.setattr(streams, "kernels_on", lambda where: own if where == device else kernels_on(where))
    monkeypatch.setattr(streams, "BLOCK_UNITS", 20_000)
    monkeypatch.setattr(streams, "_STAGED", 100)
    return device


def model_of(dtypes, sizes):
    """Names, old and new tensors: small ones, and such that are cut into blocks."""
    rows = (row for dtype in dtypes for row in pairs(dtype, sizes))
    return [(f"{number}.{meta.name}", old, new) for number, (meta, old, new) in enumerate(rows)]


def found_in(model, new_on):
    """What is found in a model, block by block; the copies follow, and so do the digests."""
    table = ParamTable.of([ParamMeta(name, new.dtype, tuple(new.shape)) for name, _, new in model])
    copies, words = [], np.zeros((len(model), 2), np.uint64)
    for stream in table.streams:
        copies.append(torch.cat([flat_bits(model[param][1]) for param in stream.params]))

    def then(found):
        own = table.streams[found.stream].params[found.segments.start : found.segments.stop]
        np.add.at(words, own, found.words)
        return found.stream, found.start, *(part.tolist() for part in (found.positions, found.before, found.after))

    given = zip(*table.place, (new.to(new_on) for _, _, new in model), strict=True)
    blocks = list(find(table, copies, given, then, threads=2, follow=True))
    for copy, stream in zip(copies, table.streams, strict=True):
        assert bytes_of(copy) == b"".join(bytes_of(flat_bits(model[param][2])) for param in stream.params)
    for (name, old, new), own in zip(model, words.tolist(), strict=True):
        assert position_digest(old).plus(own) == position_digest(new), name
    return sorted(blocks)


def test_device_lists_changes_of_every_dtype_as_the_host_does(device):
    for dtype in DTYPES:
        model = model_of([dtype], (0, 63, 45_000) if dtype == torch.bfloat16 else (17, 2500))
        generator = torch.Generator().manual_seed(6)
        old, new = (random_bits(600, dtype, generator).reshape(20, 30) for _ in range(2))
        turned = new.t().contiguous().t()
        assert not turned.is_contiguous()
        expected = found_in([*model, ("turned", old, new)], "cpu")
        assert found_in([*model, ("turned", old, turned)], device) == expected, dtype
