"""A stock vLLM server follows by files and by its nccl backend, in which gloo stands for NCCL, which no CPU has."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

import torchrl_ext as tx
from tests.engine.served import ServedVLLM, until_met
from tests.engine.test_native import as_sent, module_of, some_params, tensors
from tests.models import tiny_model
from tests.processes import WAIT_S
from torchrl_ext.errors import UpdateError
from torchrl_ext.testing import same_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import MappingSource, as_source

pytestmark = pytest.mark.engine

_GLOO = '''
"""Has vLLM's nccl backend run by gloo: its communicator, and the streams around it. No part of torchrl_ext."""
import contextlib, os
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore


class Group:
    def __init__(self, init, rank):
        wait = timedelta(seconds=300)
        store = dist.TCPStore(init.master_address, init.master_port, init.world_size, False, wait, use_libuv=False)
        name = "torchrl_ext"
        keys = PrefixStore("cpu/", PrefixStore(name + "/", PrefixStore(name, store)))
        self.pg = dist.ProcessGroupGloo(keys, rank, init.world_size, wait)

    def broadcast(self, tensor, src=0, stream=None):
        with open(os.environ["GLOO_WIRE_SEEN"], "a") as seen:  # what came before is loaded
            seen.write(".")
        self.pg.broadcast(tensor, src).wait()

    def destroy(self):
        self.pg = None


class OnCPU:
    """torch, in which a stream is nothing, and the one device has a number."""
    cuda = SimpleNamespace(stream=lambda stream: contextlib.nullcontext(), Stream=torch.cuda.Stream)
    accelerator = SimpleNamespace(current_device_index=lambda: 0, synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(torch, name)


def register():
    from vllm.distributed.weight_transfer import base, nccl_engine, packed_tensor

    base.torch = packed_tensor.torch = OnCPU()
    packed_tensor._get_streams = lambda device, count: (SimpleNamespace(synchronize=lambda: None),) * count
    nccl_engine.worker_init_process_group = lambda init, parallel: Group(init, parallel.rank + init.rank_offset)
'''


@pytest.fixture(scope="module")
def stock(checkpoint, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    (site / "gloo_wire.py").write_text(_GLOO)
    info = site / "gloo_wire-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo_wire\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo_wire = gloo_wire:register\n")
    with ServedVLLM.start(
        checkpoint,
        max_model_len=256,
        dtype="float32",
        plugin=False,
        environ={"PYTHONPATH": str(site), "VLLM_PLUGINS": "gloo_wire", "GLOO_WIRE_SEEN": str(site / "seen")},
        extra_args=["--weight-transfer-config", json.dumps({"backend": "nccl"})],
        log_path=tmp_path_factory.mktemp("log") / "vllm.log",
    ) as server:
        served = ServedVLLM(server)
        served.broadcasts = lambda: len((site / "seen").read_bytes())
        yield served


def sending(stock, *, bucket_bytes=1 << 14, **settings):
    how = {"backend": "gloo", "bucket_bytes": bucket_bytes, "timeout_s": WAIT_S}
    transport = tx.make_transport("native", make="vllm", **how)
    return tx.WeightSender(transport, tx.connect(stock.url), **settings)


def test_five_updates_by_its_own_backend_leave_it_at_the_trainers_weights(stock):
    (info,) = tx.discover(stock.url)
    assert info.transports == ("disk", "native") and info.stock
    pid, sender = stock.server.pid, sending(stock)
    for seed in range(1, 6):
        model = tiny_model(seed)
        report = sender.update_weights(model)
        assert stock.says(model) and stock.version() == str(report.version)
        assert (report.verified, report.proof) == (False, "sent")
    sender.shutdown()
    assert stock.server.pid == pid and stock.server.alive() and not stock.paused()


def test_its_outputs_prove_an_update(stock):
    sender, model = sending(stock, verify="outputs"), tiny_model(7)
    sender.register_model(model)
    report = sender.update_weights()
    assert report.proof == "outputs" and report.engines[0].max_gap < 1e-3
    sender.shutdown()


def test_it_loads_files_by_its_own_method(stock, tmp_path):
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path), tx.connect(stock.url))
    for seed in (11, 12, 13):
        model = tiny_model(seed)
        report = sender.update_weights(model)
        assert stock.says(model) and stock.version() == str(report.version) and not report.verified
    sender.shutdown()


class BrokenAttention(MappingSource):
    """A source that fails between the parts of a layer that the engine keeps as one, once it has loaded the first."""

    def __init__(self, weights, stock):
        super().__init__(weights)
        self.stock, self.before = stock, stock.broadcasts()

    def __iter__(self):
        for number, (name, tensor) in enumerate(super().__iter__(), 1):
            if name.endswith("1.self_attn.k_proj.weight"):
                loaded = self.before + number  # it waits for this one
                until_met(lambda: self.stock.broadcasts() == loaded)  # noqa: B023 - called here alone
                raise RuntimeError("it broke")
            yield name, tensor


def half_an_update(sender, stock, seed):
    with pytest.raises(UpdateError, match="it broke"):
        sender.update_weights(BrokenAttention(dict(as_source(tiny_model(seed))), stock))
    assert [row.state for row in sender.engine.rows()] == ["paused"]


def test_a_layer_that_was_filled_by_half_is_whole_after_the_next_update_of_this_trainer_or_another(stock):
    sender, model = sending(stock, bucket_bytes=1), tiny_model(23)  # every tensor travels alone
    sender.update_weights(tiny_model(21))
    half_an_update(sender, stock, 22)
    sender.update_weights(model)
    assert stock.says(model)
    half_an_update(sender, stock, 24)
    sender.shutdown()
    sender, model = sending(stock), tiny_model(25)
    sender.update_weights(model)
    assert stock.says(model) and not stock.paused()
    sender.shutdown()


@pytest.mark.parametrize("seed", range(4))
def test_vllms_own_reader_takes_every_call_apart_into_the_same_bits(seed, monkeypatch):
    theirs = module_of("vllm", "vllm", "distributed", "weight_transfer", "packed_tensor.py")
    nothing = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(theirs, "_get_streams", lambda device, count: (nothing,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    found, size = {}, 512

    def read(metas, carried):
        def broadcast(tensor, src):
            tensor.copy_(carried.pop(0))

        rows = iter([(meta.name, (list(meta.shape), meta.dtype)) for meta in metas])
        how = {"buffer_size_bytes": size, "num_buffers": 2, "device": "cpu"}
        theirs.packed_nccl_broadcast_consumer(rows, SimpleNamespace(broadcast=broadcast), 0, found.update, **how)
        assert not carried

    params = some_params(seed)
    for metas, carried in as_sent(params, "vllm", size):
        read(metas, carried)
    sent = {name: tensor for name, tensor in tensors(params).items() if tensor.numel()}
    assert found.keys() == sent.keys() and all(same_bits(found[name], sent[name]) for name in sent)
    askew = [ParamMeta("a", torch.int8, (3,)), ParamMeta("b", torch.float32, (2,))]
    with pytest.raises(RuntimeError, match="divisible"):  # without our cuts
        read(askew, [torch.zeros(11, dtype=torch.uint8)])
