"""How many requests control calls cost, and that those of many engines are under way at the same time."""

from threading import Barrier

import pytest

import torchrl_ext as tx
from tests.rpc.engines import client
from torchrl_ext.testing import MAKES, FakeEngine

MANY = 64
PAUSES = {"vllm": "POST /pause", "embedded": "POST /pause", "sglang": "POST /pause_generation"}


@pytest.mark.parametrize("make", MAKES)
def test_a_pause_and_a_resume_cost_at_most_two_requests_each(make):
    with FakeEngine(make) as fake:
        engine = client(fake)
        engine.pause()
        engine.resume()
        costs = []
        for call in (engine.pause, engine.resume):
            before = len(fake.calls)
            call()
            costs.append([one.route for one in fake.calls[before:]])
        assert fake.serving and max(map(len, costs)) <= 2, costs


@pytest.mark.parametrize("make", PAUSES)
def test_engines_are_paused_at_the_same_time_however_many_they_are(make):
    """Each of them pauses only when the request of the last one is there, too."""
    fakes = [FakeEngine(make) for _ in range(MANY)]
    try:
        fleet = tx.connect(*(fake.url for fake in fakes))
        together = Barrier(MANY)
        for fake in fakes:
            fake.inject("pass", PAUSES[make], first=lambda: together.wait(30))
        assert fleet.pause()
        assert not any(fake.serving for fake in fakes)
        fleet.resume()
        assert all(fake.serving for fake in fakes)
        fleet.close()
    finally:
        for fake in fakes:
            fake.close()
