"""The guides to external engines of vime (vLLM) and slime (SGLang): each row of their table, behind a router."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model
from tests.real_engines.test_delta import nudged
from tests.routers import settings_for_router
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.compat.flags.serving import make_serving

pytestmark = pytest.mark.engine

ROWS = {
    "full over a group": {},
    "full over files": {"update_weight_transport": "disk"},
    "deltas over files": {"update_weight_mode": "delta", "update_weight_transport": "disk"},
    "deltas over a group": {"update_weight_mode": "delta", "update_weight_encoding": "indices"},
}
GROUPS = {"vllm": ("vllm", "second_vllm"), "sglang": ("sglang",)}


@pytest.fixture(scope="module", params=GROUPS)
def engines(request):
    return [request.getfixturevalue(name) for name in GROUPS[request.param]]


@pytest.fixture(scope="module")
def serving(engines):
    config = WeightUpdateConfig(rollout_external_engine_addrs=tuple(engine.url for engine in engines))
    with make_serving(config, **settings_for_router(engines[0].kind)) as made:
        yield made


def through(routing):
    client = routing.client(timeout_s=120.0)
    (found,) = client.generate([PROMPT], max_tokens=24, temperature=0.0, ignore_eos=True)
    return list(found.token_ids)


@pytest.mark.parametrize("row", ROWS)
def test_engines_follow_by_each_row_of_the_table(serving, engines, row, tmp_path):
    options = dict(ROWS[row])
    if "transport" in str(options):
        options["update_weight_disk_dir"] = str(tmp_path)
    config = WeightUpdateConfig(rollout_external_engine_addrs=tuple(engine.url for engine in engines), **options)
    routing, model = serving.model("default"), tiny_model(30 + list(ROWS).index(row))
    sender = tx.WeightSender(config.make_transport(routing.engines), routing.fleet())
    sender.register_model(model)
    update = routing.following(sender.update_weights)
    try:
        update()
        before = greedy(model, count=24)
        model.load_state_dict(nudged(model, 0.01, 7).state_dict())  # as a step of fine-tuning in bfloat16 does
        report = update()
    finally:
        sender.shutdown()
    assert greedy(model, count=24) != before
    assert through(routing) == greedy(model, count=24)
    assert report.verified and [row.state for row in report.engines] == ["serving"] * len(engines)
    for engine in engines:
        assert engine.says(model) and engine.is_called(str(report.version))
    if config.update_weight_mode == "delta":
        assert report.bytes * 5 < report.model_bytes
    elif config.update_weight_transport == "disk":
        (version,) = tmp_path.glob("weight_v*")  # an older one, which every engine has loaded, is removed
        loaded = AutoModelForCausalLM.from_pretrained(version, dtype=torch.float32).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
