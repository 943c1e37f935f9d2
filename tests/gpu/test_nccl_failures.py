"""A group over NCCL of which one end is absent or is set up otherwise: the other says so in time, and lives."""

from __future__ import annotations

import sys

import pytest
import torch

import torchrl_ext as tx
from tests.gpu.pairs import environment
from tests.processes import calling, running_python
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group.group import Group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WAIT_S = 60


def say(*words):
    print(*words, flush=True)


def end(port, rank, timeout_s=WAIT_S):
    return tx.VLLMCollectiveTransport("127.0.0.1", port, rank, 2, timeout_s=timeout_s)


# an end that is absent


def left_waiting(port, timeout_s):
    """A trainer, whose worker does not do its part."""
    own = end(port, 0, timeout_s)
    say("started")
    try:
        own.init_all_workers_group({})
    except tx.WeightSyncError as error:
        say(type(error).__name__, "rank 1 (pid" in str(error), own.check_connection())
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
