"""The hooks that run inside engines answer whatever a body brings, and raise nothing that ends a server."""

from __future__ import annotations

import importlib
import json
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.hostile import HOSTILE, worse_json
from tests.plugins.test_other_releases import REGISTER, stand_in
from tests.processes import python
from torchrl_ext import messages
from torchrl_ext.collectors.worker_end import Keep
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.plugins.sglang import register, routes
from torchrl_ext.plugins.sglang.adapters import CheckLoaded
from torchrl_ext.plugins.sglang.routes import Land
from torchrl_ext.routes import CHANNEL, Flush, ListAdapters
from torchrl_ext.sync import inspection
from torchrl_ext.sync.worker_end import WorkerEnd
from torchrl_ext.types import ParamMeta, Part

PARAMS = (ParamMeta("w", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ()))
EVERY = [
    messages.Inspect(root={"root": "/x"}, dial=["host", 1], token="0" * 32),
    messages.Join(transport="disk", params=PARAMS, rank_offset=3, world_size=9, compares=False, offer={"root": "/x"}),
    messages.Rehearse(how="always", ask=True),
    messages.Prefetch(version=7, part=Part(base=6, names=frozenset({"w", "b"}))),
    Land(files=["a"], paused=True, label="7"),
    messages.Pull(source="/x", directory="/y", version=7),
    messages.Poll(),
    messages.Start(bracketed=True),
    messages.Load(version=7, handoff={"path": "/x/weight_v000007"}),
    messages.Verify(digests={"w": "0" * 32}),
    messages.Seal(),
    messages.Finish(version=7),
    messages.Reset(weights="gone"),
    messages.State(),
    Flush(),
    messages.CheckAdapter(params=PARAMS, root={"root": "/x"}),
    CheckLoaded(label="a@7"),
    ListAdapters(),
    messages.StageAdapter(name="a", version=7, path="/x"),
    messages.ServeAdapter(name="a", version=7),
    messages.UnloadAdapter(name="a"),
    Keep(),
    messages.Leave(),
]

MANIFESTS = [
    *HOSTILE, *({"torchrl_ext": value} for value in HOSTILE), {"w": {"dtype": "float32"}},
    *({"torchrl_ext": Land().to_json() | {name: value}} for name in ("files", "paused", "label") for value in HOSTILE),
]  # fmt: skip


def damaged(seed, count):
    """Messages that nobody of ours would send; among them half a surrogate pair, which JSON can name."""
    chance = random.Random(seed)
    yield from HOSTILE
    for message in EVERY:
        yield message.to_json() | {"kind": "land"}
        yield from (worse_json(message.to_json(), chance) for _ in range(count))
    yield json.loads('{"format": 2, "kind": "stage_adapter", "name": "a", "version": 7, "path": "/\\ud800"}')


class Scheduler:
    """Of SGLang's scheduler: a worker that it asks to load, and that lands deltas."""

    def __init__(self):
        self.model = self.scheduler = self
        self.is_draft_worker, self.waiting_queue = False, []
        self.model_config = SimpleNamespace(model_path="/start", revision=None)
        self.tp_worker = SimpleNamespace(model_runner=self)
        self.lora_manager, self.calls = None, []
        self.end = WorkerEnd(TensorsLoader({"w": torch.zeros(2)}), rank=0, workers=1, agree=lambda words: [words])

    def get_model_runner(self):
        return self

    def get_model(self):
        return self

    def invalidate(self):
        self.end.receiver.invalidate()

    def land(self, path, call):
        self.calls.append(call)
        return True, "landed"

    def answer(self, message, manager):
        return True, json.dumps(self.end.handle(message))


@pytest.fixture
def scheduler(monkeypatch):
    io_struct = SimpleNamespace(CheckWeightsReqOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    group = SimpleNamespace(get_tp_group=lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", group)
    monkeypatch.setattr("torchrl_ext.plugins.workers.agree", lambda words, *_: [words])
    monkeypatch.setattr(register, "_worker", lambda runner: runner)
    made = Scheduler()
    yield made
    made.end.close()


@pytest.mark.parametrize("load_format", ["delta", "auto", None])
def test_a_load_from_disk_with_any_manifest_gets_an_answer(scheduler, load_format):
    def theirs(manager, request):
        return register.update_weights_from_disk(
            lambda *_, **__: (True, "loaded"), scheduler, "/x", load_format, recapture_cuda_graph=False
        )

    for manifest in MANIFESTS:
        success, words = routes.load(theirs, scheduler, SimpleNamespace(manifest=manifest))
        assert success or "a 'land' message" in words, words
        assert success or load_format == "delta"
    assert routes.load(theirs, scheduler, SimpleNamespace())[0]
    call = Land(files=["a"], paused=True, label="7")
    routes.load(theirs, scheduler, SimpleNamespace(manifest={"torchrl_ext": call.to_json()}))
    if load_format == "delta":
        assert scheduler.calls[-2:] == [Land(), call]


def test_a_check_of_weights_with_any_action_gets_an_answer_that_can_be_sent(scheduler, monkeypatch):
    monkeypatch.setattr(inspection, "_DIAL_S", 0.02)  # a dial that fails takes this long, whatever the reason
    for told in damaged(1, 10):
        request = SimpleNamespace(action=CHANNEL + json.dumps(told))
        answer = register.check_weights(lambda *_: "theirs", scheduler, request)
        assert isinstance(answer.success, bool) and answer.message.encode() is not None
    for action in ("checksum", None, 7, [CHANNEL]):
        assert register.check_weights(lambda *_: "theirs", scheduler, SimpleNamespace(action=action)) == "theirs"
    assert not register.check_weights(None, scheduler, SimpleNamespace(action=f"{CHANNEL}{'[' * 100_000}")).success


VLLM = REGISTER.replace("plugin.register()\nplugin.register()", '''
import torch
from types import SimpleNamespace as Some
from tests.hostile import HOSTILE
from tests.plugins.test_damaged_calls import damaged
from torchrl_ext.errors import EngineError
from torchrl_ext.plugins.vllm.engine import TorchRLExtEngine
from torchrl_ext.sync import inspection
inspection._DIAL_S = 0.02
text = Some(get_text_config=lambda: Some(tie_word_embeddings=False))
config = Some(
    model_config=Some(model="/m", dtype=torch.float32, hf_config=text, revision=None),
    parallel_config=Some(
        rank=0, world_size=1, data_parallel_index=0, world_size_across_dp=1, enable_eplb=False,
        pipeline_parallel_size=1, enable_expert_parallel=False,
    ),
    load_config=Some(load_format="auto"), quant_config=None,
)
engine = TorchRLExtEngine(Some(backend="torchrl_ext"), config, torch.device("cpu"), torch.nn.Linear(2, 2))
for last in (True, False):
    engine._is_last = last
    for told in damaged(2, 4):
        for step in (
            lambda: engine.init_transfer_engine(engine.parse_init_info(told)),
            lambda: engine.update_weights(told),
            lambda: engine.receive_weights(engine.parse_update_info(told)),
        ):
            try:
                step()
            except EngineError as error:
                assert last, (told, error)
                assert "/" not in str(error).replace("\\\\/", ""), error  # or vLLM's server would put <path> there
''')  # fmt: skip


def test_a_worker_of_vllm_that_is_not_the_last_raises_at_no_message_whatever_it_is(tmp_path):
    """The executor of vLLM reads no reply behind the first bad one: every later call would get an earlier reply."""
    python(VLLM, tmp_path / "site", "vllm", json.dumps(stand_in()))


def test_a_request_of_a_batch_without_an_adapter_is_passed_on(monkeypatch):
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    adapters = importlib.import_module("torchrl_ext.plugins.sglang.adapters")

    async def theirs(manager, request):
        return request.lora_path

    manager = Scheduler()
    own = adapters.Adapters(manager, None)
    monkeypatch.setitem(adapters._managers, manager, own)
    own._served["a"] = "a@7"
    parts = {0: SimpleNamespace(lora_path=None), 1: SimpleNamespace(lora_path="a")}
    request = SimpleNamespace(lora_path=[None, "a"], _sub_obj_cache=parts)
    with pytest.raises(StopIteration) as done:
        adapters.resolve(theirs, manager, request).send(None)
    assert done.value.value == [None, "a@7"] and parts[0].lora_path is None and parts[1].lora_path == "a@7"
