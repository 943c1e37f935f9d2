"""What an update does for each name stays the same however many names there are, counted in calls and in bytes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import torchrl_ext as tx
from tests.models import converted_model
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights import hf_names
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver


def tensors(count):
    return {f"model.layers.{number}.weight": torch.full((4,), float(number)) for number in range(count)}


def updates(transport, weights, **settings):
    """Two updates by a transport: of everything, and of one tensor; `trainer.` is taken off its names."""
    served = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    own = {f"trainer.{name}": tensor for name, tensor in weights.items()}
    with tx.WeightSender(transport, InProcessEngine(served), **settings) as sender:
        yield sender.update_weights(own)
        next(iter(own.values()))[0] += 1
        yield sender.update_weights(own)
    assert all(torch.equal(served[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("transport", ["delta", "disk"])
def test_load_messages_do_not_list_parameters_again(transport, tmp_path, monkeypatch):
    sizes, handle = {}, WeightReceiver.handle

    def handled(receiver, message):
        sizes[count, message.kind] = len(json.dumps(message.to_json()))
        return handle(receiver, message)

    monkeypatch.setattr(WeightReceiver, "handle", handled)
    for count in (50, 200):
        made = tx.make_transport(transport, root=tmp_path / str(count))
        [*updates(made, tensors(count), mapper={"trainer.(.*)": r"\1"})]
    assert sizes[200, "join"] > 3 * sizes[50, "join"]
    assert sizes[200, "load"] < 1.1 * sizes[50, "load"] < 1000


def test_model_names_are_spelled_once_for_all_deltas(tmp_path, monkeypatch):
    """Names of a model are spelled once for all deltas, and again after its memory was replaced."""
    made, init = Counter(), hf_names.Spelling.__init__

    def counted(*given):
        made["all"] += 1
        init(*given)

    monkeypatch.setattr(hf_names.Spelling, "__init__", counted)
    policy, served = converted_model("qwen3_moe", 1), converted_model("qwen3_moe", 2)
    loader, counts = TensorsLoader(served), []
    with tx.WeightSender(tx.make_transport("delta", root=tmp_path), InProcessEngine(loader)) as sender:
        for _ in range(4):
            with torch.no_grad():
                policy.lm_head.weight[0] += 0.25
            assert sender.update_weights(policy).verified
            counts.append(made["all"])
        assert counts[3] == counts[2]
        with torch.no_grad():  # other memory under the same names: what was spelled is of no use
            served.lm_head.weight.data = served.lm_head.weight.detach().clone()
            policy.lm_head.weight[0] += 0.25
        assert sender.update_weights(policy).verified
        assert made["all"] == counts[3] + 1
    same = dict(served.named_parameters())
    assert all(torch.equal(same[name], tensor) for name, tensor in policy.named_parameters())
