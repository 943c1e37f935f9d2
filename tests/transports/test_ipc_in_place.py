"""`IPCTransport` with weights that lie in shared memory already: copied once, and let go of when the trainer leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from tests.models import tiny_model
from tests.processes import running_python
from tests.transports.ipc_ends import WORKER, joined, weights
from torchrl_ext.errors import ManifestError, TransportError, WeightSyncError
from torchrl_ext.testing import WAIT_S, any_bits, same_bits
from torchrl_ext.transports.ipc import in_place
from torchrl_ext.transports.ipc.in_place import groups, offer
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.derived import CastSource, RenamedSource
from torchrl_ext.weights.source import MappingSource, as_source

TRAINER = """
import os, signal, sys
import torch, torchrl_ext as tx
trainer = tx.make_transport("ipc", channel=sys.argv[1], bucket_bytes=4096, timeout_s=60)
trainer.send_weights({"a": torch.ones(1 << 20).share_memory_()})
print("sent", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def make(tmp_path):
    made = []

    def end(**settings):
        made.append(tx.make_transport("ipc", channel=str(tmp_path), **{"bucket_bytes": 4096, **settings}))
        return made[-1]

    yield end
    for transport in made:
        transport.shutdown()


def shared(tensors):
    return {name: tensor.clone().share_memory_() for name, tensor in tensors.items()}


def offered(tensors):
    source = as_source(tensors)
    return offer(source.params(), source.held())


def mapped(pid):
    """Shared files of torch's that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("/torch_")


def sent(trainer, worker, tensors, **how):
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(worker.receive_weights, WAIT_S, **how)
        trainer.send_weights(tensors)
        return arriving.result(WAIT_S)


def test_nothing_is_staged_and_every_byte_arrives(make, monkeypatch):
    dtypes = [torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.int32]
    tensors = shared({f"{i:03d}": any_bits(dtypes[i % 5], 1 + (i * 37) % 301, 7, seed=i) for i in range(40)})
    trainer, worker = make(), make()
    monkeypatch.setattr(trainer, "_send_staged", None)
    found = sent(trainer, worker, tensors)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    into["001"] = torch.zeros(7, tensors["001"].shape[0], dtype=tensors["001"].dtype).t()
    sent(trainer, worker, tensors, weights=into)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor) and same_bits(into[name], tensor), name
        assert found[name].data_ptr() != tensor.data_ptr()


def test_large_updates_arrive_too(make, monkeypatch):
    tensors = shared({f"{i}": any_bits(torch.uint8, (9 << 20) + i, seed=i) for i in range(9)})
    trainer, worker = make(bucket_bytes=8 << 20), make()
    monkeypatch.setattr(trainer, "_send_staged", None)
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sent(trainer, worker, tensors, weights=held)
    assert all(same_bits(held[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update(b=torch.ones(3)),
        lambda tensors: tensors.update(b=torch.ones(3, 4).share_memory_().t()),
        lambda tensors: tensors.update(b=torch.ones(0).share_memory_()),
        lambda tensors: tensors.update(b=torch.ones(3, dtype=torch.complex64).share_memory_().conj()),
    ],
)
def test_where_one_tensor_is_elsewhere_all_are_staged(make, change):
    tensors = shared({"a": torch.arange(9.0)})
    change(tensors)
    assert offered(tensors) is None
    found = sent(make(), make(), tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_it_can_be_turned_off(make, monkeypatch):
    trainer, worker = make(in_place=False), make()
    monkeypatch.setattr(trainer, "_send_in_place", None)
    assert torch.equal(sent(trainer, worker, shared({"a": torch.ones(3)}))["a"], torch.ones(3))


def test_views_of_one_storage_and_a_module_are_found_in_place():
    flat = torch.arange(60.0).share_memory_()
    found = offered({"a": flat[:20], "b": flat[20:].view(4, 10)})
    assert len(found.info["files"]) == 1 and [row[1] for row in found.info["rows"]] == [0, 80]
    json.dumps(found.info)
    model = tiny_model(0)
    assert offered(model) is None
    model.share_memory()
    assert len(offered(model).info["rows"]) == len(as_source(model).params())


def test_a_worker_needs_no_descriptor_per_tensor(tmp_path):
    count, room = 150, 48
    with running_python(FEW_DESCRIPTORS, str(tmp_path), room) as child:
        trainer = tx.make_transport("ipc", channel=str(tmp_path), bucket_bytes=4096)
        trainer.send_weights(shared(weights(1, count)))
        assert [child.stdout.readline() for _ in range(2)] == ["up\n", f"1 {300 * count}\n"]
        assert mapped(child.pid) == count
        trainer.shutdown()


FEW_DESCRIPTORS = """
import os, resource, sys
import torch, torchrl_ext as tx
worker = tx.make_transport("ipc", channel=sys.argv[1], timeout_s=60)
soft = len(os.listdir("/proc/self/fd")) + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print("up", flush=True)
received = worker.receive_weights(60)
print(worker.received_version, int(sum(tensor.sum() for tensor in received.values())), flush=True)
sys.stdin.readline()
"""


def test_what_a_worker_cannot_map_is_staged_the_next_time(make, monkeypatch):
    def refused(handle, sealed):
        raise TransportError("too many mappings")

    trainer, worker, tensors = make(), make(), shared(weights())
    monkeypatch.setattr(in_place, "attach", refused)
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(worker.receive_weights, WAIT_S)
        with pytest.raises(TransportError, match=r"not taken by .*too many mappings|no worker is left.*many mappings"):
            trainer.send_weights(tensors)
        with pytest.raises(TransportError, match="too many mappings"):
            arriving.result(WAIT_S)
    assert torch.equal(sent(trainer, worker, tensors)["00"], tensors["00"])


def test_what_is_cast_or_gathered_is_not_offered_and_what_is_renamed_is():
    source = MappingSource(shared({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}))
    assert set(RenamedSource(source, lambda name: "x." + name).held()) == {"x.a", "x.b"}
    assert set(CastSource(source, torch.bfloat16).held()) == {"b"}
    assert set(CastSource(source, torch.float32).held()) == {"a", "b"}


def test_a_group_has_the_capacity_or_one_parameter():
    params = [ParamMeta(str(i), torch.uint8, (size,)) for i, size in enumerate((3, 4, 20, 1, 1, 8))]
    assert groups(params, 8) == [(0, 2), (2, 3), (3, 5), (5, 6)]


def test_several_processes_keep_the_map_while_the_trainer_lives_and_no_longer(tmp_path):
    with (
        running_python(WORKER, str(tmp_path)) as first,
        running_python(WORKER, str(tmp_path)) as second,
    ):
        trainer = tx.make_transport("ipc", channel=str(tmp_path), bucket_bytes=4096, workers=2)
        tensors = shared(weights(1))
        trainer.send_weights(tensors)
        assert mapped(first.pid) == mapped(second.pid) == len(tensors)
        for tensor in tensors.values():
            tensor.fill_(2)
        trainer.send_weights(tensors)
        trainer.send_weights(shared(weights(3)))  # others: those of before are let go of
        assert mapped(first.pid) == len(tensors)
        trainer.shutdown()
        for child in (first, second):
            told = [child.stdout.readline() for _ in range(4)]
            assert told == ["up\n", "1 12000\n", "2 24000\n", "3 36000\n"]
            gone(child.pid)


def gone(pid):
    until = time.monotonic() + WAIT_S
    while mapped(pid):
        assert time.monotonic() < until


def test_a_trainer_that_is_killed_frees_its_weights(tmp_path):
    """Also in a worker that does not wait for it."""
    code = WORKER.replace("while True:", "for _ in range(1):") + "\nsys.stdin.readline()\n"
    with running_python(code, str(tmp_path)) as worker, running_python(TRAINER, str(tmp_path)) as trainer:
        assert trainer.stdout.readline() == "sent\n"
        assert [worker.stdout.readline() for _ in range(2)] == ["up\n", f"1 {1 << 20}\n"]
        assert mapped(worker.pid) == 1
        os.kill(trainer.pid, signal.SIGKILL)
        gone(worker.pid)
        assert worker.poll() is None


def test_a_tensor_that_moves_stops_the_update_before_it_is_complete(make):
    tensors = shared({"a": torch.ones(3), "b": torch.ones(3)})

    class Moving(MappingSource):
        def __iter__(self):
            for name, tensor in super().__iter__():
                yield name, tensor.clone() if name == "b" else tensor

    trainer, worker = make(), make()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(worker.receive_weights, WAIT_S)
        with pytest.raises(ManifestError, match="parameter 1 of the source moved"):
            trainer.send_weights(Moving(tensors))
        with pytest.raises(WeightSyncError, match="stopped: parameter 1 of the source moved"):
            arriving.result(WAIT_S)
    assert torch.equal(sent(trainer, worker, tensors)["b"], torch.ones(3))


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": [{"kind": "cuda"}]},
        {"rows": []},
        {"rows": [[0, -4]]},
        {"rows": [[0, 4]]},
        {"rows": [[1, 0]]},
        {"rows": [[0.0, 0]]},
        {"rows": [{}]},
    ],
)
def test_a_place_that_cannot_be_is_refused(make, change):
    trainer, worker = make(), make()
    joined(trainer, worker)
    tensors = shared({"a": torch.ones(4096)})
    handoff = trainer.prepare(MappingSource(tensors), 1)
    into = {"a": torch.zeros(4096)}
    with pytest.raises(WeightSyncError):
        list(worker.receive({**handoff.info, "in_place": {**handoff.info["in_place"], **change}}, into))
    assert not into["a"].any()
