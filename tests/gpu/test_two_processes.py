"""Every road between two processes on one GPU, bit for bit; small, and with a model of 8 GB."""

import pytest
import torch

from tests.gpu.ends import FILES, GROUPS, Road
from tests.gpu.pairs import travel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE_MIB = 8192


@pytest.mark.parametrize("mib", [0, 96, LARGE_MIB])
@pytest.mark.parametrize("transport", ["ipc", *FILES, *GROUPS])
def test_every_bit_of_every_version_arrives(transport, mib):
    if torch.cuda.mem_get_info()[0] < 5 * mib << 20:
        pytest.skip(f"too little GPU memory is free for two processes with {mib} MiB of weights")
    (record,) = travel([Road(transport=transport, mib=mib)])
    assert "failed" not in record, record
    print(record)  # with -s
