"""Stock servers, with nothing of ours, follow a trainer by files and broadcasts, and come back after failures.

gloo stands for NCCL in vLLM's own backend, since no CPU has NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

import torchrl_ext as tx
from tests.models import tiny_model
from tests.processes import WAIT_S, calling, finished
from tests.real_engines.conftest import small
from tests.real_engines.served import FORKING, ServedSGLang, ServedVLLM, demo, sending, serving, until_met
from tests.turns import Meanwhile
from torchrl_ext.base.errors import UpdateError, WeightSyncError
from torchrl_ext.data.weights.derived import as_source

pytestmark = pytest.mark.engine

SMALL = 1 << 14  # bytes of a bucket: an update takes many calls

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


stock_sglang = small(ServedSGLang, "module", plugin=False)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def stock(request, checkpoint, tmp_path_factory):
    if request.param == "sglang":
        yield request.getfixturevalue("stock_sglang")
        return
    site = tmp_path_factory.mktemp("site")
    (site / "gloo_wire.py").write_text(_GLOO)
    info = site / "gloo_wire-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo_wire\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo_wire = gloo_wire:register\n")
    path = os.pathsep.join((FORKING, str(site)))
    environ = {"PYTHONPATH": path, "VLLM_PLUGINS": "gloo_wire", "GLOO_WIRE_SEEN": str(site / "seen")}
    settings = {"max_model_len": 256, "dtype": "float32", "plugin": False, "log_path": site / "vllm.log"}
    settings["extra_args"] = ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    with serving(ServedVLLM, checkpoint, environ=environ, **settings) as served:
        served.broadcasts = lambda: len((site / "seen").read_bytes())
        yield served


BACKENDS = {"vllm": {"backend": "gloo"}, "sglang": {}}


def sender_to(kind, url, bucket_bytes=SMALL, **settings):
    transport = tx.make_transport("native", make=kind, bucket_bytes=bucket_bytes, timeout_s=WAIT_S, **BACKENDS[kind])
    return tx.WeightSender(transport, tx.connect(url), **settings)


@contextlib.contextmanager
def broadcasting(served, **settings):
    """A sender to one server by its own way of broadcasts."""
    sender = sender_to(served.kind, served.url, **settings)
    try:
        yield sender
    finally:
        sender.shutdown()


def test_stock_engine_matches_the_trainer_after_each_broadcast(stock):
    (info,) = tx.discover(stock.url)
    assert info.transports == ("disk", "native") and info.stock
    pid = stock.server.pid
    with broadcasting(stock) as sender:
        for seed in range(1, 6):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert stock.says(model) and stock.version() == str(report.version)
            assert (report.verified, report.proof, report.transport) == (False, "sent", "native")
    assert stock.server.pid == pid and stock.server.alive() and stock.says(tiny_model(5)) and not stock.paused()


def test_it_loads_full_files_and_the_error_says_what_it_cannot(stock, tmp_path):
    with sending("disk", tmp_path, stock) as sender:
        for seed in (11, 12, 13):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert stock.says(model) and stock.version() == str(report.version)
            assert not report.verified  # nobody could hold what it has against the trainer's digests
    refused = pytest.raises(WeightSyncError, match=r"(?s)collective.*(sglang\.srt\.plugins|vllm\.general_plugins)")
    with sending("collective", tmp_path, stock) as sender, refused:
        sender.update_weights(tiny_model(76))
    assert stock.says(model)


def half_an_update(sender, served, seed):
    """An update whose source breaks between parts of a layer that engines keep as one, when the first is loaded."""
    source, name = as_source(tiny_model(seed)), "model.layers.1.self_attn.k_proj.weight"
    place = [meta.name for meta in source.params()].index(name)
    before = served.broadcasts() if served.kind == "vllm" else 0

    def breaks():
        if served.kind == "vllm":
            until_met(lambda: served.broadcasts() == before + place + 1)  # it waits for this one
        raise RuntimeError("it broke")

    with pytest.raises(UpdateError, match="it broke"):
        sender.update_weights(Meanwhile(source, place, breaks))
    assert [row.state for row in sender.engine.look()] == ["paused"]


def test_half_loaded_layer_is_whole_after_the_next_update(stock):
    pid, model = stock.server.pid, tiny_model(33)
    with broadcasting(stock, bucket_bytes=1) as sender:  # every tensor travels alone
        sender.update_weights(tiny_model(31))
        half_an_update(sender, stock, 32)
        report = sender.update_weights(model)
        assert stock.says(model) and stock.version() == str(report.version)
        half_an_update(sender, stock, 34)
    with broadcasting(stock) as sender:
        model = tiny_model(35)
        sender.update_weights(model)
    assert stock.says(model) and not stock.paused() and stock.server.pid == pid


def dies(url):
    """Be a trainer that is killed half-way in its update."""
    source = Meanwhile(as_source(tiny_model(41)), 9, lambda: signal.raise_signal(signal.SIGKILL))
    sender_to("sglang", url).update_weights(source)


def test_another_trainer_takes_over_from_a_killed_trainer(stock_sglang):
    assert finished(calling(dies, stock_sglang.url)).returncode == -signal.SIGKILL
    model, pid = tiny_model(42), stock_sglang.server.pid
    with broadcasting(stock_sglang) as sender:
        sender.update_weights(model)
    assert stock_sglang.says(model) and stock_sglang.server.pid == pid


def test_the_demo_takes_its_own_wire(stock_sglang, checkpoint):
    told = demo("--steps", 2, "--engines", stock_sglang.url, "--model", checkpoint)
    assert told["transport"] == "native"
    assert {report["proof"] for report in told["syncs"]} == {"outputs"}
