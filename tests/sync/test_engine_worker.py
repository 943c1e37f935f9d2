"""One worker of an engine, in step with the others: what it begins, what it says of it, and who hears of a failure."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.data.sharded.sharded_engine import Together
from tests.processes import WAIT_S
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import EngineError, EngineRefusedError, StaleBaseError, error_info
from torchrl_ext.base.messages import (
    WHOLE,
    Commit,
    Inspect,
    Join,
    Poll,
    Prefetch,
    Rehearse,
    Start,
)
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.sync.engine_worker import EngineWorker, together


@pytest.fixture
def engine():
    """Two workers in threads, what they hold, and what lets all of them handle a message."""
    together, held = Together(2), [nn.Linear(3, 2), nn.Linear(3, 2)]
    ends = [
        EngineWorker(TensorsLoader(module), rank=rank, workers=2, agree=together.agree(rank))
        for rank, module in enumerate(held)
    ]

    def handled(end, message):
        """What a worker answers, or raises."""
        try:
            return end.handle(message)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        yield ends, held, lambda message: [*pool.map(handled, ends, [message] * 2, timeout=WAIT_S)]
        for end in ends:
            end.close()


def idle(handle):
    def ask():
        answers = handle(Poll())
        return None if {"working": True} in answers else answers

    return Deadline(WAIT_S).poll(ask)


def test_a_question_whether_staging_is_over_is_answered_at_once(engine):
    """Also of a prefetch that ended the one before, which was begun and had not ended."""
    ends, _, handle = engine
    begun, going, aborted = [], threading.Event(), threading.Event()

    def prefetch(told):
        begun.append(told.version)
        assert (aborted if told.version == 1 else going).wait(WAIT_S)

    for end in ends:
        end.receiver.prefetch, end.receiver.abort = prefetch, aborted.set
    assert handle(Prefetch(version=1)) == handle(Prefetch(version=2)) == [{}, {}] and aborted.is_set()
    assert handle(Poll()) == [{"working": True}] * 2
    going.set()
    assert idle(handle) == handle(Poll()) == [{"obstacle": WHOLE}] * 2  # as long as nothing else is begun
    assert sorted(begun) == [1, 1, 2, 2]


def test_a_background_step_is_in_order_with_the_engines_stream(lag):
    found = {}
    with torch.Stream(lag):
        held = torch.zeros(4).to(lag)
        end = EngineWorker(TensorsLoader({"x": held}), rank=0, workers=1, agree=lambda text: [text])
        end.receiver.prefetch = lambda told: found.update(staged=held * 2)
        held.add_(1)  # which the engine's stream has still to do
        end.handle(Prefetch(version=1))
        idle(lambda message: [end.handle(message)])
        assert found["staged"].tolist() == [2.0] * 4


def test_failure_of_one_worker_reaches_all_workers(engine):
    ends, _, handle = engine
    steps = {"prefetch": Prefetch(version=1), "confirm": Prefetch(version=2), "start": Start()}
    for number, (step, message) in enumerate(steps.items()):
        failing = number % 2
        for rank, end in enumerate(ends):
            for name in steps:
                fails = rank == failing and name == step
                setattr(end.receiver, name, lambda *_, fails=fails: 1 / 0 if fails else None)
        answers = handle(message)
        if isinstance(message, Prefetch):
            assert answers == [{}, {}]
            answers = idle(handle)
        assert [str(error) for error in answers] == [f"worker {failing}: ZeroDivisionError: division by zero."] * 2


@pytest.mark.parametrize("staged", [False, True])
def test_what_keeps_one_worker_from_a_commit_keeps_all(engine, staged):
    ends, _, handle = engine
    for end in ends:
        end.receiver.prefetch = lambda _: None
        end.receiver.obstacle = lambda: "" if staged else WHOLE
        end.receiver.commit = lambda message: {"version": message.version}
    ends[1]._own_obstacle = lambda: "it sleeps"
    handle(Prefetch(version=1))
    refused = handle(Commit(version=1))
    assert idle(handle) == [{"obstacle": "it sleeps" if staged else WHOLE}] * 2
    refused += handle(Commit(version=1))
    assert all("version 1 needs a pause" in str(error) for error in refused) and len(refused) == 4
    ends[1]._own_obstacle = str
    handle(Prefetch(version=2))
    assert idle(handle) == [{"obstacle": "" if staged else WHOLE}] * 2
    if staged:
        assert handle(Commit(version=2)) == [{"version": 2, "workers": 2}] * 2


def test_join_to_a_world_without_room_is_refused(engine):
    _, _, handle = engine
    transport = tx.MemoryTransport()
    assert all("no step has been started" in str(error) for error in handle(Poll()))
    for offset, size in ((1, 2), (2, 3), (0, 3)):
        message = Join(transport="memory", params=(), rank_offset=offset, world_size=size, offer={})
        assert all("do not fit into a world" in str(error) for error in handle(message))
    assert all("NotConnectedError" in str(error) for error in handle(Start()))
    transport.shutdown()


def test_workers_report_rank_transports_and_weakest_proof(engine, monkeypatch):
    _, held, handle = engine

    def proof(loader):
        first = loader.targets()["weight"].data_ptr() == held[0].weight.data_ptr()
        return "sent" if first else "in place"

    monkeypatch.setattr(TensorsLoader, "proof", proof)
    answers = handle(Rehearse(ask=True))
    assert [(told["worker"], told["needed"], told["proof"]) for told in answers] == [(n, False, "sent") for n in (0, 1)]
    answers = handle(Inspect())
    assert [(answer["worker"], answer["workers"]) for answer in answers] == [(0, 2), (1, 2)]
    assert {"disk", "delta", "collective"} <= set(answers[0]["transports"]) and "memory" not in answers[0]["transports"]


def test_failures_in_the_same_words_are_told_once():
    def failing(*errors):
        """What each worker raises where all but this one, which does not fail, raise ``errors``."""
        said = ["" if error is None else json.dumps(error_info(error)) for error in errors]
        with pytest.raises(EngineRefusedError) as raised:
            together(lambda own: said)
        return raised.value

    late, lost = EngineRefusedError("late", state="paused"), StaleBaseError("lost")
    assert str(failing(late)) == str(late)
    found = failing(None, late, late, lost)
    assert found.what == "worker 1, 2: late; worker 3: StaleBaseError: lost"
    assert (found.state, found.code) == ("paused", "stale_base")
