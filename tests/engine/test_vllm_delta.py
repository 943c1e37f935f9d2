"""A real vLLM server follows by delta: packed and plain linears, one and two workers, and never a wrong word."""

import pytest

from tests.engine.following_deltas import FollowsByDelta, serving_deltas
from tests.engine.served import ServedVLLM

pytestmark = pytest.mark.engine

SETTINGS = {
    "packed": {"dtype": "float32"},
    "plain": {"dtype": "float32"},
    "packed and tied, two workers": {"dtype": "float32", "tensor_parallel_size": 2},
    "plain, two workers, bfloat16": {"dtype": "bfloat16", "tensor_parallel_size": 2},
}

served = serving_deltas(ServedVLLM, SETTINGS, usual=("packed and tied, two workers",))


class TestFollowing(FollowsByDelta):
    """The suite, on vLLM."""
