"""Small models before and after a change, as hypothesis draws them, and how tables lay them out."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from torchrl_ext.kernels.base import flat_bits
from torchrl_ext.testing import any_bits

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.complex128]
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
)


@st.composite
def models(draw):
    """Tensors of a model by name, before and after some of their elements changed."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8))
    seed, density = draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    generator, old, new = torch.Generator().manual_seed(seed), {}, {}
    for number, (dtype, shape) in enumerate(kinds):
        before, after = (any_bits(dtype, *shape, seed=seed + number + extra) for extra in (0, 1000))
        mask = torch.rand(shape, generator=generator) < density
        changed = torch.where(mask, after, before)
        if draw(st.booleans()):  # a view whose elements lie apart in memory
            changed = torch.stack([changed, after], -1)[..., 0]
        old[f"p{number}"], new[f"p{number}"] = before, changed
    return old, new


def flat(table, tensors):
    """The bits of each stream of a table."""
    found = []
    for stream in table.streams:
        parts = (tensors[table.params[param].name] for param in stream.params)
        found.append(torch.cat([flat_bits(part) for part in parts]))
    return found


def placed(table, tensors):
    """The stream, segment and tensor of each parameter, in the order of the model."""
    streams, segments = table.place
    for name, tensor in tensors.items():
        yield streams[table.number[name]], segments[table.number[name]], tensor
