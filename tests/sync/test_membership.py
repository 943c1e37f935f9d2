"""Engines that come and go while a trainer sends: who takes part, what a joiner holds, and how it catches up."""

from __future__ import annotations

import threading

import pytest
import torch

import torchrl_ext as tx
from tests.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.errors import ConcurrentUpdateError, EngineError, EngineUnreachableError, UpdateError
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rpc.membership import from_file
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.serving.processes import free_port

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
def test_any_change_at_any_step_leaves_the_update_to_who_was_there_and_the_next_one_has_it(name, step, tmp_path):
    policy, (first, one), (second, two), (third, three) = model(0), engine(1, "a"), engine(2, "b"), engine(3, "c")
    with transport(name, tmp_path) as data:
        fleet = Pool([first, second])
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


@pytest.mark.parametrize("step", STEPS[3:])
@pytest.mark.parametrize("name", ["delta", "disk"])
def test_one_that_dies_at_any_step_catches_up_when_it_is_back_without_a_new_version(name, step, tmp_path):
    policy, (first, one), (second, two) = model(0), engine(1, "a"), engine(2, "b")
    with transport(name, tmp_path) as data:
        fleet, back = Pool([first, second]), []
        sender = tx.WeightSender(data, fleet)
        sender.update_weights(policy)
        change(policy)
        when(second, step, lambda: back.append(die(second)))
        with pytest.raises(UpdateError):
            sender.update_weights(policy)
        newest = max(row.version for row in fleet.rows())
        back[0]()
        report = sender.catch_up()
        assert {(row.engine, row.state, row.version) for row in report.engines} == {
            ("a", "serving", newest),
            ("b", "serving", newest),
        }
        assert report.version == newest and report.verified and same(one, policy) and same(two, policy)
        change(policy)
        assert sender.update_weights(policy).version == newest + 1 and same(two, policy)
        sender.shutdown()


@pytest.mark.parametrize("name", ["delta", "disk"])
def test_joiners_take_the_version_in_service_at_once_and_the_others_notice_nothing(name, tmp_path):
    policy, (first, one), (second, two) = model(0), engine(1, "a"), engine(2, "b")
    with transport(name, tmp_path) as data:
        fleet = Pool([first])
        sender = tx.WeightSender(data, fleet)
        assert sender.catch_up().version == 0  # nothing is in service yet
        for _ in range(3):
            change(policy)
            sender.update_weights(policy)
        calls = []
        when(first, "begin", lambda: calls.append("begin"))
        when(first, "connect", lambda: calls.append("connect"))
        fleet.add(second)
        report = sender.catch_up()
        assert [(row.engine, row.version, row.error) for row in report.engines] == [("a", 3, None), ("b", 3, None)]
        assert report.verified and report.proof == "in place" and same(two, policy) and not calls
        assert sender.catch_up().engines == report.engines and sender.version == 3
        change(policy)
        report = sender.update_weights(policy)  # nobody joins again
        assert report.version == 4 and "connect" not in calls
        assert same(one, policy) and same(two, policy)
        third, three = engine(3, "c")
        fleet.add(third)
        assert sender.catch_up().verified and same(three, policy)  # of a version that was sent as a part
        sender.shutdown()


def test_a_transport_that_keeps_no_version_says_that_joiners_wait_for_the_next_update():
    policy, (first, _), (second, two) = model(0), engine(1, "a"), engine(2, "b")
    fleet = Pool([first])
    with tx.WeightSender(tx.MemoryTransport(), fleet) as sender:
        sender.update_weights(policy)
        fleet.add(second)
        report = sender.catch_up()
        assert [row.version for row in report.engines] == [1, None] and not report.verified
        assert "takes the next update: the memory transport keeps no version 1" in report.engines[1].error
        sender.update_weights(policy)
        assert same(two, policy)


def test_a_joiner_that_fails_is_named_and_the_next_update_has_it(tmp_path):
    policy, (first, one), (second, two) = model(0), engine(1, "a"), engine(2, "b")
    with transport("disk", tmp_path) as data, tx.WeightSender(data, fleet := Pool([first])) as sender:
        sender.update_weights(policy)
        fleet.add(second)
        when(second, "load", lambda: (_ for _ in ()).throw(EngineError("b has no room")))
        with pytest.raises(UpdateError, match="b has no room") as told:
            sender.catch_up()
        assert [(row.engine, row.version) for row in told.value.report.engines] == [("a", 1), ("b", None)]
        assert fleet.health.why("b") is not None and same(one, policy)
        sender.update_weights(policy)
        assert fleet.health.why("b") is None and same(two, policy)


def test_a_joiner_that_dies_as_it_joins_keeps_the_version_from_the_others_for_one_call_only(tmp_path):
    policy, (first, _), (second, _), (third, three) = model(0), engine(1, "a"), engine(2, "b"), engine(3, "c")
    with transport("delta", tmp_path) as data, tx.WeightSender(data, fleet := Pool([first])) as sender:
        sender.update_weights(policy)
        fleet.add(second, third)
        when(second, "connect", lambda: die(second))
        with pytest.raises(UpdateError, match="b does not answer"):
            sender.catch_up()
        states = [(row.engine, row.state, row.version) for row in sender.catch_up().engines]
        assert states == [("a", "serving", 1), ("b", "unreachable", None), ("c", "serving", 1)]
        assert same(three, policy)


def test_an_update_waits_for_engines_that_catch_up_and_these_refuse_to_run_beside_an_update(tmp_path):
    policy, (first, one), (second, two) = model(0), engine(1, "a"), engine(2, "b")
    begun, go_on, refused = threading.Event(), threading.Event(), []
    with transport("delta", tmp_path) as data, tx.WeightSender(data, fleet := Pool([first])) as sender:
        sender.update_weights(policy)
        fleet.add(second)
        when(second, "load", lambda: (begun.set(), go_on.wait(WAIT_S)))
        beside = threading.Thread(target=sender.catch_up)
        beside.start()
        assert begun.wait(WAIT_S)
        change(policy)
        future = threading.Thread(target=sender.update_weights, args=(policy,))
        future.start()
        future.join(0.2)  # it has to wait
        go_on.set()
        beside.join(WAIT_S)
        future.join(WAIT_S)
        assert sender.version == 2 and same(one, policy) and same(two, policy)

        def meanwhile():
            with pytest.raises(ConcurrentUpdateError) as told:
                sender.catch_up()
            refused.append(told)

        when(first, "load", meanwhile)
        change(policy)
        assert sender.update_weights(policy).version == 3 and len(refused) == 1


def test_an_update_of_nobody_raises_and_loses_nothing(tmp_path):
    policy, (first, one) = model(0), engine(1, "a")
    with transport("delta", tmp_path) as data, tx.WeightSender(data, fleet := Pool([], members=lambda: [])) as sender:
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


# engines in processes of their own


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def serve(checkpoint, port=0):
    return EmbeddedServer(checkpoint, port=port, dtype="float32")


def says(server):
    (found,) = InferenceClient(server.url, timeout_s=WAIT_S).generate([PROMPT], max_tokens=4, temperature=0)
    return list(found.token_ids), {span.version for span in found.weight_versions}


@torch.no_grad()
def learn(policy, seed):
    policy.lm_head.weight[seed * 5 % 512].neg_()
    policy.model.embed_tokens.weight[seed * 3 % 512].neg_()


@pytest.mark.parametrize("name", ["delta", pytest.param("collective", marks=pytest.mark.exhaustive)])
def test_processes_that_are_listed_started_again_and_gone_hold_what_the_trainer_sent(name, checkpoint, tmp_path):
    policy, path, port = tiny_model(seed=1), tmp_path / "engines", free_port()
    where = {"root": tmp_path / "root", "base": checkpoint} if name == "delta" else {}
    data = tx.make_transport(name, timeout_s=20, **where)
    with serve(checkpoint) as steady, tx.WeightSender(data, tx.connect(members=from_file(path))) as sender:
        with pytest.raises(EngineError, match="the fleet has no engine"):
            sender.update_weights(policy)
        path.write_text(steady.url)
        sender.update_weights(policy)
        for _ in range(2):  # it joins, and comes back at the same address with its first weights
            with serve(checkpoint, port) as joiner:
                path.write_text(f"{steady.url}\n{joiner.url}")
                report = sender.catch_up()
                if name == "collective":
                    assert "takes the next update" in report.engines[1].error
                    learn(policy, sender.version + 1)
                    report = sender.update_weights(policy)
                assert report.verified and [row.version for row in report.engines] == [sender.version] * 2
                want = greedy(policy, PROMPT, 4)
                assert says(joiner) == says(steady) == (want, {str(sender.version)})
                learn(policy, sender.version + 1)
                report = sender.update_weights(policy)
                assert says(joiner) == says(steady) and says(joiner)[0] == greedy(policy, PROMPT, 4)
        path.write_text(steady.url)
        learn(policy, sender.version + 1)
        assert [row.engine for row in sender.update_weights(policy).engines] == [steady.url]
