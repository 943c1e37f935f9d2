"""Which block of a full tensor a strided view covers."""

import pytest

from tests.landing.views import VIEWS, made
from torchrl_ext.landing.regions import region_of
from torchrl_ext.weights.shards.blocks import Block


@pytest.mark.parametrize("name", VIEWS)
def test_a_region_is_a_block_exactly_where_its_elements_are_those_of_the_block(name):
    full = made((8, 6))
    view = VIEWS[name](full)
    if view.data_ptr() != 0 and view.untyped_storage().data_ptr() != full.untyped_storage().data_ptr():
        return
    found = region_of((8, 6), view.storage_offset(), view.shape, view.stride())
    values = view.reshape(-1).tolist()
    rows, columns = {int(one) // 6 for one in values}, {int(one) % 6 for one in values}
    box = (
        bool(values)
        and len(set(values)) == len(values)
        and max(rows) - min(rows) + 1 == len(rows)
        and max(columns) - min(columns) + 1 == len(columns)
        and len(values) == len(rows) * len(columns)
    )
    if box:
        assert found == Block((min(rows), min(columns)), (max(rows) + 1, max(columns) + 1))
    else:
        assert found is None


def test_sides_of_one_and_tensors_without_elements_have_regions_too():
    assert region_of((), 0, (), ()) == Block((), ())
    assert region_of((), 0, (1, 1), (1, 1)) == Block((), ())
    assert region_of((4, 1), 2, (2, 1), (1, 1)) == Block((2, 0), (4, 1))
    assert region_of((1, 4), 0, (4,), (1,)) == Block((0, 0), (1, 4))
    assert region_of((2, 1, 3), 3, (3,), (1,)) == Block((1, 0, 0), (2, 1, 3))
    assert region_of((0, 4), 0, (0, 4), (4, 1)) is None
    assert region_of((3, 4), 0, (2, 2, 3), (2, 2, 3)) is None  # as many elements as a box, but not its own
