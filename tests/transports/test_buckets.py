"""The layout that two processes compute for themselves, and the memory that buckets go through."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.transports.contract import DTYPES, any_bits, same_bits
from torchrl_ext.transports.collective.buckets import (
    DIRECT_BYTES,
    BufferPool,
    Plan,
    copy_each,
    landing,
    layout,
    plain,
    views,
)
from torchrl_ext.types import ParamMeta

CPU = torch.device("cpu")
BUCKET = 4096
FILLED = BUCKET * 7 // 8


def random_params(seed, count=200):
    choice = random.Random(seed)
    shapes = [(), (0,), (3, 0), (1,), (7,), (5, 9), (64, 8), (700,), (40, 40), (3000,)]
    return tuple(ParamMeta(f"p{i}", choice.choice(DTYPES), choice.choice(shapes)) for i in range(count))


def test_every_parameter_is_in_one_piece_and_in_order():
    for seed, bucket_bytes in itertools.product(range(5), [0, 1, 16, BUCKET, 1 << 20]):
        params = random_params(seed)
        found = [index for piece in layout(params, bucket_bytes) for index in range(piece.first, piece.stop)]
        assert found == list(range(len(params))), (seed, bucket_bytes)


def test_buckets_keep_to_their_size_and_large_tensors_travel_alone():
    for seed in range(5):
        params = random_params(seed)
        for piece in layout(params, BUCKET):
            if piece.direct:
                assert piece.stop == piece.first + 1, seed
                assert piece.nbytes == params[piece.first].nbytes >= FILLED, seed
            else:
                assert piece.nbytes <= FILLED, seed
                assert all(meta.nbytes < FILLED for meta in params[piece.first : piece.stop]), seed


def test_small_tensors_share_a_bucket_until_it_is_full():
    params = tuple(ParamMeta(f"p{i}", torch.float32, (224,)) for i in range(9))
    assert [(piece.first, piece.stop) for piece in layout(params, BUCKET)] == [(0, 4), (4, 8), (8, 9)]


def test_a_bucket_larger_than_the_direct_size_still_leaves_large_tensors_uncopied():
    params = (ParamMeta("large", torch.uint8, (DIRECT_BYTES,)), ParamMeta("small", torch.uint8, (DIRECT_BYTES - 1,)))
    assert [piece.direct for piece in layout(params, 8 * DIRECT_BYTES)] == [True, False]


def test_without_buckets_every_tensor_that_has_bytes_travels_alone():
    params = random_params(0)
    direct = [piece.first for piece in layout(params, 0) if piece.direct]
    assert direct == [index for index, meta in enumerate(params) if meta.nbytes]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_copied_into_a_bucket_comes_out_bit_for_bit(seed):
    params = random_params(seed)
    tensors = [any_bits(meta.dtype, *meta.shape, seed=index) for index, meta in enumerate(params)]
    for piece in layout(params, BUCKET):
        if piece.direct:
            continue
        buffer = torch.full((BUCKET,), 0xAA, dtype=torch.uint8)
        sources = tensors[piece.first : piece.stop]
        copy_each(sources, views(piece, params, buffer[: piece.nbytes]))
        for source, view in zip(sources, views(piece, params, buffer), strict=True):
            assert same_bits(source, view)


@pytest.mark.parametrize("numel", [10, 100_000])
def test_strided_and_lazily_conjugated_tensors_are_copied_as_the_values_they_stand_for(numel):
    strided = torch.randn(numel, 2)[:, 1]
    conjugate = torch.randn(numel, dtype=torch.complex64).conj()
    for source in (strided, conjugate, conjugate.imag):
        target = torch.empty(source.shape, dtype=source.dtype)
        copy_each([source], [target])
        assert torch.equal(target, source)
        assert torch.equal(plain(source, CPU), source) and plain(source, CPU).is_contiguous()


def test_a_strided_target_gets_the_values():
    target = torch.zeros(100_000, 2)
    source = torch.randn(100_000)
    copy_each([source], [target[:, 0]])
    assert torch.equal(target[:, 0], source) and not target[:, 1].any()


def test_a_plain_tensor_is_not_copied():
    tensor = torch.randn(10)
    assert plain(tensor, CPU).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "target", [torch.zeros(4, 4).t(), torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(16), torch.zeros(4, 4)[:2]]
)
def test_nothing_lands_directly_in_a_tensor_of_another_form(target):
    assert landing(ParamMeta("p", torch.float32, (4, 4)), {"p": target}, CPU) is None


def test_a_tensor_of_the_same_form_takes_the_bytes_as_they_come():
    target = torch.zeros(4, 4, requires_grad=True)
    assert landing(ParamMeta("p", torch.float32, (4, 4)), {"p": target}, CPU).data_ptr() == target.data_ptr()


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


def test_a_plan_follows_a_list_that_changes():
    plan, before, after = Plan(), random_params(1), random_params(2)
    for params in (before, after, before):
        assert plan.pieces(params, BUCKET) == layout(params, BUCKET)
        assert plan.metas([list(row) for row in plan.rows(params)]) == params
