"""The hooks that run inside engines answer whatever a body brings, and raise nothing that ends a server."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace

import pytest
import torch

from tests.engines.stand_ins import add_sglang
from tests.engines.test_register import MADE, REGISTER, stand_in
from tests.hostile import HOSTILE, worse_json
from tests.processes import python
from torchrl_ext.base import messages
from torchrl_ext.base.routes import CHANNEL, Flush
from torchrl_ext.base.types import ParamMeta, Part
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.engines.sglang import register
from torchrl_ext.sync.engine_worker import EngineWorker

PARAMS = (ParamMeta("w", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ()))
EVERY = [
    messages.Inspect(root={"root": "/x"}),
    messages.Join(transport="disk", params=PARAMS, rank_offset=3, world_size=9, compares=False, offer={"root": "/x"}),
    messages.Rehearse(how="never", ask=True),
    messages.Prefetch(version=7, part=Part(base=6, names=frozenset({"w", "b"}))),
    messages.Poll(),
    messages.Commit(version=7, keep_cache=True),
    messages.Undo(version=7),
    messages.Keep(),
    messages.Start(bracketed=True),
    messages.Load(version=7, handoff={"path": "/x/weight_v000007"}),
    messages.Verify(digests={"w": "0" * 32}),
    messages.Finish(version=7),
    messages.Reset(weights="gone"),
    messages.State(),
    Flush(),
    messages.Leave(),
]


def damaged(seed, count):
    """Messages that nobody of ours would send; among them half a surrogate pair, which JSON can name."""
    chance = random.Random(seed)
    yield from HOSTILE
    for message in EVERY:
        yield message.to_json() | {"kind": "load"}
        yield from (worse_json(message.to_json(), chance) for _ in range(count))
    yield json.loads('{"format": 2, "kind": "pull", "source": "/x", "version": 7, "directory": "/\\ud800"}')


class Scheduler:
    """SGLang's scheduler, its manager, runner, updater and model in one, with a worker of ours."""

    def __init__(self):
        self.model = self.scheduler = self
        self.is_draft_worker, self.waiting_queue, self._engine_paused = False, [], False
        self.model_config = SimpleNamespace(model_path="/start", revision=None)
        self.tp_worker = SimpleNamespace(model_runner=self)
        self.end = EngineWorker(TensorsLoader({"w": torch.zeros(2)}), rank=0, workers=1, agree=lambda words: [words])

    def get_model_runner(self):
        return self

    def get_model(self):
        return self

    def answer(self, message, manager):
        return self.end.handle(message)


@pytest.fixture(autouse=True)
def no_log(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="torchrl_ext")  # half a surrogate pair cannot be handed on by xdist


@pytest.fixture
def scheduler(monkeypatch):
    add_sglang(monkeypatch)
    monkeypatch.setattr(register, "_worker", lambda runner: runner)
    made = Scheduler()
    monkeypatch.setitem(register._workers, made, made)
    yield made
    made.end.close()


def odd(chance):
    """A value that no caller of ours would send."""
    return chance.choice([*HOSTILE, b"", b"\xff", object(), "\ud800", {"\ud800": [None]}, [[]] * 100])


def test_sglang_scheduler_calls_never_raise_on_damaged_messages(scheduler, monkeypatch):
    """An exception that leaves a scheduler ends SGLang's server."""
    for told in damaged(1, 40):
        request = SimpleNamespace(action=CHANNEL + json.dumps(told))
        answer = register.check_weights(lambda *_: "theirs", scheduler, request)
        assert answer.success and "|" not in answer.message and isinstance(json.loads(answer.message), dict)
    answer = register.check_weights(None, scheduler, SimpleNamespace(action=f"{CHANNEL}{'[' * 100_000}"))
    assert "error" in json.loads(answer.message)
    chance = random.Random(5)
    for _ in range(1000):
        value = odd(chance)
        if not str(value).startswith(CHANNEL):
            assert register.check_weights(lambda *_: "theirs", scheduler, SimpleNamespace(action=value)) == "theirs"
        assert register.continue_generation(lambda *_: "goes on", scheduler, value) in ("goes on", None)
    monkeypatch.setattr("torchrl_ext.engines.plugin.agree", lambda *_: 1 / 0)  # its other workers are gone
    assert register.continue_generation(lambda *_: "goes on", scheduler) == "goes on"
    scheduler.tp_worker = None  # whatever of SGLang is not as it was
    request = SimpleNamespace(action=CHANNEL + json.dumps(messages.State().to_json()))
    assert "error" in json.loads(register.check_weights(None, scheduler, request).message)


def test_scheduler_lets_go_of_weights_before_they_sleep(scheduler, monkeypatch):
    said = []
    for outcome in (lambda: None, lambda: 1 / 0):  # an error would end the server
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.end, "stop", lambda outcome=outcome: said.append("let go") or outcome())
            register.release_memory_occupation(lambda *_: said.append("sleeps"), scheduler, None)
    assert said == ["let go", "sleeps"] * 2


def test_scheduler_with_partial_version_refuses_to_continue(scheduler):
    assert register.continue_generation(lambda *_: "goes on", scheduler) == "goes on"
    scheduler.end.receiver.invalidate(torn=True)
    assert register.continue_generation(lambda *_: "goes on", scheduler) is None and scheduler._engine_paused


VLLM = REGISTER.replace(
    "plugin.register()\nplugin.register()",
    MADE
    + """
from tests.engines.test_damaged_calls import damaged
for told in damaged(2, 20):
    answer = worker.torchrl_ext(json.dumps(told))
    json.dumps(answer).encode()
    assert isinstance(answer, dict), (told, answer)
for text in ("", "[" * 100_000, "\\ud800", None, 3, {}):
    assert "error" in worker.torchrl_ext(text)
""",
)


def test_a_vllm_worker_answers_whatever_it_is_asked(tmp_path):
    """An exception of one worker leaves the others' replies unread, and an answer that is no JSON ends the server."""
    python(VLLM, tmp_path / "site", "vllm", json.dumps(stand_in()))
