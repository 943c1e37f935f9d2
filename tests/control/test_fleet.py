"""`Fleet`, mostly over clients in memory: who takes part, is called or lost, and what others hear of it."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch

import torchrl_ext as tx
from tests.fakes import FakeEngine
from tests.processes import WAIT_S
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, EngineError, EngineUnreachableError, UpdateError
from torchrl_ext.base.reports import EngineRow
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.control.client import Manner, Update
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.makes.vllm import vllm_engine

STEPS = ("stage", "begin", "load", "verify", "commit")
STEP_NAMES = {**{step: step for step in STEPS}, "stage": "prefetch", "begin": "pause", "verify": "load"}
"""What errors of a fleet call them."""


def taking(step):
    return lambda update, *given: update.engine.take(step)


class ScriptedUpdate(Update):
    """Has its engine take each step."""

    def __init__(self, engine, version, manner):
        super().__init__(version)
        self.engine, self.manner, self.before = engine, manner, engine.version

    load, verify, keep = map(taking, ("load", "verify", "keep"))

    def stage(self, part=None):
        self.engine.take("stage")
        self.obstacle = self.engine.obstacle

    def begin(self):
        self.engine.take("begin")
        self.engine.serving = not self.obstacle

    def commit(self):
        self.engine.take("commit")
        self.engine.version, self.engine.serving = str(self.version), True
        if not self.obstacle and self.manner.canary is not None:
            self.manner.canary(self.engine)
        return self.rows()

    def undo(self):
        self.engine.take("undo")
        self.engine.version, self.engine.serving = self.before, True

    def rows(self):
        return self.engine.look()


class Scripted(Engine):
    """Keeps what it is told, and fails the calls that it should."""

    kind, url = "scripted", ""

    def __init__(self, url, *, serving=True, version="", fails=()):
        self.url, self.serving, self.version, self.fails, self.calls = url, serving, version, set(fails), []

    def take(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise EngineUnreachableError(f"{self.url} does not {name}")

    def info(self):
        self.take("info")
        return EngineInfo(url=self.url, kind=self.kind, world_size=1, weight_version=self.version, transports=("disk",))

    def join(self, offer, on_failure=None):
        self.take("join")

    def rehearse(self, how="once"):
        return "sent"

    def replaced(self, connection):
        return ""

    verifies, rehearsed, obstacle = True, (), "it is scripted so"

    def update(self, version, manner=Manner()):
        return ScriptedUpdate(self, version, manner)

    def pause(self):
        served = self.serving
        self.take("pause")
        self.serving = False
        return served

    def resume(self):
        self.take("resume")
        self.serving = True

    def look(self):
        state = "serving" if self.serving else "paused"
        return (EngineRow(engine=self.url, kind=self.kind, state=state, version=int(self.version or 0)),)

    def close(self):
        self.take("close")


def test_a_fleet_pauses_as_far_as_it_can_and_names_the_rest():
    one, other = engines = [Scripted("one"), Scripted("other", fails=["pause"])]
    with pytest.raises(EngineError, match="1 of 2 engines did not pause"):
        Fleet(engines).pause()
    assert not one.serving and other.serving
    assert Fleet([one]).pause() is False and Fleet([one, Scripted("third")]).pause() is True


def test_fleet_version_is_its_oldest_and_no_number_is_reused(tmp_path):
    engines = [Scripted("new", version="9"), Scripted("old", version="3")]
    fleet = Fleet(engines)
    assert fleet.info().weight_version == "3" and fleet.info().world_size == 2
    report = tx.WeightSender(tx.DiskTransport(tmp_path), fleet, verify=False).update_weights({"x": torch.ones(2)})
    assert report.version == 10 and [engine.version for engine in engines] == ["10", "10"]


@pytest.mark.parametrize("label", ["1732789123456789012", "4611686018427387903", "9" * 5000, "\u0663"])
def test_a_label_with_more_digits_than_versions_have_is_a_name(tmp_path, label):
    engine = Scripted("a", version=label)
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), Fleet([engine]), verify=False)
    for version in (1, 2):
        assert sender.update_weights({"x": torch.ones(2)}).version == version
    sender.shutdown()
    assert engine.version == "2" and tx.DiskTransport(tmp_path).latest_version() == 2


@pytest.mark.parametrize("transport", ["delta", "disk"])
def test_impossible_version_number_is_refused_before_writing(tmp_path, transport):
    engine = Scripted("a", version="9" * 18)
    sender = tx.WeightSender(tx.make_transport(transport, root=tmp_path), Fleet([engine]), verify=False)
    with pytest.raises(UpdateError, match=f"{10**18} cannot be the number of a version"):
        sender.update_weights({"x": torch.ones(2)})
    sender.shutdown()
    assert engine.version == "9" * 18 and "load" not in engine.calls
    assert not list(tmp_path.glob("weight_v*")) and not (tmp_path / "latest").exists()


def test_engines_that_hang_are_not_waited_for_twice(monkeypatch):
    """Neither a lost one that is asked how it is, nor one whose client is made."""
    monkeypatch.setattr("torchrl_ext.control.fleet._PROBE_S", 0.05)
    leave, made = threading.Event(), Scripted("http://new")

    class Hanging(Scripted):
        def info(self):
            if not leave.wait(WAIT_S):
                raise DeadlineError("too late")
            return super().info()

    steady, hanging = Scripted("http://steady"), Hanging("http://hanging", fails=["info"])
    listed = [steady, hanging, "new"]
    fleet = Fleet([steady, hanging], members=lambda: listed, make=lambda url: leave.wait(WAIT_S) and made)
    fleet.lose(hanging, EngineUnreachableError("it does not answer"))
    assert fleet.members() == fleet.members() == (steady.url,)
    assert [row.state for row in fleet.look()] == ["serving", "unreachable"]
    leave.set()
    monkeypatch.setattr("torchrl_ext.control.fleet._PROBE_S", WAIT_S)
    Deadline(WAIT_S).poll(lambda: fleet.members() == (steady.url, made.url))  # an answer counts as soon as it is there
    hanging.fails.clear()  # one whose answer was an error is asked again
    assert fleet.members() == (steady.url, hanging.url, made.url)


def test_fleet_discovers_listed_engines_and_skips_absent_ones(caplog):
    with FakeEngine("vllm") as first, FakeEngine("sglang") as second:
        listed = [first.url, "127.0.0.1:9"]
        fleet = tx.connect(members=lambda: listed)
        assert fleet.members() == fleet.members() == (first.url,)
        assert caplog.text.count("http://127.0.0.1:9 changes nothing") == 1 and fleet.url == first.url
        listed = [second.url]
        assert fleet.members() == (second.url,) and fleet.info().kind == "fleet"
        assert [one.kind for one in fleet.each()] == ["sglang"]
        fleet.close()


def test_only_a_fleet_that_makes_clients_takes_addresses(caplog):
    assert Fleet([Scripted("a")], members=lambda: [Scripted("a"), "b:1"]).members() == ("a",)
    assert "cannot make a client for 'http://b:1'" in caplog.text or "cannot make a client for 'b:1'" in caplog.text


def test_a_pool_goes_to_another_process():
    fleet = Fleet([vllm_engine("a:1"), vllm_engine("b:1")])
    fleet.lose(fleet.engines[0], EngineError("it died"))
    copied = pickle.loads(pickle.dumps(fleet))
    assert copied.url == fleet.url and [*copied.lost()] == [copied.engines[0]]


def test_membership_change_applies_to_next_update(tmp_path):
    first, second, joiner, late = Scripted("a"), Scripted("b"), Scripted("c"), Scripted("late", fails=["info"])
    listed = [first, second]
    fleet = Fleet(listed, members=lambda: listed)
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), fleet, verify=False)

    def meanwhile(version):
        listed[:] = [Scripted("a"), joiner, late]  # another client of an engine that is known changes nothing

    first.take = lambda name: meanwhile(name) if name == "stage" else None
    report = sender.update_weights({"x": torch.ones(2)})
    assert [row.engine for row in report.engines] == ["a", "b"] and second.version == "1" and not joiner.calls
    report = sender.update_weights({"x": torch.ones(2)})
    assert [row.engine for row in report.engines] == ["a", "c"] and joiner.version == "2" and second.version == "1"
    late.fails.clear()
    assert fleet.members() == ("a", "c", "late") and second.calls[-1] == "close"


def test_fleet_keeps_its_members_when_the_members_function_fails(tmp_path, caplog):
    listed = [Scripted("a")]

    def source():
        if listed is None:
            raise OSError("no list today")
        return listed

    fleet = Fleet([Scripted("a")], members=source)
    assert fleet.members() == ("a",)
    listed = None
    assert fleet.members() == fleet.members() == ("a",) and caplog.text.count("no list today") == 1
    listed = []
    with pytest.raises(EngineError, match="has no engine"):
        fleet.members()
    listed = [Scripted("b")]
    assert fleet.members() == ("b",)


QUESTIONS = {
    "look": Fleet.look,
    "info": Fleet.info,
    "infos": Fleet.infos,
    "members": Fleet.members,
    "pause": Fleet.pause,
    "resume": Fleet.resume,
}


class Asked(Scripted):
    """Has another thread call ``ask``, to its end, within each step of an update from ``since`` on."""

    since, ask, ready = "", staticmethod(lambda: None), None

    def take(self, name):
        if name in STEPS and self.since and STEPS.index(name) >= STEPS.index(self.since):
            assert self.ready is None or self.ready.wait(WAIT_S)
            with ThreadPoolExecutor(1) as other:
                other.submit(self.ask).result(WAIT_S)
        super().take(name)


class Failing(Scripted):
    def __init__(self, url):
        super().__init__(url)
        self.failed = threading.Event()

    def take(self, name):
        try:
            super().take(name)
        except EngineUnreachableError:
            self.failed.set()
            raise


def update(fleet, version, **manner):
    """Update a fleet as a sender does, and return the rows of its report."""
    fleet.members()
    running = fleet.update(version, Manner(**manner))
    running.stage()
    with running.begun():
        running.load({})
        running.verify({"x": "its digest"})
        rows = running.commit()
    running.keep()
    return rows


@pytest.mark.parametrize("step", ["begin", "load", "commit"])
def test_interrupted_update_logs_engines_that_may_stay_paused(step, caplog):
    class Interrupted(Scripted):
        def take(self, name):
            super().take(name)
            if name == step:
                raise KeyboardInterrupt

    for engine in (Interrupted("one"), Fleet([Interrupted("one"), Scripted("other")])):
        caplog.clear()
        running = engine.update(2)
        with pytest.raises(KeyboardInterrupt), running.begun():
            running.load({})
            running.commit()
        ((level, words),) = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert level == "ERROR" and all(one.url in words for one in engine.each())


class TestAnotherThreadAsks:
    @pytest.mark.parametrize("question", QUESTIONS)
    @pytest.mark.parametrize("step", STEPS)
    def test_an_engine_that_failed_a_step_takes_no_later_one(self, step, question):
        steady, failing = Asked("steady"), Failing("failing")
        fleet = Fleet([steady, failing])
        update(fleet, 1)
        failing.fails, failing.calls = {step}, []
        steady.since, steady.ask, steady.ready = step, lambda: QUESTIONS[question](fleet), failing.failed
        with pytest.raises(EngineError, match=f"failing does not {step}; 1 of 2 engines did not take version 2"):
            update(fleet, 2)
        assert [call for call in failing.calls if call in STEPS] == list(STEPS[: STEPS.index(step) + 1])
        assert steady.version == "2" and failing.version == "1"
        failing.fails, steady.since = set(), ""
        assert [row.error for row in update(fleet, 3)] == [None, None] and failing.version == "3"

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_an_engine_that_does_not_answer_it_takes_the_update(self, question):
        steady, busy = Asked("steady"), Scripted("busy")
        fleet = Fleet([steady, busy])
        update(fleet, 1)

        def ask():
            busy.fails = {"info", "pause", "resume"}
            with suppress(EngineError):
                QUESTIONS[question](fleet)
            busy.fails = set()

        steady.since, steady.ask = "stage", ask
        assert [row.error for row in update(fleet, 2)] == [None, None]
        assert steady.version == busy.version == "2"

    @pytest.mark.parametrize("since", STEPS)
    def test_engines_that_come_within_an_update_take_the_next_one(self, since):
        steady, late, new = Asked("steady"), Scripted("late"), Scripted("new")
        listed = [steady, late]
        fleet = Fleet(listed, members=lambda: listed)
        update(fleet, 1)
        fleet.lose(late, EngineUnreachableError("it does not answer"))
        late.fails, late.calls = {"info"}, []

        def ask():
            late.fails = set()
            listed.append(new)
            assert fleet.members() == ("steady", "late", "new")

        steady.since, steady.ask = since, ask
        with pytest.raises(EngineError, match="late does not info; 1 of 2 engines did not take version 2"):
            update(fleet, 2)
        assert not {*STEPS} & {*late.calls, *new.calls} and (late.version, new.version) == ("1", "")
        steady.since = ""
        update(fleet, 3)
        assert steady.version == late.version == new.version == "3"

    def test_each_of_two_callers_hears_of_its_own_failures(self):
        class Slow(Scripted):
            def resume(self):
                if not second.is_set() and failing.failed.wait(WAIT_S):
                    second.set()
                    failing.fails = set()
                    with ThreadPoolExecutor(1) as other:
                        other.submit(fleet.resume).result(WAIT_S)
                super().resume()

        second, failing = threading.Event(), Failing("failing")
        fleet = Fleet([Slow("slow"), failing])
        failing.fails = {"resume"}
        with pytest.raises(EngineError, match="failing does not resume; 1 of 2 engines did not resume") as caught:
            fleet.resume()
        assert [row.error for row in caught.value.rows] == ["failing does not resume."]


class Live(Scripted):
    """Takes versions while it serves."""

    obstacle = ""


class TestTheWayBack:
    @pytest.mark.parametrize("kind", [Scripted, Live])
    @pytest.mark.parametrize("step", STEPS)
    def test_one_engine_that_fails_takes_the_version_back_from_all(self, step, kind):
        engines = failing, _ = [kind("failing"), kind("steady")]
        fleet = Fleet(engines)
        update(fleet, 1)
        failing.fails = {step}
        words = f"1 of 2 engines failed to {STEP_NAMES[step]}, and version 2 was taken back.*serve what they did before"
        with pytest.raises(EngineError, match=words):
            update(fleet, 2, policy="all")
        assert [(one.version, one.serving, one.calls[-1]) for one in engines] == [("1", True, "undo")] * 2
        failing.fails = set()
        assert [row.version for row in update(fleet, 3, policy="all")] == [3, 3]

    def test_engines_that_took_the_version_keep_it(self):
        steady, failing = Live("steady"), Live("failing", fails={"commit"})
        with pytest.raises(EngineError, match="1 of 2 engines did not take version 1"):
            update(Fleet([steady, failing]), 1)
        assert (steady.version, failing.version) == ("1", "") and "undo" not in steady.calls
        failing.fails = set()
        update(Fleet([steady, failing]), 2)
        assert steady.calls[-1] == failing.calls[-1] == "keep"

    @pytest.mark.parametrize("lost", [(), ("first",)])
    def test_the_first_engine_that_is_left_is_asked_before_the_others_commit(self, lost):
        engines = [Live(name, fails={"stage"} if name in lost else ()) for name in ("first", "second", "third")]
        left, asked = engines[len(lost) :], []

        def canary(engine):
            asked.append((engine, [one.version for one in left]))

        with pytest.raises(EngineError, match="first does not stage") if lost else nullcontext():
            update(Fleet(engines), 1, canary=canary)
        assert asked == [(left[0], ["1", *[""] * (len(left) - 1)])] and {one.version for one in left} == {"1"}

    def test_a_canary_that_fails_leaves_every_engine_as_it_was(self):
        def canary(engine):
            raise EngineError(f"{engine.url} computes something else")

        engines = [Live("first"), Live("second")]
        fleet = Fleet(engines)
        update(fleet, 1)
        with pytest.raises(EngineError, match=r"first computes something else.*version 2 was taken back"):
            update(fleet, 2, canary=canary)
        assert [(one.version, one.serving) for one in engines] == [("1", True)] * 2
        assert engines[0].calls.count("commit") == 2 and engines[1].calls.count("commit") == 1

    def test_one_that_pauses_anyway_is_not_asked_within_the_update(self):
        engines = [Live("live"), Scripted("paused")]
        update(Fleet(engines), 1, canary=lambda engine: pytest.fail("a sender asks all of them afterwards"))
        assert [one.version for one in engines] == ["1", "1"]
