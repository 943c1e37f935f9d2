"""What changed in a model, found stream by stream, against a comparison of tensor with tensor."""

import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.deltas.data import DTYPES
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas import streams
from torchrl_ext.data.deltas.bits import flat_bits
from torchrl_ext.data.deltas.streams import StreamPatch, find, fold
from torchrl_ext.data.deltas.table import ParamTable, unit_of
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.testing import any_bits

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
        lies = draw(st.sampled_from(["in order", "apart", "turned"]))
        if lies == "apart":
            changed = torch.stack([changed, after], -1)[..., 0]
        elif lies == "turned" and changed.dim() > 1:
            changed = changed.mT.contiguous().mT
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


@given(model=models(), block=st.sampled_from([7, 64, 1 << 20]), staged=st.sampled_from([3, 100, 1 << 14]))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_list_each_change_once_and_copies_follow(way, model, block, staged):
    (kernels, device), (old, new) = way, model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "kernels_on", lambda where: kernels if where == device else kernels_on(where))
        patch.setattr(streams, "BLOCK_UNITS", block)
        patch.setattr(streams, "_STAGED", staged)
        table = ParamTable.of([ParamMeta.of(name, tensor) for name, tensor in old.items()])
        olds, copies, news = flat(table, old), flat(table, old), flat(table, new)
        words = [np.zeros((stream.params.size, 2), np.uint64) for stream in table.streams]

        def then(block):
            words[block.stream][block.segments.start : block.segments.stop] += block.words
            places = block.start + block.positions.astype(np.int64)
            return block.stream, places.tolist(), block.before.tolist(), block.after.tolist()

        found = [([], [], []) for _ in olds]
        there = {name: tensor.to(device) for name, tensor in new.items()}
        for stream, *lists in find(table, copies, placed(table, there), then, threads=2, follow=True):
            for own, more in zip(found[stream], lists, strict=True):
                own += more
    for number, (was, copy, now) in enumerate(zip(olds, copies, news, strict=True)):
        where = (was != now).nonzero()[:, 0]
        unsigned = unit_of(table.streams[number].dtype).dtype
        bits = (part[where].numpy().view(unsigned).tolist() for part in (was, now))
        assert found[number] == (where.tolist(), *bits)
        assert torch.equal(copy, now)
    for number, stream in enumerate(table.streams):
        for at, param in enumerate(stream.params):
            name, own = table.params[param].name, tuple(map(int, words[number][at]))
            assert position_digest(old[name]) + own == position_digest(new[name]), name


@pytest.mark.parametrize("threads", [2, 16, 64])
def test_bytes_taken_ahead_are_bounded_for_any_thread_count(threads, monkeypatch):
    monkeypatch.setattr(streams, "_AHEAD", 4 << 20)
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 18)
    sizes = [1 << 18, 1 << 10, 3 << 18, 1 << 15, 1 << 15, 1 << 15, 2 << 18] * 8
    table = ParamTable.of([ParamMeta(f"w{n}", torch.bfloat16, (size,)) for n, size in enumerate(sizes)])
    live = most = 0

    def gone(nbytes):
        nonlocal live
        live -= nbytes

    def model():
        nonlocal live, most
        for number, size in enumerate(sizes):
            new = torch.ones(size, dtype=torch.bfloat16)
            live += new.nbytes
            most = max(most, live)
            weakref.finalize(new, gone, new.nbytes)
            yield 0, number, new

    old = torch.zeros(sum(sizes), dtype=torch.int16)
    found = sum(find(table, [old], model(), lambda block: block.positions.size, threads=threads))
    assert found == sum(sizes) and sum(2 * size for size in sizes) > 5 * streams._AHEAD
    assert most <= streams._AHEAD + 5 * 2 * max(sizes)  # one that is cut into blocks, one more, and two being looked at


def test_search_error_reaches_caller_and_leaves_no_thread(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 15)
    before, new = threading.active_count(), torch.ones(1 << 20)
    table, old = ParamTable.of([ParamMeta.of("w", new)]), torch.zeros(1 << 20, dtype=torch.int32)

    def then(block):
        if block.start:
            raise IntegrityError("what a test raises")

    with pytest.raises(IntegrityError, match="what a test raises"):
        list(find(table, [old], [(0, 0, new)], then, threads=2))
    search = find(table, [old], [(0, 0, new)], lambda block: block.start, threads=2)
    assert next(search) == 0
    search.close()
    assert threading.active_count() == before


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_folded_patches_do_what_they_do_one_after_the_other(data):
    size = data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.uint8, torch.float32]))
    table = ParamTable.of([ParamMeta("a", dtype, (size // 2,)), ParamMeta("b", dtype, (size - size // 2,))])
    unit = unit_of(dtype)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    start = generator.integers(0, 256, size * unit.width, np.uint8).view(unit.dtype)
    patches, now = [], start.copy()
    for steps in data.draw(st.lists(st.booleans(), max_size=5)):
        positions = np.flatnonzero(generator.random(size) < generator.choice([0.1, 0.5, 1.0])).astype(np.int32)
        values = generator.choice([1, 2, 3, 255, 254], positions.size).astype(unit.dtype)
        patches.append(StreamPatch(table, 0, 0, size, positions, values, steps))
        patches[-1].apply(now)
    folded = fold(patches)
    places = np.concatenate([patch.positions for patch in folded]) if folded else np.empty(0)
    assert np.unique(places).size == places.size
    for order in (folded, folded[::-1]):
        whole, once = start.copy(), start.copy()
        for patch in order:
            patch.apply(whole)
            for own in patch.split():  # parameter by parameter
                assert own.size == own.meta.numel
                own.apply(once[own.start :][: own.size])
        assert np.array_equal(once, now) and np.array_equal(whole, now)
    if folded and not patches[-1].steps:
        assert all((np.diff(patch.positions) > 0).all() for patch in folded)


@pytest.mark.parametrize("threads", [1, 4])
def test_tensors_still_computed_on_the_callers_stream(threads, lag, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_UNITS", 64)
    old = {f"w{n}": torch.arange(float(size)) for n, size in enumerate((5, 3, 200, 70))}
    table = ParamTable.of([ParamMeta.of(name, tensor) for name, tensor in old.items()])

    copies = flat(table, old)
    with torch.Stream(lag):

        def computed():
            for stream, segment, tensor in placed(table, old):
                yield stream, segment, tensor.to(lag) * 3 + 1  # queued now, as by an optimizer or a gather

        found = [
            one for many in find(table, copies, computed(), changes_in, threads=threads, follow=True) for one in many
        ]
    (after,) = copies
    expected = torch.cat([tensor * 3 + 1 for tensor in old.values()])
    assert torch.equal(after.view(torch.float32), expected)
    assert sorted(found) == [*enumerate(expected.view(torch.int32).tolist())]


def changes_in(block):
    """Where a block changed, and the new bits."""
    return [*zip((block.start + block.positions).tolist(), block.after.tolist(), strict=True)]


def test_neighbours_on_two_devices_are_no_run():
    block, near, far = streams._Open(0, 0, 10), torch.ones(2), torch.ones(2, device="meta")
    for at, tensor in enumerate((near, near, far, near)):
        block.add(2 * at, 2 * at + 2, tensor, True)
    block.close()
    runs = [(run.at, run.units, {one.device.type for one in run.tensors}) for run in block.runs]
    assert runs == [(0, 4, {"cpu"}), (4, 2, {"meta"}), (6, 2, {"cpu"})]
