"""FSDP2 trainers: real gloo ranks, each in a process of its own, gather in lockstep; rank 0 alone talks to engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import torchrl_ext as tx
from tests.models import converted_model
from tests.ranks import on_ranks, raises_if
from torchrl_ext.errors import (
    ConcurrentUpdateError,
    ConfigError,
    DeadlineError,
    ManifestError,
    StoreError,
    TransportError,
    UpdateError,
)
from torchrl_ext.proof.outputs import Probe
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.transports.base import exclusive
from torchrl_ext.weights.source import as_source, checked


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.randn(1, 3))  # rank 1 holds nothing of it
        self.other = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x):
        return self.head(self.body(self.embed(x))) + self.one.sum() + self.other.sum()


class Collector:
    version = 0

    def increment_version(self):
        self.version += 1


def plain():
    torch.manual_seed(0)
    return Policy()


def sharded():
    policy = plain()
    fully_shard(policy.body)
    fully_shard(policy)
    return policy


def trained(policy):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return policy


def sender_of(transport=None, served=None, **settings):
    """A sender; rank 0 drives an engine, which serves ``served``, by default another policy."""
    engine = InProcessEngine(plain() if served is None else served) if dist.get_rank() == 0 else None
    return tx.WeightSender(transport or tx.MemoryTransport(), engine, **settings)


@on_ranks(2)
def test_rank_0_keeps_an_engine_at_the_trained_weights(rank, world, folder):
    policy, served = sharded(), plain()
    sender = sender_of(served=served, rank=rank)
    sender.register_model(policy)
    for step in (1, 2):
        trained(policy)
        report = sender.update_weights()
        assert report.version == step == sender.version
    reference = dict(as_source(policy))
    for name, tensor in as_source(served):
        assert torch.equal(tensor, reference[name]) == (rank == 0 or name == "steps"), (rank, name)
    assert report.verified == (rank == 0)


@on_ranks(2)
def test_rank_0_publishes_the_whole_checkpoint_on_disk_in_another_dtype(rank, world, folder):
    policy = trained(sharded())
    sender = tx.WeightSender(tx.DiskTransport(folder, shard_bytes=128), rank=rank, dtype=torch.bfloat16)
    sender.register_model(policy)
    sender.update_weights()
    reference = dict(as_source(policy))
    dist.barrier()
    received = tx.DiskTransport(folder).receive_weights(30)
    assert set(received.keys()) == set(reference)
    for name, tensor in reference.items():
        assert torch.equal(received[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name


@on_ranks(2)
def test_a_failure_on_rank_0_at_any_moment_leaves_no_rank_waiting(rank, world, folder):
    class Broken(tx.MemoryTransport):
        def __init__(self):
            super().__init__()
            self.stop_after = 0

        def open(self, workers, params, within):
            if self.stop_after is None:
                raise TransportError("cannot open")
            return super().open(workers, params, within)

        def prepare(self, update, within):
            stream = iter(update.source)
            for _ in range(self.stop_after):
                next(stream)
            raise TransportError("cannot prepare")

    policy, served = sharded(), plain()
    transport = Broken()
    sender = sender_of(transport, served, rank=rank)
    sender.register_model(policy)
    for moment in (None, 0, 1, 4, len(as_source(policy).params())):
        transport.stop_after = moment
        with raises_if(rank == 0, UpdateError, match="cannot"):
            sender.update_weights()
        dist.barrier()


@on_ranks(2)
def test_a_part_gathers_nothing_else_and_no_rank_waits_whether_it_is_sent_refused_or_too_much(rank, world, folder):
    class Failing(tx.MemoryTransport):
        failing = False

        def prepare(self, update, within):
            if self.failing:
                raise TransportError("cannot prepare")
            return super().prepare(update, within)

    gathered, whole = [], DTensor.full_tensor
    policy, served = sharded(), plain()
    transport = Failing() if rank == 0 else tx.DiskTransport(folder)
    sender = sender_of(transport, served, rank=rank)
    sender.register_model(policy)
    everything = len(as_source(policy).params()) - 1  # a buffer is no shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", lambda self: gathered.append(self) or whole(self))
        for only, fails, gathers in [
            (["body"], False, everything),
            (["body.0"], False, 2),
            (["body.2.bias"], True, 1),
            (["body.2.bias"], False, everything),
            (["one", "embed.weight"], False, 2),
            (None, False, everything),
        ]:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 1
            transport.failing = fails
            before = {name: tensor.clone() for name, tensor in as_source(served)}
            gathered.clear()
            with raises_if(fails and rank == 0, UpdateError, match="cannot prepare"):
                report = sender.update_weights(only=only)
            assert len(gathered) == gathers, (only, gathered)
            if fails:
                continue
            now = dict(as_source(policy))
            if rank == 0:
                assert report.part == (gathers == 2), only
                for name, tensor in as_source(served):
                    sent = gathers != 2 or any(f"{name}.".startswith(f"{path}.") for path in only)
                    assert torch.equal(tensor, now[name] if sent else before[name]), (only, name)
    with pytest.raises(ManifestError, match="nobody"):
        sender.update_weights(only="nobody")
    sender.update_weights()


@on_ranks(2)
def test_rank_0_leaves_no_gather_and_no_forward_pass_whatever_stops_it_before_it_sends(rank, world, folder):
    class Down(tx.MemoryTransport):
        down = False

        def latest_version(self):
            if self.down:
                raise StoreError("the store is down")
            return super().latest_version()

    def together(prompts):
        once = torch.ones(1)
        dist.all_reduce(once)
        return [[0.0] * (len(prompt) - 1) for prompt in prompts]

    class Answers(InProcessEngine):
        def logprobs(self, prompts):
            return [[0.0] * (len(prompt) - 1) for prompt in prompts]

    transport, engine = Down(), Answers(plain()) if rank == 0 else None
    probe = Probe(prompts=((1, 2),), compute=together)
    sender = tx.WeightSender(transport, engine, rank=rank, verify="outputs", probe=probe)
    sender.register_model(sharded())
    transport.down = rank == 0
    with raises_if(rank == 0, UpdateError, match="is down"):
        sender.update_weights()
    transport.down = False
    dist.barrier()
    with exclusive(transport, "another sender's update"), pytest.raises(ConcurrentUpdateError):
        sender.update_weights()
    dist.barrier()
    assert sender.update_weights().version == sender.version == 1


@on_ranks(2)
def test_every_rank_knows_the_version_in_service_and_its_collectors_count_accepted_updates(rank, world, folder):
    class Failing(tx.DiskTransport):
        failing = False

        def prepare(self, update, within):
            return replace(super().prepare(update, within), ahead=self.fail)

        def fail(self, within):
            if self.failing:
                raise TransportError("no route there")

    for source in (sharded(), plain()):  # gathered, and replicated as under DDP
        folder_of = f"{folder}/{type(source).__name__}"
        if rank == 0:
            early = tx.DiskTransport(folder_of)
            for _ in range(4):
                early.send_weights("policy", nn.Linear(1, 1))
            early.shutdown()
        transport, collector = Failing(folder_of) if rank == 0 else tx.MemoryTransport(), Collector()
        sender = sender_of(transport, **({"mapper": str} if rank == 0 else {"rank": rank}))
        sender.register_model(source)
        sender.register_collector(collector)
        sender.init_all_workers_group()
        assert transport.check_connection() == (rank == 0)
        for fails, version in ((True, 0), (False, 6), (True, 6), (False, 8)):
            transport.failing = fails
            with raises_if(fails and rank == 0, UpdateError, match="no route"):
                assert sender.update_weights().version == version
            assert sender.version == version
        assert collector.version == 2
        sender.shutdown()
        dist.barrier()


@on_ranks(2)
def test_a_call_that_fails_before_anything_is_sent_counts_on_every_rank_and_nobody_waits_for_it(rank, world, folder):
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in plain().state_dict().items()}
    for source, gathers in ((sharded(), True), (plain(), False)):
        sender, collector = sender_of(tx.MemoryTransport(timeout_s=600)), Collector()
        sender.register_model(source)
        sender.register_collector(collector)
        calls = [({0: meta}, 0), ({0: 3, 1: 3}, 0), ({}, 1)]  # wrong weights by rank, and the version in service then
        if gathers:
            calls += [({}, 2)]
        else:
            calls += [({1: meta}, 2), ({1: 3}, 3), ({}, 4)]
        for wrong, version in calls:
            with raises_if(rank in wrong, (ConfigError, ManifestError)):
                assert sender.update_weights(wrong.get(rank)).version == version
            dist.barrier()  # a rank is early, or late; here all are early
        assert (sender.version, collector.version) == (version, version)
        sender.shutdown()
        dist.barrier()


@on_ranks(2)
def test_a_rank_waits_as_long_for_rank_0_as_the_timeout_of_the_transport_lets_it(rank, world, folder):
    sender = sender_of(tx.MemoryTransport(timeout_s=0.01))
    if rank == 1:
        with pytest.raises(DeadlineError, match=r"trainer rank 0 began no update within 0\.3 s"):
            sender.update_weights(plain())


@on_ranks(2)
def test_models_that_transformers_converts_travel_under_the_names_of_their_checkpoints(rank, world, folder):
    for kind in ("qwen3_moe", "qwen2_5_vl", "hrm_text"):
        model, reference = converted_model(kind), converted_model(kind)
        inner = getattr(model.model, "language_model", model.model)
        for layer in getattr(inner, "layers", ()):
            fully_shard(layer)
        fully_shard(model)
        source = as_source(model)
        assert source.params() == as_source(reference).params()
        found = {meta.name: tensor for meta, tensor in checked(source)}
        for name, tensor in as_source(reference):
            assert torch.equal(found[name], tensor), name
        assert not source.held()
        served = converted_model(kind, 1)
        sender = sender_of(served=served, rank=rank)
        sender.register_model(model)
        assert sender.update_weights().verified == (rank == 0)
        for name, tensor in as_source(served):
            assert torch.equal(tensor, found[name]) == (rank == 0), (rank, name)


@on_ranks(2)
def test_what_fsdp1_holds_in_flat_pieces_is_refused_on_every_rank_and_nothing_is_published(rank, world, folder):
    def flat(**how):
        torch.manual_seed(0)
        how["device_id"] = torch.device("cpu")
        yield FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)), **how)
        yield nn.Sequential(nn.Linear(6, 6), FullyShardedDataParallel(nn.Linear(6, 9), **how))

    def refused(error, call, *args):
        with pytest.raises(error, match=r"(?s)FSDP1.*fully_shard"):
            call(*args)
        dist.barrier()  # a rank that comes late takes the newest call of rank 0

    for policy in (*flat(use_orig_params=False), *flat(use_orig_params=True)):
        transport = tx.DiskTransport(folder)
        sender = tx.WeightSender(transport, rank=rank)
        sender.register_model(policy)
        refused(ConfigError, sender.update_weights)
        refused(ConfigError, sender.init_all_workers_group)
        refused(ConfigError, sender.update_weights, policy)
        refused(ConfigError, transport.send_weights, "policy", policy)
        sender.shutdown()
        refused(ManifestError, as_source(TensorDict.from_module(policy).data).params)
    assert not [*Path(folder).glob("weight_v*")]


@on_ranks(2)
def test_a_parameter_that_diverges_from_the_manifest_is_named_and_leaves_no_rank_waiting(rank, world, folder):
    class Wrong(tx.WeightSource):
        def __init__(self, source):
            self.source = source

        def params(self):
            params = self.source.params()
            return (params[1], params[0], *params[2:]) if rank == 0 else params

        def __iter__(self):
            return iter(self.source)

    sender = tx.WeightSender(tx.DiskTransport(folder), rank=rank)
    with raises_if(rank == 0, UpdateError, match="parameter 0 of the source is"):
        sender.update_weights(Wrong(as_source(sharded())))
    dist.barrier()
