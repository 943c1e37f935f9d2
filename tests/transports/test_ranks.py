"""Trainer ranks follow rank 0 through its updates: over each kind of store, and whatever failed before."""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.processes import WAIT_S, calling, running_python
from tests.ranks import on_ranks
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    ConcurrentUpdateError,
    DeadlineError,
    ManifestError,
    NotConnectedError,
    TransportError,
    UpdateError,
)
from torchrl_ext.transports.ranks import Group, TrainerRanks, numbered

PATIENT_S = 60.0
KINDS = ["hash", "file", "tcp"]
WAYS = ["follows", "fails to begin", "fails a step", "is away"]


class Stores:
    """A kind of store, as the ranks of one trainer share it."""

    def __init__(self, kind, folder):
        self.kind, self.folder, self.shared = kind, folder, dist.HashStore()
        if kind == "tcp":
            self.shared = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), False)

    def client(self):
        if self.kind == "file":
            return dist.FileStore(f"{self.folder}/store", -1)
        if self.kind == "tcp":
            client = dist.TCPStore("127.0.0.1", self.shared.port, None, False, timedelta(seconds=WAIT_S), False)
            return dist.PrefixStore("default_pg", client)
        return self.shared

    def trainer(self, size=2, timeout_s=PATIENT_S):
        groups = [Group(rank, size, self.client()) for rank in range(size)]
        return [TrainerRanks("policy", timeout_s, group=lambda group=group: group) for group in groups]


@pytest.fixture(params=KINDS)
def stores(request, tmp_path):
    return Stores(request.param, tmp_path)


@pytest.fixture
def stored(tmp_path):
    return Stores("hash", tmp_path)


@pytest.fixture
def beside():
    """Runs calls in threads of their own; all must have ended by the end of the test."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def echo():
    return {"echo": dict, "fail": fail}


def fail(args):
    raise ManifestError("the tensors differ", expected="the same", state="nothing was sent", hint="look")


def raising(error):
    def steps():
        raise error

    return steps


def lead(ranks, version, *, ask=True):
    with ranks.leading() as session:
        said = session.ask("echo", version=version) if ask else []
        session.end(version, True)
        return said


def together(beside, trainer, version):
    """One good update on all ranks; returns how many accepted ones each rank hears of."""
    calls = [beside(ranks.following, echo) for ranks in trainer[1:]]
    assert lead(trainer[0], version) == [{"version": version}] * len(calls)
    ended = [call.result(WAIT_S) for call in calls]
    assert all((one.version, one.error) == (version, None) for one in ended)
    return [one.accepted for one in ended]


class Follower:
    """Rank 1 or 2 of a trainer in one update, in one of `WAYS`; ``ran`` is set when it has had its chance to answer."""

    def __init__(self, beside, ranks, way):
        self.rank, self.way, self.ran = ranks.rank, way, threading.Event()
        self.call = None if way == "is away" else beside(ranks.following, self._steps)

    def _steps(self):
        if self.way == "fails to begin":
            self.ran.set()
            raise ManifestError("the tensors differ")
        return {"echo": self._echo}

    def _echo(self, args):
        self.ran.set()
        return args if self.way == "follows" else fail(args)


UPDATE = st.tuples(st.sampled_from(["leads", "leads", "fails"]), st.sampled_from(WAYS), st.sampled_from(WAYS))


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(UPDATE, max_size=4))
@example("tcp", [("leads", "is away", "fails a step"), ("fails", "follows", "fails to begin"), ("leads", *WAYS[::3])])
def test_whatever_happens_in_an_update_all_ranks_hear_of_it_and_are_in_step_with_the_next(kind, updates):
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        stores = Stores(kind, folder)
        trainer, served, unheard = stores.trainer(3), 0, {1: 0, 2: 0}
        for version, (first, *ways) in enumerate([*updates, ("leads", "follows", "follows")], 1):
            if first == "fails":  # rank 0 would wait at its next update for ranks that heard of nothing
                ways = ["follows" if way == "is away" else way for way in ways]
            others = [Follower(pool.submit, trainer[rank], way) for rank, way in enumerate(ways, 1)]
            here = [other for other in others if other.call is not None]
            away = [other.rank for other in others if other.call is None]
            failing = [other for other in here if other.way != "follows"]
            met = None
            try:
                with trainer[0].leading() as session:
                    if first == "fails":
                        raise ValueError("no module")
                    session.order("echo", version=version)
                    assert all(other.ran.wait(WAIT_S) for other in here)
                    assert session.answers(Deadline(0.3 if away else WAIT_S)) == [{"version": version}] * 2
                    session.end(version, True)
            except (ValueError, ManifestError, DeadlineError) as error:
                met = error
            if first == "fails":
                assert isinstance(met, ValueError)
                failing = [other for other in failing if other.way == "fails to begin"]
            elif failing:  # which comes before the silence of another rank
                assert isinstance(met, ManifestError) and f"trainer rank {failing[0].rank}: the tensors" in str(met)
            elif away:
                named = f"rank {away[0]}" if len(away) == 1 else "ranks 1, 2"
                assert isinstance(met, DeadlineError) and f"trainer {named} did not answer" in str(met)
            else:
                assert met is None
                served = version
                unheard = {rank: count + 1 for rank, count in unheard.items()}
            if failing and first == "leads":  # those that come late hear of a failure for which none waited for them
                for other in others:
                    other.call = other.call or pool.submit(trainer[other.rank].following, echo)
            for other in [other for other in others if other.call is not None]:
                if other in failing:
                    with pytest.raises(ManifestError, match=r"^the tensors differ"):
                        other.call.result(WAIT_S)
                    continue
                ended = other.call.result(WAIT_S)
                assert (ended.version, ended.accepted) == (served, unheard[other.rank])
                assert str(met if met is None else getattr(met, "what", met)) in str(ended.error)
                unheard[other.rank] = 0


class TestInStep:
    def test_values_of_any_length_pass(self, stores, beside):
        text = "x" * (9 << 20)  # more than one value of the store takes
        first, second = stores.trainer()
        call = beside(second.following, echo)
        with first.leading() as session:
            assert session.ask("echo", text=text) == [{"text": text}]
        assert call.result(WAIT_S).version == 0

    def test_what_is_not_of_use_to_json_is_the_failure_of_the_rank_that_says_it(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, lambda: {"echo": lambda args: {"value": object()}})
        with pytest.raises(TransportError, match="trainer rank 1: TypeError"):
            lead(first, 1)
        with pytest.raises(TransportError, match="TypeError"):
            call.result(WAIT_S)

    def test_the_store_does_not_grow(self, stores, beside):
        trainer, counts = stores.trainer(3), []
        for version in range(1, 31):
            assert together(beside, trainer, version) == [1, 1]
            counts.append(stores.client().num_keys())
        assert max(counts[3:]) <= counts[2], counts


class TestFailures:
    def test_a_failure_keeps_its_class_and_its_four_parts_and_later_steps_go_on(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, echo)
        with first.leading() as session:
            with pytest.raises(ManifestError) as met:
                session.ask("fail")
            assert session.ask("echo", more=1) == [{"more": 1}]
            session.end(1, True)
        expected = ("trainer rank 1: the tensors differ", "the same", "nothing was sent", "look")
        assert (met.value.what, met.value.expected, met.value.state, met.value.hint) == expected
        with pytest.raises(ManifestError, match=r"^the tensors differ"):
            call.result(WAIT_S)
        assert together(beside, [first, second], 2) == [2]  # one of an update that this rank did not hear of

    def test_errors_of_every_class_interrupts_and_words_that_are_no_text_are_heard(self, stored, beside):
        first, second = stored.trainer()
        for error, kind in (
            (UpdateError("no engine is left"), UpdateError),
            (KeyboardInterrupt(), TransportError),
            (OSError("no such file: \udcff"), TransportError),
        ):
            call = beside(second.following, dict)
            with pytest.raises(type(error)), first.leading() as session:
                session.end(7, False)
                raise error
            ended = call.result(WAIT_S)
            assert ended.version == 7 and type(ended.error) is kind
        assert "no such file: ?" in str(ended.error)

    def test_a_rank_that_comes_late_to_an_update_that_met_nobody_follows_that_one(self, stores, beside):
        trainer, failed = stores.trainer(), threading.Event()

        def lead_twice():
            with suppress(ManifestError), trainer[0].leading():
                raise ManifestError("nothing is named so")
            failed.set()
            return lead(trainer[0], 1)

        leading = beside(lead_twice)
        assert failed.wait(WAIT_S)
        with pytest.raises(ManifestError, match=r"^nothing is named so"):  # its own
            trainer[1].following(raising(ManifestError("nothing is named so")))
        assert trainer[1].following(echo, Deadline(20.0)).version == 1  # else it waits for an update that nobody begins
        assert leading.result(WAIT_S) == [{"version": 1}]

    def test_a_late_rank_that_was_missed_hears_of_it_when_no_update_follows(self, stored):
        first, second = stored.trainer(timeout_s=0.5)
        with pytest.raises(DeadlineError):
            lead(first, 1)
        assert "trainer rank 1 did not answer" in str(second.following(echo).error)

    def test_two_threads_of_one_rank_are_refused_and_the_update_goes_on(self, stored, beside):
        trainer = stored.trainer()
        entered, refused = threading.Event(), threading.Event()

        def slow():
            with trainer[0].leading() as session:
                session.ask("echo")
                entered.set()
                assert refused.wait(WAIT_S)
                session.end(1, True)

        update, call = beside(slow), beside(trainer[1].following, echo)
        assert entered.wait(WAIT_S)
        try:
            with pytest.raises(ConcurrentUpdateError), trainer[0].leading():
                pytest.fail("two updates at once")
            with pytest.raises(ConcurrentUpdateError):
                trainer[1].following(echo)
        finally:
            refused.set()
        update.result(WAIT_S)
        assert call.result(WAIT_S) == (1, 1, None)
        assert together(beside, trainer, 2) == [1]


class TestLate:
    def test_updates_that_a_rank_leaves_out_are_counted_with_the_next(self, stores, beside):
        trainer = stores.trainer()
        for version in range(1, 4):
            lead(trainer[0], version, ask=False)
        assert trainer[1].following(echo) == (3, 3, None)  # for which nobody waited
        assert together(beside, trainer, 4) == [1]

    def test_a_step_of_all_ranks_runs_on_a_late_one_too_and_others_do_not(self, stored, beside):
        trainer, ran = stored.trainer(3), []

        def steps():
            return {name: lambda args, name=name: ran.append(name) for name in ("gather", "enter")}

        call = beside(trainer[1].following, steps)
        with trainer[0].leading() as session:
            session.order("enter")
            session.order("gather", always=True)
            session.end(1, True)
        call.result(WAIT_S)
        ran.clear()
        before = stored.shared.num_keys()
        assert trainer[2].following(steps) == (1, 1, None)
        assert ran == ["gather"] and stored.shared.num_keys() == before

    def test_a_rank_leaves_a_session_that_a_newer_one_has_replaced(self, stores, beside):
        trainer = stores.trainer(timeout_s=1)
        frozen, goes_on, turns = threading.Event(), threading.Event(), itertools.count()

        def step(args):
            if next(turns) == 0:
                frozen.set()
                assert goes_on.wait(WAIT_S)
            return args

        call = beside(trainer[1].following, lambda: {"echo": step})
        with suppress(DeadlineError), trainer[0].leading() as session:
            session.order("echo")
            assert frozen.wait(WAIT_S)
            session.answers(Deadline(0.1))
        for version in (2, 3):
            lead(trainer[0], version, ask=False)
        with trainer[0].leading() as session:  # the first session is not in the store any more
            goes_on.set()
            session.order("echo", version=4)
            assert session.answers(Deadline(WAIT_S)) == [{"version": 4}]
            session.end(4, True)
        assert call.result(WAIT_S) == (4, 3, None)


class TestWaits:
    def test_a_stop_flag_ends_the_waits_of_both_sides(self, stores, beside):
        trainer = stores.trainer()
        within = Deadline(WAIT_S)
        call = beside(trainer[1].following, echo, within)
        within.stop.set()
        with pytest.raises(TransportError, match="trainer rank 0 began no update before a failure elsewhere"):
            call.result(WAIT_S)
        with pytest.raises(TransportError, match="trainer rank 1 did not answer before"), trainer[0].leading() as led:
            led.order("echo")
            led.answers(within)
        assert "before a failure elsewhere" in str(trainer[1].following(echo).error)
        assert together(beside, trainer, 2) == [1]

    def test_a_rank_waits_for_rank_0_until_its_deadline_and_its_own_failure_comes_first(self, stored):
        _, second = stored.trainer(timeout_s=0.01)
        with pytest.raises(DeadlineError, match="trainer rank 0 began no update"):
            second.following(echo)
        with pytest.raises(ValueError, match="bad input") as met:
            second.following(raising(ValueError("bad input")))
        assert isinstance(met.value.__cause__, DeadlineError)

    def test_a_wait_keeps_no_lock_of_the_store(self, beside):
        """Over one client, a rank that waits lets another thread post what it waits for."""
        server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), False)
        trainer = [TrainerRanks("one", PATIENT_S, group=lambda r=rank: Group(r, 2, server)) for rank in range(2)]
        assert together(beside, trainer, 1) == [1]

    def test_a_store_that_is_gone_is_said_so(self, beside, tmp_path):
        gone = Stores("tcp", tmp_path)
        first, second = gone.trainer()
        together(beside, [first, second], 1)
        with first.leading() as session:  # which is left without an error of its own
            gone.shared = None
            with pytest.raises(NotConnectedError, match="the store of the trainer's process group is gone"):
                session.ask("echo")
        with pytest.raises(NotConnectedError, match="is gone"):
            second.following(echo)
        with pytest.raises(NotConnectedError), first.leading():
            pytest.fail("no other rank can take part")


class TestAlone:
    def test_a_trainer_of_one_rank_posts_nothing(self):
        ranks = TrainerRanks("alone", PATIENT_S)
        assert (ranks.rank, ranks.size, ranks.drives) == (0, 1, True)
        with ranks.leading() as session:
            assert ranks.session is session and session.ask("echo") == []
            session.order("gather")
            session.end(1, True)
        assert ranks.session.answers() == []

    def test_a_rank_without_a_group_gathers_and_believes_in_the_update(self):
        ranks, ran = TrainerRanks("alone", PATIENT_S, rank=1), []
        assert not ranks.drives
        assert ranks.following(lambda: {"gather": ran.append}) == (None, 1, None)
        assert ran == [{}]
        with pytest.raises(ManifestError):
            ranks.following(lambda: {"gather": fail})

    def test_orders_need_a_session(self, stored):
        with pytest.raises(TransportError, match="leads no update"):
            stored.trainer()[0].session.order("echo")


def leads_for_ever(path):
    ranks = TrainerRanks("policy", 30, group=lambda: Group(0, 2, dist.FileStore(path, -1)))
    with ranks.leading() as session:
        session.order("echo")
        print("now", flush=True)
        sys.stdin.read()


def test_rank_0_that_is_killed_is_named_at_the_deadline(tmp_path, beside):
    path = f"{tmp_path}/store"
    store, follows = dist.FileStore(path, -1), threading.Event()
    with running_python(calling(leads_for_ever, path)) as first:
        assert first.stdout.readline() == "now\n"
        ranks = TrainerRanks("policy", 0.1, group=lambda: Group(1, 2, store))
        call = beside(ranks.following, lambda: {"echo": lambda args: follows.set()})
        assert follows.wait(WAIT_S)
        first.send_signal(signal.SIGKILL)
        with pytest.raises(DeadlineError, match="trainer rank 0 gave no order within 3 s"):
            call.result(WAIT_S)


MADE_BEFORE_THE_GROUP = TrainerRanks(numbered("policy"), PATIENT_S)


@on_ranks(3)
def test_over_torchs_process_group(rank, world, folder):
    def gather(args=None):
        found = torch.tensor(rank)
        dist.all_reduce(found)
        return {"sum": found.item()}

    ranks = MADE_BEFORE_THE_GROUP
    assert (ranks.rank, ranks.size, ranks.drives) == (rank, world, rank == 0)
    for version in range(1, 4):
        if rank == 0:
            with ranks.leading() as session:
                session.order("gather", always=True)
                gather()
                assert session.answers() == [{"sum": sum(range(world))}] * (world - 1)
                session.end(version, True)
        else:
            assert ranks.following(lambda: {"gather": gather}) == (version, 1, None)
