import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.data.weights.checkpoint import CheckpointSource, companion_files, local_checkpoint, revised
from torchrl_ext.testing import same_bits


@pytest.fixture
def sharded(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_a_pass_keeps_no_file_open(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    before, source = len(os.listdir("/proc/self/fd")), CheckpointSource(sharded)
    assert dict(source).keys() == tiny_model().state_dict().keys()
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


def test_missing_or_duplicate_checkpoint_weights_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        CheckpointSource(tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        companion_files(tmp_path / "nowhere")
    save_file({"y": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"y": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(IntegrityError, match=r"'y' is in a\.safetensors and in b\.safetensors"):
        CheckpointSource(tmp_path)


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def in_place(tensors, path):
    fresh = path.with_suffix(".fresh")
    save_file(tensors, fresh)
    path.write_bytes(fresh.read_bytes())
    os.utime(path, ns=(0, 0))  # a clock may tick slower than two saves


def renamed(tensors, path):
    save_file(tensors, path.with_suffix(".fresh"))
    os.replace(path.with_suffix(".fresh"), path)


def saved(folder, value, how=renamed):
    """A checkpoint of two shards, with an index, saved into a folder; its source."""
    for file, name in ((A, "a"), (B, "b")):
        how({name: torch.full((9,), value)}, folder / file)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        index.write_text(json.dumps({"weight_map": {"a": A, "b": B}}))
    return CheckpointSource(folder)


READINGS = {
    "pass": lambda source: (tensor for _, tensor in source),
    "shards": lambda source: (shard.take() for shard in source.shards()),
}


class TestDirectoriesThatAreSavedInto:
    @pytest.mark.parametrize("how", [renamed, in_place], ids=["renamed", "in place"])
    @pytest.mark.parametrize("reading", READINGS)
    def test_no_mixture_of_two_checkpoints_is_accepted(self, reading, how, tmp_path):
        found = READINGS[reading](saved(tmp_path, 1.0))
        assert next(found).eq(1).all()
        later = saved(tmp_path, 2.0, how)
        with pytest.raises(IntegrityError, match=B):
            next(found)
        assert all(tensor.eq(2).all() for _, tensor in later)

    @pytest.mark.parametrize("change", [Path.unlink, lambda path: os.utime(path, ns=(0, 0))], ids=["gone", "older"])
    def test_a_pass_ends_with_a_look_at_every_file(self, tmp_path, change):
        pairs = iter(saved(tmp_path, 1.0))
        assert [next(pairs)[0], next(pairs)[0]] == ["a", "b"]
        change(tmp_path / A)
        with pytest.raises(IntegrityError, match=A):
            next(pairs)


def test_companion_files_hold_tokenizers_and_skip_folders(tmp_path):
    carried = {
        "tokenizer.model": b"1",
        "tokenizer.model.v3": b"2",
        "vocab.bpe": b"3",
        "vocab.txt": b"4",
        "code.py": b"5",
    }
    left = {"additional_chat_templates/tool.jinja": b"6", "package/helper.py": b"7", "optimizer.pt": b"8"}
    for name, content in (carried | left).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert companion_files(tmp_path) == carried


@pytest.mark.parametrize("single", [1.0, 2.0])
def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path, single):
    saved(tmp_path, 3.0)
    save_file({"a": torch.full((9,), single), "b": torch.full((9,), single)}, tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model\.safetensors lies beside model\.safetensors\.index\.json"):
        CheckpointSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for file in (A, B):
        (tmp_path / file).unlink()
    assert all(tensor.eq(single).all() for tensor in dict(CheckpointSource(tmp_path)).values())


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
    def test_one_means_what_is_in_the_local_cache(self, cache, name, seed, tmp_path, monkeypatch):
        found, expected = dict(CheckpointSource(name)), tiny_model(seed).state_dict()
        assert found.keys() == expected.keys()
        assert all(same_bits(found[one], expected[one]) for one in found)
        assert "config.json" in companion_files(name)
        (tmp_path / "here" / name).mkdir(parents=True)  # a directory of that name comes first
        monkeypatch.chdir(tmp_path / "here")
        assert str(local_checkpoint(name)) == name

    @pytest.mark.parametrize("name", ["somebody/other", "somebody/policy@v3", "other", "so--me/../body"])
    def test_one_that_is_not_there_is_refused_and_not_fetched(self, cache, name):
        with pytest.raises(ConfigError, match="there is no checkpoint directory") as refused:
            CheckpointSource(name)
        if ".." not in name:
            assert f"hf download {name.split('@')[0]}" in str(refused.value)

    def test_the_revision_that_an_engine_was_started_with_counts(self, cache, tmp_path):
        assert revised("somebody/policy", None) == "somebody/policy"
        assert revised("somebody/policy", "v2") == "somebody/policy@v2"
        assert revised(str(tmp_path), "v2") == str(tmp_path)
