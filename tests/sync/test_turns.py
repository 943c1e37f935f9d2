"""Senders that take turns on an embedded engine, and trainers that die: it computes with one version, or refuses."""

import random
from contextlib import ExitStack

import httpx
import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.turns import PROMPTS, ROUTES, TRANSPORTS, Meanwhile, Policy, Turns, each_after_each, may_serve
from torchrl_ext.base.errors import ConcurrentUpdateError, WeightSyncError
from torchrl_ext.data.weights.derived import as_source

FEW = ("delta on a base", "delta by broadcast", "disk", "sharded", "ipc")
"""Of `ROUTES`, those that leave an engine in different states."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), 1)


@pytest.fixture(scope="module")
def server(checkpoint):
    """One engine for all tests: whatever others did to it, the next update has to be right."""
    with EmbeddedServer(checkpoint) as server:
        yield server


@pytest.fixture
def ends():
    with ExitStack() as ends:
        yield ends


def logprobs(server):
    """A function that asks the engine for log-probabilities; None where it refuses."""

    def ask(prompts):
        answer = httpx.post(f"{server.url}/prompt_logprobs", json={"prompts": prompts}, timeout=60)
        return answer.json()["logprobs"] if answer.status_code == 200 else None

    return ask


@pytest.mark.parametrize("routes", [FEW, pytest.param(ROUTES, marks=pytest.mark.exhaustive)])
def test_sender_lands_update_in_one_call_after_any_other_sender(routes, server, checkpoint, tmp_path, ends):
    """Each sender's first call lands its update, whichever sender updated the engine before."""
    turns = Turns(tmp_path, server.url, ends, logprobs(server), base=str(checkpoint))
    senders = [turns.sender(route) for route in routes]
    for place in each_after_each(len(senders)):
        senders[place].update()
        turns.check(senders[place])


def test_two_senders_of_one_process_share_a_client(server, tmp_path, ends):
    engine, policy = tx.connect(server.url), Policy(3)
    delta, disk = (tx.WeightSender(tx.make_transport(name, root=tmp_path / name), engine) for name in ("delta", "disk"))
    ends.callback(delta.shutdown)
    ends.callback(disk.shutdown)
    turns = Turns(tmp_path, server.url, ends, logprobs(server))
    for sender in (delta, delta, disk, delta, disk, disk, delta):
        assert sender.update_weights(policy.train().model).verified
        turns.check(policy)

    def at_once():
        with pytest.raises(ConcurrentUpdateError, match="another sender of this process"):
            delta.update_weights(policy.model)

    assert disk.update_weights(Meanwhile(as_source(policy.model), 9, at_once)).verified


def test_replaced_sender_is_warned_of_its_successor(server, tmp_path, ends, caplog):
    """A replaced sender logs which sender joined after it and has to join again."""
    turns = Turns(tmp_path, server.url, ends, logprobs(server))
    first, second = turns.sender("collective"), turns.sender("collective")
    for sender in (first, second, first):
        sender.update()
    (words,) = [record.getMessage() for record in caplog.records if "join this sender again" in record.getMessage()]
    assert "a collective sender, process " in words and " has joined" in words


def test_step_of_replaced_sender_is_refused_without_a_pause(server, tmp_path, ends):
    """A step of a replaced sender is refused; the engine keeps its weights and is not paused."""
    first, second = (tx.connect(server.url), tx.connect(server.url))
    for engine, seed in ((first, 4), (second, 5)):
        sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / str(seed)), engine)
        ends.callback(sender.shutdown)
        assert sender.update_weights(Policy(seed).model).verified
    before = logprobs(server)(PROMPTS)
    for step in (lambda: first.prefetch(1), lambda: first.load({"version": 1, "handoff": {}})):
        with pytest.raises(WeightSyncError, match="must join again"):
            step()
    assert not httpx.get(f"{server.url}/is_paused").json()["is_paused"]
    assert logprobs(server)(PROMPTS) == before


POINTS = [
    ("collective", "tensor:2"),
    ("collective", "tensor:20"),
    ("collective", "call:8"),
    ("collective", "sent:9"),
    ("collective", "call:11"),
    ("delta", "sent:8"),
    ("delta", "call:9"),
    ("disk", "sent:8"),
    ("sharded", "tensor:3"),
]
MORE = [
    *(("collective", f"call:{count}") for count in range(5, 15)),
    *(("delta", f"{where}:{count}") for where in ("call", "sent") for count in range(6, 12)),
    *(("disk", f"{where}:{count}") for where in ("call", "sent") for count in range(6, 12)),
    *((route, f"tensor:{count}") for route in ("sharded", "ipc", "delta by broadcast") for count in (3, 9, 20)),
]
POINTS += [pytest.param(*point, marks=pytest.mark.exhaustive) for point in MORE if point not in POINTS]


@pytest.mark.parametrize(("route", "point"), POINTS)
def test_trainer_death_leaves_one_version_or_refusing_engine(server, tmp_path, ends, route, point):
    """After a trainer dies in an update, the engine serves one whole version or refuses to serve."""
    turns = Turns(tmp_path, server.url, ends, logprobs(server))
    may_serve(turns, route, point, resume=f"{server.url}/resume")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100))
def test_senders_take_turns_in_any_order_and_some_die(server, checkpoint, tmp_path, ends, seed):
    drawn = random.Random(seed)
    turns = Turns(tmp_path, server.url, ends, logprobs(server), base=str(checkpoint))
    senders = [turns.sender(route) for route in drawn.sample(ROUTES[1:], 3)]
    for _ in range(8):
        if drawn.random() < 0.25:
            route = drawn.choice([name for name in TRANSPORTS if name != "delta on a base"])
            where = drawn.choice(("tensor", "call", "sent"))
            may_serve(turns, route, f"{where}:{drawn.randrange(1, 14)}", resume=f"{server.url}/resume")
        sender = drawn.choice(senders)
        sender.update()
        turns.check(sender)
