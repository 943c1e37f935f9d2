"""A real SGLang server follows by delta, one worker and two."""

import pytest

from tests.engine.following_deltas import FollowsByDelta, serving_deltas
from tests.engine.served import ServedSGLang

pytestmark = pytest.mark.engine

SETTINGS = {
    "one worker": {"dtype": "float32"},
    "two workers": {"dtype": "float32", "tensor_parallel_size": 2},
    "two workers, tied": {"dtype": "float32", "tensor_parallel_size": 2},
    "bfloat16": {"dtype": "bfloat16"},
}

served = serving_deltas(ServedSGLang, SETTINGS, usual=("two workers, tied",))


class TestFollowing(FollowsByDelta):
    """The suite, on SGLang."""
