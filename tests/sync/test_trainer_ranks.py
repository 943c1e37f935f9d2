"""`WeightSender` on several trainer ranks, real processes over gloo: an update fails on all of them or on none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchrl_ext as tx
from tests.ranks import on_ranks
from tests.sync.ends import before
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.outputs import Probe


class Gathered(WeightSource):
    """A policy whose every tensor is gathered by all ranks, as FSDP's are."""

    def __init__(self, tensors):
        self.tensors, self.passes = tensors, 0

    def params(self):
        return as_source(self.tensors).params()

    def __iter__(self):
        self.passes += 1
        for name, tensor in self.tensors.items():
            found = tensor.clone()
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            yield name, found


def plain(step):
    """Weights that need no gather."""
    return {"a": torch.full((8,), float(step)), "b": torch.full((4,), float(step))}


def policy(step):
    """What rank 0 has on step; other ranks hold zeros, which a gather replaces."""
    return Gathered(plain(step if dist.get_rank() == 0 else 0))


class Trainer:
    """A sender per rank; rank 0's drives an engine, and it counts accepted updates."""

    version = 0

    def __init__(self, transport, engine=InProcessEngine, **settings):
        self.served = plain(0)
        self.receiver = tx.WeightReceiver(self.served)
        self.engine = engine(self.receiver) if dist.get_rank() == 0 else None
        self.sender = tx.WeightSender(transport, self.engine, **settings)
        self.sender.register_collector(self)
        self.update = self.sender.update_weights

    def increment_version(self):
        self.version += 1

    def serves(self, step, names=("a", "b")):
        assert dist.get_rank() != 0 or all(bool((self.served[name] == step).all()) for name in names), self.served

    def in_step(self, step, accepted):
        """The next update reaches all ranks, which met before it, as in training."""
        dist.barrier()
        self.update(policy(step))
        self.serves(step)
        versions = [None] * dist.get_world_size()
        dist.all_gather_object(versions, (self.sender.version, self.version))
        assert len({*versions}) == 1 and versions[0][1] == accepted, versions


@on_ranks(2)
def test_an_engine_that_refuses_fails_the_update_on_every_rank(rank, world, folder):
    def fails():
        raise RuntimeError("out of memory")

    trainer = Trainer(tx.DiskTransport(folder))
    trainer.in_step(1, 1)
    if rank == 0:
        before(trainer.engine, "load", fails)
    with pytest.raises(UpdateError, match="out of memory"):
        trainer.update(policy(2))
    trainer.in_step(3, 2)
    assert trainer.sender.version == 3


@on_ranks(2)
def test_rank_failing_in_its_pass_fails_update_on_every_rank(rank, world, folder):
    class Failing(Gathered):
        def __iter__(self):
            yield from super().__iter__()
            if rank == 1:
                raise ManifestError("the tensors differ")

    trainer = Trainer(tx.DiskTransport(folder))
    trainer.in_step(1, 1)
    with pytest.raises((UpdateError, ManifestError), match="the tensors differ"):
        trainer.update(Failing(plain(2 if rank == 0 else 0)))
    trainer.in_step(3, 2)


@on_ranks(2)
def test_partial_update_becomes_full_after_receiver_failure(rank, world, folder):
    trainer, source = Trainer(tx.MemoryTransport()), policy(2)
    trainer.in_step(1, 1)
    report = trainer.update(source, only="b")
    assert source.passes == 1 and (rank != 0 or report.part)
    trainer.serves(2, "b")
    trainer.serves(1, "a")
    with pytest.raises(ManifestError):
        trainer.update(policy(3), only="nothing")
    report = trainer.update(policy(4), only="b")
    assert rank != 0 or report.part, "nothing was sent, so the last version still holds"
    trainer.receiver.invalidate()
    report = trainer.update(policy(5), only="b")
    assert not report.part
    trainer.serves(5)
    trainer.in_step(6, 5)


@on_ranks(2)
def test_outputs_are_compared_by_all_ranks(rank, world, folder):
    def answers(value, prompts):
        return [[-float(value)] * (len(prompt) - 1) for prompt in prompts]

    class Answers(InProcessEngine):
        def logprobs(self, prompts):
            return answers(trainer.served["a"][0], prompts)

    def forward(prompts):
        value = torch.tensor([float(step) if rank == 0 else 0.0])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)  # as a sharded model's forward pass
        return answers(value, prompts)

    probe = Probe(prompts=((1, 2, 3),), compute=forward)
    trainer = Trainer(tx.DiskTransport(folder), Answers, verify="outputs", probe=probe)
    for step in (1, 2):
        report = trainer.update(policy(step))
        assert rank != 0 or report.proof == "outputs", report
        trainer.serves(step)
    step = 9
    with pytest.raises(UpdateError):
        trainer.update(policy(3))
    step = 4
    trainer.in_step(4, 3)


@on_ranks(2)
def test_ranks_join_before_first_update_all_or_rank_0_alone(rank, world, folder):
    for everywhere in (True, False):
        for transport in (tx.DiskTransport(folder), tx.MemoryTransport()):
            trainer, source = Trainer(transport), policy(1)
            trainer.sender.register_model(source)
            if everywhere or rank == 0:
                trainer.sender.init_all_workers_group()
            assert rank != 0 or trainer.sender.check_connection()
            trainer.update()
            trainer.serves(1)
            assert source.passes == 1 and trainer.version == 1
