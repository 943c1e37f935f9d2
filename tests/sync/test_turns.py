"""Senders that take turns on an embedded engine, and trainers that die: it computes with one version, or refuses."""

import random
from contextlib import ExitStack

import httpx
import pytest

import torchrl_ext as tx
from tests.turns import PROMPTS, ROUTES, TRANSPORTS, Policy, Turns, each_after_each, may_serve
from torchrl_ext.base.errors import WeightSyncError

FEW = ("delta on a base", "delta by broadcast", "disk", "sharded", "ipc")
"""Of `ROUTES`, those that leave an engine in different states."""


@pytest.fixture
def turns(server, checkpoint, tmp_path):
    """Senders to one engine for all tests; it is asked for log-probabilities, None where it refuses."""

    def logprobs(prompts):
        answer = httpx.post(f"{server.url}/prompt_logprobs", json={"prompts": prompts}, timeout=60)
        return answer.json()["logprobs"] if answer.status_code == 200 else None

    with ExitStack() as ends:
        yield Turns(tmp_path, server.url, ends, logprobs, base=str(checkpoint))


@pytest.mark.parametrize("routes", [FEW, pytest.param(ROUTES, marks=pytest.mark.exhaustive)])
def test_sender_lands_update_in_one_call_after_any_other_sender(routes, turns):
    senders = [turns.sender(route) for route in routes]
    for place in each_after_each(len(senders)):
        senders[place].update()
        turns.check(senders[place])


def test_two_senders_of_one_process_share_a_client(turns):
    engine, policy = tx.connect(turns.url), Policy(3)
    delta, disk = (tx.WeightSender(kind(turns.folder()), engine) for kind in (tx.DeltaTransport, tx.DiskTransport))
    with delta, disk:
        for sender in (delta, delta, disk, delta, disk, disk, delta):
            assert sender.update_weights(policy.train().model).verified
            turns.check(policy)


def test_step_of_replaced_sender_is_refused_without_a_pause(turns):
    replaced, engine = tx.connect(turns.url), tx.connect(turns.url)
    with (
        tx.WeightSender(tx.DiskTransport(turns.folder()), replaced) as first,
        tx.WeightSender(tx.DiskTransport(turns.folder()), engine) as second,
    ):
        for sender, seed in ((first, 4), (second, 5)):
            assert sender.update_weights(Policy(seed).model).verified
        before = turns.logprobs(PROMPTS)
        update = replaced.update(1)
        for step in (update.stage, lambda: update.load({"version": 1, "handoff": {}})):
            with pytest.raises(WeightSyncError, match="must join again"):
                step()
        assert not httpx.get(f"{turns.url}/is_paused").json()["is_paused"]
        assert turns.logprobs(PROMPTS) == before


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
def test_trainer_death_leaves_one_version_or_refusing_engine(turns, route, point):
    may_serve(turns, route, point, resume=f"{turns.url}/resume")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100))
def test_senders_take_turns_in_any_order_and_some_die(turns, seed):
    drawn = random.Random(seed)
    senders = [turns.sender(route) for route in drawn.sample(ROUTES[1:], 3)]
    for _ in range(8):
        if drawn.random() < 0.25:
            route = drawn.choice([name for name in TRANSPORTS if name != "delta on a base"])
            where = drawn.choice(("tensor", "call", "sent"))
            may_serve(turns, route, f"{where}:{drawn.randrange(1, 14)}", resume=f"{turns.url}/resume")
        sender = drawn.choice(senders)
        sender.update()
        turns.check(sender)
