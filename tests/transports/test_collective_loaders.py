"""Loaders that fail in a worker process, at any point of a packed update: the process lives and the trainer learns."""

from __future__ import annotations

import random

import pytest
import torch

from tests.processes import running_python
from tests.transports.members import BUCKET, member
from torchrl_ext.errors import TransportError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.testing import any_bits
from torchrl_ext.transports.collective.stream import buckets_of
from torchrl_ext.weights.source import as_source

WORKER = """
import sys, torch
from torchrl_ext.deadline import Deadline
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport

def load(pairs, stop_at):
    taken = 0
    for index, (name, tensor) in enumerate(pairs):
        if index == stop_at:
            raise ValueError(f"the loader does not like {name}")
        taken += int(tensor.view(-1).view(torch.uint8).sum())
    return taken

end = VLLMCollectiveTransport("127.0.0.1", int(sys.argv[1]), 1, 2, "cpu", bucket_bytes=int(sys.argv[2]), timeout_s=60)
end.init_all_workers_group({})
worker = end.attend(Deadline(60))
for line in sys.stdin:
    within = Deadline(60)
    try:
        print("took", load(worker.receive(worker.get(within), {}, within), int(line)), flush=True)
    except ValueError as error:
        print("failed:", error, flush=True)
"""


def packed(choice):
    """Tensors of which most share buckets, and a few are too large for one."""
    sizes = [choice.choice([1, 7, 50, 300, 300, 700, 700, 3000]) for _ in range(25)]
    return {f"p{index:02d}": any_bits(torch.float32, size, seed=index) for index, size in enumerate(sizes)}


def test_wherever_a_loader_fails_its_process_lives_and_the_trainer_names_it_and_the_next_update_passes():
    choice, port = random.Random(13), free_port()
    with running_python(WORKER, port, BUCKET) as child:

        def ask(stop_at):
            child.stdin.write(f"{stop_at}\n")
            child.stdin.flush()

        trainer = member(port, 0, 2)
        trainer.init_all_workers_group({})
        for number in range(200):
            sent = packed(choice)
            assert sum(not bucket.direct for bucket in buckets_of(as_source(sent).params(), BUCKET)) > 2
            stop_at = number % len(sent)
            ask(stop_at)
            with pytest.raises(TransportError, match=rf"was not taken by rank 1 \(pid {child.pid}"):
                trainer.send_weights("policy", sent)
            assert child.stdout.readline() == f"failed: the loader does not like p{stop_at:02d}\n", number
            if number % 4:
                continue  # the next that fails must be in step, too
            ask(-1)
            trainer.send_weights("policy", sent)
            expected = sum(int(tensor.view(torch.uint8).sum()) for tensor in sent.values())
            assert child.stdout.readline() == f"took {expected}\n", number
        trainer.shutdown()
