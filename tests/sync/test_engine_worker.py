"""One worker of an engine, in step with the others: what it begins, what it says of it, and who hears of a failure."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.data.sharded.sharded_engine import Together as Agreeing
from tests.processes import WAIT_S
from tests.sync.by_hand import invitation, prepared
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.messages import (
    Finish,
    Inspect,
    Join,
    Poll,
    Prefetch,
    Rehearse,
    Seal,
    Start,
    Verify,
)
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digest_of, position_digest
from torchrl_ext.sync.engine_worker import EngineWorker, joined


class Together(Agreeing):
    """Workers of one engine in threads of this process."""

    def __init__(self, count):
        super().__init__(count)
        self._pool = ThreadPoolExecutor(count)

    def handle(self, ends, message):
        """What each worker answers, or raises."""

        def one(end):
            try:
                return end.handle(message)
            except EngineError as error:
                return error

        return [job.result(WAIT_S) for job in [self._pool.submit(one, end) for end in ends]]


@pytest.fixture
def engine():
    """Two workers, what they hold, and what lets all of them handle a message."""
    together, held = Together(2), [nn.Linear(3, 2), nn.Linear(3, 2)]
    ends = [
        EngineWorker(TensorsLoader(module), rank=rank, workers=2, agree=together.agree(rank))
        for rank, module in enumerate(held)
    ]
    yield ends, held, lambda message: together.handle(ends, message)
    for end in ends:
        end.close()


def idle(handle):
    def ask():
        answers = handle(Poll())
        return None if {"working": True} in answers else answers

    return Deadline(WAIT_S).poll(ask)


def test_workers_follow_a_trainer_step_by_step(engine):
    _, held, handle = engine
    policy, transport = nn.Linear(3, 2), tx.MemoryTransport()
    assert handle(invitation(transport, policy, 2)) == [{}, {}]
    assert idle(handle) == [{}, {}]
    load = prepared(transport, policy, 1)
    digests = {name: position_digest(tensor).hex() for name, tensor in as_source(policy)}
    for message in (Prefetch(version=1), Start(), load, Verify(digests=digests), Seal()):
        assert handle(message) == [{}, {}]
        assert not isinstance(message, Prefetch) or idle(handle) == [{}, {}]
    confirmed = {"version": 1, "digest": digest_of(digests), "workers": 2}
    assert handle(Finish(version=1)) == [confirmed, confirmed]
    assert all(torch.equal(module.weight, policy.weight) for module in held)
    transport.shutdown()


def test_a_question_whether_staging_is_over_is_answered_at_once(engine):
    ends, _, handle = engine
    going = threading.Event()
    ends[1].receiver.prefetch = lambda told: going.wait(WAIT_S)  # one of them takes its time
    ends[0].receiver.prefetch = lambda told: None
    assert handle(Prefetch(version=1)) == [{}, {}]
    assert handle(Poll()) == [{"working": True}] * 2
    going.set()
    assert idle(handle) == [{}, {}]
    assert handle(Poll()) == [{}, {}]  # as long as nothing else is begun


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
    """All workers answer with the failure of one, also with that of a step in the background."""
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


def test_join_to_a_world_without_room_is_refused(engine):
    """Ranks that do not fit into the world are refused before a worker joins a group."""
    _, _, handle = engine
    transport = tx.MemoryTransport()
    assert all("no step has been started" in str(error) for error in handle(Poll()))
    for offset, size in ((1, 2), (2, 3), (0, 3)):
        message = Join(transport="memory", params=(), rank_offset=offset, world_size=size, offer={})
        assert all("do not fit into a world" in str(error) for error in handle(message))
    assert all("NotConnectedError" in str(error) for error in handle(Start()))
    transport.shutdown()


def test_a_prefetch_that_is_begun_anew_ends_the_one_before(engine):
    ends, _, handle = engine
    begun, aborted = [], threading.Event()
    for end in ends:
        end.receiver.prefetch = lambda told: (begun.append(told.version), told.version > 1 or aborted.wait(WAIT_S))
        end.receiver.abort = aborted.set
    assert handle(Prefetch(version=1)) == [{}, {}]
    assert handle(Prefetch(version=2)) == [{}, {}]
    assert aborted.is_set() and idle(handle) == [{}, {}] and sorted(begun) == [1, 1, 2, 2]


def test_staged_changes_are_dropped_after_the_engines_own_load(engine, tmp_path, monkeypatch):
    """Changes that are staged while the engine loads other weights never land on those weights."""
    ends, held, handle = engine
    policy, transport = nn.Linear(3, 2), tx.DeltaTransport(tmp_path)

    def send(version):
        with torch.no_grad():
            policy.weight[0, 0] += 1
        load = prepared(transport, policy, version)
        assert handle(Prefetch(version=version)) == [{}, {}]
        answers = idle(handle)
        if answers == [{}, {}]:
            for message in (Start(), load, Finish(version=version)):
                found = handle(message)
            assert [answer["version"] for answer in found] == [version, version]
        return answers

    assert handle(invitation(transport, policy, 2)) == [{}, {}] and idle(handle) == [{}, {}]
    assert send(1) == send(2) == [{}, {}]
    began, going = threading.Barrier(3), threading.Event()
    stage = TensorsLoader.stage

    def late(loader, changes):
        began.wait(WAIT_S)
        assert going.wait(WAIT_S)
        stage(loader, changes)

    monkeypatch.setattr(TensorsLoader, "stage", late)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(send, 3)
        began.wait(WAIT_S)
        for end in ends:
            end.receiver.invalidate()  # as vLLM's and SGLang's own loads do
        going.set()
        assert all("loaded other weights while version 3" in str(error) for error in answers.result(WAIT_S))
    with torch.no_grad():
        held[0].weight.zero_()
        held[1].weight.zero_()
    assert send(4) == [{}, {}]
    assert all(torch.equal(module.weight, policy.weight) for module in held)
    transport.shutdown()


def test_workers_report_rank_transports_and_weakest_proof(engine, monkeypatch):
    """Workers report their rank, the transports they can follow and the weakest proof among them."""
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
    assert joined(["only one"]) == "only one"
    assert joined(["", "late", "late", "lost"]) == "worker 1, 2: late; worker 3: lost"
