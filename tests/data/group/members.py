"""Members of a collective group, most of them in this process; and sources that break or stop."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group.group import Member
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import any_bits, same_bits

WAIT_S = 60
SHORT_S = 1
BUCKET = 4096


def member(port, rank, size, **settings):
    settings = {"bucket_bytes": BUCKET, "timeout_s": WAIT_S, **settings}
    return VLLMCollectiveTransport("127.0.0.1", port, rank, size, "cpu", **settings)


def place(port, backend="gloo"):
    """The place of a rank of which no transport knows."""
    return Member("127.0.0.1", port, "", device=torch.device("cpu"), backend=backend, timeout_s=WAIT_S)


def meet(own, rank, size=2):
    """Form the group of these ranks."""
    if rank:
        return own.enter(rank, size, (), Deadline(WAIT_S), again=True)
    own.open(size, private=False)
    return own.host(size, (), Deadline(WAIT_S))


def beside(*calls):
    """Run the calls beside each other; what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(3 * WAIT_S) or future.result() for future in futures]


def enter(*members, metadata=()):
    return beside(*(lambda one=one: one.init_all_workers_group(dict(metadata)) for one in members))


@contextmanager
def group(size, make=member, **settings):
    port = free_port()
    members = [make(port, rank, size, **settings) for rank in range(size)]
    try:
        assert enter(*members) == [None] * size
        yield members
    finally:
        for one in members:
            one.shutdown()


def weights(seed=0, count=20, numel=5000):
    return {f"p{i:02d}": any_bits(torch.float32, numel, seed=100 * seed + i) for i in range(count)}


def same(received, sent):
    return all(same_bits(received[name], tensor) for name, tensor in sent.items())


class Interrupted(MappingSource):
    """Yields some parameters, then calls back."""

    def __init__(self, tensors, after, call):
        super().__init__(tensors)
        self._after, self._call = after, call

    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == self._after:
                self._call()
            yield pair


def broken():
    raise ValueError("the source broke")


def stop(*_, **__):
    """Say "now", and wait for a line."""
    print("now", flush=True)
    sys.stdin.readline()
