"""What changed in a model, found stream by stream, against a comparison of tensor with tensor."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_ext.codecs import streams
from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.codecs.streams import StreamPatch, find, fold
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import IntegrityError
from torchrl_ext.kernels.base import LINEAR, POSITION, flat_bits
from torchrl_ext.stores.table import ParamTable, Segment
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import position_digest

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.complex128]


@st.composite
def models(draw):
    """A table of plain or cut parameters, and their tensors before and after."""
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12))
    metas = [ParamMeta(f"p{n}", draw(st.sampled_from(DTYPES)), shape) for n, shape in enumerate(shapes)]
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.1, 1.0]))

    def made(meta):
        data = np.frombuffer(generator.bytes(meta.nbytes) + b"\0", np.uint8).copy()
        return torch.from_numpy(data)[: meta.nbytes].view(meta.dtype).reshape(meta.shape)

    old, new = {meta.name: made(meta) for meta in metas}, {}
    for meta in metas:
        mask = torch.from_numpy(np.asarray(generator.random(meta.shape) < density))
        new[meta.name] = torch.where(mask, made(meta), old[meta.name]) if meta.numel else old[meta.name]
    segments = None
    if draw(st.booleans()):
        segments = {}
        for number, meta in enumerate(metas):
            cut = draw(st.integers(0, max(0, len(meta.shape) - 1)))
            if meta.numel and meta.shape and meta.shape[cut] > 1:
                at = draw(st.integers(1, meta.shape[cut] - 1))
                start = tuple(at if dim == cut else 0 for dim in range(len(meta.shape)))
                low = tuple(at if dim == cut else size for dim, size in enumerate(meta.shape))
                high = tuple(size - at if dim == cut else size for dim, size in enumerate(meta.shape))
                own = [Segment(number, (0,) * len(meta.shape), low), Segment(number, start, high)]
            else:
                own = [Segment(number)]
            for rank, segment in enumerate(own):
                segments.setdefault((rank, meta.dtype), []).append(segment)
        segments = [*segments.values()]
    return ParamTable.of(metas, segments), old, new


def of_segments(table, tensors):
    """Each segment's stream, number and tensor, streams in turns."""
    rows = []
    for number, stream in enumerate(table.streams):
        for at, segment in enumerate(stream.segments):
            tensor = tensors[table.params[segment.param].name]
            if segment.start is not None:
                cut = tuple(slice(a, a + n) for a, n in zip(segment.start, segment.sizes, strict=True))
                tensor = tensor[cut]
            rows.append((at, number, tensor))
    return [(number, at, tensor) for at, number, tensor in sorted(rows, key=lambda row: row[:2])]


@given(models(), st.sampled_from([POSITION, LINEAR]), st.sampled_from([1, 7, 64]), st.sampled_from([1, 3, 50]))
@settings(max_examples=150, deadline=None)
def test_streams_list_each_change_once_and_keep_the_digests(model, digest, block, staged):
    table, old, new = model
    flat = [[] for _ in table.streams]
    for stream, _, tensor in of_segments(table, old):
        flat[stream].append(flat_bits(tensor))
    olds = [torch.cat(own) for own in flat]
    found = {number: [] for number in range(len(olds))}
    words = [np.zeros((len(stream.segments), 2), np.uint64) for stream in table.streams]

    def then(block):
        words[block.stream][block.segments.start : block.segments.stop] += block.words
        return block.stream, block.start + block.positions.astype(np.int64), block.before.copy(), block.after.copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK_UNITS", block)
        patch.setattr(streams, "_STAGED", staged)
        for stream, *lists in find(table, olds, of_segments(table, new), then, threads=2, digest=digest):
            found[stream].append(lists)
    after = [[] for _ in table.streams]
    for stream, _, tensor in of_segments(table, new):
        after[stream].append(flat_bits(tensor))
    for number, bits in enumerate(after):
        was, now = olds[number].numpy(), torch.cat(bits).numpy()
        places = np.flatnonzero(was != now)
        lists = [np.concatenate(each) for each in zip(*found[number], strict=True)] if found[number] else [[], [], []]
        assert np.array_equal(lists[0], places)
        assert np.array_equal(lists[1], was[places].view(lists[1].dtype) if len(places) else lists[1])
        assert np.array_equal(lists[2], now[places].view(lists[2].dtype) if len(places) else lists[2])
    total = {meta.name: position_digest(old[meta.name], digest) for meta in table.params if math.prod(meta.shape)}
    for number, stream in enumerate(table.streams):
        for at, param in enumerate(stream.params):
            name = table.params[param].name
            if name in total:
                total[name] = total[name].plus(tuple(map(int, words[number][at])))
    assert total == {name: position_digest(new[name], digest) for name in total}


@pytest.mark.parametrize("threads", [2, 16, 64])
def test_the_bytes_taken_ahead_are_bounded_however_many_threads_there_are(threads, monkeypatch):
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
    found = sum(find(table, [old], model(), lambda block: block.positions.size, threads=threads, digest=LINEAR))
    assert found == sum(sizes) and sum(2 * size for size in sizes) > 5 * streams._AHEAD
    assert most <= streams._AHEAD + 5 * 2 * max(sizes)  # one that is cut into blocks, one more, and two being looked at


def test_an_error_reaches_the_caller_and_a_stopped_search_leaves_no_thread(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 15)
    before, new = threading.active_count(), torch.ones(1 << 20)
    table, old = ParamTable.of([ParamMeta.of("w", new)]), torch.zeros(1 << 20, dtype=torch.int32)

    def then(block):
        if block.start:
            raise IntegrityError("what a test raises")

    with pytest.raises(IntegrityError, match="what a test raises"):
        list(find(table, [old], [(0, 0, new)], then, threads=2, digest=LINEAR))
    search = find(table, [old], [(0, 0, new)], lambda block: block.start, threads=2, digest=LINEAR)
    assert next(search) == 0
    search.close()
    assert threading.active_count() == before


@given(st.data())
@settings(max_examples=300, deadline=None)
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
        land([patches[-1]], now)
    folded = fold(patches)
    places = np.concatenate([patch.positions for patch in folded]) if folded else np.empty(0)
    assert np.unique(places).size == places.size
    for order in (folded, folded[::-1]):
        once = start.copy()
        land(order, once)
        assert np.array_equal(once, now)
    if folded and not patches[-1].steps:
        assert all((np.diff(patch.positions) > 0).all() for patch in folded)


def land(patches, bits):
    """Apply patches, parameter by parameter."""
    table = patches[0].table if patches else None
    for patch in patches:
        for own in patch.split():
            first = table.streams[0].first[table.number[own.meta.name]]
            apply_patch(own, torch.from_numpy(bits[first:][: own.meta.numel]).view(own.meta.dtype))
