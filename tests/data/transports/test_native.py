"""Transport native: its wires against readers that know only what stock engines do, and its trainer end against their
workers. The suite of every transport runs over both ends of ours."""

import hashlib
import json
import sys
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from tests.data.group.members import Interrupted, broken
from tests.processes import WAIT_S, calling, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, TransportError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Update
from torchrl_ext.data.transports.native import NativeTransport, layout_of
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.testing import DTYPES, any_bits

SHORT_S = 2


# how tensors are cut


SHAPES = [(), (0, 3), (1,), (7,), (33,), (40, 50), (3, 1, 5)]
PARAMS = st.lists(st.builds(ParamMeta, st.just("p"), st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=60)
SIZE = 512


@given(PARAMS, st.sampled_from(["sglang", "vllm"]))
def test_native_layout_covers_each_parameter_once_in_order(params, make):
    buckets, calls = layout_of(params, make, SIZE)
    carried = [(span.first, span.stop) for one in buckets for span in one.spans]
    for pairs in (calls, carried):
        assert [index for first, stop in pairs for index in range(first, stop)] == list(range(len(params)))
    expected = []
    for first, stop in calls:
        filled = 0
        for meta in params[first:stop]:  # one after the other without padding, as the readers of both engines count
            assert not meta.nbytes or filled % meta.dtype.itemsize == 0
            filled += meta.nbytes
            if make == "vllm" and filled > SIZE:
                expected.append(filled)
                filled = 0
        expected += [filled] if filled else []
        assert make == "vllm" or filled <= SIZE or sum(bool(meta.nbytes) for meta in params[first:stop]) == 1
    assert [bucket.nbytes for bucket in buckets if bucket.nbytes] == expected
    assert make == "vllm" or calls == [(bucket.spans[0].first, bucket.spans[-1].stop) for bucket in buckets]


# the trainer's end, and workers as stock engines have them


GROUPS = {}
"""Those that a stock worker's process has joined, by name."""


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


class StockWorker:
    """A process that forms a group and receives by calls of torch's alone; it answers one call after the other."""

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
        yield [StockWorker(stack.enter_context(running_python(calling(follow)))) for _ in range(count)]


@pytest.fixture(scope="module")
def workers():
    with stock_workers(4) as found:
        yield found


@pytest.fixture
def trainer(workers):
    made = NativeTransport(timeout_s=WAIT_S, bucket_bytes=1 << 16)
    yield made
    made.shutdown()


LARGE = {f"p{i}": torch.ones(1 << 20) for i in range(8)}


def connect(trainer, workers):
    """Form a group, and return its name."""
    handoff = trainer.open(len(workers), (), Deadline(trainer.timeout_s))
    for rank, worker in enumerate(workers, 1):
        worker.tell("init", group=handoff.info["group"], rank=rank)
    handoff.transfer(Deadline(trainer.timeout_s))
    assert [worker.answer() for worker in workers] == [{"ok": None}] * len(workers)
    return handoff.info["group"]["group_name"]


def prepared(trainer, source, version=1):
    return trainer.prepare(Update(source=source, version=version), Deadline(trainer.timeout_s))


def tell_to_receive(handoff, source, workers, name):
    rows = [meta.to_json() for meta in source.params()]
    for first, stop in handoff.info["calls"]:
        for worker in workers:
            worker.tell("receive", name=name, params=rows[first:stop])


def received(handoff, worker):
    return {name: digest for _ in handoff.info["calls"] for name, digest in worker.answer()["ok"].items()}


def weights(seed=0):
    found = {f"{dtype}".replace("torch.", ""): any_bits(dtype, 37, 11, seed=seed) for dtype in DTYPES}
    return found | {"large": any_bits(torch.bfloat16, 300, 400, seed=seed), "scalar": any_bits(torch.float32)}


def digests(named):
    return {name: hashlib.sha256(byte_view(tensor).numpy().tobytes()).hexdigest() for name, tensor in named.items()}


def send(trainer, workers, name, version=1):
    source = as_source(weights(version))
    handoff = prepared(trainer, source, version)
    tell_to_receive(handoff, source, workers, name)
    handoff.transfer(Deadline(WAIT_S))
    for worker in workers:
        assert received(handoff, worker) == digests(dict(source))


def leave(workers, name):
    for worker in workers:
        worker.tell("destroy", name=name)
    return [worker.answer() for worker in workers]


def test_every_bit_arrives_and_a_failed_transfer_frees_workers(trainer, workers):
    name = connect(trainer, workers)
    send(trainer, workers, name)
    send(trainer, workers, name, 2)
    source = Interrupted(weights(), 5, broken)
    handoff = prepared(trainer, source, 3)
    tell_to_receive(handoff, source, workers, name)
    with pytest.raises(ValueError, match="the source broke"):
        handoff.transfer(Deadline(WAIT_S))
    for worker in workers:  # as the client of an engine does after a failure
        worker.tell("destroy", name=name)
    for worker in workers:
        told = [worker.answer() for _ in handoff.info["calls"]]
        assert any("error" in answer for answer in told)
        assert worker.answer() == {"ok": None}
    again = connect(trainer, workers)
    assert (name, again) == ("torchrl_ext-1", "torchrl_ext-2")
    send(trainer, workers, again, 4)
    assert leave(workers, again) == [{"ok": None}] * 4


def test_missing_rank_ends_rendezvous_at_trainer_deadline(workers):
    trainer = NativeTransport(timeout_s=SHORT_S)
    handoff = trainer.open(3, (), Deadline(SHORT_S))
    for rank in (1, 2):
        workers[rank].tell("init", group=handoff.info["group"], rank=rank)
    with pytest.raises(DeadlineError, match="the 4 ranks of a group did not meet"):
        handoff.transfer(Deadline(SHORT_S))
    for rank in (1, 2):
        assert "error" in workers[rank].answer()
    trainer.shutdown()


def test_a_worker_that_dies_ends_the_update_at_once():
    with stock_workers(2) as two:
        trainer = NativeTransport(timeout_s=WAIT_S)
        connect(trainer, two)
        assert trainer.check_connection()
        handoff = prepared(trainer, as_source(LARGE))
        two[1].child.kill()
        with pytest.raises(TransportError, match="did not reach rank 1"):
            handoff.transfer(Deadline(WAIT_S))
        trainer.shutdown()
