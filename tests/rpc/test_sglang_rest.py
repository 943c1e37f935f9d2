"""Pause and sleep of an SGLang server with our plugin: what its client says of them is what the server says."""

import json
import threading

import pytest

from tests.rpc.servers import running
from tests.rpc.test_sglang_client import NEW, STARTED_WITH, STOCK, plugin, refused, update
from torchrl_ext.errors import DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.routes import CHANNEL
from torchrl_ext.rpc.engines.sglang import SGLangEngine

ALL = {"weights", "kv_cache", "cuda_graph"}


class Resting:
    """Pause and sleep as SGLang 0.5.23 has them, and our plugin's words on them.

    Attributes:
        paused: whether it generates nothing.
        in_place: whether it has requests that are frozen, so that it is not idle.
        asleep: what gave its memory up.
        ended: what its scheduler died of.
    """

    def __init__(self, **started_with):
        self.paused, self.in_place, self.asleep, self.hollow, self.ended = False, False, set(), False, None
        self.seen = []  # of the plugin's messages, with what slept then
        self.answers = {
            **NEW,
            "GET /server_info": (200, {**STARTED_WITH, "dp_size": 1, **started_with}),
            "GET /ready": lambda _: (503 if self.paused else 200, ""),
            "POST /pause_generation": self.pause,
            "POST /continue_generation": lambda _: self.resume(),
            "POST /release_memory_occupation": self.release,
            "POST /resume_memory_occupation": self.take,
            "POST /weights_checker": self.tell,
        }

    def pause(self, asked):
        if asked["mode"] == "abort" and self.in_place:
            return 504, {"message": "it waits for what is frozen, for ever"}
        freezes = asked["mode"] == "in_place" and (self.in_place or not self.paused)
        self.paused, self.in_place = True, freezes
        return 200, {}

    def resume(self):
        self.paused = self.in_place = False
        return 200, {}

    def release(self, asked):
        if not self.paused or self.in_place:
            self.ended = "release_memory_occupation should be called only when server is idle"
        tags = set(asked["tags"]) or ALL
        if tags & self.asleep:
            self.ended = f"{tags & self.asleep} gave their memory up before"
        self.asleep |= tags
        return 200, None

    def take(self, asked):
        if not set(asked["tags"]) <= self.asleep:
            self.ended = f"KeyError: {set(asked['tags']) - self.asleep}"
        self.asleep -= set(asked["tags"])
        return 200, None

    def tell(self, asked):
        message = json.loads(asked["action"].removeprefix(CHANNEL))
        self.seen.append((message["kind"], set(self.asleep)))
        self.hollow = message["kind"] == "reset" or (self.hollow and message["kind"] != "finish")
        if message["kind"] == "rehearse":
            return plugin(proof="rehearsed", needed=message["ask"], worker=0)
        if message["kind"] == "flush":
            return plugin(flushed=not self.in_place)
        return plugin(paused=self.paused, asleep=sorted(self.asleep), empty=self.hollow)


def mute(_):
    raise ConnectionAbortedError("the answer is lost")


def lost(server, resting):
    """The answer of a flush is lost, once."""
    tell, told = resting.tell, []

    def telling(asked):
        if "flush" in asked["action"] and not told:
            told.append(asked)
            return mute(asked)
        return tell(asked)

    server.answers["POST /weights_checker"] = telling


def test_after_a_lost_flush_it_is_resumed_before_it_is_said_to_serve():
    resting = Resting()
    with running(resting.answers) as server:
        lost(server, resting)
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineUnreachableError, match=f"nothing was changed, and it serves again: {server.url}"):
            update(engine)
        assert not resting.paused and engine.rows()[0].state == "serving"


def test_after_a_lost_flush_a_server_that_does_not_resume_is_not_said_to_serve():
    resting = Resting()
    with running(resting.answers, post_continue_generation=refused("no")) as server:
        lost(server, resting)
        engine = SGLangEngine(server.url)
        with pytest.raises(EngineUnreachableError, match=r"not known whether .* serves again") as caught:
            update(engine)
        assert "nothing was changed" not in str(caught.value) and engine.rows()[0].state == "paused"


def test_one_that_was_paused_before_is_not_resumed():
    resting = Resting()
    resting.pause({"mode": "retract"})
    with running(resting.answers) as server:
        lost(server, resting)
        with pytest.raises(EngineUnreachableError, match="is paused, serves nobody"):
            update(SGLangEngine(server.url))
        assert resting.paused


def test_a_pause_that_comes_too_late_is_taken_back():
    resting, gone = Resting(), threading.Event()

    def late(asked):
        resting.pause(asked)
        gone.wait(20)
        return 200, {}

    with running(resting.answers, post_pause_generation=late) as server:
        engine = SGLangEngine(server.url, load_timeout_s=0.3)
        with pytest.raises(DeadlineError, match=r"0\.\d+ s.*did not pause.*serves again"):
            engine.pause()
        assert not resting.paused and engine.rows()[0].state == "serving"
        gone.set()


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("level", [1, 2])
def test_the_colocated_order_works_with_a_client_of_its_own_for_every_step(level, mode):
    resting = Resting(enable_weights_cpu_backup=True)
    with running(resting.answers) as server:

        def client():
            return SGLangEngine(server.url, pause_mode=mode)

        client().sleep(level)
        assert resting.asleep == ALL and resting.paused and resting.hollow == (level == 2)
        client().wake_up(["weights"])
        assert resting.asleep == {"kv_cache", "cuda_graph"} and resting.paused
        update(client())
        client().wake_up(["kv_cache"])
        client().wake_up()
        assert not resting.asleep and not resting.paused and not resting.hollow and resting.ended is None


def test_an_update_wakes_weights_before_they_are_touched_and_the_cache_last():
    resting = Resting()
    with running(resting.answers) as server:
        engine = SGLangEngine(server.url)
        engine.sleep(2)
        resting.seen.clear()
        update(engine)
        slept = dict(resting.seen)
        assert not any("weights" in slept[what] for what in ("prefetch", "start", "load", "finish"))
        assert "kv_cache" in slept["finish"]
        assert not resting.asleep and not resting.paused and resting.ended is None


@pytest.mark.parametrize(("level", "tags"), [(1, ["kv_cache"]), (1, None), (2, None)])
def test_a_server_that_is_put_to_sleep_again_gives_up_no_more(level, tags):
    resting = Resting(enable_weights_cpu_backup=True)
    with running(resting.answers) as server:
        for _ in range(2):
            SGLangEngine(server.url).sleep(level, tags)
        assert resting.asleep == (ALL if tags is None else {"kv_cache", "cuda_graph"}) and resting.ended is None


def test_a_rehearsal_wakes_the_weights_of_a_server_that_others_put_to_sleep_and_leaves_it_paused():
    resting = Resting(enable_weights_cpu_backup=True)
    with running(resting.answers) as server:
        SGLangEngine(server.url).sleep(1)
        resting.seen.clear()
        SGLangEngine(server.url).rehearse()
        rehearsed = [asleep for kind, asleep in resting.seen if kind == "rehearse"]
        assert rehearsed == [{"kv_cache", "cuda_graph"}] * 2 and resting.asleep == rehearsed[0]
        assert resting.paused and resting.ended is None


def test_a_server_without_weights_does_not_serve():
    resting = Resting()
    with running(resting.answers) as server:
        SGLangEngine(server.url).sleep(2)
        stranger = SGLangEngine(server.url)
        for call in (stranger.resume, stranger.wake_up, lambda: stranger.wake_up(["kv_cache"])):
            with pytest.raises(EngineRefusedError, match="no weights to serve"):
                call()
        assert resting.paused and resting.asleep == ALL


def test_a_level_that_the_server_cannot_have_is_refused_before_it_is_paused():
    for started_with, answers, words in (
        ({}, {}, "enable-weights-cpu-backup"),
        ({}, {"post_weights_checker": STOCK}, "without our plugin"),
    ):
        resting = Resting(**started_with)
        with running(resting.answers, **answers) as server:
            with pytest.raises(EngineRefusedError, match=words):
                SGLangEngine(server.url).sleep(1)
            assert not resting.paused and not resting.asleep


def test_requests_that_are_frozen_in_place_can_be_aborted():
    resting = Resting()
    with running(resting.answers) as server:
        SGLangEngine(server.url, pause_mode="in_place").pause()
        assert resting.in_place
        SGLangEngine(server.url, pause_mode="abort").pause()
        assert resting.paused and not resting.in_place
