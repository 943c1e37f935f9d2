"""Engines that come and go while a trainer sends: who takes part, and what a joiner holds."""

from __future__ import annotations

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineError, EngineUnreachableError
from torchrl_ext.control.fleet import Fleet

STEPS = ("info", "connect", "rehearse", "prefetch", "begin", "load", "commit")


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))


def engine(seed, name):
    """An engine in this process, and the model that it computes with."""
    held = model(seed)
    return tx.make_engine("inprocess", engine=held, url=name), held


def transport(name, tmp_path):
    return tx.make_transport(name, root=tmp_path / "root")


def change(policy):
    with torch.no_grad():
        policy[0].weight[0].add_(1)


def same(held, policy):
    return all(torch.equal(held.state_dict()[name], tensor) for name, tensor in policy.state_dict().items())


def when(client, step, act):
    """Have ``act`` run once, as soon as the engine is asked for ``step``."""
    real = getattr(client, step)

    def acting(*args, **more):
        setattr(client, step, real)
        act()
        return getattr(client, step)(*args, **more)

    setattr(client, step, acting)


def die(client):
    """Have an engine answer nothing from now on; returns what brings it back."""
    gone = {step: getattr(client, step) for step in (*STEPS, "verify", "resume", "pause")}

    def dead(*args, **more):
        raise EngineUnreachableError(f"{client.url} does not answer")

    for step in gone:
        setattr(client, step, dead)
    return lambda: [setattr(client, step, call) for step, call in gone.items()]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["delta", pytest.param("disk", marks=pytest.mark.exhaustive)])
def test_membership_change_applies_to_next_update(name, step, tmp_path):
    """Engines that join or leave during any step of an update do so from the next update on."""
    policy, (first, one), (second, two), (third, three) = model(0), engine(1, "a"), engine(2, "b"), engine(3, "c")
    with transport(name, tmp_path) as data:
        fleet = Fleet([first, second])
        sender = tx.WeightSender(data, fleet)

        def meanwhile():
            fleet.add(third)
            fleet.remove("b")

        when(first, step, meanwhile)
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
        sender.shutdown()


def test_an_update_of_nobody_raises_and_loses_nothing(tmp_path):
    policy, (first, one) = model(0), engine(1, "a")
    with transport("delta", tmp_path) as data, tx.WeightSender(data, fleet := Fleet([first])) as sender:
        fleet.remove(first)
        with pytest.raises(EngineError, match="the fleet has no engine"):
            sender.update_weights(policy)
        assert not list(tmp_path.glob("root/weight_v*")) and fleet.rows() == ()
        fleet.add(first)
        assert sender.update_weights(policy).version == 1 and same(one, policy)
        fleet.remove(first)
        for _ in range(2):
            with pytest.raises(EngineError, match="the fleet has no engine"):
                sender.update_weights(policy)
        fleet.add(first)
        change(policy)
        assert sender.update_weights(policy).version == 2 and same(one, policy)
