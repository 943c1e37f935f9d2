"""A Megatron trainer's weights, as a stand-in for Megatron-Bridge gathers them over the ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchrl_ext as tx
from tests.ranks import on_ranks
from torchrl_ext.base.errors import ManifestError
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.data.weights.source import checked


class Bridge:
    """Gathers the rows of a module that each rank holds a part of, one tensor at a time, as AutoBridge does."""

    hf_pretrained = SimpleNamespace(config=SimpleNamespace(to_json_string=lambda: '{"model_type": "qwen3"}'))

    def export_hf_weights(self, model, cpu=True, show_progress=True, **_):
        for name, part in model[0].named_parameters():
            parts = [part]
            if dist.is_initialized():
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, part)
            yield f"model.{name}", torch.cat(parts)


def part_of(rank):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for number, one in enumerate(module.parameters()):
            one.copy_(torch.arange(one.numel()).view(one.shape) + 10 * number + 100 * rank)
    return module


@on_ranks(2)
def test_every_rank_takes_part_and_the_version_has_whole_tensors(rank, world, folder):
    model = [part_of(rank)]
    source = tx.MegatronSource(Bridge(), model)
    assert [(meta.name, meta.shape) for meta in source.params()] == [("model.weight", (4, 3)), ("model.bias", (4,))]
    sender = tx.WeightSender(tx.make_transport("disk", root=folder), rank=rank)
    sender.register_model(source)
    for step in range(2):
        with torch.no_grad():
            model[0].weight += step
        sender.update_weights()
    if rank == 0:
        (version,) = sorted(Path(folder).glob("weight_v*"))[-1:]
        saved = dict(CheckpointSource(version))
        wanted = torch.cat([part_of(one).weight.detach() for one in range(world)]) + 1
        assert torch.equal(saved["model.weight"], wanted)
        assert version.joinpath("config.json").read_text() == '{"model_type": "qwen3"}'


def test_an_export_of_other_shapes_is_refused_by_name():
    model = [part_of(0)]
    source = tx.MegatronSource(Bridge(), model)
    model[0] = nn.Linear(3, 5)
    with pytest.raises(ManifestError, match=r"model\.weight"):
        list(checked(source))
