from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.table import SparsePatch, apply_patch

META = ParamMeta("w", torch.bfloat16, (4, 5))


def bits(indices: list[int], values: list[int]) -> SparsePatch:
    return SparsePatch(META, np.array(indices, np.int32), np.array(values, np.uint16))


@pytest.mark.parametrize(
    ("indices", "values"), [([3, 3], [1, 1]), ([5, 2], [1, 1]), ([-1], [1]), ([20], [1]), ([1], [1, 2])]
)
def test_sparse_patch_refuses_invalid_indices(indices, values):
    """Invalid indices or values raise IntegrityError with the parameter's name or the wanted dtype."""
    with pytest.raises(IntegrityError, match="'w'"):
        bits(indices, values)
    with pytest.raises(IntegrityError, match="uint16"):
        SparsePatch(META, np.array([1], np.int32), np.array([1], np.uint32))


def test_a_patch_lands_only_in_the_tensor_that_it_is_for():
    with pytest.raises(ManifestError, match="'w'"):
        apply_patch(bits([1], [1]), torch.zeros(20))
    with pytest.raises(ConfigError, match="contiguous"):
        apply_patch(bits([1], [1]), torch.zeros(5, 4, dtype=torch.bfloat16).T)
