"""A deadline is one moment, one flag and one party for every wait of a step."""

from __future__ import annotations

import threading

import pytest

from torchrl_ext.base.deadline import Deadline, beside, in_thread
from torchrl_ext.base.errors import DeadlineError, TransportError

LONG_S, WAIT_S = 3600.0, 60.0


def test_a_wait_that_gets_what_it_asks_for_ends_with_it():
    answers = iter([None, "", 0, "found"])
    assert Deadline(WAIT_S).poll(lambda: next(answers), shortest_s=0.001) == "found"


def test_last_look_is_at_the_deadline_and_error_names_party():
    looks = []
    with pytest.raises(DeadlineError, match=r"worker 3 \(pid 17\) did not answer within 0\.05 s"):
        Deadline(0.05, "worker 3 (pid 17)").poll(lambda: looks.append(1), shortest_s=0.01)
    assert len(looks) >= 2
    assert Deadline(0).poll(lambda: "found") == "found"  # one look, always
    with pytest.raises(ZeroDivisionError):
        Deadline(0.0).poll(lambda: None, late=ZeroDivisionError)


def test_another_thread_ends_every_wait_under_the_same_flag():
    whole = Deadline(LONG_S, "the trainer")
    parts = [whole, whole.again("rank 1"), whole.within(LONG_S)]
    waits = [in_thread(lambda part=part: part.poll(lambda: None), "wait") for part in parts]
    whole.stop.set()
    for wait, who in zip(waits, ("the trainer", "rank 1", "the trainer"), strict=True):
        with pytest.raises(TransportError, match=f"{who} did not answer before a failure elsewhere"):
            wait.result(WAIT_S)
    assert all(part.over for part in parts)


def test_a_shorter_deadline_is_never_later_than_the_one_it_is_in():
    assert Deadline(0.0).within(LONG_S).left_s == 0
    assert Deadline(LONG_S).within(1.0).left_s <= 1.0
    spent = Deadline(0.0)
    assert spent.over and not Deadline(LONG_S).over
    assert spent.again().timeout_s == 0


class TestBeside:
    def test_both_sides_that_succeed_are_waited_for(self):
        done, within = [], Deadline(WAIT_S)
        with beside(lambda early: done.append("call"), within):
            done.append("block")
        assert sorted(done) == ["block", "call"] and not within.stop.is_set()

    def test_failed_call_ends_waits_of_the_block_and_is_raised(self):
        def call(early):
            raise ValueError("the engine refused")

        within = Deadline(LONG_S)
        with pytest.raises(ValueError, match="the engine refused") as met, beside(call, within):
            within.poll(lambda: None, "no worker came")
        assert "no worker came" in str(met.value.__cause__)

    def test_failed_block_ends_waits_of_the_call_and_chains_error(self):
        within = Deadline(LONG_S)
        load = lambda early: within.poll(lambda: None, "the load did not end")  # noqa: E731
        with pytest.raises(OSError, match="disk full") as met, beside(load, within):
            raise OSError("disk full") from ConnectionError("reset")
        assert str(met.value.__cause__) == "reset" and "the load did not end" in str(met.value.__cause__.__cause__)

    def test_block_error_is_raised_although_the_call_failed_first(self):
        """The block's error is raised, with the call's as its cause, although the call heard of it first."""
        heard = threading.Event()

        def call(early):
            heard.set()
            raise TransportError("a peer closed its connection")

        within = Deadline(LONG_S)
        with pytest.raises(OSError, match="disk full") as met, beside(call, within):
            assert heard.wait(WAIT_S) and within.stop.wait(WAIT_S)
            raise OSError("disk full")
        assert "a peer closed its connection" in str(met.value.__cause__)

    def test_a_failure_that_is_seen_early_frees_the_block_at_once(self):
        go_on = threading.Event()

        def call(early):
            early()
            assert go_on.wait(WAIT_S)
            raise ValueError("one engine failed, and the others were waited for")

        within = Deadline(LONG_S)
        with pytest.raises(ValueError, match="one engine failed"), beside(call, within):
            try:
                within.poll(lambda: None)
            finally:
                go_on.set()
