from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codecs.data import bytes_of
from torchrl_ext.codecs.patch import DensePatch, SparsePatch, StepPatch, apply_patch, diff, fold
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.types import ParamMeta

META = ParamMeta("w", torch.bfloat16, (4, 5))


def bits(indices: list[int], values: list[int]) -> SparsePatch:
    return SparsePatch(META, np.array(indices, np.int32), np.array(values, np.uint16))


def steps(indices: list[int], values: list[int]) -> StepPatch:
    return StepPatch(META, np.array(indices, np.int32), np.array(values).astype(np.uint16))


def landed(*patches) -> bytes:
    tensor = torch.arange(20, dtype=torch.float32).to(torch.bfloat16).reshape(4, 5)
    for patch in patches:
        apply_patch(patch, tensor)
    return bytes_of(tensor)


@pytest.mark.parametrize(
    ("indices", "values"), [([3, 3], [1, 1]), ([5, 2], [1, 1]), ([-1], [1]), ([20], [1]), ([1], [1, 2])]
)
def test_places_that_a_parameter_does_not_have_are_refused_by_name(indices, values):
    with pytest.raises(IntegrityError, match="'w'"):
        bits(indices, values)


def test_values_of_another_width_are_refused():
    with pytest.raises(IntegrityError, match="uint16"):
        SparsePatch(META, np.array([1], np.int32), np.array([1], np.uint32))
    with pytest.raises(IntegrityError, match="'w'"):
        DensePatch(META, np.zeros(19, np.uint16))


def test_one_changed_element_is_one_place_and_the_sign_of_zero_counts():
    old = torch.zeros(4, 5, dtype=torch.bfloat16)
    new = old.clone()
    new[2, 3] = -0.0
    patch = diff(META, old, new)
    assert patch.indices.tolist() == [13]
    assert patch.values.tolist() == [0x8000]


def test_new_bits_replace_earlier_ones():
    first, second = bits([1, 4, 9], [10, 11, 12]), bits([0, 4, 19], [20, 21, 22])
    folded = fold([first, second])
    assert folded.indices.tolist() == [0, 1, 4, 9, 19]
    assert folded.values.tolist() == [20, 10, 21, 12, 22]
    assert landed(folded) == landed(first, second)


def test_steps_add_up_without_a_base_and_vanish_where_they_cancel():
    first, second = steps([1, 4, 9], [1, -1, 3]), steps([1, 4, 19], [2, 1, -5])
    folded = fold([first, second])
    assert isinstance(folded, StepPatch)
    assert folded.indices.tolist() == [1, 9, 19]
    assert landed(folded) == landed(first, second)


def test_steps_cross_zero_and_the_end_of_the_line():
    for start in (0x0000, 0x8000, 0x7FFF, 0xFFFF, 0x7F80):
        tensor = torch.full((4, 5), 0.0, dtype=torch.bfloat16)
        tensor.view(torch.int16).fill_(start - 0x10000 if start > 0x7FFF else start)
        there = tensor.clone()
        apply_patch(steps([7], [-3]), there)
        assert bytes_of(there) != bytes_of(tensor)
        apply_patch(steps([7], [3]), there)
        assert bytes_of(there) == bytes_of(tensor)


def test_a_dense_patch_ends_what_came_before_and_takes_what_comes_after():
    dense = DensePatch(META, np.arange(20, dtype=np.uint16))
    for later in (bits([3], [7]), steps([3, 4], [2, -2])):
        folded = fold([bits([1], [1]), dense, later])
        assert isinstance(folded, DensePatch)
        assert landed(folded) == landed(bits([1], [1]), dense, later)
    assert fold([steps([1], [1]), dense]) is dense


def test_steps_after_known_bits_are_resolved_where_they_meet_and_refused_where_not():
    folded = fold([bits([1, 4], [10, 11]), steps([4], [2])])
    assert landed(folded) == landed(bits([1, 4], [10, 11]), steps([4], [2]))
    assert landed(fold([steps([4], [1]), bits([3, 4], [5, 6])])) == landed(steps([4], [1]), bits([3, 4], [5, 6]))
    with pytest.raises(ManifestError, match=r"'w'.*base"):
        fold([bits([1], [10]), steps([2], [1])])


def test_patches_of_different_parameters_do_not_fold():
    other = SparsePatch(ParamMeta("v", torch.bfloat16, (4, 5)), np.array([1], np.int32), np.array([1], np.uint16))
    with pytest.raises(ManifestError, match="v bfloat16"):
        fold([bits([1], [1]), other])
    with pytest.raises(ManifestError):
        fold([])


def test_a_patch_lands_only_in_the_tensor_that_it_is_for():
    with pytest.raises(ManifestError, match="'w'"):
        apply_patch(bits([1], [1]), torch.zeros(20))
    with pytest.raises(ConfigError, match="contiguous"):
        apply_patch(bits([1], [1]), torch.zeros(5, 4, dtype=torch.bfloat16).T)
