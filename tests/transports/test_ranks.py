"""Trainer ranks follow rank 0 through its updates: over each kind of store, and whatever failed before."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

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
WAYS = ["both do it", "rank 1 fails", "rank 1 is away", "rank 0 fails"]


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


@pytest.fixture(params=["hash", "file", "tcp"])
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


def nothing():
    return {}


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
    """One good update on all ranks."""
    calls = [beside(ranks.following, echo) for ranks in trainer[1:]]
    assert lead(trainer[0], version) == [{"version": version}] * len(calls)
    for call in calls:
        ended = call.result(WAIT_S)
        assert (ended.version, ended.error) == (version, None)
        yield ended.accepted


class TestInStep:
    @pytest.mark.parametrize("size", [2, 4])
    def test_ranks_run_what_rank_0_orders_and_hear_how_it_ends(self, stores, beside, size):
        trainer = stores.trainer(size)
        assert [ranks.drives for ranks in trainer] == [True] + [False] * (size - 1)
        for version in range(1, 4):
            assert list(together(beside, trainer, version)) == [1] * (size - 1)

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

    @pytest.mark.parametrize("size", [2, 3])
    def test_the_store_does_not_grow(self, stores, beside, size):
        trainer, counts = stores.trainer(size), []
        for version in range(1, 51):
            for _ in together(beside, trainer, version):
                pass
            counts.append(stores.client().num_keys())
        assert max(counts[3:]) <= counts[2], counts

    def test_words_that_are_no_text_are_carried_too(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, nothing)
        with pytest.raises(OSError), first.leading():
            raise OSError("no such file: \udcff")
        assert "no such file: ?" in str(call.result(WAIT_S).error)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "kind"), [(ManifestError("a meta tensor"), ManifestError), (ValueError("bad input"), TransportError)]
    )
    def test_a_rank_that_fails_before_it_follows_says_so_and_is_in_step_with_the_next(
        self, stores, beside, error, kind
    ):
        trainer = stores.trainer(3)
        calls = [beside(trainer[1].following, raising(error)), beside(trainer[2].following, echo)]
        with pytest.raises(kind, match=rf"trainer rank 1: .*{error}"):
            lead(trainer[0], 1)
        with pytest.raises(type(error), match=str(error)):
            calls[0].result(WAIT_S)
        assert f"trainer rank 0: trainer rank 1: {'' if kind is ManifestError else 'ValueError: '}" in str(
            calls[1].result(WAIT_S).error
        )
        for version in range(2, 5):
            assert list(together(beside, trainer, version)) == [1, 1]

    def test_a_failure_keeps_its_class_and_its_four_parts(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, echo)
        with pytest.raises(ManifestError) as met, first.leading() as session:
            session.ask("fail")
        expected = ("trainer rank 1: the tensors differ", "the same", "nothing was sent", "look")
        assert (met.value.what, met.value.expected, met.value.state, met.value.hint) == expected
        with pytest.raises(ManifestError, match=r"^the tensors differ"):
            call.result(WAIT_S)

    def test_a_rank_goes_on_with_later_steps_after_one_that_failed(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, echo)
        with first.leading() as session:
            with suppress(ManifestError):
                session.ask("fail")
            assert session.ask("echo", more=1) == [{"more": 1}]
            session.end(1, True)
        with pytest.raises(ManifestError):
            call.result(WAIT_S)
        assert list(together(beside, [first, second], 2)) == [2]  # one of an update that this rank did not hear of

    def test_rank_0_that_fails_before_its_first_order_is_heard_at_once(self, stores, beside):
        trainer = stores.trainer()
        assert list(together(beside, trainer, 1)) == [1]
        call = beside(trainer[1].following, echo)
        with pytest.raises(ManifestError), trainer[0].leading():
            raise ManifestError("2 tensors are on the meta device", state="nothing was sent")
        ended = call.result(WAIT_S)
        assert isinstance(ended.error, ManifestError) and "trainer rank 0: 2 tensors" in str(ended.error)
        assert (ended.version, ended.accepted) == (1, 0)
        assert list(together(beside, trainer, 2)) == [1]

    def test_an_error_of_several_engines_and_an_interrupt_are_heard(self, stored, beside):
        first, second = stored.trainer()
        for error, kind in ((UpdateError("no engine is left"), UpdateError), (KeyboardInterrupt(), TransportError)):
            call = beside(second.following, nothing)
            with pytest.raises(type(error)), first.leading() as session:
                session.end(7, False)
                raise error
            ended = call.result(WAIT_S)
            assert ended.version == 7 and type(ended.error) is kind

    def test_ranks_that_do_not_answer_are_named_and_come_back_in_step(self, stores, beside):
        trainer, ran = stores.trainer(4), threading.Event()
        call = beside(trainer[2].following, lambda: {"echo": lambda args: ran.set()})
        with (
            pytest.raises(DeadlineError, match="trainer ranks 1, 3 did not answer within 1 s"),
            trainer[0].leading() as session,
        ):
            session.order("echo")
            assert ran.wait(WAIT_S)
            session.answers(Deadline(1))
        assert "trainer ranks 1, 3" in str(call.result(WAIT_S).error)
        assert list(together(beside, trainer, 2)) == [1, 1, 1]  # those that were missed follow the next one at once

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
        assert trainer[1].following(echo).version == 1
        assert leading.result(WAIT_S) == [{"version": 1}]

    def test_a_late_rank_that_was_missed_hears_of_it_when_no_update_follows(self, stored):
        first, second = stored.trainer(timeout_s=0.5)
        with pytest.raises(DeadlineError):
            lead(first, 1)
        assert "trainer rank 1 did not answer" in str(second.following(echo).error)

    def test_an_error_of_one_rank_comes_before_the_silence_of_another(self, stored, beside):
        trainer, ran = stored.trainer(3), threading.Event()
        call = beside(trainer[1].following, lambda: {"fail": lambda args: ran.set() or fail(args)})
        with pytest.raises(ManifestError, match="trainer rank 1: the tensors differ"), trainer[0].leading() as session:
            session.order("fail")
            assert ran.wait(WAIT_S)
            session.answers(Deadline(1))
        with pytest.raises(ManifestError):
            call.result(WAIT_S)

    def test_two_threads_on_rank_0(self, stores, beside):
        trainer = stores.trainer()
        entered, refused = threading.Event(), threading.Event()

        def slow():
            with trainer[0].leading() as session:
                entered.set()
                assert refused.wait(WAIT_S)
                session.ask("echo")
                session.end(1, True)

        update, call = beside(slow), beside(trainer[1].following, echo)
        assert entered.wait(WAIT_S)
        with pytest.raises(ConcurrentUpdateError), trainer[0].leading():
            pytest.fail("two updates at once")
        refused.set()
        update.result(WAIT_S)
        assert call.result(WAIT_S) == (1, 1, None)
        assert list(together(beside, trainer, 2)) == [1]

    def test_two_threads_on_another_rank(self, stored, beside):
        first, second = stored.trainer()
        entered = threading.Event()
        call = beside(second.following, lambda: entered.set() or echo())
        assert entered.wait(WAIT_S)
        with pytest.raises(ConcurrentUpdateError):
            second.following(echo)
        lead(first, 1)
        assert call.result(WAIT_S).version == 1


class TestLate:
    def test_updates_that_a_rank_leaves_out_are_counted_with_the_next(self, stores, beside):
        trainer = stores.trainer()
        for version in range(1, 4):
            lead(trainer[0], version, ask=False)
        assert trainer[1].following(echo) == (3, 3, None)  # for which nobody waited
        assert list(together(beside, trainer, 4)) == [1]

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

    @pytest.mark.parametrize("ways", list(itertools.product(WAYS, repeat=2)), ids=" then ".join)
    def test_whatever_went_before_the_next_update_finds_both_ranks_in_step(self, stored, ways):
        first, second = stored.trainer()
        with ThreadPoolExecutor(1) as pool:
            for version, way in enumerate(ways, 1):
                steps = raising(ManifestError("broken")) if way == "rank 1 fails" else echo
                call = None if way == "rank 1 is away" else pool.submit(second.following, steps)
                with suppress(ManifestError, DeadlineError, ValueError), first.leading() as session:
                    if way == "rank 0 fails":
                        raise ValueError("no module")
                    session.ask("echo", within=Deadline(0.05 if call is None else WAIT_S))
                    session.end(version, True)
                failed = call is not None and call.exception(WAIT_S) is not None
                assert failed == (way == "rank 1 fails")
            call = pool.submit(second.following, echo)
            with first.leading() as session:
                assert session.ask("echo") == [{}]
                session.end(100, True)
            assert call.result(WAIT_S).version == 100


class TestWaits:
    def test_a_stop_flag_ends_the_waits_of_both_sides(self, stores, beside):
        trainer = stores.trainer()
        within = Deadline(WAIT_S)
        call = beside(trainer[1].following, echo, within)
        within.stop.set()
        with pytest.raises(TransportError, match="trainer rank 0 began no update before the wait was ended"):
            call.result(WAIT_S)
        with pytest.raises(TransportError, match="trainer rank 1 did not answer before"), trainer[0].leading() as led:
            led.ask("echo", within=within)
        assert "before the wait was ended" in str(trainer[1].following(echo).error)
        assert list(together(beside, trainer, 2)) == [1]

    def test_a_rank_waits_for_rank_0_until_its_deadline_and_its_own_failure_comes_first(self, stores):
        _, second = stores.trainer(timeout_s=0.01)
        with pytest.raises(DeadlineError, match="trainer rank 0 began no update"):
            second.following(echo)
        with pytest.raises(ValueError, match="bad input") as met:
            second.following(raising(ValueError("bad input")))
        assert isinstance(met.value.__cause__, DeadlineError)

    def test_a_wait_keeps_no_lock_of_the_store(self, beside):
        """Over one client, a rank that waits lets another thread post what it waits for."""
        server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), False)
        first, second = (TrainerRanks("one", PATIENT_S, group=lambda r=rank: Group(r, 2, server)) for rank in range(2))
        call = beside(second.following, echo)
        lead(first, 1)
        assert call.result(WAIT_S).version == 1

    def test_a_store_that_is_gone_is_said_so(self, beside, tmp_path):
        gone = Stores("tcp", tmp_path)
        first, second = gone.trainer()
        call = beside(second.following, echo)
        lead(first, 1)
        call.result(WAIT_S)
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

    def test_names_count_by_kind(self):
        kind = "a kind of this test"
        assert numbered(kind) != numbered(kind) != numbered("another")


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
