"""The staging buffer of `IPCTransport`: what goes in comes out, and it is all the memory that a send takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.processes import running_python
from tests.transports import ipc_ends
from tests.transports.ipc_ends import WORKER
from torchrl_ext.bench.runner import track_peak
from torchrl_ext.testing import WAIT_S, any_bits, same_bits

channel, make = ipc_ends.channel, ipc_ends.make


class TestStaging:
    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
    def test_a_send_adds_no_more_memory_than_the_staging_buffer(self, make, channel):
        trainer = make(bucket_bytes=4 << 20)
        sent = {f"{i}": torch.ones(8 << 20, dtype=torch.uint8) for i in range(8)}
        with running_python(WORKER, channel):
            trainer.send_weights(sent)
            rounds = []
            for _ in range(3):  # what else lives in this process only ever adds to a round
                with track_peak() as extra:
                    trainer.send_weights(sent)
                rounds.append(extra[0])
        assert min(rounds) <= 4 << 20

    def test_an_update_much_larger_than_the_buffer_loses_nothing(self, make):
        trainer, worker = make(bucket_bytes=4 << 20), make()
        sent = {f"{i}": any_bits(torch.uint8, (16 << 20) + i, seed=i) for i in range(5)}
        held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S, weights=held)
            trainer.send_weights(sent)
            arriving.result(WAIT_S)
        for name, tensor in sent.items():
            assert same_bits(held[name], tensor)
