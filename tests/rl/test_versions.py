"""`MaxLag`: what is too old, or of another run, is not trained on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MetaData, TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm.policies import LogProbs, Masks

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.rl.versions import MaxLag, TokenVersions

ROWS = st.lists(st.lists(st.integers(-1, 7), min_size=1, max_size=3), min_size=1, max_size=3)


def rollout(versions, run="", prompt=2):
    """One sequence whose response tokens are of ``versions``."""
    full = torch.tensor([-1] * prompt + versions)
    said = torch.tensor([False] * prompt + [True] * len(versions))
    return TensorDict(
        {
            "token_versions": TokenVersions(full=full, response=full[prompt:], run=MetaData(run)),
            "masks": Masks(all_assistant_mask=said, all_attention_mask=torch.ones_like(said)),
            "log_probs": LogProbs(full=torch.where(said, -1.0, torch.nan), response=torch.full((len(versions),), -1.0)),
        },
        batch_size=[],
    )


def batch(*rows, run=""):
    return TensorDict.lazy_stack([rollout(row, run) for row in rows], 0)


def said(data):
    return [row["masks", "all_assistant_mask"].int().tolist() for row in data.reshape(-1).unbind(0)]


@given(rows=ROWS, lag=st.integers(0, 6))
def test_max_lag_masks_stale_tokens(rows, lag):
    """Also tokens of unknown versions, and of numbers that this run has not reached."""
    fresh = [[version in range(max(0, 5 - lag), 6) for version in row] for row in rows]
    data, looks = batch(*rows), MaxLag(lag, lambda: 5)
    out = looks(data)
    assert said(out) == [[0, 0, *map(int, row)] for row in fresh]
    scored = [torch.isfinite(row["log_probs", "full"]).tolist() for row in out.unbind(0)]
    assert scored == [[False, False, *row] for row in fresh]
    assert said(data) == [[0, 0] + [1] * len(row) for row in rows]  # what is stored is not changed
    assert (looks.seen, looks.stale) == (sum(map(len, rows)), sum(not one for row in fresh for one in row))


def test_each_turn_of_a_trajectory_is_masked_by_itself():
    turns = TensorDict.lazy_stack([batch([2], [2]), batch([2], [1])], 0)
    assert said(MaxLag(0, lambda: 2)(turns)) == [[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_a_buffer_gives_no_token_of_an_earlier_run():
    """Each sample is checked anew; versions of a buffer that was saved are no newer ones, whatever their numbers."""
    newest = [1]
    buffer = ReplayBuffer(storage=LazyStackStorage(3), batch_size=3, sampler=SamplerWithoutReplacement(shuffle=False))
    buffer.extend(TensorDict.lazy_stack([rollout([1, 3], run) for run in ("first", "second", "")], 0))
    buffer.append_transform(MaxLag(1, lambda: newest[0], run="second"))
    for number, kept in ((1, [1, 0]), (3, [0, 1]), (2, [1, 0]), (4, [0, 1]), (5, [0, 0])):
        newest[0] = number
        assert said(buffer.sample()) == [[0] * 4, [0, 0, *kept], [0] * 4]


def test_data_of_other_policies_is_refused():
    with pytest.raises(ConfigError, match="token_versions"):
        MaxLag(1, lambda: 0)(TensorDict({"masks": {"all_assistant_mask": torch.ones(1, 1)}}, batch_size=[1]))
    with pytest.raises(ConfigError, match="max_lag is -1"):
        MaxLag(-1, lambda: 0)
