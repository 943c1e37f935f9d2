from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.testing import same_bits
from torchrl_ext.weights.checkpoint import CheckpointSource, companion_files, local_checkpoint, revised
from torchrl_ext.weights.source import checked


@pytest.fixture
def sharded(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_a_checkpoint_gives_its_tensors_each_time_and_its_other_files_and_holds_no_file_open(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    expected, before = tiny_model(dtype=torch.bfloat16).state_dict(), len(os.listdir("/proc/self/fd"))
    source = CheckpointSource(sharded)
    for _ in range(2):
        found = {meta.name: tensor for meta, tensor in checked(source)}
        assert set(found) == set(expected)
        assert all(same_bits(found[name], expected[name]) for name in found)
        next(iter(source))
        assert len(os.listdir("/proc/self/fd")) == before
    assert source.files().keys() >= {"config.json", "tokenizer.json", "generation_config.json"}
    assert not any("safetensors" in name for name in source.files())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_a_missing_or_truncated_shard_is_named(sharded, damage):
    source, victim = CheckpointSource(sharded), sorted(sharded.glob("*.safetensors"))[1]
    damage(victim)
    for read in (lambda: CheckpointSource(sharded), lambda: dict(source)):
        with pytest.raises(IntegrityError, match=victim.name):
            read()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows, first, last: rows.update({"extra.weight": "model-00001-of-00009.safetensors"}), "00001-of-0000"),
        (lambda rows, first, last: rows.update({"extra.weight": "../../etc/passwd"}), "cannot be used"),
        (lambda rows, first, last: rows.update({"extra.weight": 3}), "cannot be used"),
        (lambda rows, first, last: rows.update({next(row for row in rows if rows[row] == first): last}), "lacks"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(sharded, change, said):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    change(index["weight_map"], files[0], files[1])
    path.write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match=said):
        CheckpointSource(sharded)
    path.write_text("{}")
    with pytest.raises(IntegrityError, match="cannot be used"):
        CheckpointSource(sharded)


def test_files_that_contradict_each_other_or_hold_no_weights_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        CheckpointSource(tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        companion_files(tmp_path / "nowhere")
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    source = CheckpointSource(tmp_path)
    save_file({"y": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(IntegrityError, match=r"a\.safetensors holds no tensor 'x'"):
        dict(source)
    save_file({"y": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(IntegrityError, match=r"'y' is in a\.safetensors and in b\.safetensors"):
        CheckpointSource(tmp_path)


class TestNamesOfTheHub:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        def refuse(*_, **__):
            raise AssertionError("nothing is fetched")

        monkeypatch.setattr("socket.socket.connect", refuse)
        monkeypatch.setattr("socket.getaddrinfo", refuse)

    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        """A cache with two revisions of one model, as a download leaves it."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        model = tmp_path / "models--somebody--policy"
        for seed, revision in enumerate(("main", "v2")):
            tiny_checkpoint(model / "snapshots" / (str(seed) * 40), seed)
            (model / "refs").mkdir(exist_ok=True)
            (model / "refs" / revision).write_text(str(seed) * 40)
        return model

    @pytest.mark.parametrize(("name", "seed"), [("somebody/policy", 0), ("somebody/policy@v2", 1)])
    def test_one_means_what_is_in_the_local_cache(self, cache, name, seed):
        found, expected = dict(CheckpointSource(name)), tiny_model(seed).state_dict()
        assert found.keys() == expected.keys()
        assert all(same_bits(found[one], expected[one]) for one in found)
        assert "config.json" in companion_files(name)

    def test_a_directory_of_the_same_name_comes_first(self, cache, tmp_path, monkeypatch):
        (tmp_path / "here" / "somebody" / "policy").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here")
        assert str(local_checkpoint("somebody/policy")) == "somebody/policy"

    @pytest.mark.parametrize("name", ["somebody/other", "somebody/policy@v3", "other", "so--me/../body"])
    def test_one_that_is_not_there_is_refused_and_not_fetched(self, cache, name):
        with pytest.raises(ConfigError, match="there is no checkpoint directory") as refused:
            CheckpointSource(name)
        if ".." not in name:
            assert f"hf download {name.split('@')[0]}" in str(refused.value)

    def test_a_copy_that_lacks_a_shard_is_damaged(self, cache):
        place = cache / "snapshots" / ("0" * 40)
        where = {name: "model-00001-of-00002.safetensors" for name, _ in CheckpointSource(place)}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        with pytest.raises(IntegrityError, match="model-00001-of-00002"):
            CheckpointSource("somebody/policy")

    def test_the_revision_that_an_engine_was_started_with_counts(self, cache, tmp_path):
        assert revised("somebody/policy", None) == "somebody/policy"
        assert revised("somebody/policy", "v2") == "somebody/policy@v2"
        assert revised(str(tmp_path), "v2") == str(tmp_path)
