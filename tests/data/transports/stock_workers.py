"""Workers as stock engines have them: processes that form a group and receive by calls of torch's alone."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from tests.processes import calling, running_python

GROUPS = {}
"""Those that a worker's process has joined, by name."""


def init(group, rank, **_):
    """What SGLang does: a store, a prefix, and a group beside the default one, which there is none of."""
    size, name = group["world_size"], group["group_name"]
    where = f"tcp://{group['master_address']}:{group['master_port']}"
    store, _, _ = next(rendezvous(where, rank, size, timeout=timedelta(seconds=1800)))
    how = {"group_name": name, "timeout": timedelta(seconds=1800), "backend_options": None}
    made, _ = _new_process_group_helper(size, rank, [], Backend("gloo"), PrefixStore(name, store), **how)
    _world.pg_group_ranks[made] = {one: one for one in range(size)}
    GROUPS[name] = made


def destroy(name, **_):
    dist.destroy_process_group(GROUPS.pop(name))


def receive(name, params, **_):
    """One broadcast, cut into tensors in order."""
    params = [(one, getattr(torch, dtype), shape) for one, dtype, shape in params]
    sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for _, dtype, shape in params]
    held = torch.empty(sum(sizes), dtype=torch.uint8)
    GROUPS[name]._get_backend(torch.device("cpu")).broadcast([held], dist.BroadcastOptions()).wait()
    parts = {}
    for (one, dtype, shape), part in zip(params, held.split(sizes), strict=True):
        tensor = part.view(dtype).view(shape)
        parts[one] = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return parts


def follow():
    """Do what each line of standard input says, and answer it with a line."""
    print(json.dumps({"here": True}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"ok": {"init": init, "destroy": destroy, "receive": receive}[told.pop("do")](**told)}
        except Exception as error:  # noqa: BLE001 - the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Worker:
    """One such process, which does one thing after the other and answers each."""

    def __init__(self, child):
        self.child = child
        assert self.answer() == {"here": True}

    def tell(self, do, **how):
        self.child.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self.child.stdin.flush()

    def answer(self):
        lines = (line for line in self.child.stdout if line.startswith("{"))  # torch's come between
        return json.loads(next(lines, '{"error": "gone"}'))


@contextmanager
def stock_workers(count):
    with ExitStack() as stack:
        yield [Worker(stack.enter_context(running_python(calling(follow)))) for _ in range(count)]
