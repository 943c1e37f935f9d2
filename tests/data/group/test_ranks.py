"""Trainer ranks follow rank 0 through its updates, which fail on all ranks if on one: over each kind of store."""

import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.processes import WAIT_S, calling, running_python
from tests.ranks import on_ranks
from torchrl_ext.base import errors
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, ManifestError, NotConnectedError, TransportError
from torchrl_ext.data.group.ranks import RankStore, TrainerRanks, numbered

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
        groups = [RankStore(rank, size, self.client()) for rank in range(size)]
        return [TrainerRanks("policy", timeout_s, group=lambda group=group: group) for group in groups]


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


def lead(ranks, version, fails=False):
    with ranks.leading() as session:
        if fails:
            raise ValueError("no module")
        said = session.ask("echo", version=version)
        session.version = version
        session.settle()
        return said


def together(beside, trainer, version):
    """One good update on all ranks."""
    calls = [beside(ranks.following, echo) for ranks in trainer[1:]]
    assert lead(trainer[0], version) == [{"version": version}] * len(calls)
    assert [call.result(WAIT_S) for call in calls] == [version] * len(calls)


UPDATE = st.tuples(st.sampled_from(["leads", "leads", "fails"]), st.sampled_from(WAYS), st.sampled_from(WAYS))


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(UPDATE, max_size=4))
@example("tcp", [("leads", "is away", "fails a step"), ("fails", "follows", "fails to begin"), ("leads", *WAYS[::3])])
def test_update_fails_on_all_ranks_or_none(kind, updates):
    steps = {
        "follows": echo,
        "fails to begin": raising(ManifestError("the tensors differ")),
        "fails a step": lambda: {"echo": fail},
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        stores = Stores(kind, folder)
        trainer = stores.trainer(3)
        for version, (first, *ways) in enumerate([*updates, ("leads", "follows", "follows")], 1):
            trainer[0]._timeout_s = 0.5 if "is away" in ways else PATIENT_S
            calls = [pool.submit(trainer[at].following, steps[way]) for at, way in enumerate(ways, 1) if way in steps]
            if ways == ["follows", "follows"] and first == "leads":
                assert lead(trainer[0], version) == [{"version": version}] * 2
                assert [call.result(WAIT_S) for call in calls] == [version] * 2
                continue
            with pytest.raises((ValueError, ManifestError, DeadlineError)) as met:
                lead(trainer[0], version, fails=first == "fails")
            if "is away" in ways and "fails to begin" not in ways:
                away = [str(at) for at, way in enumerate(ways, 1) if way == "is away"]
                assert f"trainer rank{'s' * (len(away) > 1)} {', '.join(away)} did not answer" in str(met.value)
            calls += [pool.submit(trainer[at].following, echo) for at, way in enumerate(ways, 1) if way == "is away"]
            for call in calls:  # one that was away comes late, and hears of it
                with pytest.raises((TransportError, ManifestError, DeadlineError)):
                    call.result(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_does_not_grow(kind, beside, tmp_path):
    stores, counts = Stores(kind, tmp_path), []
    trainer = stores.trainer(3)
    for version in range(1, 21):
        together(beside, trainer, version)
        counts.append(stores.client().num_keys())
    assert max(counts[2:]) <= counts[1], counts


class TestFailures:
    def test_a_failure_keeps_its_class_and_its_four_parts_to_the_end(self, stored, beside):
        first, second = stored.trainer()
        call = beside(second.following, echo)
        with pytest.raises(ManifestError) as last, first.leading() as session:
            with pytest.raises(ManifestError) as met:
                session.ask("fail")
            session.settle()
        expected = ("trainer rank 1: the tensors differ", "the same", "nothing was sent", "look")
        for each in (met, last):
            assert (each.value.what, each.value.expected, each.value.state, each.value.hint) == expected
        with pytest.raises(ManifestError, match=r"^the tensors differ"):
            call.result(WAIT_S)
        together(beside, [first, second], 2)

    def test_rank_0_errors_of_any_class_reach_other_ranks(self, stored, beside):
        first, second = stored.trainer()
        for error, kind in (
            (errors.UpdateError("no engine is left"), errors.UpdateError),
            (KeyboardInterrupt(), TransportError),
            (OSError("no such file: \udcff"), TransportError),
        ):
            call = beside(second.following, dict)
            with pytest.raises(type(error)), first.leading():
                raise error
            with pytest.raises(kind) as met:
                call.result(WAIT_S)
            assert type(met.value) is kind
        assert "no such file: ?" in str(met.value)

    def test_a_rank_that_comes_too_late_hears_that_it_was_missed(self, stored, beside):
        first, second = stored.trainer(timeout_s=0.5)
        with pytest.raises(DeadlineError, match="trainer rank 1 did not answer"), first.leading():
            pytest.fail("not every rank is there")
        with pytest.raises(DeadlineError, match="trainer rank 0: trainer rank 1 did not answer"):
            second.following(echo)
        together(beside, [first, second], 2)

    def test_second_thread_of_a_rank_is_refused_during_update(self, stored, beside):
        trainer = stored.trainer()
        entered, refused = threading.Event(), threading.Event()

        def slow():
            with trainer[0].leading() as session:
                session.ask("echo")
                entered.set()
                assert refused.wait(WAIT_S)
                session.version = 1

        update, call = beside(slow), beside(trainer[1].following, echo)
        assert entered.wait(WAIT_S)
        try:
            with pytest.raises(errors.ConcurrentUpdateError), trainer[0].leading():
                pytest.fail("two updates at once")
            with pytest.raises(errors.ConcurrentUpdateError):
                trainer[1].following(echo)
        finally:
            refused.set()
        update.result(WAIT_S)
        assert call.result(WAIT_S) == 1
        together(beside, trainer, 2)


class TestWaits:
    def test_a_stop_flag_ends_the_waits_of_both_sides(self, stored, beside):
        trainer = stored.trainer()
        within = Deadline(WAIT_S)
        call = beside(trainer[1].following, echo, within)
        within.stop.set()
        with pytest.raises(TransportError, match="trainer rank 0 began no update before a failure elsewhere"):
            call.result(WAIT_S)
        goes_on = threading.Event()
        call = beside(trainer[1].following, lambda: {"echo": lambda args: goes_on.wait(WAIT_S) and args})
        with pytest.raises(TransportError, match="trainer rank 1 did not answer before"), trainer[0].leading() as led:
            led.order("echo")
            led.answers(within)
        goes_on.set()
        with pytest.raises(TransportError, match="before a failure elsewhere"):
            call.result(WAIT_S)
        together(beside, trainer, 2)

    def test_rank_waits_for_rank_0_until_deadline(self, stored):
        _, second = stored.trainer(timeout_s=0.01)
        with pytest.raises(DeadlineError, match="trainer rank 0 began no update"):
            second.following(echo)
        with pytest.raises(ValueError, match="bad input") as met:
            second.following(raising(ValueError("bad input")))
        assert isinstance(met.value.__cause__, DeadlineError)

    def test_a_store_that_is_gone_is_said_so(self, beside, tmp_path):
        gone = Stores("tcp", tmp_path)
        first, second = gone.trainer()
        together(beside, [first, second], 1)
        call = beside(second.following, echo)
        with first.leading() as session:  # which is left without an error of its own
            gone.shared = None
            with pytest.raises(NotConnectedError, match="the store of the trainer's process group is gone"):
                session.ask("echo")
        with pytest.raises(NotConnectedError, match="is gone"):
            call.result(WAIT_S)
        with pytest.raises(NotConnectedError, match="is gone"):
            second.following(echo)
        with pytest.raises(NotConnectedError), first.leading():
            pytest.fail("no other rank can take part")


def test_rank_without_group_gathers_and_assumes_success(stored):
    ranks, ran = TrainerRanks("alone", PATIENT_S, rank=1), []
    assert not ranks.drives
    assert ranks.following(lambda: {"gather": ran.append}) is None
    assert ran == [{}]
    with pytest.raises(ManifestError):
        ranks.following(lambda: {"gather": fail})
    with pytest.raises(TransportError, match="leads no update"):
        stored.trainer()[0].session.order("echo")


def leads_for_ever(path):
    ranks = TrainerRanks("policy", 30, group=lambda: RankStore(0, 2, dist.FileStore(path, -1)))
    print("now", flush=True)
    with ranks.leading() as session:
        session.order("echo")
        sys.stdin.read()


def test_rank_0_that_is_killed_is_named_at_the_deadline(tmp_path, beside):
    path = f"{tmp_path}/store"
    store, follows = dist.FileStore(path, -1), threading.Event()
    with running_python(calling(leads_for_ever, path)) as first:
        assert first.stdout.readline() == "now\n"
        ranks = TrainerRanks("policy", 0.1, group=lambda: RankStore(1, 2, store))
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
                session.order("gather")
                gather()
                assert session.answers() == [{"sum": sum(range(world))}] * (world - 1)
                session.version = version
        else:
            assert ranks.following(lambda: {"gather": gather}) == version
