"""The staging buffer of `IPCTransport`: what goes in comes out, and it is all the memory that a send takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.processes import python, running_python
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

    def test_large_updates_go_around_the_caches_and_lose_nothing(self, make):
        trainer, worker = make(bucket_bytes=4 << 20), make()
        sent = {f"{i}": any_bits(torch.uint8, (16 << 20) + i, seed=i) for i in range(5)}
        held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(worker.receive_weights, WAIT_S, weights=held)
            trainer.send_weights(sent)
            arriving.result(WAIT_S)
        for name, tensor in sent.items():
            assert same_bits(held[name], tensor)


def test_a_worker_that_joined_compiles_no_copy_in_an_update():
    python(JOINED)


JOINED = """
import threading, torch, torchrl_ext as tx
from tests.transports.ipc_ends import joined
from torchrl_ext.weights.source import MappingSource
weights = {"a": torch.arange(18 << 20, dtype=torch.int32)}
source = MappingSource(weights)
trainer, worker = tx.make_transport("ipc"), tx.make_transport("ipc")
join = worker.join
worker.join = lambda info: join({**info, "params": [meta.to_json() for meta in source.params()]})
joined(trainer, worker)
for thread in threading.enumerate():
    if thread.name == "torchrl-ext-warm":
        thread.join(60)
from torchrl_ext.kernels.jit import LOOPS
before = {loop.__name__: set(loop.signatures) for loop in LOOPS}
assert any(before.values())
handoff = trainer.prepare(source, 1)
sending = threading.Thread(target=handoff.transfer)
sending.start()
into = {"a": torch.zeros_like(weights["a"])}
assert [torch.equal(tensor, weights["a"]) for _, tensor in worker.receive(handoff.info, into)] == [True]
sending.join(60)
assert before == {loop.__name__: set(loop.signatures) for loop in LOOPS}
trainer.shutdown()
worker.shutdown()
"""
