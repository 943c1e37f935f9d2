"""Workers as stock engines have them: processes that form a group and receive by calls of torch's alone."""

from __future__ import annotations

import hashlib
import json
import queue
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from tests.processes import calling, running_python

WAIT_S = 60

GROUPS = {}
"""Those that a worker's process has joined, by name."""


def init(group, rank, **_):
    """What SGLang does: a store, a prefix, and a group beside the default one, which there is none of."""
    size, name = group["world_size"], group["group_name"]
    where = f"tcp://{group['master_address']}:{group['master_port']}"
    store, _, _ = next(rendezvous(where, rank, size, timeout=timedelta(seconds=1800)))
    made, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=1800),
        backend_options=None,
    )
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
        self.child, self._answers = child, queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.answer() == {"here": True}

    def _read(self):
        for line in self.child.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put({"error": "gone"})

    def tell(self, do, **how):
        self.child.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self.child.stdin.flush()

    def answer(self):
        return self._answers.get(timeout=WAIT_S)

    def freeze(self):
        self.child.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.child.send_signal(signal.SIGCONT)


@contextmanager
def stock_workers(count):
    with ExitStack() as stack:
        yield [Worker(stack.enter_context(running_python(calling(follow)))) for _ in range(count)]
