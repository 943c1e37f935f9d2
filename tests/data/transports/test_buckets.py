"""The layout that two processes compute for themselves, and the memory that buckets go through."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.buckets import BufferPool, Lander, Packer, copy_each, layout
from torchrl_ext.data.group.carrier import HOST as SIZES
from torchrl_ext.data.transports.collective import buckets_of
from torchrl_ext.testing import DTYPES, any_bits, same_bits

CPU = torch.device("cpu")
MOST_ALIGNED = 16  # bytes of the largest element

LAYOUTS = st.sampled_from(["plain", "transposed"])
TENSORS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 9), max_size=4),
        LAYOUTS,
        LAYOUTS | st.sampled_from(["of another shape", "of another dtype", "none"]),
    ),
    max_size=40,
)
"""Each has a dtype, a shape, a layout in memory, and a target."""


def laid_out(tensor, layout):
    return tensor.mT.contiguous().mT if layout == "transposed" and tensor.ndim > 1 else tensor


def made(tensors):
    """Return parameters, their tensors and the targets of some."""
    sent, into = {}, {}
    for number, (dtype, shape, source, target) in enumerate(tensors):
        name, tensor = str(number), any_bits(dtype, *shape, seed=number)
        sent[name] = laid_out(tensor, source)
        if target in ("plain", "transposed"):
            into[name] = laid_out(torch.zeros_like(tensor), target)
        elif target == "of another shape":
            into[name] = torch.zeros(*shape, 1, dtype=dtype)
        elif target == "of another dtype":
            into[name] = torch.zeros(shape, dtype=torch.int64 if dtype is torch.int32 else torch.int32)
    return tuple(ParamMeta.of(name, tensor) for name, tensor in sent.items()), sent, into


def carry(buckets, params, sent, into, *, lasting):
    """Pack all tensors, unpack them, and compare."""
    packer, lander, found = Packer(params, zip(params, sent.values(), strict=True)), Lander(params, into, CPU), []
    for bucket in buckets:
        if bucket.direct:
            lander.begin(bucket.spans[0].first).copy_(packer.direct(CPU))
            found.append(lander.end(bucket.spans[0].first))
            continue
        buffer = torch.full((bucket.nbytes,), 0xAA, dtype=torch.uint8)
        packer.fill(bucket, [buffer])
        found += lander.take(bucket, buffer, lasting=lasting)
        if not lasting:
            buffer.fill_(0xAA)
    packer.finish()
    assert [name for name, _ in found] == [meta.name for meta in params]
    for name, tensor in found:
        assert same_bits(tensor, sent[name]), name
        alike = name in into and ParamMeta.of(name, into[name]) == ParamMeta.of(name, tensor)
        assert alike == (tensor is into.get(name))


@given(TENSORS, st.integers(0, 1 << 14))
def test_broadcast_buckets_have_bounded_size_or_one_large_tensor(tensors, bucket_bytes):
    params, sent, into = made(tensors)
    buckets, capacity = buckets_of(params, bucket_bytes, SIZES), bucket_bytes - bucket_bytes // 8
    for bucket in buckets:
        held = [params[index] for span in bucket.spans for index in range(span.first, span.stop)]
        assert bucket.nbytes <= capacity or bucket.direct
        assert bucket.direct == any(meta.nbytes >= max(1, capacity) for meta in held)
        assert len(held) == 1 or not bucket.direct
    for one, following in pairwise(buckets):  # none is closed before it has to be
        needed = params[following.spans[0].first].nbytes + MOST_ALIGNED
        assert one.direct or following.direct or one.nbytes + needed > capacity
    carry(buckets, params, sent, into, lasting=True)


@given(TENSORS, st.integers(1, 1 << 8))
def test_what_goes_through_a_staging_buffer_fills_it_and_arrives(tensors, size):
    params, sent, into = made(tensors)
    buckets, capacity = layout(params, 64 * size), 64 * size
    assert all(bucket.nbytes <= capacity for bucket in buckets)
    assert all(bucket.nbytes > capacity - capacity // 4 - MOST_ALIGNED for bucket in buckets[:-1])
    carry(buckets, params, sent, into, lasting=False)


def test_large_tensors_stay_uncopied_with_large_bucket_sizes():
    direct = SIZES.direct_bytes
    params = (ParamMeta("large", torch.uint8, (direct,)), ParamMeta("small", torch.uint8, (direct - 1,)))
    assert [bucket.direct for bucket in buckets_of(params, 8 * direct, SIZES)] == [True, False]


def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left():
    pool = BufferPool(CPU)
    first = pool.take(1000)
    where, view = first.data_ptr(), first[10:20].view(torch.int8)
    del first
    assert pool.take(1000).data_ptr() != where
    view.fill_(7)
    other = pool.take(1000)
    other.fill_(1)
    assert (view == 7).all()
    del view
    again = [pool.take(1000) for _ in range(3)]
    assert where in [buffer.data_ptr() for buffer in again]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8])
def test_elements_of_a_byte_are_copied_as_bytes(dtype, monkeypatch):
    copy = torch._foreach_copy_

    def only_common(targets, sources):
        assert {one.dtype for one in (*targets, *sources)} <= {torch.uint8, torch.float32}
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", only_common)
    sources = [any_bits(dtype, 5, 3, seed=1), laid_out(any_bits(dtype, 4, 6, seed=2), "transposed"), torch.ones(3)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_each(sources, targets)
    assert all(map(same_bits, sources, targets))
