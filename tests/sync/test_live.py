"""Versions that engines take while they serve: the calls that they get, when they pause after all, and the way back."""

from dataclasses import replace

import pytest
import torch

import torchrl_ext as tx
from tests.sync.live import QUESTIONS, LiveFleet
from torchrl_ext.base.errors import ConfigError, EngineError, IntegrityError, UpdateError
from torchrl_ext.base.messages import WHOLE, Keep
from torchrl_ext.data.landing.loader import TensorsLoader


def asked(engine):
    """What an engine was asked since, but for questions."""
    calls = [name for name in engine.calls if name not in QUESTIONS]
    engine.calls.clear()
    return calls


@pytest.mark.parametrize("engines", [1, 2])
def test_a_version_that_comes_as_changes_takes_one_call_and_no_pause(engines, tmp_path):
    fleet = LiveFleet(tmp_path, engines)
    assert {row.commit for row in fleet.update().engines} == {f"paused: {WHOLE}"}
    for engine in fleet.engines:
        engine.calls.clear()
    for version in (2, 3):
        report = fleet.update()
        assert report.verified and report.version == version
        assert {(row.commit, row.state, row.pause_s, row.version) for row in report.engines} == {
            ("live", "serving", 0.0, version)
        }
        for engine in fleet.engines:
            assert asked(engine) == ["prefetch", "poll", "commit", "keep"]
    fleet.check(one_version=True)
    assert fleet.engines[0].receiver.version == 3


def test_a_sender_may_ask_for_the_pause_or_refuse_it(tmp_path):
    fleet = LiveFleet(tmp_path / "paused", 1, commit="paused")
    fleet.update()
    (row,) = fleet.update().engines
    assert row.commit == "paused: commit='paused'" and row.pause_s > 0
    fleet = LiveFleet(tmp_path / "live", 1, commit="live")
    fleet.update()  # nobody can take a whole version otherwise
    assert fleet.update().engines[0].commit == "live"
    (engine,) = fleet.engines
    engine.port.live = False
    with pytest.raises(UpdateError, match="version 3 needs a pause: this kind of engine") as told:
        fleet.update()
    assert "serves its previous weights" in told.value.state or told.value.rows[0].state == "serving"
    fleet.check()
    assert engine.receiver.version == 2
    for wrong in ({"commit": "later"}, {"policy": "some"}):
        with pytest.raises(ConfigError, match="there is no"):
            LiveFleet(tmp_path / "wrong", 1, **wrong)


@pytest.mark.parametrize("why", ["the engine does not serve", "a test says so"])
def test_an_obstacle_takes_the_pause_and_is_named(why, tmp_path, monkeypatch):
    fleet = LiveFleet(tmp_path, 1)
    fleet.update()
    if why == "the engine does not serve":
        fleet.engines[0].client.pause()
    else:
        monkeypatch.setattr(TensorsLoader, "obstacle", lambda self: why)
    (row,) = fleet.update().engines
    assert row.commit == f"paused: {why}" and row.state == "serving"
    fleet.check()


@pytest.mark.parametrize("how", ["lose", "refuse"])
def test_a_lost_answer_is_asked_for_again_and_a_refusal_leads_back(how, tmp_path):
    fleet = LiveFleet(tmp_path, 2)
    fleet.update()
    broken = fleet.engines[1]
    broken.calls.clear()
    fleet.update()
    broken.fault = how, broken.calls.index("commit")
    if how == "lose":
        assert fleet.update().verified
        assert [engine.receiver.version for engine in fleet.engines] == [3, 3]
    else:
        with pytest.raises(UpdateError, match="did not take version 3") as told:
            fleet.update()
        assert [(row.state, row.version) for row in told.value.rows] == [("serving", 3), ("serving", 2)]
        assert "serves its previous weights" in told.value.rows[1].error
    fleet.check()
    assert fleet.update().verified
    fleet.check(one_version=True)


def test_damage_that_is_read_back_is_taken_back_bit_by_bit(tmp_path):
    fleet = LiveFleet(tmp_path, 1)
    fleet.update(), fleet.update()
    (engine,) = fleet.engines
    engine.calls.clear()
    fleet.update()
    engine.fault = "damage", engine.calls.index("commit")
    before = {name: tensor.clone() for name, tensor in engine.held.items()}
    with pytest.raises(UpdateError, match="differs from what was written") as told:
        fleet.update()
    assert engine.serving and all(torch.equal(engine.held[name], tensor) for name, tensor in before.items())
    assert (told.value.rows[0].state, told.value.rows[0].version) == ("serving", 3)
    assert fleet.update().verified
    fleet.check()


@pytest.mark.parametrize("commit", ["auto", "paused"])
@pytest.mark.parametrize("at", ["prefetch", "commit or load", "keep"])
def test_all_or_none_takes_a_version_back_from_those_that_took_it(commit, at, tmp_path):
    fleet = LiveFleet(tmp_path, 3, policy="all", commit=commit)
    fleet.update()
    broken = fleet.engines[2]
    broken.calls.clear()
    fleet.update()
    step = {"auto": "commit", "paused": "load"}[commit] if " " in at else at
    broken.fault = "refuse", broken.calls.index(step)
    if at == "keep":  # all have agreed
        assert fleet.update().verified
        assert {engine.receiver.version for engine in fleet.engines} == {3}
    else:
        with pytest.raises(UpdateError, match="was taken back") as told:
            fleet.update()
        assert {(row.state, row.version) for row in told.value.rows} == {("serving", 2)}
        assert fleet.sender.version == 2
    fleet.check(one_version=True)
    assert fleet.update().verified
    fleet.check(one_version=True)


def test_an_engine_that_cannot_go_back_is_paused_where_all_or_none_take_a_version(tmp_path):
    fleet = LiveFleet(tmp_path / "whole", 2)
    fleet.update()  # a first version comes whole
    finish = fleet.engines[1].calls.index("finish")
    fleet = LiveFleet(tmp_path / "fails", 2, policy="all")
    fleet.engines[1].fault = "refuse", finish
    with pytest.raises(UpdateError, match="came whole, and cannot be taken back"):
        fleet.update()
    assert not any(engine.serving for engine in fleet.engines)
    fleet.mend()
    assert fleet.update().verified
    fleet.check(one_version=True)


def test_one_engine_that_computes_other_outputs_serves_the_version_before(tmp_path):
    fleet = LiveFleet(tmp_path, 1)
    fleet.update(), fleet.update()

    def canary(client):
        raise EngineError("it computes other outputs")

    fleet.sender._manner = replace(fleet.sender._manner, canary=canary)
    with pytest.raises(UpdateError, match="it computes other outputs"):
        fleet.update()
    assert fleet.engines[0].receiver.version == 2 and fleet.engines[0].serving
    fleet.check()


def test_the_first_engine_tries_a_version_before_the_others_take_it(tmp_path):
    fleet, tried = LiveFleet(tmp_path, 3), []

    def canary(client):
        tried.append([engine.receiver.version for engine in fleet.engines])
        if len(tried) == 2:
            raise EngineError("it computes other outputs")

    fleet.sender._manner = replace(fleet.sender._manner, canary=canary)
    fleet.update()
    assert not tried  # it came whole
    fleet.update()
    with pytest.raises(UpdateError, match="it computes other outputs") as told:
        fleet.update()
    assert tried == [[2, 1, 1], [3, 2, 2]]
    assert {(row.state, row.version) for row in told.value.rows} == {("serving", 2)}
    fleet.check(one_version=True)
    fleet.sender._manner = replace(fleet.sender._manner, canary=None)
    assert fleet.update().verified


def test_the_way_back_takes_no_more_memory_than_the_changes_and_is_given_back(tmp_path):
    fleet = LiveFleet(tmp_path, 1)
    fleet.update(), fleet.update()
    (engine,) = fleet.engines
    held, keep = [], engine.handle

    def handle(message):
        patcher = engine.receiver._loader._patcher
        held.append((message.kind, sum(one.values.nbytes + one.offsets.nbytes for one in patcher._lists)))
        return keep(message)

    engine.port.handle = handle
    fleet.update()
    fleet.update()
    taken = dict(held)
    assert taken["commit"] == taken["keep"] > 0 == taken["prefetch"]


def test_a_way_back_that_is_not_given_up_fails_no_update(tmp_path, caplog):
    fleet = LiveFleet(tmp_path, 1)
    fleet.update(), fleet.update()
    (engine,) = fleet.engines
    handle = engine.handle

    def keeps(message):
        if isinstance(message, Keep):
            raise IntegrityError("version 3 is not the one held")
        return handle(message)

    engine.port.handle = keeps
    assert fleet.update().verified and "keeps the way back from version 3" in caplog.text
    assert fleet.update().engines[0].commit == "live"
    fleet.check()


def test_another_sender_takes_over_after_a_live_commit(tmp_path):
    first = LiveFleet(tmp_path / "one", 1)
    first.update(), first.update()
    (engine,) = first.engines
    other = tx.WeightSender(tx.make_transport("delta", root=tmp_path / "two"), engine.client)
    policy = {name: tensor + 7 for name, tensor in first.policy.items()}
    other.register_model(policy)
    assert other.update_weights().verified
    policy["a"][3] += 1
    assert other.update_weights().engines[0].commit == "live"
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in policy.items())
    assert first.update().verified
    first.check()
