"""`DiskTransport` beyond the contract: what is published, how long it stays, and what happens when no space is left."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchrl_ext as tx
from tests.data.transports import disk_ends
from tests.data.transports.disk_ends import everything, publish, versions, weights
from tests.memory import track_peak
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import calling, python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import StoreError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, same_bits

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
        assert model.state_dict().keys() == loaded.state_dict().keys()
        assert all(same_bits(sent, loaded.state_dict()[name]) for name, sent in model.state_dict().items())
        assert AutoTokenizer.from_pretrained(folder).decode([5]) == AutoTokenizer.from_pretrained(base).decode([5])
        trainer.shutdown()

    def test_published_version_has_model_config_with_sent_dtype(self, root, trainer):
        for dtype in (torch.float32, torch.bfloat16):
            trainer.send_weights("policy", MappedSource(as_source(tiny_model()), dtype=dtype))
        found = [json.loads((folder / "config.json").read_bytes()) for folder in sorted(root.glob("weight_v*"))]
        assert [config["dtype"] for config in found] == ["float32", "bfloat16"]
        assert all(config["architectures"] == ["Qwen3ForCausalLM"] for config in found)

    def test_no_shard_is_larger_than_its_bound_but_for_one_tensor(self, root, trainer):
        trainer.send_weights("policy", {**weights(1), "v": torch.zeros(5000)})
        index = json.loads((root / "weight_v000001" / "model.safetensors.index.json").read_bytes())
        assert index["metadata"] == {"total_size": 20 * 2000 + 20000, "version": "000001"}  # other readers look for it
        for name in set(index["weight_map"].values()):
            tensors = load_file(root / "weight_v000001" / name)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4096

    def test_given_files_win_over_those_of_the_source(self, root):
        trainer = tx.DiskTransport(root, files={"config.json": b"{}", "notes.txt": b"hello"})
        trainer.send_weights("policy", tiny_model())
        assert (root / "weight_v000001" / "config.json").read_bytes() == b"{}"
        assert (root / "weight_v000001" / "notes.txt").read_bytes() == b"hello"
        trainer.shutdown()

    def test_publishing_needs_less_memory_than_two_shards(self, root):
        python(calling(publishes_in_bounds, str(root)), fresh=True)  # a fork copies what it touches


class Gathering(WeightSource):
    """Every tensor is made for the pass, as a gathered one is."""

    def params(self):
        return tuple(ParamMeta(f"w{i:03d}", torch.uint8, (2 << 20,)) for i in range(96))

    def __iter__(self):
        for i, meta in enumerate(self.params()):
            yield meta.name, torch.full(meta.shape, i, dtype=meta.dtype)


def publishes_in_bounds(root):
    shard_bytes, coming = 48 << 20, 2 << 20  # the tensor that is made while two shards are held
    transport = tx.DiskTransport(root, shard_bytes=shard_bytes)
    transport.send_weights({"x": torch.zeros(1)})  # threads, imports
    with track_peak() as extra:
        transport.send_weights(Gathering())
    assert extra[0] < 2 * shard_bytes + coming, extra[0] / shard_bytes


class TestLifetime:
    def test_older_versions_go_once_no_engine_may_read_them(self, root, trainer):
        trainer.open(1, (), Deadline(WAIT_S))
        for version in (1, 2, 3):
            handoff, _ = publish(trainer, weights(version), version)
        for served in (1, 2, 3):
            handoff.served(served)
            assert versions(root) == [f"weight_v{version:06d}" for version in range(served, 4)]

    @pytest.mark.parametrize(("keep_files", "first"), [(True, 1), (False, 3)])
    def test_alone_the_newest_two_stay_or_all(self, root, keep_files, first):
        with tx.DiskTransport(root, keep_files=keep_files) as trainer:
            for version in range(1, 5):
                trainer.send_weights("policy", weights(version))
        assert versions(root) == [f"weight_v{version:06d}" for version in range(first, 5)]

    def test_a_failed_update_keeps_what_the_engine_serves_on_disk(self, root, trainer):
        policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
        sender = tx.WeightSender(trainer, InProcessEngine(served))
        sender.update_weights(policy)
        with pytest.raises(tx.WeightSyncError):
            sender.update_weights({"weight": torch.zeros(4, 3)})
        assert "weight_v000001" in versions(root)
        sender.update_weights(policy)
        assert len(versions(root)) == 1

    def test_number_of_unpublished_version_folder_is_not_used_again(self, root, trainer, worker):
        """The number of a folder that `latest` never pointed to is not used again; the next one is."""
        for version in (1, 3):
            trainer.send_weights("policy", weights(version))
            assert worker.receive_weights(WAIT_S)["w00"][0] == worker.received_version == version
            if version == 1:
                shutil.copytree(root / "weight_v000001", root / "weight_v000002")  # renamed, then killed

    def test_second_trainer_on_root_is_refused_until_first_leaves(self, root, trainer):
        trainer.send_weights("policy", weights(1))
        second = tx.DiskTransport(root)
        with pytest.raises(StoreError, match="another trainer publishes into"):
            second.send_weights("policy", weights(2))
        with pytest.raises(AssertionError, match="another trainer publishes into"):
            python("import sys, torchrl_ext as tx; tx.DiskTransport(sys.argv[1]).send_weights({})", root)
        trainer.shutdown()
        second.send_weights("policy", weights(2))
        second.shutdown()

    def test_probe_file_goes_with_next_version_and_with_shutdown(self, root, trainer):
        trainer.open(1, (), Deadline(WAIT_S))
        assert len(everything(root)) == 1
        trainer.send_weights("policy", weights(1))
        assert everything(root) == ["latest", "weight_v000001"]
        trainer.open(1, (), Deadline(WAIT_S))
        trainer.shutdown()
        assert everything(root) == ["latest", "weight_v000001"]
