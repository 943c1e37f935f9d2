"""The supervisor of engines: whom it takes for lost, what it says of them, and what it survives."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from tests.processes import WAIT_S
from tests.rpc.sockets import serving
from torchrl_ext.errors import EngineError
from torchrl_ext.rpc.health import Health
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.processes import free_port
from torchrl_ext.serving.supervisor import Supervisor
from torchrl_ext.serving.topology import EnginePlan


@contextmanager
def answering(statuses):
    """A server that answers its routes with these statuses; None is an answer that comes too late."""

    def answer(asked):
        code = statuses.get(asked.path, 404)
        return code or (threading.Event().wait(2) or 503), {}

    with serving(answer) as server:
        yield server.url


class Started:
    """An engine whose process is somebody else's matter."""

    def __init__(self, url, runs=True):
        self.url, self.runs = url, runs

    def alive(self):
        return self.runs

    def log(self):
        return "its last words"

    def stop(self):
        self.runs = False


class Scripted(LocalLauncher):
    """Every start of a plan is answered by the next of what ``starts`` gives."""

    def __init__(self, url, starts=()):
        self.url, self.starts, self.count = url, iter(starts), 0

    def launch(self, plan, encoders=(), *, cancel=None):
        self.count += 1
        do = next(self.starts, None)
        return Started(self.url) if do is None else do(cancel or threading.Event())


def plans(count=1, kind="embedded"):
    return [
        EnginePlan(name=f"a/regular/{i}", model="a", kind=kind, worker_type="regular", model_path="/m", gpus=(i,))
        for i in range(count)
    ]


def supervisor(launcher, *, count=1, kind="embedded", health=None, **settings):
    return Supervisor(
        plans(count, kind), launcher, health, **{"interval_s": 0, "timeout_s": 0.3, "patience": 0, **settings}
    )


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "statuses",
    [
        pytest.param({"/ping": 200, "/health": None}, id="it is paused, and /health waits for a token"),
        pytest.param({"/ping": 503, "/health": 200}, id="/health_generate was asked while it was paused"),
        pytest.param({"/ping": 401, "/health": 200}, id="it has a key, for which /health does not ask"),
        pytest.param({"/health": 200}, id="it has no /ping"),
    ],
)
def test_a_sglang_that_is_up_but_generates_nothing_is_not_lost(statuses):
    with answering(statuses) as url, supervisor(Scripted(url), kind="sglang") as watched:
        for _ in range(3):
            assert watched.recover() == ()


@pytest.mark.parametrize("kind", ["vllm", "sglang", "embedded"])
def test_an_engine_that_answers_no_probe_is_lost_after_its_patience(kind):
    with (
        answering({"/ping": None, "/health": None}) as url,
        supervisor(Scripted(url), kind=kind, patience=1) as watched,
    ):
        assert watched.recover() == ()
        assert watched.recover() == watched.engines


def refusing(error):
    def start(cancel):
        raise error

    return start


@pytest.mark.parametrize("error", [OSError("no space left on device"), RuntimeError("odd"), EngineError("it ended")])
def test_a_restart_that_fails_whatever_for_is_tried_again_by_the_thread_that_looks(error, caplog):
    class Unreadable(Started):
        def log(self):
            raise OSError("the log was removed")

    with answering({"/health": 200}) as url:
        launcher = Scripted(url, [lambda _: Unreadable(url, runs=False), refusing(error), refusing(error)])
        with supervisor(launcher, first_wait_s=0.01, interval_s=0.01) as watched:
            until(lambda: watched.engines[0].restarts == 1)
            assert launcher.count == 4 and watched.engines[0].engine.alive()
    assert str(error) in caplog.text


def test_who_could_not_act_on_a_restart_is_told_again(caplog):
    health, told = Health(), []

    def changed(url, why):
        if why is None:
            told.append(url)
            if len(told) == 1:
                raise OSError("the router was busy")

    health.subscribe(changed)
    with (
        answering({"/health": 200}) as url,
        supervisor(Scripted(url, [lambda _: Started(url, runs=False)]), health=health) as watched,
    ):
        assert watched.recover() == watched.engines and told == [url] and health.why(url) is not None
        for _ in range(2):
            assert watched.recover() == () and told == [url, url] and health.why(url) is None
    assert "the router was busy" in caplog.text


def test_engines_that_are_lost_together_are_started_again_together():
    meet = threading.Barrier(2)

    def beside_another(cancel):
        meet.wait(20)
        return Started(f"http://127.0.0.1:{free_port()}")

    dead = [lambda _: Started("http://127.0.0.1:1", runs=False)] * 2
    with supervisor(Scripted("", [*dead, beside_another, beside_another]), count=2) as watched:
        assert watched.recover() == watched.engines
    assert not meet.broken


@pytest.mark.parametrize("comes_up", [False, True])
def test_the_end_of_a_job_gives_up_a_restart_that_is_under_way_or_ends_what_comes_up_late(comes_up):
    began, late, given_up = threading.Event(), Started("http://127.0.0.1:1"), []

    def slow(cancel):
        began.set()
        given_up.append(cancel.wait(20))
        if comes_up:
            return late
        raise EngineError("it was not healthy")

    watched = supervisor(Scripted("", [lambda _: Started("http://127.0.0.1:1", runs=False), slow]))
    looking = threading.Thread(target=watched.recover)
    looking.start()
    assert began.wait(WAIT_S)
    watched.stop()
    looking.join(WAIT_S)
    assert given_up == [True] and not looking.is_alive() and late.alive() is not comes_up


def test_a_start_that_fails_gives_up_the_others_and_says_why():
    given_up, well = [], Started("http://127.0.0.1:1")

    def slow(cancel):
        given_up.append(cancel.wait(20))
        raise EngineError("it was given up")

    with pytest.raises(EngineError, match="no such model"):
        supervisor(Scripted("", [lambda _: well, slow, refusing(EngineError("no such model"))]), count=3)
    assert given_up == [True] and not well.alive()


def test_an_engine_that_ends_while_another_is_started_again_is_started_again_at_once():
    leave = threading.Event()

    class Slow(Scripted):
        def launch(self, plan, encoders=(), *, cancel=None):
            engine = super().launch(plan)
            if self.count > 2 and plan.name.endswith("/0"):
                leave.wait(WAIT_S)
            return engine

    with answering({"/health": 200}) as url:
        launcher = Slow(url)
        with supervisor(launcher, count=2, first_wait_s=300, interval_s=300) as watched:
            slow, other = watched.engines
            slow.engine.runs = False
            until(lambda: launcher.count == 3)
            other.engine.runs = False
            until(lambda: other.restarts == 1)
            assert slow.restarts == 0
            leave.set()
            until(lambda: slow.restarts == 1)
