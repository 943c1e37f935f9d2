"""Trainer ranks and engines that are killed in the middle of an update: seeded, at any step, on either side.

Whatever dies, no engine ever serves a mixture, everybody else comes out of the update by a deadline, and the next
update brings all that is left to the trainer's weights.
"""

from __future__ import annotations

import json
import random
import signal
from contextlib import ExitStack

import pytest

from tests.processes import WAIT_S, running_python
from torchrl_ext.testing import free_port

KILLING = """
import os, signal, sys, threading
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.group.notes import HostedNotes, RemoteNotes
from torchrl_ext.transports.ranks import _Notes

class Steps:
    '''Counts what this process does in an update, and dies at one of its steps.'''
    def __init__(self):
        self.count, self.at, self.lock = 0, 0, threading.Lock()
    def take(self):
        with self.lock:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

steps = Steps()

def counted(cls, name):
    own = getattr(cls, name)
    def step(self, *args, **more):
        steps.take()
        return own(self, *args, **more)
    setattr(cls, name, step)

for cls, names in ((Group, ("send", "receive", "wait")), (HostedNotes, ("put", "wait")), (RemoteNotes, ("put", "wait")),
                   (_Notes, ("put", "_sleep"))):
    for name in names:
        counted(cls, name)
"""

ENGINE = (
    KILLING
    + """
from tests.transports import sharded_engine as one
own = one.Served.answer
def answer(self, told):
    if told["do"] == "die":
        steps.count, steps.at = 0, told["at"]
        return {}
    if told["do"] == "count":
        return {"count": steps.count}
    steps.take()
    return own(self, told)
one.Served.answer = answer
one.serve(2)
"""
)

RANK = (
    KILLING
    + """
import datetime, json, torch, torch.distributed as dist, torchrl_ext as tx
from tests.transports import sharded_engine
from tests.transports.sharded_engine import LineEngine
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource

rank, port, ports, role, at = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
)
SHAPES = {"a": (12, 8), "b": (8, 12), "c": (10,), "d": (16, 16), "e": (4, 4)}

def whole(name, version):
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * version + len(name)

class Source(WeightSource):
    '''Rank 0 holds the upper half of each tensor, rank 1 the lower one.'''
    def __init__(self, version):
        self.version = version
    def params(self):
        return tuple(ParamMeta(name, torch.float32, shape) for name, shape in SHAPES.items())
    def __iter__(self):
        raise AssertionError("nothing is gathered")
    def shards(self):
        for meta in self.params():
            every, half = Block.whole(meta.shape), meta.shape[0] // 2
            first, stop = (0, half) if rank == 0 else (half, meta.shape[0])
            block = Block((first, *every.start[1:]), (stop, *every.stop[1:]))
            full = whole(meta.name, self.version)
            yield Shard(meta, block, lambda full=full, block=block, every=every: full[block.within(every)].clone())

def expected(version):
    return sharded_engine.expected({name: whole(name, version) for name in SHAPES})

def say(what):
    print(json.dumps(what), flush=True)

engines = [LineEngine(one, 2) for one in ports]
transport = tx.make_transport("sharded", bucket_bytes=256, timeout_s=15)
sender = tx.WeightSender(transport, Pool(engines) if rank == 0 else None, rank=rank)
sender.update_weights(Source(1))
dist.barrier()  # rank 1 is told how an update ended by rank 0, which may die at the first step of the next one
steps.count = 0
if role == f"rank {rank}":
    steps.at = at
if rank == 0 and role.startswith("engine"):
    engines[int(role[-1])]._ask(do="die", at=at)
try:
    sender.update_weights(Source(2))
    say("updated")
except WeightSyncError as error:
    say(str(error))
if role == "nobody":
    say({"steps": steps.count, "engine": engines[0]._ask(do="count")["count"] if rank == 0 else 0})
if rank == 0 and role.startswith("engine"):
    steps.at = 0
    for attempt in range(3):  # the dead one is found out, and left out
        try:
            report = sender.update_weights(Source(3))
            break
        except WeightSyncError as error:
            say(str(error))
    left = [one for number, one in enumerate(engines) if number != int(role[-1])]
    assert [one.state()["held"] for one in left] == [expected(3)] * len(left), "the others did not get the next one"
    assert not any(one.state()["paused"] for one in left)
    say("recovered")
elif role.startswith("engine"):
    for attempt in range(3):
        try:
            sender.update_weights(Source(3))
            break
        except WeightSyncError as error:
            say(str(error))
if rank == 0:
    say(expected(1))
    say(expected(2))
    if role != "rank 1":  # which asks this process's store how the update ended
        dist.distributed_c10d._get_default_store().get("bye")
elif role != "rank 0":
    dist.distributed_c10d._get_default_store().set("bye", "1")
os._exit(0)
"""
)

ROLES = ("rank 0", "rank 1", "engine 0", "engine 1")


def killed(role, at):
    """What became of an update in which ``role`` died at its step ``at``: what ranks said, and the engines' states."""
    from tests.transports.sharded_engine import LineEngine

    port = free_port()
    with ExitStack() as stack:
        children = [stack.enter_context(running_python(ENGINE)) for _ in range(2)]
        ports = [int(child.stdout.readline()) for child in children]
        ranks = [
            stack.enter_context(running_python(RANK, rank, port, json.dumps(ports), role, at)) for rank in range(2)
        ]
        statuses = [child.wait(WAIT_S) for child in ranks]  # nobody hangs
        said = [list(map(json.loads, child.stdout.read().splitlines())) for child in ranks]
        states = {}
        for number, child in enumerate(children):
            if child.poll() is None:
                states[number] = LineEngine(ports[number], 2).state()
    return statuses, said, states


def assert_survived(role, at):
    statuses, said, states = killed(role, at)
    where = f"{role} at step {at}: {statuses} {said}"
    if role.startswith("rank"):
        victim = int(role[-1])
        assert statuses[victim] in (-signal.SIGKILL, 0), where
        survivor = 1 - victim
        assert statuses[survivor] == 0, where
        if survivor == 0:
            wanted = said[0][-2:]
            for state in states.values():
                assert state["paused"] or state["held"] in wanted, f"{where}: a mixture is served: {state}"
                assert state["paused"] or state["held"] == wanted[state["version"] - 1], f"{where}: {state}"
        for state in states.values():
            held = state["held"]
            assert state["paused"] or all(worker["c"] == held[0]["c"] for worker in held), f"{where}: {state}"
    else:
        assert statuses == [0, 0], where
        assert "recovered" in said[0], where


@pytest.fixture(scope="module")
def counts():
    """How many steps an update has, on each side."""
    statuses, said, _ = killed("nobody", 0)
    assert statuses == [0, 0] and said[0][0] == said[1][0] == "updated", said
    return {"rank 0": said[0][1]["steps"], "rank 1": said[1][1]["steps"], "engine": said[0][1]["engine"]}


def drawn(counts, seed):
    """A role and one of its steps, for a seed."""
    chance = random.Random(seed)
    role = ROLES[seed % len(ROLES)]
    return role, chance.randint(1, counts[role if role in counts else "engine"])


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_no_engine_serves_a_mixture_and_nobody_hangs(counts, seed):
    assert_survived(*drawn(counts, seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4, 200))
def test_whoever_is_killed_at_any_of_many_steps(counts, seed):
    assert_survived(*drawn(counts, seed))
