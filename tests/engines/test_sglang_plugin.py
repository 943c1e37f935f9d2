"""What reaches an engine's environment, seen from an interpreter that has only that; and how workers agree."""

import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest

from tests.processes import python
from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import Commit, Finish, Reset, Start, Undo
from torchrl_ext.base.routes import Flush
from torchrl_ext.control.serving.processes import free_port, make_overlay
from torchrl_ext.engines.plugin import started_with
from torchrl_ext.engines.sglang import keys, register

LOOK = """
import sys
sys.path.insert(0, {overlay!r})
from importlib.metadata import entry_points
(found,) = [entry for entry in entry_points(group={group!r}) if entry.name == "torchrl_ext"][:1]
before = set(sys.modules)
found.load()
import torchrl_ext.sync.receiver, torchrl_ext.data.landing.placement, torchrl_ext.data.weights.checkpoint
import torchrl_ext.data.transports.disk, torchrl_ext.data.transports.collective, torchrl_ext.engines.plugin
new = set(sys.modules) - before
print(sorted(new & {{"torchrl", "tensordict", "transformers", "ray", "httpx", "requests", "sglang", "vllm"}}))
print(torchrl_ext.__file__)
"""


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "vllm.general_plugins"])
def test_overlay_brings_the_plugin_without_trainer_packages(tmp_path, group):
    make_overlay(tmp_path)
    look = LOOK.format(overlay=str(tmp_path), group=group)
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    imported, home = done.stdout.split("\n")[:2]
    assert imported == "[]" and home.startswith(str(tmp_path))


class Model:
    """Of SGLang, a runner, its model and what loads it; our worker for it is known by what it is told."""

    def __init__(self, path, revision=None):
        self.model, self.is_draft_worker, self.eplb_manager = self, False, None
        self.model_config = SimpleNamespace(model_path=path, revision=revision)
        self.server_args = SimpleNamespace(load_format="auto")

    def get_model_runner(self):
        return self

    def get_model(self):
        return self

    def load(self, updater, path, *_, **__):
        self.model_config.model_path = path
        return True, "loaded"


class Worker:
    def __init__(self, runner):
        self.checkpoint, self.loaded_past_us = started_with(runner.model, runner.model_config), 0
        self.end = self.receiver = self

    def invalidate(self):
        self.loaded_past_us += 1


@pytest.mark.parametrize("by", ["update_weights_from_disk", "load_past_us"])
def test_model_loaded_before_the_first_message_is_noticed(monkeypatch, by):
    """A load before the first message counts; the model is not taken for the one of the start."""
    group = SimpleNamespace(cpu_group=None, world_size=1)
    parallel = SimpleNamespace(get_pp_group=lambda: group, get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", parallel)
    monkeypatch.setitem(sys.modules, "torchrl_ext.engines.sglang.worker", SimpleNamespace(SGLangWorker=Worker))
    monkeypatch.setattr("torchrl_ext.engines.plugin.agree", lambda words, *_: [words])
    loaded, fresh = Model("org/start", revision="main"), Model("org/start", revision="main")
    arguments = ("/another", "auto") if by == "update_weights_from_disk" else ("/another",)
    assert getattr(register, by)(loaded.load, loaded, *arguments) == (True, "loaded")
    ours = register._worker(loaded)
    assert ours.loaded_past_us == 1 and register._worker(loaded) is ours
    if by == "update_weights_from_disk":  # before, SGLang's own record was of the start
        assert ours.checkpoint == "org/start@main"
    assert register._worker(fresh).loaded_past_us == 0 and register._worker(fresh).checkpoint == "org/start@main"
    register.load_past_us(fresh.load, fresh, "/another")
    assert register._worker(fresh).loaded_past_us == 1


def test_only_a_load_of_all_tensors_gives_a_model_another_origin(monkeypatch):
    monkeypatch.setattr(register, "_workers", {})
    model, told = Model("org/start"), []
    receiver = SimpleNamespace(invalidate=lambda **how: told.append(how), handle=told.append)
    register._workers[model] = SimpleNamespace(end=SimpleNamespace(receiver=receiver))
    for settings, wanted in (({"weight_name_filter": len}, []), ({}, [Reset(weights="reloaded")])):
        register.update_weights_from_disk(model.load, model, "/another", "auto", **settings)
        assert [one for one in told if isinstance(one, Reset)] == wanted
    assert {"torn": False} in told
    register.update_weights_from_disk(lambda *_, **__: (False, "it broke"), model, "/another")
    assert told[-1] == {"torn": True}


@pytest.fixture
def worker(monkeypatch):
    """The module of the worker, without a model of SGLang's."""
    monkeypatch.setitem(sys.modules, "torchrl_ext.engines.sglang.model", SimpleNamespace(SGLangModel=None))
    yield import_module("torchrl_ext.engines.sglang.worker")
    sys.modules.pop("torchrl_ext.engines.sglang.worker")


class Overlapping:
    """SGLang's scheduler where a batch is launched before the result of the last one is looked at, and its device.

    A token is the version that computed it.
    """

    def __init__(self):
        self.weights, self.label, self.launched = 1, "1", []
        self.running_batch = self.last_batch = SimpleNamespace(reqs=[])
        self.waiting_queue, self.result_queue, self.device_module = [], deque(), self
        self.scheduler, self.forward_stream, self._engine_paused, self.labelled = self, "forward", False, []

    def synchronize(self):
        while self.launched:
            self.compute()

    def current_stream(self):
        return self

    def wait_stream(self, stream):
        assert stream == self.forward_stream
        self.synchronize()

    def record_weight_version_after_update(self, label):
        self.labelled.append(label)
        self.record_weight_version_change(label)

    def _record_kv_event_lora_name(self, request, name):
        assert name is None

    def compute(self):
        reqs, tokens = self.launched.pop(0)
        tokens += [self.weights] * len(reqs)

    def step(self):
        """One round of its loop, in which requests that wait are taken in."""
        new, self.waiting_queue = self.waiting_queue, []
        self.running_batch.reqs = [one for one in self.running_batch.reqs if len(one.output_ids) < one.count]
        batch = SimpleNamespace(reqs=[*self.running_batch.reqs, *new])
        self.launched.append((batch.reqs, []))
        self.result_queue.append((batch, self.launched[-1][1]))
        if len(self.result_queue) > 1:
            self.process_batch_result(*self.result_queue.popleft())
        self.running_batch, self.last_batch = SimpleNamespace(reqs=list(batch.reqs)), batch

    def process_batch_result(self, batch, tokens):
        while len(tokens) < len(batch.reqs):
            self.compute()
        for request, token in zip(batch.reqs, tokens, strict=True):
            if len(request.output_ids) < request.count:
                request.output_ids.append(token)
                request.labels = spans(request, self.label)  # as they are sent with the token

    def record_weight_version_change(self, new_version):
        known = [*self.running_batch.reqs, *self.last_batch.reqs, *self.waiting_queue]
        for request in {id(one): one for one in known}.values():
            request.events.append((self.label, len(request.output_ids)))
        self.label = new_version

    def hooked(self, name):
        return partial(getattr(register, name), getattr(type(self), name), self)


def spans(request, label):
    """The version of each token, as SGLang reckons it from the changes that it recorded."""
    found = []
    for version, end in [*request.events, (label, len(request.output_ids))]:
        found += [int(version)] * (end - len(found))
    return found


class Rollout:
    """A request of SGLang's."""

    def __init__(self, count, tokens=(), extra_key=None):
        self.count, self.output_ids, self.events, self.labels = count, list(tokens), [], []
        self.kv, self.extra_key = SimpleNamespace(holds_kv=False), extra_key


class End:
    """An `EngineWorker` and its receiver, of two workers; ``fails`` says what goes wrong here, or on the other one."""

    def __init__(self, scheduler):
        self.scheduler, self.receiver, self.fails, self.torn = scheduler, self, {}, False
        self.held, self.before, self.done = 1, None, ""

    def refuse_replaced(self, message):
        pass

    def invalidate(self, torn):
        self.torn = torn

    def handle(self, message):
        if self.fails.get(message.kind) == "here":
            raise EngineRefusedError(f"{message.kind} fails here")
        match message:
            case Commit() if message.version != self.held:
                self.before, self.held = self.held, message.version
            case Undo() if message.version == self.held:
                self.held = self.before
            case Finish():
                self.held = message.version
        self.scheduler.weights = self.held
        self.done = message.kind
        return {"version": self.held}

    def together(self, step):
        step()
        if self.fails.get(self.done) == "there":
            raise EngineRefusedError(f"{self.done} fails there")


@pytest.fixture
def served(worker):
    """A scheduler with our hooks, and our worker in it."""
    scheduler, ours = Overlapping(), object.__new__(worker.SGLangWorker)
    for name in ("process_batch_result", "record_weight_version_change"):
        setattr(scheduler, name, scheduler.hooked(name))
    ours._model, ours.end = SimpleNamespace(prepared=False), End(scheduler)
    return scheduler, ours


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("live", [True, False])
def test_tokens_of_a_launched_batch_keep_weights_and_label(served, live, updates):
    scheduler, ours = served
    ends, goes_on, retracted, late = (Rollout(3), Rollout(9), Rollout(9, [1, 1]), Rollout(2))
    scheduler.waiting_queue = [ends, goes_on]
    for _ in range(3):
        scheduler.step()
    scheduler.waiting_queue = [retracted]
    for version in range(2, 2 + updates):  # live, or paused in place: the third batch is still on the device
        for message in [Commit(version=version)] if live else [Start(), Finish(version=version)]:
            ours.answer(message, scheduler)
    scheduler.waiting_queue.append(late)
    for _ in range(4):
        scheduler.step()
    new = 1 + updates
    assert ends.output_ids == ends.labels == [1, 1, 1]
    assert goes_on.output_ids == goes_on.labels == [1, 1, 1, new, new, new]
    assert retracted.output_ids == retracted.labels == [1, 1, new, new, new]
    assert late.output_ids == late.labels == [new, new] and scheduler.label == str(new)


def test_a_version_taken_back_behind_a_launched_batch_labels_nothing(served):
    scheduler, ours = served
    request = Rollout(6)
    scheduler.waiting_queue = [request]
    for _ in range(2):
        scheduler.step()
    ours.answer(Commit(version=2), scheduler)
    assert ours.answer(Undo(version=2), scheduler) == {"version": 1}
    for _ in range(5):
        scheduler.step()
    assert request.output_ids == request.labels == [1] * 6 and scheduler.label == "1"


def named(scheduler, request):
    """The request, after it was queued."""
    keys.add_request_to_queue(lambda them, one: them.waiting_queue.append(one), scheduler, request)
    return request


def test_requests_share_keys_with_those_of_their_weights_alone(served):
    scheduler, ours = served
    plain, own = named(scheduler, Rollout(9)), named(scheduler, Rollout(9, extra_key="mine"))
    assert (plain.extra_key, own.extra_key) == (None, "mine")
    scheduler.waiting_queue, plain.kv.holds_kv = [own], True  # it runs from here on
    taken = [plain.extra_key]
    for message in (Commit(version=2), Commit(version=3), Undo(version=3)):
        ours.answer(message, scheduler)
        ours.answer(message, scheduler)  # sent again
        late = named(scheduler, Rollout(9))
        assert late.extra_key not in taken and plain.extra_key is None
        assert own.extra_key == f"mine{late.extra_key}"
        taken.append(late.extra_key)
    assert scheduler.labelled == ["2", "3", "2"]
    ours.answer(Commit(version=4, keep_cache=True), scheduler)
    assert named(scheduler, Rollout(9)).extra_key == taken[-1]
    plain.kv.holds_kv = False  # retracted: its keys are computed anew
    assert named(scheduler, plain).extra_key == taken[-1]
    assert named(Overlapping(), Rollout(9)).extra_key is None


@pytest.mark.parametrize(
    ("fails", "held", "paused"),
    [
        ({"commit": "here"}, 1, False),
        ({"commit": "there"}, 1, False),
        ({"commit": "there", "undo": "here"}, 2, True),
        ({"commit": "there", "undo": "there"}, 1, True),
        ({"undo": "here"}, 2, False),
        ({"undo": "there"}, 1, True),
    ],
)
def test_all_workers_have_a_version_or_none_has(served, fails, held, paused):
    scheduler, ours = served
    if "commit" not in fails:
        ours.answer(Commit(version=2), scheduler)
    labelled, waits = [*scheduler.labelled], named(scheduler, Rollout(9))
    name, ours.end.fails = waits.extra_key, fails
    message = (Commit if "commit" in fails else Undo)(version=2)
    with pytest.raises(EngineRefusedError, match=f"{message.kind} fails"):
        ours.answer(message, scheduler)
    assert (ours.end.held, scheduler._engine_paused, ours.end.torn) == (held, paused, paused)
    assert scheduler.labelled == labelled and waits.extra_key == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_engine_paused": True}, "paused"),
        ({"offload_tags": {"kv_cache"}}, "memory sleeps"),
        ({"_session": object()}, "session for an update"),
        ({"disaggregation_mode": "decode"}, "halved"),
        ({"enable_pdmux": True}, "between two layers"),
        ({"enable_streaming_session": True}, "keys and values between requests"),
    ],
)
def test_a_server_that_cannot_take_a_version_is_left_as_it_is(served, changes, words):
    scheduler, ours = served
    scheduler.server_args = SimpleNamespace(disaggregation_mode="null")
    ((name, value),) = changes.items()
    setattr(scheduler if name in ("_engine_paused", "offload_tags", "_session") else scheduler.server_args, name, value)
    with pytest.raises(EngineRefusedError, match=f"{words}.*nothing was changed"):
        ours.answer(Commit(version=2), scheduler)
    assert ours._obstacle and ours.end.held == 1 and not scheduler.labelled


def test_images_of_older_weights_are_dropped(served, monkeypatch):
    scheduler, ours = served
    images, scheduler.flush_cache = {"a cat": "old"}, lambda **_: True
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", SimpleNamespace(embedding_cache=images))
    ours.answer(Commit(version=2, keep_cache=True), scheduler)
    assert images
    ours.answer(Commit(version=3), scheduler)
    assert not images
    images["a cat"] = "new"
    assert ours.answer(Flush(), scheduler) == {"flushed": True} and not images


TOGETHER = """
import os, sys, torch
from torch import distributed
from torchrl_ext.engines.plugin import agree, combine
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.patcher import Patcher, Piece
from torchrl_ext.data.weights.digests import position_digest

rank = int(sys.argv[1])
store = distributed.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = distributed.group.WORLD
assert agree("" if rank else "cannot", group) == ["cannot", ""]
assert agree("", group) == ["", ""]
assert agree("\\0é" * 5000 if rank else "short", group) == ["short", "\\0é" * 5000]
assert agree("x" * (2 << 20), group)[1] == "x" * (2 << 20)
alone = [distributed.new_group([one]) for one in range(2)][rank]  # a group inside another
assert agree(f"worker {rank}", alone, group) == ["worker 0", "worker 1"]
assert agree("cannot" if rank else "", alone, group) == ["", "cannot"]

full = torch.arange(24, dtype=torch.float32).reshape(4, 6)
rows = full[2 * rank : 2 * rank + 2].clone()
columns = full[:, 3 * rank : 3 * rank + 3].clone()
pieces = {
    "rows": [Piece(destination=rows, offset=12 * rank, strides=(6, 1))],
    "columns": [Piece(destination=columns, offset=3 * rank, strides=(6, 1))],
    "both": [Piece(destination=full.clone(), offset=0, strides=(6, 1))],
    "half": [Piece(destination=full[:2].clone(), offset=0, strides=(6, 1))],
}
params = [ParamMeta.of(name, full) for name in ("packed on one", *pieces)]
pieces |= {} if rank else {"packed on one": []}  # the other one cannot tell what it holds of this one
patcher = Patcher(pieces)
found = combine(patcher.digests_of_memory(), patcher.shares, params, group)
assert {name: digest.hex() for name, digest in found.items()} == dict.fromkeys(
    ("rows", "columns", "both"), position_digest(full).hex()
), found
distributed.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def test_workers_agree_and_their_shares_add_up():
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: python(TOGETHER, str(rank), port), range(2)))
