"""Every road between two processes on one GPU, bit for bit; small, and with a model of 8 GB."""

import pytest
import torch

from tests.gpu.ends import GROUPS
from tests.processes import running_python
from torchrl_ext.control.serving.processes import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CODE = "import sys; from tests.gpu.ends import main; main(*sys.argv[1:])"
LARGE_MIB = 8192


def environment(role):
    """NCCL refuses two ranks on one GPU unless it takes them for two machines, which then talk over the loopback."""
    return ("env", f"NCCL_HOSTID=torchrl-ext-{role}", "NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1")


@pytest.mark.parametrize("megabytes", [96, LARGE_MIB])
@pytest.mark.parametrize("transport", ["ipc", "delta", *GROUPS])
def test_every_bit_of_every_version_arrives(transport, megabytes, tmp_path):
    if torch.cuda.mem_get_info()[0] < 5 * megabytes << 20:
        pytest.skip(f"too little GPU memory is free for two processes with {megabytes} MiB of weights")
    place = str(free_port()) if transport in GROUPS else str(tmp_path / "place")
    settings = (transport, place, megabytes)
    with (
        running_python(CODE, "trainer", *settings, prefix=environment("trainer")) as trainer,
        running_python(CODE, "worker", *settings, prefix=environment("worker")) as worker,
    ):
        assert trainer.stdout.readline() == "up\n"
        assert worker.stdout.readline() == "up\n"
        for version in (1, 2, 3):
            trainer.stdin.write(f"{version}\n")
            trainer.stdin.flush()
            assert worker.stdout.readline() == f"got {version} True\n"
            sent = trainer.stdout.readline()
            assert sent.startswith(f"sent {version} ")
            print(transport, megabytes, "MiB:", sent.strip())  # with -s, or where the test fails
