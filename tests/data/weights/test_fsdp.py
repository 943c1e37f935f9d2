"""FSDP2 trainers: real gloo ranks, each in a process of its own, gather in lockstep; rank 0 alone talks to engines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import torchrl_ext as tx
from tests.data.weights.ranks import Policy, sharded
from tests.ranks import on_ranks
from torchrl_ext.base.errors import ConfigError, ManifestError, TransportError, UpdateError
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine


def sender_of(transport):
    """A sender; rank 0 drives an engine, which serves another policy."""
    return tx.WeightSender(transport, InProcessEngine(Policy()) if dist.get_rank() == 0 else None)


@on_ranks(2)
def test_rank_0_failure_at_any_step_reaches_every_rank(rank, world, folder):
    class Broken(tx.MemoryTransport):
        at = None

        def fail_at(self, moment):
            if self.at == moment:
                raise TransportError(f"broken at {moment}")

        def latest_version(self):
            self.fail_at("look")
            return super().latest_version()

        def open(self, workers, params, within):
            self.fail_at("open")
            return super().open(workers, params, within)

        def prepare(self, update, within):
            stream = iter(update.source)
            for _ in range(self.at):
                next(stream)
            self.fail_at(self.at)

    policy, transport = sharded(Policy()), Broken()
    sender = sender_of(transport)
    sender.register_model(policy)
    for transport.at in ("look", "open", 0, 1, 4, len(as_source(policy).params())):
        with pytest.raises(UpdateError, match="broken at"):
            sender.update_weights()
        dist.barrier()


@on_ranks(2)
def test_fsdp1_flat_parameters_are_refused_on_every_rank(rank, world, folder):
    def flat(**how):
        torch.manual_seed(0)
        how["device_id"] = torch.device("cpu")
        yield FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)), **how)
        yield nn.Sequential(nn.Linear(6, 6), FullyShardedDataParallel(nn.Linear(6, 9), **how))

    for policy in (*flat(use_orig_params=False), *flat(use_orig_params=True)):
        sender = tx.WeightSender(tx.MemoryTransport(), rank=rank)
        sender.register_model(policy)
        for error, call in (
            (ConfigError, sender.update_weights),
            (ConfigError, sender.init_all_workers_group),
            (ManifestError, as_source(TensorDict.from_module(policy).data).params),
        ):
            with pytest.raises(error, match=r"(?s)FSDP1.*fully_shard"):
                call()
            dist.barrier()  # a rank that comes late takes the newest call of rank 0
        sender.shutdown()
