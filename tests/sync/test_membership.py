"""Engines that come and go while a trainer sends: who takes part, and what a joiner holds."""

from __future__ import annotations

import pytest
from torch import nn

import torchrl_ext as tx
from tests.sync.ends import before, change, same
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.sync.local.inprocess import InProcessEngine


@pytest.fixture
def models():
    return [nn.Linear(16, 32) for _ in range(4)]


@pytest.fixture
def engines(models):
    return [InProcessEngine(model, url=name) for model, name in zip(models[1:], "abc", strict=True)]


@pytest.mark.parametrize("step", ["info", "join", "rehearse", "stage", "begin", "load", "commit"])
def test_membership_change_applies_to_next_update(step, models, engines, tmp_path):
    (policy, one, two, three), (first, second, third) = models, engines
    fleet = Fleet([first, second])

    def meanwhile():
        fleet.add(third)
        fleet.remove("b")

    before(first, step, meanwhile)
    with tx.WeightSender(tx.DeltaTransport(tmp_path / "root"), fleet) as sender:
        report = sender.update_weights(policy)
        assert [row.engine for row in report.engines] == ["a", "b"] and same(one, policy) and same(two, policy)
        change(policy)
        report = sender.update_weights(policy)
        assert [(row.engine, row.version) for row in report.engines] == [("a", 2), ("c", 2)] and report.verified
        assert same(one, policy) and same(three, policy) and not same(two, policy)
        fleet.add(second)  # it comes back with an old version
        change(policy)
        sender.update_weights(policy)
        assert same(one, policy) and same(two, policy) and same(three, policy)
