"""Every registered transport passes the same suite."""

import json
import os
from contextlib import suppress
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrl_ext as tx
from tests.data.transports.standalone import Ends, StandaloneContract, assert_arrived
from tests.hostile import worse_json
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.base.registry import transports
from torchrl_ext.data.transports.base import Abilities, Worker
from torchrl_ext.testing import SMALL_BYTES, WAIT_S, free_port


class TestMemory(StandaloneContract):
    name = "memory"

    def make_ends(self, tmp_path):
        return Ends(*(tx.MemoryTransport(str(tmp_path)) for _ in range(2)))

    def make_trainer(self, tmp_path):
        return tx.MemoryTransport()


class UnderRoot(StandaloneContract):
    """Ends that share a directory."""

    settings: ClassVar = {}

    def make_ends(self, tmp_path):
        return Ends(self.make_trainer(tmp_path / "root"), tx.make_transport(self.name, root=tmp_path / "root"))

    def make_trainer(self, tmp_path):
        return tx.make_transport(self.name, root=tmp_path, shard_bytes=SMALL_BYTES, **self.settings)


class TestDisk(UnderRoot):
    name = "disk"


class TestDelta(UnderRoot):
    name, settings = "delta", {"encoding": "auto", "keyframe_every": 2}


class InGroup(StandaloneContract):
    """Ends that meet in a group of two, of which member 0 is the trainer."""

    settings: ClassVar = {}

    def make_ends(self, tmp_path):
        port = free_port()
        return Ends(*(self.make_member(rank, port) for rank in (0, 1)), in_group=True)

    def make_trainer(self, tmp_path):
        return self.make_member(0, free_port())

    def make_member(self, rank, port):
        settings = {**self.seat(rank), **self.settings, "timeout_s": WAIT_S}
        return tx.make_transport(self.name, master_port=port, **settings)

    def seat(self, rank):
        return {"rank": rank, "world_size": 2}


class TestCollective(InGroup):
    name, settings = "collective", {"master_address": "127.0.0.1", "bucket_bytes": SMALL_BYTES}


class TestIPC(InGroup):
    name, settings = "ipc", {"bucket_bytes": SMALL_BYTES}


class TestNativeSGLang(InGroup):
    name, settings = "native", {"make": "sglang", "backend": "gloo", "bucket_bytes": SMALL_BYTES}


class TestNativeVLLM(InGroup):
    name, settings = "native", {"make": "vllm", "backend": "gloo", "bucket_bytes": SMALL_BYTES}


class TestDeltaByBroadcast(InGroup):
    name, settings = "delta", {"carrier": "collective"}


class TestSharded(InGroup):
    name, settings = "sharded", {"master_address": "127.0.0.1", "bucket_bytes": SMALL_BYTES}

    def seat(self, rank):
        return {"worker": None if rank == 0 else 0, "workers": 1}


SUITES = [TestMemory, *UnderRoot.__subclasses__(), *InGroup.__subclasses__()]


def test_every_registered_transport_is_under_the_contract():
    assert {suite.name for suite in SUITES} == set(tx.transports())


REFUSED = {
    "collective": [{"rank": 2, "world_size": 2}, {"backend": "mpi"}, {"bucket_bytes": -1}],
    "delta": [{"encoding": "deltaz"}],
    "disk": [{"files": {name: b""}} for name in ("../x", "a/b", "", ".hidden", "manifest.json", "model.safetensors")],
    "ipc": [{"bucket_bytes": 100}, {"rank": 2, "world_size": 2}, {"timeout_s": 0}],
    "native": [{"make": "tensorrt"}, {"make": "vllm"}, {"bucket_bytes": 0}, {"timeout_s": 0}],
    "sharded": [{"bucket_bytes": 0}, {"worker": 2, "workers": 2}],
}


@pytest.mark.parametrize(("name", "how"), [(name, one) for name in REFUSED for one in REFUSED[name]], ids=str)
def test_settings_that_cannot_work_are_refused_at_once(name, how, tmp_path):
    where = {"root": tmp_path} if name in ("delta", "disk") and "carrier" not in how else {}
    with pytest.raises(ConfigError):
        tx.make_transport(name, **where, **how)


@pytest.mark.parametrize("suite", SUITES)
def test_worker_joins_damaged_offer_or_raises_our_error(suite, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_ext.data.transports.disk.VISIBLE_S", 0.0)
    trainer, ended = suite().make_trainer(tmp_path), Deadline(0.0)
    ended.stop.set()
    info = json.loads(json.dumps(trainer.open(1, (), Deadline(WAIT_S)).info))

    @settings(max_examples=20)
    @given(st.randoms(use_true_random=False))
    def join(draw):
        offer = worse_json(info, draw)
        with suppress(WeightSyncError):
            trainer.join(offer if isinstance(offer, dict) else {}, Worker(rank=draw.choice([1, 2])), ended).close()

    join()
    trainer.shutdown()


@pytest.mark.parametrize("suite", SUITES)
def test_updates_leave_no_threads_behind(suite, tmp_path):
    ends, counts, weights = suite().make_ends(tmp_path), [], {"w": torch.ones(40, 50), "b": torch.ones(7)}
    for version in range(23):
        weights["w"][0, version] = version
        assert_arrived(ends.exchange("policy", weights), weights)
        counts.append(len(os.listdir("/proc/self/task")))  # those of backends, too
    assert counts[-1] < counts[2] + 10
    ends.trainer.shutdown(), ends.worker.shutdown()


def test_table_of_abilities_shows_the_classes():
    rows = [line.split() for line in Abilities.__doc__.splitlines() if line.endswith((" yes", " no"))]
    shown = {name: Abilities(*(word == "yes" for word in words)) for name, *words in rows}
    assert shown == {name: transports.load(name).abilities for name in shown}
    assert shown.keys() == {name for name, summary in transports.names().items() if "of package" not in summary}
