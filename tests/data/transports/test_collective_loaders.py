"""Loaders that fail in a worker process, at any point of a packed update: the process lives and the trainer learns."""

from __future__ import annotations

import random
import sys
from contextlib import closing

import pytest
import torch

from tests.data.group.members import BUCKET, WAIT_S, member
from tests.processes import calling, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import TransportError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group.carrier import HOST
from torchrl_ext.data.transports.collective import buckets_of
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.testing import any_bits

COUNT = 25


def load(pairs, stop_at):
    """Sum up all bytes; fail at a parameter, by its number, or before the first where that is -1."""
    taken = 0
    if stop_at < 0:
        raise ValueError("the loader loads nothing")
    for index, (name, tensor) in enumerate(pairs):
        if index == stop_at:
            raise ValueError(f"the loader does not like {name}")
        taken += int(tensor.view(-1).view(torch.uint8).sum())
    return taken


def follow(port):
    end, held = member(port, 1, 2), None  # errors are held, as a caller may
    for line in sys.stdin:
        within = Deadline(WAIT_S)
        if not end.check_connection():
            end.init_all_workers_group({})
        worker = end.attend(within)
        try:
            with closing(worker.receive(worker.next(within), {}, within)) as pairs:
                print("took", load(pairs, int(line)), flush=True)
        except ValueError as error:
            held = error
            print("failed:", held, flush=True)


def packed(choice):
    """Tensors of which most share buckets, and a few are too large for one."""
    sizes = [choice.choice([1, 7, 50, 300, 300, 700, 700, 3000]) for _ in range(COUNT)]
    return {f"p{index:02d}": any_bits(torch.float32, size, seed=index) for index, size in enumerate(sizes)}


def test_failing_loader_is_named_and_the_next_update_passes():
    """Wherever a loader fails, its process lives, the trainer names its rank, and the next update passes."""
    choice, port = random.Random(13), free_port()
    with running_python(calling(follow, port)) as child:

        def ask(stop_at):
            child.stdin.write(f"{stop_at}\n")
            child.stdin.flush()

        trainer = member(port, 0, 2)
        for stop_at in range(-1, COUNT):
            sent = packed(choice)
            assert sum(not bucket.direct for bucket in buckets_of(as_source(sent).params(), BUCKET, HOST)) > 2
            ask(stop_at)
            if not trainer.check_connection():
                trainer.init_all_workers_group({})
            with pytest.raises(TransportError, match=rf"rank 1 .*{'loaded nothing' if stop_at < 0 else 'stopped'}"):
                trainer.send_weights("policy", sent)
            words = "loads nothing" if stop_at < 0 else f"does not like p{stop_at:02d}"
            assert child.stdout.readline() == f"failed: the loader {words}\n", stop_at
            if stop_at % 4:
                continue
            ask(COUNT)
            trainer.init_all_workers_group({})
            trainer.send_weights("policy", sent)
            expected = sum(int(tensor.view(torch.uint8).sum()) for tensor in sent.values())
            assert child.stdout.readline() == f"took {expected}\n", stop_at
        trainer.shutdown()
