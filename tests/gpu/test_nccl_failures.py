"""A group over NCCL whose other rank is not there when it is used first: an error in time, and a process that lives."""

import pytest
import torch

from tests.gpu.test_two_processes import environment
from tests.processes import running_python
from torchrl_ext.control.serving.processes import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAINER = """
import sys, torch
import torchrl_ext as tx
end = tx.VLLMCollectiveTransport("127.0.0.1", int(sys.argv[1]), 0, 2, timeout_s=float(sys.argv[2]))
print("started", flush=True)
try:
    end.init_all_workers_group({})
except tx.WeightSyncError as error:
    print(type(error).__name__, "rank 1" in str(error), end.check_connection(), flush=True)
print(torch.ones(3, device=end.device).sum().item(), flush=True)
"""

ABSENT = """
import sys
import torchrl_ext as tx
from torchrl_ext.data.group.process_group import Group
Group._exchange = lambda self, within: (print("connected", flush=True), sys.stdin.readline())
tx.VLLMCollectiveTransport("127.0.0.1", int(sys.argv[1]), 1, 2, timeout_s=300).init_all_workers_group({})
"""


def test_worker_absent_from_the_first_nccl_exchange_is_named():
    """The trainer names a worker that is absent from the first exchange at the deadline, and goes on."""
    port = free_port()
    with (
        running_python(TRAINER, port, 20, prefix=environment("trainer")) as trainer,
        running_python(ABSENT, port, prefix=environment("worker")) as worker,
    ):
        assert trainer.stdout.readline() == "started\n"
        assert worker.stdout.readline() == "connected\n"
        assert trainer.stdout.readline() == "DeadlineError True False\n"
        assert trainer.stdout.readline() == "3.0\n"
        assert trainer.wait() == 0
