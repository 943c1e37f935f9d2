"""Sizes against entropy; exact, so they are asserted (speeds are not: `torchrl-ext bench delta` measures them)."""

from __future__ import annotations

import pytest
import torch

from torchrl_ext.bench.data import bounds, synthetic_pair
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.pipeline import encode_tensor
from torchrl_ext.types import ParamMeta


@pytest.fixture(scope="module", params=[0.01, 0.1, 0.5])
def pair(request):
    name, old, new = synthetic_pair(request.param, hidden=512, layers=0, vocabulary=8192)[0]
    return ParamMeta.of(name, new), old, new


def test_the_fast_encoding_is_within_two_percent_of_bernoulli_positions_and_order_0_steps(pair):
    meta, old, new = pair
    changed, plain, _ = bounds(old, new)
    coded = encode_tensor(make_codec("ulp"), meta, old, new)
    assert coded.changed == changed
    assert plain * 0.98 < 8 * len(coded.payload) <= plain * 1.02


def test_the_tight_encoding_is_within_four_percent_of_the_same_per_exponent(pair):
    meta, old, new = pair
    _, plain, conditional = bounds(old, new)
    payload = encode_tensor(make_codec("context"), meta, old, new).payload
    assert conditional * 0.98 < 8 * len(payload) <= conditional * 1.04
    assert 8 * len(payload) < 0.8 * plain


def test_runs_of_changes_cost_less_than_scattered_ones():
    _, old, new = synthetic_pair(0.01, clustered=True, hidden=512, layers=0, vocabulary=8192)[0]
    _, plain, _ = bounds(old, new)
    for name in ("ulp", "context"):
        assert 8 * len(encode_tensor(make_codec(name), ParamMeta.of("w", new), old, new).payload) < 0.6 * plain


def test_the_bounds_are_the_entropies_of_a_pair_that_can_be_counted_by_hand():
    old = torch.full((1024,), 1.0, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[::4] += 1
    new.view(torch.int16)[::8] += 1  # steps of one and two, equally often; a quarter of all elements
    changed, plain, conditional = bounds(old, new)
    assert changed == 256
    assert plain == conditional == pytest.approx(1024 * 0.8112781244591328 + 256)
