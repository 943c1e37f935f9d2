"""Trainer ranks and engines that are killed in the middle of an update: seeded, at any step, on either side.

Whatever dies, no engine ever serves a mixture, everybody else comes out of the update by a deadline, and the next
update brings all that is left to the trainer's weights.
"""

import json
import os
import random
import signal
import sys
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

import torchrl_ext as tx
from tests.data.sharded import sharded_engine
from tests.data.sharded.shard_ranks import Blocks, chunk
from tests.data.sharded.sharded_engine import Served, SocketPort
from tests.processes import WAIT_S, calling, running_python
from tests.ranks import join
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.group.ranks import _Notes
from torchrl_ext.data.group.store import HostedStore, RemoteStore
from torchrl_ext.testing import free_port

SHAPES = {"a": (12, 8), "b": (8, 12), "c": (10,), "d": (16, 16), "e": (4, 4)}
ROLES = ("rank 0", "rank 1", "engine 0", "engine 1")
COUNTED = {Group: ("send", "receive", "wait"), _Notes: ("put", "read")}
COUNTED |= dict.fromkeys((HostedStore, RemoteStore), ("set", "find"))


class Steps:
    """Counts what this process does in an update, and kills it at one of its steps."""

    def __init__(self):
        self.count, self.at, self._lock = 0, 0, threading.Lock()
        for kind, names in COUNTED.items():
            for name in names:
                setattr(kind, name, self._counted(getattr(kind, name)))

    def begin(self, at):
        self.count, self.at = 0, at

    def take(self):
        with self._lock:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, own):
        def step(*args, **more):
            self.take()
            return own(*args, **more)

        return step


def run_engine():
    steps = Steps()

    class Mortal(Served):
        def answer(self, told):
            if told["do"] == "begin":
                steps.begin(told["at"])
                return {}
            if told["do"] == "count":
                return {"count": steps.count}
            steps.take()
            return super().answer(told)

    print(Mortal().listen(), flush=True)
    sys.stdin.read()


def whole(version):
    every = {name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32) for name, shape in SHAPES.items()}
    return {name: flat.view(SHAPES[name]) + 1000 * version + len(name) for name, flat in every.items()}


def expected(version):
    return sharded_engine.expected(whole(version))


def say(what):
    print(json.dumps(what), flush=True)


def run_rank(rank, port, ports, role, at):
    """A rank, which holds a half of each tensor: it sends one version, a second one in which ``role`` dies, a third."""

    def source(version):
        return Blocks(whole(version), rank, 2, of=lambda name, shape, rank, world: [chunk(shape, 0, rank, world)])

    def send(version):
        try:
            return sender.update_weights(source(version)) or True
        except WeightSyncError as error:
            say(str(error))

    steps = Steps()
    join(rank, 2, port)
    engines = [Engine.of(SocketPort(one)) for one in ports]
    transport = tx.make_transport("sharded", bucket_bytes=256, timeout_s=10)  # which one of the deaths takes to be seen
    sender = tx.WeightSender(transport, Fleet(engines) if rank == 0 else None, rank=rank, finite=False)
    sender.update_weights(source(1))
    dist.barrier()  # rank 1 hears how an update ended from rank 0, which may die at the first step of the next one
    steps.begin(at if role == f"rank {rank}" else 0)
    victim = engines[int(role[-1])] if role.startswith("engine") else None
    if rank == 0 and victim is not None:
        victim.port.ask("begin", at=at)
    if send(2):
        say("updated")
    if role == "nobody":
        say({"steps": steps.count, "engine": engines[0].port.ask("count")["count"] if rank == 0 else 0})
    if victim is not None:
        recovered = any(send(3) for _ in range(3))  # the dead one is found out, and left out
        left = [one.port.ask("state") for one in engines if one is not victim] if rank == 0 else []
        assert [one["held"] for one in left] == [expected(3)] * len(left), "the others did not get the next one"
        assert recovered and not any(one["paused"] for one in left)
        say("recovered")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        say(expected(1))
        say(expected(2))
        if role != "rank 1":  # which asks this process's store how the update ended
            store.get("bye")
    elif role != "rank 0":
        store.set("bye", "1")
    os._exit(0)


def killed(role, at):
    """What became of an update in which ``role`` died at its step ``at``: what ranks said, and the engines' states."""
    port = free_port()
    with ExitStack() as stack:
        children = [stack.enter_context(running_python(calling(run_engine))) for _ in range(2)]
        ports = [int(child.stdout.readline()) for child in children]
        programs = [calling(run_rank, rank, port, ports, role, at) for rank in range(2)]
        ranks = [stack.enter_context(running_python(program)) for program in programs]
        statuses = [child.wait(WAIT_S) for child in ranks]  # nobody hangs
        said = [list(map(json.loads, child.stdout.read().splitlines())) for child in ranks]
        alive = [number for number, child in enumerate(children) if child.poll() is None]
        states = [SocketPort(ports[number]).ask("state") for number in alive]
    return statuses, said, states


def assert_survived(role, at):
    statuses, said, states = killed(role, at)
    where = f"{role} at step {at}: {statuses} {said} {states}"
    if role.startswith("engine"):
        assert statuses == [0, 0] and "recovered" in said[0], where
        return
    victim = int(role[-1])
    assert statuses[victim] in (-signal.SIGKILL, 0) and statuses[1 - victim] == 0, where
    for state in states:
        held = state["held"]
        assert state["paused"] or all(worker["c"] == held[0]["c"] for worker in held), where
        if victim == 1:  # the other one said what each version is
            assert state["paused"] or held == said[0][-2:][state["version"] - 1], f"a mixture is served: {where}"


@pytest.fixture(scope="module")
def counts():
    """How many steps an update has, on each side."""
    statuses, said, _ = killed("nobody", 0)
    assert statuses == [0, 0] and said[0][0] == said[1][0] == "updated", said
    engine = said[0][1]["engine"]
    return dict(zip(ROLES, (said[0][1]["steps"], said[1][1]["steps"], engine, engine), strict=True))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(at, marks=pytest.mark.exhaustive) for at in range(4, 200))])
def test_killed_process_leaves_no_mixed_weights_and_no_hang(counts, seed):
    role = ROLES[seed % len(ROLES)]
    assert_survived(role, random.Random(seed).randint(1, counts[role]))
