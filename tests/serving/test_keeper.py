"""The keeper of engines: whom it takes for lost, and what it survives."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.processes import WAIT_S
from torchrl_ext.errors import EngineError
from torchrl_ext.serving.keeper import Keeper
from torchrl_ext.serving.launchers import EngineLauncher
from torchrl_ext.serving.processes import free_port
from torchrl_ext.serving.topology import EnginePlan


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status = self.server.statuses.get(self.path, 404)
        if status is None:  # hangs until its server ends
            self.server.over.wait(WAIT_S)
            status = 503
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def answering(statuses):
    """A server that answers its routes with these statuses; None is no answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.statuses, server.over = True, statuses, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Started:
    """A `RunningEngine` whose process is somebody else's matter."""

    def __init__(self, url, runs=True):
        self.url, self.runs = url, runs

    def alive(self):
        return self.runs

    def log(self):
        return "its last words"

    def stop(self):
        self.runs = False


class Scripted(EngineLauncher):
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


def keeper(launcher, *, count=1, kind="embedded", **settings):
    return Keeper(plans(count, kind), launcher, **{"interval_s": 0, "timeout_s": 0.3, "patience": 0, **settings})


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("statuses", "who"),
    [
        ({"/ping": 200, "/health": None}, "one that is paused, whose /health waits for a token"),
        ({"/ping": 503, "/health": 200}, "one whose /health_generate was asked by somebody while it was paused"),
        ({"/ping": 401, "/health": 200}, "one with a key, which its /health does not ask for"),
        ({"/health": 200}, "one without /ping"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sglang_that_is_up_but_generates_nothing_is_not_lost(statuses, who):
    with answering(statuses) as url:
        launcher = Scripted(url)
        with keeper(launcher, kind="sglang") as kept:
            for _ in range(3):
                assert kept.recover() == (), who
            assert launcher.count == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang", "embedded"])
def test_an_engine_that_answers_no_probe_is_lost_after_its_patience(kind):
    with answering({"/ping": None, "/health": None}) as url, keeper(Scripted(url), kind=kind, patience=1) as kept:
        assert kept.recover() == ()
        assert kept.recover() == kept.engines


def refusing(error):
    def start(cancel):
        raise error

    return start


@pytest.mark.parametrize("error", [OSError("no space left on device"), RuntimeError("odd"), EngineError("it ended")])
def test_a_restart_that_fails_whatever_for_is_tried_again_by_the_thread_that_looks(error, caplog):
    with answering({"/health": 200}) as url:
        launcher = Scripted(url, [lambda _: Started(url, runs=False), refusing(error), refusing(error)])
        with keeper(launcher, first_wait_s=0.01, interval_s=0.01) as kept:
            until(lambda: kept.engines[0].restarts == 1)
            assert launcher.count == 4 and kept.engines[0].engine.alive()
    assert str(error) in caplog.text


def test_an_engine_whose_log_cannot_be_read_is_started_again_all_the_same():
    class Unreadable(Started):
        def log(self):
            raise OSError("the log was removed")

    with answering({"/health": 200}) as url, keeper(Scripted(url, [lambda _: Unreadable(url, runs=False)])) as kept:
        assert kept.recover() == kept.engines


def test_who_is_told_of_a_restart_is_told_again_where_that_failed(caplog):
    told = []

    def restarted(kept):
        told.append(kept.url)
        if len(told) == 1:
            raise OSError("the router was busy")

    with (
        answering({"/health": 200}) as url,
        keeper(Scripted(url, [lambda _: Started(url, runs=False)]), on_restarted=restarted) as kept,
    ):
        assert kept.recover() == kept.engines and told == [url]
        assert kept.recover() == () and told == [url, url]
        assert kept.recover() == () and told == [url, url]
    assert "the router was busy" in caplog.text


def test_engines_that_are_lost_together_are_started_again_together():
    meet = threading.Barrier(2)

    def beside_another(cancel):
        meet.wait(20)
        return Started(f"http://127.0.0.1:{free_port()}")

    dead = [lambda _: Started("http://127.0.0.1:1", runs=False)] * 2
    with keeper(Scripted("", [*dead, beside_another, beside_another]), count=2) as kept:
        assert kept.recover() == kept.engines
    assert not meet.broken


def test_the_end_of_a_job_gives_up_a_restart_that_is_under_way():
    began, given_up = threading.Event(), []

    def never_healthy(cancel):
        began.set()
        given_up.append(cancel.wait(20))
        raise EngineError("it was not healthy")

    launcher = Scripted("", [lambda _: Started("http://127.0.0.1:1", runs=False), never_healthy])
    kept = keeper(launcher)
    looking = threading.Thread(target=kept.recover)
    looking.start()
    assert began.wait(WAIT_S)
    kept.stop()
    looking.join(WAIT_S)
    assert given_up == [True] and not looking.is_alive()


def test_an_engine_that_came_up_when_the_job_had_ended_is_ended_too():
    began, late = threading.Event(), Started("http://127.0.0.1:1")

    def too_late(cancel):
        began.set()
        cancel.wait(20)
        return late

    kept = keeper(Scripted("", [lambda _: Started("http://127.0.0.1:1", runs=False), too_late]))
    looking = threading.Thread(target=kept.recover)
    looking.start()
    assert began.wait(WAIT_S)
    kept.stop()
    looking.join(WAIT_S)
    assert not late.alive()


def test_a_start_that_fails_gives_up_the_others_and_says_why():
    given_up, well = [], Started("http://127.0.0.1:1")

    def slow(cancel):
        given_up.append(cancel.wait(20))
        raise EngineError("it was given up")

    with pytest.raises(EngineError, match="no such model"):
        keeper(Scripted("", [lambda _: well, slow, refusing(EngineError("no such model"))]), count=3)
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
        with keeper(launcher, count=2, first_wait_s=300, interval_s=300) as kept:
            slow, other = kept.engines
            slow.engine.runs = False
            until(lambda: launcher.count == 3)
            other.engine.runs = False
            until(lambda: other.restarts == 1)
            assert slow.restarts == 0
            leave.set()
            until(lambda: slow.restarts == 1)
