"""What an update does for each name stays the same however many names there are, counted in calls and in bytes."""

from __future__ import annotations

import json

import pytest
import torch

import torchrl_ext as tx
from tests.models import converted_model
from tests.sync.ends import made, same
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights import hf_names
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver


@pytest.mark.parametrize("transport", ["delta", "disk"])
def test_load_messages_do_not_list_parameters_again(transport, tmp_path, monkeypatch):
    sizes, handle = {}, WeightReceiver.handle

    def handled(receiver, message):
        sizes[count, message.kind] = len(json.dumps(message.to_json()))
        return handle(receiver, message)

    monkeypatch.setattr(WeightReceiver, "handle", handled)
    for count in (50, 200):
        own = {f"trainer.layers.{number}.weight": torch.full((4,), float(number)) for number in range(count)}
        served = {name.removeprefix("trainer."): torch.zeros(4) for name in own}
        given = made(transport, tmp_path / str(count)), InProcessEngine(served)
        with tx.WeightSender(*given, mapper=lambda name: name.removeprefix("trainer.")) as sender:
            sender.update_weights(own)
    assert sizes[200, "join"] > 3 * sizes[50, "join"]
    assert sizes[200, "load"] < 1.1 * sizes[50, "load"] < 1000


def test_model_names_are_spelled_once_for_all_deltas(tmp_path, monkeypatch):
    spelled, init = [], hf_names.Spelling.__init__
    monkeypatch.setattr(hf_names.Spelling, "__init__", lambda *given: spelled.append(init(*given)))
    policy, served = converted_model("qwen3_moe", 1), converted_model("qwen3_moe", 2)
    counts = []
    with tx.WeightSender(tx.DeltaTransport(tmp_path), InProcessEngine(TensorsLoader(served))) as sender:
        for update in range(5):
            if update == 4:  # other memory under the same names: what was spelled is of no use
                served.lm_head.weight.data = served.lm_head.weight.detach().clone()
            with torch.no_grad():
                policy.lm_head.weight[0] += 0.25
            assert sender.update_weights(policy).verified
            counts.append(len(spelled))
    assert counts[2] == counts[3] == counts[4] - 1
    assert same(served, policy)
