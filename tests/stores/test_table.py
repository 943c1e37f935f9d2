"""Tables of parameters, and where the units of their streams lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.weights.boxes import SHAPES, blocks_of
from torchrl_ext.codecs.streams import StreamPatch
from torchrl_ext.codecs.units import units
from torchrl_ext.errors import ManifestError
from torchrl_ext.stores.table import ParamTable, Segment, units_of
from torchrl_ext.testing import any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.view import Block


@given(SHAPES, st.sampled_from([torch.bfloat16, torch.complex128]), st.data())
def test_units_of_a_box_lie_where_its_elements_do(shape, dtype, data):
    block = data.draw(blocks_of(shape))
    assume(block.numel)
    meta, segment = ParamMeta("w", dtype, shape), Segment(0, block.start, block.shape)
    table = ParamTable.of([meta], [[segment]])
    (stream,) = table.streams
    tensor = any_bits(dtype, *shape)
    part = tensor[block.within(Block.whole(shape))].contiguous()
    places = stream.positions(0, np.arange(units_of(meta, segment)))
    assert np.array_equal(units(tensor)[places], units(part)) and stream.box(0) == block
    straight = places[-1] - places[0] == places.size - 1
    assert stream.starts[0] == (places[0] if straight else -1)
    patch = StreamPatch(table, 0, 0, stream.size, np.arange(stream.size), units(part), False)
    assert patch.of(0).indices.tolist() == places.tolist()


METAS = [ParamMeta("a", torch.float32, (4, 6)), ParamMeta("b", torch.bfloat16, (5,)), ParamMeta("c", torch.float32, ())]
LEFT, RIGHT = Segment(0, (0, 0), (4, 2)), Segment(0, (0, 2), (4, 4))


def test_a_plain_table_has_a_stream_for_each_dtype():
    table = ParamTable.of(METAS)
    assert table.plain and [stream.dtype for stream in table.streams] == [torch.float32, torch.bfloat16]
    assert [stream.first.tolist() for stream in table.streams] == [[0, 24, 25], [0, 5]]
    assert table.places == [[(0, 0)], [(1, 0)], [(0, 1)]] and table.last_place == ([0, 1, 0], [0, 0, 1])
    assert table.lays_out_as(ParamTable.of(METAS)) and table.lost() is None
    assert table.lays_out_as(ParamTable.of(METAS, [[Segment(0), Segment(2)], [Segment(1)]]))


def test_a_table_of_boxes_covers_each_parameter_once():
    whole = ParamTable.of(METAS, [[LEFT, Segment(2)], [RIGHT], [Segment(1)]])
    assert whole.lost() is None and not whole.plain and not whole.lays_out_as(ParamTable.of(METAS))
    assert whole.places[0] == [(0, 0), (1, 0)]
    for streams in ([[LEFT, Segment(2)], [Segment(1)]], [[LEFT, Segment(2), RIGHT, LEFT], [Segment(1)]]):
        assert ParamTable.of(METAS, streams).lost() == METAS[0]


@pytest.mark.parametrize(
    "segment", [Segment(3), Segment(1), Segment(0, (0, 0), None), Segment(0, (0, 5), (4, 2)), Segment(0, (0,), (4,))]
)
def test_segments_that_cannot_be_are_refused(segment):
    with pytest.raises(ManifestError):
        ParamTable.of(METAS, [[Segment(2), segment]])


@given(st.integers(0, 24), st.integers(0, 25))
def test_the_segments_of_a_range_are_those_with_a_unit_in_it(start, stop):
    (stream, _) = ParamTable.of(METAS).streams
    if start < stop:
        meeting = [at for at in (0, 1) if stream.first[at] < stop and start < stream.first[at + 1]]
        assert list(stream.within(start, stop)) == meeting
