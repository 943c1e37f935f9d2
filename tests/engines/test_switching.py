"""What a vLLM core does around a commit or an undo, over a core and workers that note what they are asked.

`tests.real_engines.in_core` has the same from vLLM's own core and schedulers.
"""

import sys
from collections import deque
from types import SimpleNamespace

import pytest

from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import Commit, State, Undo, answered, answers_of
from torchrl_ext.base.routes import CALL, called
from torchrl_ext.engines.vllm import switching

DEFAULT = "default"


class Worker:
    """Holds a version; a message whose kind is in ``fails`` is refused, or, in ``breaks``, carried out in part."""

    def __init__(self):
        self.version, self.before, self.whole, self.asked = 0, 0, True, []
        self.fails, self.breaks = set(), set()

    def handle(self, message):
        self.asked.append(message.kind)
        if message.kind in self.fails:
            raise EngineRefusedError("refused")
        match message:
            case Commit() if message.version != self.version:
                self.before, self.version = self.version, message.version
            case Undo() if message.version == self.version:
                self.version = self.before
        self.whole = message.kind not in self.breaks
        if not self.whole:
            raise EngineRefusedError("broken")
        return {"version": self.version}


class Request:
    def __init__(self, salt=None, computed=0, preemptions=0):
        self.cache_salt, self.block_hashes = salt, [salt]
        self.num_computed_tokens, self.num_preemptions = computed, preemptions

    def update_block_hashes(self):
        self.block_hashes += [self.cache_salt]


class Core:
    """vLLM's, as far as the plugin knows it."""

    def __init__(self, workers=2, queue=True):
        self.workers, self.paused, self._weight_version = [Worker() for _ in range(workers)], [], DEFAULT
        self.model_executor = SimpleNamespace(collective_rpc=self.asked)
        self.batch_queue = deque() if queue else None
        self.scheduler = SimpleNamespace(requests={})
        self.raises = None

    def asked(self, method, timeout=None, args=(), kwargs=None):
        if self.raises:
            raise self.raises
        if method == switching.RESUMES:
            return [worker.whole for worker in self.workers]
        return [answered(worker.handle, *args) for worker in self.workers]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def is_scheduler_paused(self):
        return bool(self.paused)

    def pause_scheduler(self, mode, clear_cache=True):
        self.paused.append((mode, clear_cache))

    def set_weight_version(self, label):
        self._weight_version = label

    def get_weight_version(self):
        return self._weight_version

    def _attach_weight_version(self, outputs):
        for one in outputs.values():
            one.weight_version = self._weight_version

    def preprocess_add_request(self, request):
        return Request(request.cache_salt), 0

    def add_request(self, request, wave=0):
        self.scheduler.requests[len(self.scheduler.requests)] = request

    def popped(self):
        """The label of the oldest batch in the queue."""
        self.batch_queue.pop()
        return self.labelled()

    def labelled(self):
        outputs = {0: SimpleNamespace()}
        self._attach_weight_version(outputs)
        return outputs[0].weight_version

    def send(self, message):
        return self.collective_rpc(CALL, None, tuple(called(message)["args"]))

    def arrives(self, salt=None):
        return self.preprocess_add_request(SimpleNamespace(cache_salt=salt))[0]


@pytest.fixture
def made(monkeypatch):
    kind = type("EngineCore", (Core,), dict(vars(Core)))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=kind))
    switching.switch_between_steps()
    return kind


@pytest.fixture
def core(made):
    return made()


def test_batches_in_flight_keep_their_labels_over_several_commits(core):
    core.batch_queue.extend("ab")
    core.send(Commit(version=1))
    core.batch_queue.appendleft("c")
    core.send(Commit(version=2))
    core.send(Commit(version=3))
    core.send(Commit(version=3))  # again, as its answer was lost
    core.batch_queue.appendleft("d")
    assert [core.popped() for _ in range(2)] == [DEFAULT, DEFAULT]
    core.send(Undo(version=3))
    core.batch_queue.appendleft("e")
    assert [core.popped() for _ in range(3)] == ["1", "3", "2"]
    assert core.labelled() == core.get_weight_version() == "2"


def test_without_a_queue_the_next_outputs_have_the_new_label(made):
    core = made(queue=False)
    for version in (1, 2):
        core.send(Commit(version=version))
        assert core.labelled() == str(version)


def test_other_messages_and_calls_pass_untouched(core, monkeypatch):
    texts = []
    monkeypatch.setattr(core.model_executor, "collective_rpc", lambda *call: texts.append(call) or ["answer"])
    for args in (
        ("{",),
        ("[]",),
        (7,),
        ('{"kind": "commit"}',),
        ('{"kind": 7}',),
        ("a", "b"),
        (),
        called(State())["args"],
    ):
        assert core.collective_rpc(CALL, 5, args, {"a": 1}) == ["answer"]
        assert texts.pop() == (CALL, 5, args, {"a": 1})
    text = called(Commit(version=1))["args"]
    assert core.collective_rpc("other", None, text) == ["answer"] and texts == [("other", None, text, None)]


def test_a_paused_engine_refuses_a_commit(core):
    core.paused = [()]
    with pytest.raises(EngineRefusedError, match="the engine is paused"):
        answers_of(core.send(Commit(version=1)), "")
    assert [worker.asked for worker in core.workers] == [[], []]


def test_a_commit_that_all_refuse_changes_nothing(core):
    for worker in core.workers:
        worker.fails = {"commit"}
    assert all("error" in row for row in core.send(Commit(version=1)))
    assert [worker.asked for worker in core.workers] == [["commit"], ["commit"]]
    assert core.labelled() == DEFAULT and not core.paused


@pytest.mark.parametrize("how", ["fails", "breaks"])
@pytest.mark.parametrize("which", [(0,), (1,)])
def test_a_commit_that_fails_on_a_worker_is_undone_on_all(core, how, which):
    for rank in which:
        getattr(core.workers[rank], how).add("commit")
    assert ["error" in row for row in core.send(Commit(version=1))] == [rank in which for rank in range(2)]
    assert [worker.version for worker in core.workers] == [0, 0]
    assert core.labelled() == DEFAULT and not core.paused


@pytest.mark.parametrize("undo", ["fails", "breaks"])
def test_an_engine_that_cannot_go_back_pauses_itself(core, undo):
    core.batch_queue.append("a")
    core.workers[0].breaks.add("commit")
    getattr(core.workers[1], undo).add("undo")
    assert "error" in core.send(Commit(version=1))[0]
    assert core.paused == [("keep", False)] and core.popped() == DEFAULT


def test_an_undo_that_fails_on_a_worker_pauses_the_engine(core):
    core.send(Commit(version=1))
    core.workers[1].fails.add("undo")
    assert "error" in core.send(Undo(version=1))[1]
    assert core.paused == [("keep", False)]


def test_an_executor_that_does_not_answer_leaves_the_engine_paused(core):
    core.raises = TimeoutError()
    with pytest.raises(TimeoutError):
        core.send(Commit(version=1))
    assert core.paused == [("keep", False)] and core.labelled() == DEFAULT


def test_requests_that_have_not_begun_get_a_cache_of_their_own(core):
    early, running, preempted = core.arrives("own"), Request("old", computed=7), Request("old", preemptions=1)
    waiting = core.arrives()
    for request in (running, preempted, waiting):
        core.add_request(request)
    assert early.cache_salt == "own" and waiting.cache_salt is None
    for message in (Commit(version=1), Commit(version=1), Undo(version=1), Commit(version=2)):
        core.send(message)
    core.add_request(early)
    late = core.arrives("own")
    core.add_request(late)
    assert early.cache_salt == late.cache_salt == "own|torchrl_ext=3" and waiting.cache_salt == "|torchrl_ext=3"
    assert [request.block_hashes for request in (early, late, waiting)] == [
        [request.cache_salt] for request in (early, late, waiting)
    ]
    assert running.cache_salt == preempted.cache_salt == "old"
    core.send(Commit(version=3, keep_cache=True))
    assert waiting.cache_salt == "|torchrl_ext=3" and core.arrives().cache_salt == "|torchrl_ext=3"
