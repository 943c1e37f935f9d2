"""vLLM's own core and schedulers over workers of ours, whose tokens are the versions of the weights that sample them.

``python -m tests.real_engines.in_core NAME CHECKPOINT`` runs one of the functions below in vLLM's environment. Two
batches are in flight: as with async scheduling, or as in a pipeline of two stages.
"""

import json
import random
import sys
from collections import deque
from concurrent.futures import Future

import torch

from tests.models import PROMPT
from tests.real_engines.in_process import SETTINGS, sampling
from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import Commit, Inspect, Undo, answered, answers_of
from torchrl_ext.base.routes import CALL, called
from torchrl_ext.engines.vllm import register
from torchrl_ext.engines.vllm.switching import RESUMES

register.register()

from vllm import EngineArgs  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

FIRST = 100  # the token that version 0 samples
LONG = [(7 * i + 3) % 97 + 3 for i in range(100)]


class Later(Future):
    """The result of a call that waits in a worker's queue until somebody asks for it."""

    def __init__(self, wait):
        super().__init__()
        self._wait = wait

    def result(self, timeout=None):
        self._wait(self)
        return super().result(0)


class Worker:
    """One worker with a queue of calls, which it empties in order and no earlier than it has to.

    Attributes:
        fails: kinds of messages that fail halfway, as often as they are in it.
    """

    def __init__(self):
        self.version, self.before, self.whole, self.fails = 0, None, True, []
        self._calls, self._batch, self._prompts = deque(), None, {}

    def put(self, method, *args):
        later = Later(self._wait)
        self._calls.append((later, getattr(self, method), args))
        return later

    def _wait(self, wanted):
        while not wanted.done():
            later, method, args = self._calls.popleft()
            later.set_result(method(*args))

    def torchrl_ext(self, text):
        return answered(self._handle, text)

    def torchrl_ext_resumes(self):
        return self.whole

    def synchronize_device(self):
        pass

    def _handle(self, message):
        match message:
            case Commit() if message.version != self.version:
                self.before, self.version = self.version, message.version
            case Undo() if message.version == self.version:
                self.version, self.before = self.before, None
            case Inspect():
                return {"worker": 0}
        self.whole = message.kind not in self.fails
        if not self.whole:
            self.fails.remove(message.kind)
            raise EngineRefusedError("no memory")
        return {"version": self.version}

    def execute_model(self, scheduled):
        """Note who gets a token, and of which version; the tokens come with `sample_tokens`."""
        self._prompts.update({one.req_id: len(one.prompt_token_ids) for one in scheduled.scheduled_new_reqs})
        done = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        done.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._batch = {
            name: [FIRST + self.version] if done[name] + count >= self._prompts[name] else []
            for name, count in scheduled.num_scheduled_tokens.items()
        }
        return None if self._batch else told({})

    def sample_tokens(self, _):
        return told(self._batch)


def told(batch):
    rows = {name: row for row, name in enumerate(batch)}
    return ModelRunnerOutput(req_ids=[*batch], req_id_to_index=rows, sampled_token_ids=[*batch.values()])


class Workers(Executor):
    supported_tasks = ("generate",)
    late = False  # whether the next collective call is answered too late

    def _init_executor(self):
        self.workers, self.is_failed = [Worker(), Worker()], False

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        if method in ("execute_model", "sample_tokens"):
            futures = [worker.put(method, *args) for worker in self.workers]
            return [futures[-1]] if non_block else [futures[-1].result()]  # of the last stage
        if method not in (CALL, RESUMES, "synchronize_device"):
            return self._own(method)
        futures = [worker.put(method, *args) for worker in self.workers]
        if self.late and method == CALL:
            raise TimeoutError
        return [future.result() for future in futures]

    def _own(self, method):
        kind = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        facts = {
            "get_kv_cache_spec": {"layer": kind},
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": 1 << 20,
        }
        return [facts.get(method)] * 2 if method in facts else []

    def check_health(self):
        pass


class Driven:
    """A core that is driven step by step, with two batches in flight by either ``mode``.

    Attributes:
        tokens: by request, the tokens and, in the same order, their labels.
        met: how many batches were in flight at the changes of version so far.
    """

    def __init__(self, checkpoint, mode, **settings):
        config = EngineArgs(checkpoint, **SETTINGS, max_num_batched_tokens=32, **settings).create_engine_config()
        if mode == "async":
            config.scheduler_config.async_scheduling = True
        else:
            config.parallel_config.pipeline_parallel_size = 2
        assert config.max_concurrent_batches == 2
        self.core, self.tokens, self.cached, self.met = EngineCore(config, Workers, True), {}, {}, []
        self.workers = self.core.model_executor.workers
        assert self.core.step_fn == self.core.step_with_batch_queue

    def request(self, prompt=LONG, count=8, salt=None):
        """A request as the core's other thread makes it; `add` brings it to the scheduler."""
        name = str(len(self.tokens))
        self.tokens[name] = []
        return self.core.preprocess_add_request(
            EngineCoreRequest(name, [*prompt], None, sampling(count), None, 0.0, None, salt, None)
        )

    def add(self, made=None, **request):
        made = made or self.request(**request)
        self.core.add_request(*made)
        return made[0]

    def step(self):
        outputs, _ = self.core.step_fn()
        for told in (outputs or {}).values():
            for one in told.outputs:
                self.tokens[one.request_id] += [(token - FIRST, told.weight_version) for token in one.new_token_ids]
                if one.prefill_stats:
                    self.cached[one.request_id] = one.prefill_stats.num_cached_tokens

    def run(self):
        for _ in range(10_000):
            if not (self.core.scheduler.has_requests() or self.core.batch_queue):
                return
            self.step()
        raise AssertionError("it never ends")

    def send(self, message):
        self.met.append(len(self.core.batch_queue))
        return answers_of(self.core.collective_rpc(CALL, None, tuple(called(message)["args"])), "the core")

    def fails(self, message):
        try:
            self.send(message)
        except EngineRefusedError:
            return True
        return False

    def assert_exact(self):
        """Each token has the label of the version that sampled it."""
        for name, tokens in self.tokens.items():
            assert all(label == (str(version) if version else "default") for version, label in tokens), (name, tokens)


def labels(checkpoint, mode):
    """Random commits, undos and failures among random requests."""
    driven, chance = Driven(checkpoint, mode), random.Random(0)
    version = before = latest = 0
    for _ in range(3000):
        match chance.choice(("add", "step", "step", "step", "commit", "again", "undo", "fail")):
            case "add":
                driven.add(prompt=PROMPT * chance.choice((1, 9)), count=chance.randrange(1, 12))
            case "step":
                driven.step()
            case "commit":
                version, before, latest = latest + 1, version, latest + 1
                driven.send(Commit(version=version))
            case "again" if version:
                driven.send(Commit(version=version))
            case "undo" if version != before:
                driven.send(Undo(version=version))
                version = before
            case "fail":
                chance.choice(driven.workers).fails.append("commit")
                assert driven.fails(Commit(version=latest + 10_000))
                before = version  # what it replaced before is not known any more
        assert [worker.version for worker in driven.workers] == [version] * 2
        assert driven.core.get_weight_version() == (str(version) if version else "default")
    driven.run()
    driven.assert_exact()
    assert not driven.core.is_scheduler_paused()
    assert all(driven.tokens.values())
    crossed = [name for name, tokens in driven.tokens.items() if len({label for _, label in tokens}) > 1]
    assert len(crossed) > 50 and max(driven.met) == 1, (len(crossed), max(driven.met))


def failures(checkpoint, mode):
    """What cannot be taken back, and an executor that does not answer, pause the engine."""
    for late in (False, True):
        driven = Driven(checkpoint, mode)
        driven.add()
        for _ in range(6):
            driven.step()
        if late:
            driven.core.model_executor.late = True
            try:
                driven.send(Commit(version=1))
            except TimeoutError:
                pass
            else:
                raise AssertionError
        else:
            driven.workers[1].fails += ["commit", "undo"]
            assert driven.fails(Commit(version=1))
        assert driven.core.is_scheduler_paused()
        for _ in range(4):
            if driven.core.batch_queue:
                driven.step()
        driven.assert_exact()
        assert {label for _, label in driven.tokens["0"]} <= {"default"}
    driven = Driven(checkpoint, mode)
    driven.core.pause_scheduler("keep", clear_cache=False)
    try:
        driven.send(Commit(version=1))
    except EngineRefusedError as error:
        assert "the engine is paused" in str(error)
    else:
        raise AssertionError
    assert [worker.version for worker in driven.workers] == [0, 0]
    assert driven.send(Inspect()) == [{"worker": 0}] * 2
    for text in ("{", "[]", json.dumps({"kind": "commit"}), json.dumps({"kind": 7})):
        assert all("error" in row for row in driven.core.collective_rpc(CALL, args=(text,)))


def namespaces(checkpoint, mode):
    """Requests that begin after a change share nothing with those before; what runs goes on."""
    driven = Driven(checkpoint, mode, max_num_seqs=2)

    def hits(*made, **request):
        done = driven.add(*made, **request)
        driven.run()
        return driven.cached[done.request_id]

    assert hits() == 0 and hits() == 96
    changes = [Commit(version=1), Undo(version=1), Commit(version=2), Commit(version=3)]
    for change in changes:
        early = driven.request()
        driven.send(change)
        assert hits(early) == 0 and hits() == 96, change
    driven.send(Commit(version=3))  # again
    assert hits() == 96
    driven.send(Commit(version=4, keep_cache=True))
    assert hits() == 96
    assert hits(salt="own") == 0 and hits(salt="own") == 96
    driven.send(Commit(version=5))
    running = [driven.add(prompt=[5, *LONG], count=30) for _ in range(2)]
    for _ in range(8):
        driven.step()
    waiting = [driven.add(salt=salt) for salt in (None, "own")]
    salts = [request.cache_salt for request in running]
    assert all(request.num_computed_tokens for request in running)
    for version in (6, 7):
        driven.send(Commit(version=version))
    assert [request.cache_salt for request in running] == salts
    assert [request.cache_salt for request in waiting] == [f"{own}|torchrl_ext=7" for own in ("", "own")]
    driven.run()
    driven.assert_exact()
    assert [driven.cached[request.request_id] for request in waiting] == [0, 0]
    assert hits() == 96 and hits(salt="own") == 96


PROGRAMS = {"labels": labels, "failures": failures, "namespaces": namespaces}

if __name__ == "__main__":
    for two in ("async", "pipeline"):
        PROGRAMS[sys.argv[1]](sys.argv[2], two)
