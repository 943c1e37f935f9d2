"""Policies and sources for tests, and what the ranks of a trainer say about the shards of a source."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.data.weights.source import WeightSource, checked
from torchrl_ext.testing import same_bits


class Policy(nn.Module):
    """Tied weights, a parameter of one row, which one rank holds, a buffer, and a tensor without elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0, 2))

    def forward(self, x):
        return self.head(self.body(self.embed(x))) + self.one.sum()


class Passing(WeightSource):
    """Has what a source has to have, and nothing more: its weights exist only as they pass."""

    def __init__(self, inner):
        self.inner = inner

    def params(self):
        return self.inner.params()

    def __iter__(self):
        return iter(self.inner)


def sharded(model, **how):
    """A model by FSDP2, with its body in a group of its own."""
    fully_shard(model.body, **how)
    return fully_shard(model, **how)


@contextmanager
def no_collectives():
    """Nothing in this block may communicate."""
    with CommDebugMode() as seen:
        yield
    assert seen.get_total_counts() == 0, seen.get_comm_counts()


def require_assembled(source, *, gathers=()):
    """The shards of all ranks have every bit of what a pass over ``source`` gives; only ``gathers`` are gathered.

    They are copied as a bucket is filled: into the dtype in which they are sent. Returns this rank's shards.
    """
    with no_collectives():
        shards = list(source.shards())
    params = list(source.params())
    order = [params.index(shard.meta) for shard in shards]
    assert order == sorted(order)
    assert {shard.meta.name for shard in shards if shard.gathers} == set(gathers)
    assert all(bool(shard.why) == shard.gathers for shard in shards)
    own = []
    for shard in shards:
        if shard.gathers:
            taken = shard.take()
        else:
            with no_collectives():
                taken = shard.take()
        assert not taken.requires_grad
        assert type(taken) is torch.Tensor
        sent = torch.empty(shard.block.shape, dtype=shard.meta.dtype).copy_(taken)
        own.append((shard.meta.name, shard.block, byte_view(sent).tolist()))  # torch pickles no float8
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    full = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in params}
    known = {meta.name: torch.zeros(meta.shape, dtype=torch.bool) for meta in params}
    for one in everybody:
        for name, block, sent_bytes in one:
            where = tuple(map(slice, block.start, block.stop))
            sent = torch.tensor(sent_bytes, dtype=torch.uint8).view(full[name].dtype).view(block.shape)
            if bool(known[name][where].all()):
                assert same_bits(full[name][where], sent), (name, block)
            full[name][where], known[name][where] = sent, True
    for meta, tensor in checked(source):
        assert bool(known[meta.name].all()), f"nobody holds all of {meta}"
        assert same_bits(full[meta.name], tensor), meta
    return shards
