"""Ranks of a trainer for tests: real processes over gloo that run the same scenarios, one after the other; and what
they say about the shards of a source."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from tests.processes import WAIT_S, running_python
from torchrl_ext.launch.processes import free_port
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.source import checked

_BEGIN = """
import datetime, json, sys, traceback
import torch, torch.distributed as dist
rank, world, port, folders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
)
"""

_LOOP = """
outcomes = {}
for number, (name, scenario) in enumerate(json.loads(sys.stdin.read()).items()):
    folder = f"{folders}/{number}"
    try:
        exec(scenario, globals() | {"folder": folder})
        dist.barrier()
        outcomes[name] = "passed"
    except BaseException:
        outcomes[name] = traceback.format_exc()
        break  # the ranks are out of step now
print(json.dumps(outcomes))
"""


def outcomes_of(scenarios, prelude, world, folder):
    """What became of each scenario on each of ``world`` ranks: "passed", or a traceback; by name, in order of rank.

    Scenarios are code that knows ``rank``, ``world``, a ``folder`` of its own and what ``prelude`` makes known.
    """
    port = free_port()
    with ExitStack() as ends:
        ranks = [
            ends.enter_context(running_python(_BEGIN + prelude + _LOOP, rank, world, port, folder))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.stdin.write(json.dumps(scenarios))
            rank.stdin.close()
        return [json.loads(rank.stdout.read().splitlines()[-1]) for rank in ranks if rank.wait(WAIT_S) == 0]


def require_passed(scenario, outcomes, world):
    assert len(outcomes) == world, "a rank died"
    said = [outcome.get(scenario, f"never reached: {[*outcome.values()][-1]}") for outcome in outcomes]
    assert set(said) == {"passed"}, "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(said))


@contextmanager
def no_collectives():
    """Nothing in this block may communicate."""
    from torch.distributed.tensor.debug import CommDebugMode

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
