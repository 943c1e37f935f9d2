"""Tables of parameters, and where the units of their streams lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.table import ParamTable

METAS = [ParamMeta("a", torch.float32, (4, 6)), ParamMeta("b", torch.bfloat16, (5,)), ParamMeta("c", torch.float32, ())]


def test_table_has_a_stream_per_dtype_or_the_given_streams():
    table = ParamTable.of(METAS)
    assert [stream.dtype for stream in table.streams] == [torch.float32, torch.bfloat16]
    assert [stream.first.tolist() for stream in table.streams] == [[0, 24, 25], [0, 5]]
    assert table.place == ([0, 1, 0], [0, 0, 1])
    assert table.lays_out_as(ParamTable.of(METAS, [[0, 2], [1]]))
    shared = ParamTable.of(METAS, [[2], [1], [0]])
    assert shared.place == ([2, 1, 0], [0, 0, 0])
    assert not table.lays_out_as(shared) and not table.lays_out_as(ParamTable.of(METAS[:2]))


@pytest.mark.parametrize(
    "streams", [[[0, 2]], [[0, 2, 0], [1]], [[0, 1, 2]], [[0, 2], [1], []], [[0, 2], [1, 3]], [[-1]]]
)
def test_streams_that_cannot_be_are_refused(streams):
    with pytest.raises(ManifestError):
        ParamTable.of(METAS, streams)


@given(st.integers(0, 24), st.integers(0, 25))
def test_the_segments_of_a_range_are_those_with_a_unit_in_it(start, stop):
    (stream, _) = ParamTable.of(METAS).streams
    if start < stop:
        meeting = [at for at in (0, 1) if stream.first[at] < stop and start < stream.first[at + 1]]
        assert list(stream.within(start, stop)) == meeting
