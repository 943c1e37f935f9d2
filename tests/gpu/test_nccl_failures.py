"""A group over NCCL of which one end is absent, dies or is set up otherwise: the other says so in time, and lives.

The roles run with gloo where there is no GPU, to try this file itself: ``killed(victim, 64)``.
"""

from __future__ import annotations

import sys

import pytest
import torch

import torchrl_ext as tx
from tests.data.group.members import Interrupted, stop
from tests.gpu.ends import holds, model
from tests.gpu.pairs import environment
from tests.processes import calling, running_python
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.group.nccl import package

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE_MIB = 2048
WAIT_S = 60


def say(*words):
    print(*words, flush=True)


def end(port, rank, timeout_s=WAIT_S):
    return tx.VLLMCollectiveTransport("127.0.0.1", port, rank, 2, timeout_s=timeout_s)


def said(error, peer):
    """The class of an error, and whether it names the other rank."""
    return type(error).__name__, f"rank {peer} (pid" in str(error)


# an end that is absent


def left_waiting(port, timeout_s):
    """A trainer, whose worker does not do its part."""
    own = end(port, 0, timeout_s)
    say("started")
    try:
        own.init_all_workers_group({})
    except tx.WeightSyncError as error:
        say(*said(error, 1), own.check_connection())
    say(torch.ones(3, device=own.device).sum().item())


def absent(port, where):
    """A worker that is seen in the store, and then waits for a line."""

    def missing(*_):
        say("connected")
        sys.stdin.readline()

    setattr(Group, {"forming": "form", "first sum": "total"}[where], missing)
    end(port, 1, 300).init_all_workers_group({})


@pytest.mark.parametrize("where", ["forming", "first sum"])
def test_a_worker_that_is_absent_is_named_at_the_deadline(where):
    port = free_port()
    with (
        running_python(calling(left_waiting, port, 20), prefix=environment("trainer")) as trainer,
        running_python(calling(absent, port, where), prefix=environment("worker")) as worker,
    ):
        assert trainer.stdout.readline() == "started\n"
        assert worker.stdout.readline() == "connected\n"
        assert trainer.stdout.readline() == "DeadlineError True False\n"
        assert trainer.stdout.readline() == "3.0\n"
        assert trainer.wait() == 0


# an end that dies


def trains(ports, megabytes):
    """A trainer that stops in the middle of the first version; one for each port, in which a group forms."""
    for port in ports:
        own, weights = end(port, 0), model(megabytes, 1)
        own.init_all_workers_group({})
        source = Interrupted(weights, len(weights) // 2, stop) if port == ports[0] else weights
        try:
            own.send_weights("policy", source)
            say("sent")
        except tx.WeightSyncError as error:
            say(*said(error, 1))
        own.shutdown()


def receives(ports, megabytes):
    """A worker with a group for each port."""
    for port in ports:
        own, held = end(port, 1), model(megabytes, 0)
        own.init_all_workers_group({})
        try:
            own.receive_weights(WAIT_S, weights=held)
            say("got", holds(held, megabytes, 1))
        except tx.WeightSyncError as error:
            say(*said(error, 0))
        own.shutdown()


def killed(victim, megabytes):
    """Kill an end in the middle of a version; the other one says so, and forms a group with a successor."""
    first, second = free_port(), free_port()
    roles = {"trainer": trains, "worker": receives}
    ports = {role: [first] if role == victim else [first, second] for role in roles}
    with (
        running_python(calling(trains, ports["trainer"], megabytes), prefix=environment("trainer")) as trainer,
        running_python(calling(receives, ports["worker"], megabytes), prefix=environment("worker")) as worker,
    ):
        ends = {"trainer": trainer, "worker": worker}
        assert trainer.stdout.readline() == "now\n"
        ends.pop(victim).kill()
        if victim == "worker":
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        (survivor,) = ends.values()
        kind, named = survivor.stdout.readline().split()
        assert (kind, named) in {("TransportError", "True"), ("NotConnectedError", "True")}
        with running_python(calling(roles[victim], [second], megabytes), prefix=environment(victim)) as third:
            ends[victim] = third
            if victim == "trainer":
                assert third.stdout.readline() == "now\n"
                third.stdin.write("\n")
                third.stdin.flush()
            assert ends["trainer"].stdout.readline() == "sent\n"
            assert ends["worker"].stdout.readline() == "got True\n"
            assert survivor.wait(WAIT_S) == 0


@pytest.mark.skipif(package() is None, reason="without nccl4py torch's watchdog ends the other process, too")
@pytest.mark.parametrize("victim", ["worker", "trainer"])
def test_a_killed_end_leaves_the_other_alive(victim):
    killed(victim, LARGE_MIB)


# an end with other settings


def joins(port, rank):
    try:
        end(port, rank).init_all_workers_group({})
    except tx.ConfigError as error:
        say("NCCL_PROTO" in str(error))


def test_a_protocol_of_one_end_is_named_in_time():
    port = free_port()
    with (
        running_python(calling(joins, port, 0), prefix=environment("trainer")) as trainer,
        running_python(calling(joins, port, 1), prefix=(*environment("worker"), "NCCL_PROTO=Simple")) as worker,
    ):
        assert trainer.stdout.readline() == worker.stdout.readline() == "True\n"
