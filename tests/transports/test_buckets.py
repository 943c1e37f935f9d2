"""The layout that two processes compute for themselves, and the memory that buckets go through."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from torchrl_ext.testing import DTYPES, any_bits, same_bits
from torchrl_ext.transports.buckets import Lander, Packer, Plan, layout
from torchrl_ext.transports.collective.stream import DIRECT_BYTES, buckets_of
from torchrl_ext.transports.copies import BufferPool, copy_each, plain
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import MappingSource, checked

CPU = torch.device("cpu")
BUCKET = 4096
FILLED = BUCKET * 7 // 8


def random_params(seed, count=200):
    choice = random.Random(seed)
    shapes = [(), (0,), (3, 0), (1,), (7,), (5, 9), (64, 8), (700,), (40, 40), (3000,)]
    return tuple(ParamMeta(f"p{i}", choice.choice(DTYPES), choice.choice(shapes)) for i in range(count))


def broadcast(params, bucket_bytes):
    return buckets_of(Plan(), tuple(params), bucket_bytes)


def indices(bucket):
    return [index for span in bucket.spans for index in range(span.first, span.stop)]


def test_every_parameter_is_in_one_bucket_and_in_order():
    for seed, bucket_bytes in itertools.product(range(5), [0, 1, 16, BUCKET, 1 << 20]):
        params = random_params(seed)
        found = [index for bucket in broadcast(params, bucket_bytes) for index in indices(bucket)]
        assert found == list(range(len(params))), (seed, bucket_bytes)


def test_buckets_keep_to_their_size_and_large_tensors_travel_alone():
    for seed in range(5):
        params = random_params(seed)
        for bucket in broadcast(params, BUCKET):
            if bucket.direct:
                (index,) = indices(bucket)
                assert bucket.nbytes == params[index].nbytes >= FILLED, seed
            else:
                assert bucket.nbytes <= FILLED, seed
                assert all(params[index].nbytes < FILLED for index in indices(bucket)), seed


def test_small_tensors_share_a_bucket_until_it_is_full():
    params = tuple(ParamMeta(f"p{i}", torch.float32, (224,)) for i in range(9))
    assert [indices(bucket) for bucket in broadcast(params, BUCKET)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_bucket_larger_than_the_direct_size_still_leaves_large_tensors_uncopied():
    params = (ParamMeta("large", torch.uint8, (DIRECT_BYTES,)), ParamMeta("small", torch.uint8, (DIRECT_BYTES - 1,)))
    assert [bucket.direct for bucket in broadcast(params, 8 * DIRECT_BYTES)] == [True, False]


def test_without_buckets_every_tensor_that_has_bytes_travels_alone():
    params = random_params(0)
    direct = [indices(bucket) for bucket in broadcast(params, 0) if bucket.direct]
    assert direct == [[index] for index, meta in enumerate(params) if meta.nbytes]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_copied_into_a_bucket_comes_out_bit_for_bit(seed):
    params = random_params(seed)
    tensors = [any_bits(meta.dtype, *meta.shape, seed=index) for index, meta in enumerate(params)]
    packer, lander, found = Packer(params, zip(params, tensors, strict=True)), Lander(params, {}, CPU), []
    for bucket in broadcast(params, BUCKET):
        if bucket.direct:
            (index,) = indices(bucket)
            lander.begin(index).copy_(packer.direct(CPU))
            found.append(lander.end(index))
            continue
        buffer = torch.full((BUCKET,), 0xAA, dtype=torch.uint8)
        packer.fill(bucket, [buffer])
        found += lander.take(bucket, buffer, lasting=True)
    packer.finish()
    assert [name for name, _ in found] == [meta.name for meta in params]
    assert all(same_bits(tensor, sent) for (_, tensor), sent in zip(found, tensors, strict=True))


@pytest.mark.parametrize("capacity", [64, 192, 1024, 1 << 20])
def test_whatever_the_size_of_a_staging_buffer_the_same_bytes_come_out(capacity):
    dtypes = [torch.uint8, torch.bfloat16, torch.float64, torch.complex128, torch.int32]
    sent = {f"{i:03d}": any_bits(dtypes[i % 5], (i * 37) % 301, seed=i) for i in range(60)}
    sent["010"] = any_bits(torch.float32, 50, 40, seed=1).t()
    params = MappingSource(sent).params()
    packer = Packer(params, checked(MappingSource(sent), params))
    into = {name: torch.zeros_like(tensor) for name, tensor in sent.items() if int(name) % 3}
    lander = Lander(params, into, CPU)
    slot, found = torch.zeros(capacity, dtype=torch.uint8), []
    for bucket in layout(params, capacity):
        packer.fill(bucket, [slot])
        found += lander.take(bucket, slot)
        slot.fill_(255)
    packer.finish()
    assert [name for name, _ in found] == [meta.name for meta in params]
    for name, tensor in found:
        assert same_bits(tensor, sent[name]), name
        assert name not in into or tensor.data_ptr() == into[name].data_ptr()


def test_no_staged_bucket_but_the_last_is_much_less_than_full():
    params = [ParamMeta(str(i), torch.bfloat16, (1000 + 7 * i, 64)) for i in range(50)]
    buckets = layout(params, 1 << 20)
    assert len(buckets) <= -(-sum(meta.nbytes for meta in params) // ((1 << 20) - (128 << 10)))


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
    lander = Lander((ParamMeta("p", torch.float32, (4, 4)),), {"p": target}, CPU)
    assert lander.begin(0).untyped_storage().data_ptr() != target.untyped_storage().data_ptr()


def test_a_tensor_of_the_same_form_takes_the_bytes_as_they_come():
    target = torch.zeros(4, 4, requires_grad=True)
    lander = Lander((ParamMeta("p", torch.float32, (4, 4)),), {"p": target}, CPU)
    assert lander.begin(0).data_ptr() == target.data_ptr()


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
        assert plan.buckets(params, BUCKET) == layout(params, BUCKET)
        assert plan.buckets(params, BUCKET, 64) == layout(params, BUCKET, 64)
        assert plan.metas([list(row) for row in plan.rows(params)]) == params
