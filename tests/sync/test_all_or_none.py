"""A fleet whose engines, or whose trainer, fail at any call: each engine serves the old version or the new one, whole.

Versions come as changes, to engines that serve all the time. With policy "all" the engines that answer serve the same.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tests.sync.live import FAULTS, LiveFleet, TrainerEnds
from torchrl_ext.base.errors import EngineError, UpdateError

POLICIES = ("best_effort", "all")


def sent(fleet):
    """Send the next version; return whether the trainer is left, and the engines of which it knows nothing."""
    before = fleet.sender.version
    try:
        report = fleet.update()
    except TrainerEnds:
        return False, set()
    except (UpdateError, EngineError) as error:
        rows = error.rows
        assert fleet.sender.version == before
    else:
        rows = report.engines
        taken = {(row.state, row.version) for row in rows if row.state != "unreachable"}
        assert taken == {("serving", report.version)}
    by_url = {engine.url: engine for engine in fleet.engines}
    for row in rows:
        engine = by_url[row.engine]
        if row.state == "serving" and engine.serving and row.version is not None:
            assert engine.receiver.version == row.version, f"{row} is not so"
    return True, {row.engine for row in rows if row.state == "unreachable"}


def lives(fleet, policy, versions):
    """Have a fleet live through faults that its engines have been set to, and recover."""
    for _ in range(versions):
        left, unsure = sent(fleet)
        fleet.check(one_version=policy == "all" and left, unsure=unsure)
        if not left:
            fleet.end()
            fleet.mend()
            fleet.begin()
    fleet.mend()
    for _ in range(3):  # an engine that was lost may be noticed only now
        with suppress(UpdateError):
            fleet.update()
            break
    fleet.check(one_version=True)
    assert {engine.receiver.version for engine in fleet.engines} == {fleet.sender.version}
    assert all(engine.serving for engine in fleet.engines)
    assert fleet.update().verified
    fleet.sender.shutdown()


def calls_of(root, engines, versions):
    """How many calls the first engine gets while nothing fails."""
    fleet = LiveFleet(root, engines)
    for _ in range(versions):
        fleet.update()
    fleet.sender.shutdown()
    return len(fleet.engines[0].calls)


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fault_at_any_call_of_three_engines_and_three_versions(policy, how, tmp_path, request):
    every = calls_of(tmp_path / "whole", 3, 3)
    thorough = request.config.getoption("--exhaustive")
    # the first and the last engine are asked first and last, and of the first one a canary would be
    points = [(engine, call) for engine in range(3) for call in range(every)]
    for engine, call in points if thorough else points[sum(map(ord, policy + how)) % 19 :: 19]:
        fleet = LiveFleet(tmp_path / f"{engine}-{call}", 3, policy=policy)
        fleet.engines[engine].fault = how, call
        lives(fleet, policy, 3)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.exhaustive)])
def test_schedules_of_faults(seeds, tmp_path):
    """Two or three engines, up to four versions, each engine fails in its own way, some more than once."""
    for seed in seeds:
        drawn = random.Random(seed)
        policy, engines = drawn.choice(POLICIES), drawn.choice((2, 3))
        fleet = LiveFleet(tmp_path / str(seed), engines, policy=policy)
        for _ in range(drawn.choice((1, 2, 3))):
            for engine in fleet.engines:
                if drawn.random() < 0.7:
                    engine.fault = drawn.choice(FAULTS), drawn.randrange(0, 24)
            try:
                lives(fleet, policy, drawn.choice((1, 2)))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            fleet.end()
            fleet.begin()
        fleet.sender.shutdown()
