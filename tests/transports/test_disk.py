"""`DiskTransport` beyond the contract: what is published, how long it stays, and what happens when no space is left."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_checkpoint, tiny_config, tiny_model
from tests.processes import calling, python, running_python
from tests.transports import disk_ends
from tests.transports.disk_ends import everything, joined, publish, versions, weights
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, any_bits, same_bits
from torchrl_ext.weights.derived import MappedSource
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import MappingSource, as_source

IN_A_SMALL_FILESYSTEM = ("unshare", "--user", "--map-root-user", "--mount")

root, trainer, worker = disk_ends.root, disk_ends.trainer, disk_ends.worker


class TestFiles:
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_version_loads_with_from_pretrained(self, tmp_path, root, tied):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base = tiny_checkpoint(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=tied)
        model = tiny_model(seed=3, dtype=torch.bfloat16, tie_word_embeddings=tied)
        trainer = tx.DiskTransport(root, shard_bytes=200_000, files=base)
        trainer.send_weights("policy", model)
        folder = root / "weight_v000001"
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.dtype == torch.bfloat16
        for (name, sent), (other, found) in zip(
            sorted(model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
        ):
            assert name == other
            assert same_bits(sent, found), name
        assert AutoTokenizer.from_pretrained(folder).decode([5]) == AutoTokenizer.from_pretrained(base).decode([5])
        trainer.shutdown()

    def test_a_model_brings_its_own_config_with_the_dtype_that_is_sent(self, root, trainer):
        for dtype in (torch.float32, torch.bfloat16):
            trainer.send_weights("policy", MappedSource(as_source(tiny_model()), dtype=dtype))
        found = [json.loads((folder / "config.json").read_bytes()) for folder in sorted(root.glob("weight_v*"))]
        assert [config["dtype"] for config in found] == ["float32", "bfloat16"]
        for config in found:
            assert config["architectures"] == ["Qwen3ForCausalLM"]
            assert config["hidden_size"] == tiny_config().hidden_size

    def test_the_reference_library_reads_shards_of_mixed_dtypes(self, root, trainer):
        sent = {
            f"{i}": any_bits(dtype, 3 * i + 1) for i, dtype in enumerate([torch.int8, torch.bfloat16, torch.float64])
        }
        sent |= {"b": any_bits(torch.bool, 7), "e": any_bits(torch.float32, 0, 4), "s": any_bits(torch.int64)}
        trainer.send_weights("policy", sent)
        found = load_file(root / "weight_v000001" / "model.safetensors")
        assert set(found) == set(sent)
        for name, tensor in sent.items():
            assert same_bits(found[name], tensor), name

    def test_no_shard_is_larger_than_its_bound_but_for_one_tensor(self, root, trainer):
        trainer.send_weights("policy", {**weights(1), "v": torch.zeros(5000)})
        index = json.loads((root / "weight_v000001" / "model.safetensors.index.json").read_bytes())
        assert index["metadata"] == {"total_size": 20 * 2000 + 20000, "version": "000001"}  # other readers look for it
        for name in set(index["weight_map"].values()):
            tensors = load_file(root / "weight_v000001" / name)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4096
            assert {index["weight_map"][key] for key in tensors} == {name}

    def test_the_manifest_says_what_the_version_holds(self, root, trainer):
        sent = {"a": any_bits(torch.bfloat16, 4, 5)}
        trainer.send_weights("policy", sent)
        folder = root / "weight_v000001"
        manifest = json.loads((folder / "manifest.json").read_bytes())
        (row,) = manifest.pop("params")
        assert row.pop("checksum") == tensor_digest(sent["a"])
        assert row == {"name": "a", "dtype": "bfloat16", "shape": [4, 5], "file": "model.safetensors"}
        assert manifest["version"] == 1
        assert manifest["base_version"] is None
        assert manifest["files"] == {
            path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
        }

    def test_given_files_win_over_those_of_the_source(self, root):
        trainer = tx.DiskTransport(root, files={"config.json": b"{}", "notes.txt": b"hello"})
        trainer.send_weights("policy", tiny_model())
        assert (root / "weight_v000001" / "config.json").read_bytes() == b"{}"
        assert (root / "weight_v000001" / "notes.txt").read_bytes() == b"hello"
        trainer.shutdown()

    @pytest.mark.parametrize("name", ["../config.json", "a/b", "", ".hidden", "manifest.json", "model.safetensors"])
    def test_files_that_would_not_be_companions_are_refused(self, root, name):
        with pytest.raises(ConfigError, match="a checkpoint cannot hold a file called"):
            tx.DiskTransport(root, files={name: b""})

    def test_a_model_directory_that_is_not_there_is_refused(self, root):
        with pytest.raises(ConfigError, match="no directory"):
            tx.DiskTransport(root, files=root / "nowhere")

    def test_publishing_needs_less_memory_than_two_shards(self, root):
        python(MEASURE_PEAK, root, fresh=True)  # a fork copies what it touches


MEASURE_PEAK = """
import sys, torch
from torchrl_ext import DiskTransport, WeightSource
from torchrl_ext.types import ParamMeta
SHARD, COUNT, SIZE = 96 << 20, 96, 4 << 20

class Gathering(WeightSource):  # every tensor is made for the pass, as a gathered one is
    def params(self):
        return tuple(ParamMeta(f"w{i:03d}", torch.uint8, (SIZE,)) for i in range(COUNT))
    def __iter__(self):
        for i in range(COUNT):
            yield f"w{i:03d}", torch.full((SIZE,), i, dtype=torch.uint8)

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

transport = DiskTransport(sys.argv[1], shard_bytes=SHARD)
transport.send_weights({"x": torch.zeros(1)})  # threads, imports
open("/proc/self/clear_refs", "w").write("5")
before = peak()
transport.send_weights(Gathering())
assert peak() - before < 2 * SHARD, (peak() - before) / SHARD
"""


class TestLifetime:
    def test_older_versions_go_once_no_engine_may_read_them(self, root, trainer):
        trainer.open(1, (), Deadline(WAIT_S))
        for version in (1, 2, 3):
            handoff, _ = publish(trainer, weights(version), version)
        assert versions(root) == ["weight_v000001", "weight_v000002", "weight_v000003"]
        handoff.served(2)
        assert versions(root) == ["weight_v000002", "weight_v000003"]
        handoff.served(3)
        assert versions(root) == ["weight_v000003"]

    def test_keep_files_keeps_them(self, root):
        trainer = tx.DiskTransport(root, keep_files=True)
        for version in (1, 2):
            trainer.send_weights("policy", weights(version))
        publish(trainer, weights(3), 3)[0].served(3)
        assert versions(root) == ["weight_v000001", "weight_v000002", "weight_v000003"]
        trainer.shutdown()

    def test_alone_the_newest_two_stay(self, root, trainer):
        for version in range(1, 6):
            trainer.send_weights("policy", weights(version))
        assert versions(root) == ["weight_v000004", "weight_v000005"]

    def test_a_failed_update_keeps_what_the_engine_serves_on_disk(self, root, trainer):
        policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
        sender = tx.WeightSender(trainer, InProcessEngine(served))
        sender.update_weights(policy)
        with pytest.raises(tx.WeightSyncError):
            sender.update_weights({"weight": torch.zeros(4, 3)})
        assert "weight_v000001" in versions(root)
        sender.update_weights(policy)
        assert len(versions(root)) == 1

    def test_numbers_go_on_after_a_restart(self, root, trainer, worker):
        trainer.send_weights("policy", weights(1))
        trainer.send_weights("policy", weights(2))
        trainer.shutdown()
        again = tx.DiskTransport(root)
        assert again.latest_version() == 2
        again.send_weights("policy", weights(3))
        assert worker.receive_weights(WAIT_S)["w00"][0] == 3
        assert worker.received_version == 3
        again.shutdown()

    def test_a_number_is_not_used_again_when_the_pointer_did_not_move(self, root, trainer, worker):
        trainer.send_weights("policy", weights(1))
        shutil.copytree(root / "weight_v000001", root / "weight_v000002")  # renamed, then killed
        assert worker.receive_weights(WAIT_S)["w00"][0] == 1
        trainer.send_weights("policy", weights(3))
        assert worker.receive_weights(WAIT_S)["w00"][0] == 3
        assert worker.received_version == 3

    def test_a_second_trainer_on_the_root_is_refused_until_the_first_leaves(self, root, trainer):
        trainer.send_weights("policy", weights(1))
        second = tx.DiskTransport(root)
        with pytest.raises(StoreError, match="another trainer publishes into"):
            second.send_weights("policy", weights(2))
        with pytest.raises(AssertionError, match="another trainer publishes into"):
            python("import sys, torchrl_ext as tx; tx.DiskTransport(sys.argv[1]).send_weights({})", root)
        assert versions(root) == ["weight_v000001"]
        trainer.shutdown()
        second.send_weights("policy", weights(2))
        second.shutdown()

    def test_a_trainer_that_is_forgotten_leaves_its_root(self, root):
        tx.DiskTransport(root).send_weights("policy", weights(1))
        tx.DiskTransport(root).send_weights("policy", weights(2))

    def test_what_a_killed_trainer_left_is_swept_and_the_old_version_stays(self, root, worker):
        with running_python(calling(stops_half_way, str(root))) as child:
            assert child.stdout.readline() == "half-way\n"
        assert any(".tmp-" in name for name in everything(root))
        assert worker.receive_weights(WAIT_S)["w00"][0] == 1
        assert worker.receive_weights(0.0) is None
        trainer = tx.DiskTransport(root)
        trainer.send_weights("policy", weights(2))
        assert everything(root) == ["latest", "weight_v000001", "weight_v000002"]
        assert worker.receive_weights(WAIT_S)["w00"][0] == 2
        trainer.shutdown()

    def test_the_probe_goes_with_the_next_version_and_with_the_trainer(self, root, trainer):
        trainer.open(1, (), Deadline(WAIT_S))
        assert len(everything(root)) == 1
        trainer.send_weights("policy", weights(1))
        assert everything(root) == ["latest", "weight_v000001"]
        trainer.open(1, (), Deadline(WAIT_S))
        trainer.shutdown()
        assert everything(root) == ["latest", "weight_v000001"]


def stops_half_way(root):
    """A trainer that stops, and says so, in the middle of its second version."""

    class Hanging(MappingSource):
        def __iter__(self):
            yield from list(super().__iter__())[:10]
            print("half-way", flush=True)
            sys.stdin.read()

    transport = tx.DiskTransport(root, shard_bytes=4096)
    transport.send_weights(weights(1))
    transport.open(1, (), Deadline(WAIT_S))
    transport.send_weights(Hanging(weights(1)))


class TestNoSpace:
    def test_too_little_space_is_told_before_anything_is_written(self, tmp_path):
        said = in_a_small_filesystem(tmp_path, 10 << 20)
        assert "No space left on device" in said
        assert "10,4" in said  # bytes needed, of which 10,485,760 are the tensor
        assert "older versions are still in place" in said

    def test_space_that_runs_out_half_way_loses_nothing(self, tmp_path):
        said = in_a_small_filesystem(tmp_path, 3 << 20, others=4 << 20)
        assert "No space left on device" in said
        assert "3,1" in said

    def test_a_file_size_limit_is_told_and_loses_nothing(self, root):
        python(calling(meets_a_file_size_limit, str(root)))


def in_a_small_filesystem(folder, size, others=0):
    if subprocess.run([*IN_A_SMALL_FILESYSTEM, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a filesystem of his own")
    return python(calling(runs_out_of_space, str(folder), size, others))


def runs_out_of_space(folder, size, others):
    """Send ``size`` bytes into a file system of 5 MiB, of which another program takes ``others`` meanwhile."""
    root, user, group, libc = Path(folder), os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x10020000) == 0, ctypes.get_errno()  # CLONE_NEWUSER | CLONE_NEWNS, as unshare(1) does it
    for name, said in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(said)
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0, ctypes.get_errno()  # MS_REC | MS_PRIVATE
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", root], check=True)

    class Filling(MappingSource):
        def __iter__(self):
            (root / "other").write_bytes(bytes(others))
            yield from super().__iter__()

    sender = tx.DiskTransport(root, shard_bytes=1 << 20)
    sender.send_weights({"x": torch.ones(100_000, dtype=torch.uint8)})
    with pytest.raises(StoreError) as met:
        sender.send_weights(Filling({"x": torch.zeros(size, dtype=torch.uint8)}))
    assert not [path for path in root.iterdir() if "tmp" in path.name]
    assert tx.DiskTransport(root).receive_weights(WAIT_S)["x"].sum() == 100_000
    (root / "other").unlink(missing_ok=True)
    sender.send_weights({"x": torch.full((1 << 20,), 2, dtype=torch.uint8)})
    assert tx.DiskTransport(root).receive_weights(WAIT_S)["x"].sum() == 2 << 20
    print(met.value)


def meets_a_file_size_limit(root):
    sender = tx.DiskTransport(root)
    sender.send_weights({"x": torch.ones(1000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(StoreError, match=r"(?s)File too large.*4,19"):
        sender.send_weights({"x": torch.ones(1 << 20)})
    assert sorted(os.listdir(root)) == ["latest", "weight_v000001"]
    assert tx.DiskTransport(root).receive_weights(WAIT_S)["x"].sum() == 1000


class TestCopiesOnTheHost:
    """``local_dir``: a version is copied to the engine's host while it serves, and loaded from there."""

    def ends(self, root, local, count=1):
        trainer = tx.DiskTransport(root, local_dir=local)
        return trainer, joined(trainer, count)

    def test_what_is_loaded_comes_from_the_copy_also_when_the_root_is_gone(self, tmp_path, root):
        trainer, (worker,) = self.ends(root, tmp_path / "nvme" / "copy")
        (tmp_path / "nvme").mkdir()
        for seed in (1, 2):
            sent = weights(seed)
            _, arrival = publish(trainer, sent, seed)
            worker.stage(seed, None, Deadline(WAIT_S))
            shutil.rmtree(root / f"weight_v{seed:06d}")
            found = dict(worker.receive(arrival, {}, Deadline(WAIT_S)))
            assert found.keys() == sent.keys() and all(same_bits(found[name], sent[name]) for name in sent)
            state = json.loads((tmp_path / "nvme/copy/.weight_sync/state.json").read_bytes())
            assert state["version"] == f"{seed:06d}"

    def test_engines_of_a_host_share_one_copy(self, tmp_path, root):
        trainer, workers = self.ends(root, tmp_path / "copy", 2)
        _, arrival = publish(trainer, weights(1), 1)
        files = []
        for worker in workers:
            worker.stage(1, None, Deadline(WAIT_S))
            files.append({path.name: path.stat().st_ino for path in (tmp_path / "copy").glob("*.safetensors")})
        assert files[0] and files[0] == files[1]
        for worker in workers:
            assert dict(worker.receive(arrival, {}, Deadline(WAIT_S))).keys() == weights(1).keys()

    def test_a_version_that_came_without_a_prefetch_is_copied_when_it_is_loaded(self, tmp_path, root):
        trainer, worker = tx.DiskTransport(root), tx.DiskTransport(root, local_dir=tmp_path / "copy")
        trainer.send_weights("policy", weights(1))
        found = worker.receive_weights(WAIT_S)
        assert all(same_bits(found[name], tensor) for name, tensor in weights(1).items())
        assert list((tmp_path / "copy").glob("*.safetensors"))
