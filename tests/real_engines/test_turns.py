"""Senders that take turns on real engines, and trainers that die in an update: an engine serves one version or none."""

from contextlib import ExitStack

import pytest

import torchrl_ext as tx
from tests.control.test_engine_states import run_real, seeds
from tests.turns import TRANSPORTS as BY
from tests.turns import Turns, each_after_each, may_serve
from torchrl_ext.base.errors import DeadlineError, EngineError

pytestmark = pytest.mark.engine

seeds = seeds

ROUTES = (*(route for route in BY if route != "delta on a base"), "push")
RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}
POINTS = [
    *(("collective", point) for point in ("tensor:3", "call:12")),
    ("disk", "sent:10"),
    *(("delta", point) for point in ("sent:10", "sent:11")),
    ("sharded", "call:11"),
    ("ipc", "tensor:9"),
]
MORE = [(route, f"{where}:{count}") for route in BY for where in ("call", "sent") for count in range(7, 16)]
POINTS += [pytest.param(*point, marks=pytest.mark.exhaustive) for point in MORE if "base" not in point[0]]


@pytest.fixture(params=["vllm", "sglang"])
def served(request):
    """A server that all tests share; the last thing that each does is an update that is right."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def turns(served, tmp_path):
    def logprobs(prompts):
        """None where the engine refuses, or does not answer since it is paused."""
        paused = tx.make_engine(served.kind, url=served.url).paused()
        engine = tx.make_engine(served.kind, url=served.url, load_timeout_s=1.0 if paused else 60.0)
        try:
            return engine.logprobs(prompts)
        except (EngineError, DeadlineError):
            assert paused
            return None

    with ExitStack() as ends:
        yield Turns(tmp_path, served.url, ends, logprobs)


def test_each_sender_updates_the_engine_after_each_other_sender(turns):
    senders = [turns.sender(route) for route in ROUTES]
    for place in each_after_each(len(senders)):
        senders[place].update()
        turns.check(senders[place])


@pytest.mark.parametrize(("route", "point"), POINTS)
def test_engine_of_a_dead_trainer_serves_one_version_or_refuses(turns, served, route, point):
    may_serve(turns, route, point, resume=f"{served.url}{RESUME[served.kind]}")


def test_engine_with_a_partial_version_stays_paused_on_resume(turns, served):
    """The engine's own route is what a program of others calls."""
    refused = may_serve(turns, "collective", "tensor:20", resume=f"{served.url}{RESUME[served.kind]}")
    assert len(refused) == 4


def test_two_clients_in_any_order_never_serve_a_partial_update(served, request, seeds):
    run_real(request, served.kind, served.url, seeds)
