"""Runs vLLM's own backends ``nccl`` and ``sparse_nccl`` by gloo, as no CPU has NCCL: a plugin of vLLM, and a trainer.

Only the communicator and the streams around it are replaced; the wire and the loading are vLLM's.
"""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

WAIT = timedelta(seconds=120)


class Group:
    """One rank of a group: as much of vLLM's communicator as its backends use."""

    device = torch.device("cpu")

    def __init__(self, address, port, rank, world_size):
        store = dist.TCPStore(address, port, world_size, rank == 0, WAIT, wait_for_workers=False, use_libuv=False)
        keys = dist.PrefixStore("cpu/", dist.PrefixStore("torchrl_ext/", dist.PrefixStore("torchrl_ext", store)))
        self.store, self.pg = store, dist.ProcessGroupGloo(keys, rank, world_size, WAIT)

    def broadcast(self, tensor, src=0, stream=None):
        """Send, on rank 0, or receive in place."""
        self.pg.broadcast(tensor, src).wait()

    def destroy(self):
        """Leave the group."""
        self.store = self.pg = None


def _nothing(*_, **__):
    return contextlib.nullcontext()


class OnCPU:
    """torch, in which a stream is nothing, and the one device has a number."""

    cuda = SimpleNamespace(
        stream=_nothing, current_stream=_nothing, is_available=lambda: False, Stream=torch.cuda.Stream
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0, device_index=_nothing, synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(torch, name)


def register():
    """Replace the communicator and the streams in this process."""
    from vllm.distributed.weight_transfer import base, nccl_engine, packed_tensor, sparse_nccl_engine

    def joined(init, parallel):
        return Group(init.master_address, init.master_port, parallel.rank + init.rank_offset, init.world_size)

    for module in (base, nccl_engine, packed_tensor, sparse_nccl_engine):
        module.torch = OnCPU()
    packed_tensor._get_streams = lambda device, count: (SimpleNamespace(synchronize=lambda: None),) * count
    nccl_engine.worker_init_process_group = sparse_nccl_engine.worker_init_process_group = joined
