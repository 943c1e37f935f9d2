from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.checkpoint import CheckpointSource, companion_files
from torchrl_ext.weights.source import checked


@pytest.fixture
def sharded(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_a_checkpoint_gives_its_tensors_and_companion_files(tmp_path):
    source = CheckpointSource(tiny_checkpoint(tmp_path))
    expected = tiny_model().state_dict()
    found = {meta.name: tensor for meta, tensor in checked(source)}
    assert set(found) == set(expected)
    assert all(same_bits(found[name], expected[name]) for name in found)
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= set(source.files())
    assert not any("safetensors" in name for name in source.files())


def test_a_sharded_checkpoint_gives_the_same_tensors_each_time(sharded):
    expected = tiny_model(dtype=torch.bfloat16).state_dict()
    source = CheckpointSource(sharded)
    for _ in range(2):
        found = {meta.name: tensor for meta, tensor in checked(source)}
        assert set(found) == set(expected)
        assert all(same_bits(found[name], expected[name]) for name in found)


def test_no_file_stays_open_after_construction(sharded):
    before = len(os.listdir("/proc/self/fd"))
    source = CheckpointSource(sharded)
    assert len(os.listdir("/proc/self/fd")) == before
    next(iter(source))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(IntegrityError, match=victim.name):
        CheckpointSource(sharded)


def test_a_truncated_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(victim, victim.stat().st_size - 1)
    with pytest.raises(IntegrityError, match=victim.name):
        CheckpointSource(sharded)


def test_a_shard_that_vanishes_later_is_named(sharded):
    source = CheckpointSource(sharded)
    victim = sorted(sharded.glob("*.safetensors"))[-1]
    victim.unlink()
    with pytest.raises(IntegrityError, match=victim.name):
        dict(source)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda index: index["weight_map"].update({"extra.weight": "model-00001-of-00009.safetensors"}),
            "00001-of-0000",
        ),
        (lambda index: index["weight_map"].update({"extra.weight": "../../etc/passwd"}), "cannot be used"),
        (lambda index: index["weight_map"].update({"extra.weight": 3}), "cannot be used"),
        (lambda index: index.pop("weight_map"), "cannot be used"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(sharded, change, said):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match=said):
        CheckpointSource(sharded)


def test_a_tensor_that_the_index_places_in_the_wrong_shard_is_named(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    path.write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match=rf"{files[1]} lacks '{name}'"):
        CheckpointSource(sharded)


def test_one_name_in_two_files_without_an_index_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(IntegrityError, match=r"'x' is in a\.safetensors and in b\.safetensors"):
        CheckpointSource(tmp_path)


def test_a_file_that_was_replaced_since_the_source_was_made_is_told(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    save_file({"y": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model\.safetensors holds no tensor 'x'"):
        dict(source)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        CheckpointSource(tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        companion_files(tmp_path / "nowhere")
