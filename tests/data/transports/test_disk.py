"""`DiskTransport` beyond the contract: what is published and how long it stays, and damage, which lands nowhere."""

import json
import os
import shutil

import pytest
import torch

import torchrl_ext as tx
from tests.data.transports.chains import flip, rewrite
from tests.memory import track_peak
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import calling, python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.transports.base import Arrival, Update, Worker
from torchrl_ext.data.weights.derived import MappedSource, as_source
from torchrl_ext.data.weights.source import MappingSource, WeightSource
from torchrl_ext.testing import WAIT_S, same_bits


@pytest.fixture
def trainer(root):
    transport = tx.DiskTransport(root, shard_bytes=4096)
    yield transport
    transport.shutdown()


@pytest.fixture
def worker(root):
    transport = tx.DiskTransport(root)
    yield transport
    transport.shutdown()


def everything(root):
    return sorted(path.name for path in root.iterdir())


def versions(root):
    return [name for name in everything(root) if name != "latest"]


def weights(value, count=20):
    return {f"w{i:02d}": torch.full((500,), float(value)) for i in range(count)}


def publish(trainer, sent, version):
    """Prepare a version; return its handoff, and how workers hear of it."""
    source = MappingSource(sent)
    handoff = trainer.prepare(Update(source=source, version=version), Deadline(WAIT_S))
    return handoff, Arrival(version=version, params=source.params(), info=handoff.info)


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
        total = sum(meta.nbytes for meta in as_source(model).params())
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        assert index["metadata"] == {"total_size": total, "version": "000001"}  # other readers look for it
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


def test_a_root_that_only_the_trainer_sees_is_named_with_its_path(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "nowhere", tmp_path / "empty"):
        info = {**tx.DiskTransport(root).open(1, (), Deadline(WAIT_S)).info, "root": str(other)}
        with pytest.raises(StoreError, match="only the trainer sees") as told:
            tx.DiskTransport.join(info, Worker(rank=1), Deadline(WAIT_S))
        assert f"{other} on " in str(told.value) and f"the trainer wrote into {root} on " in str(told.value)


def test_a_version_that_was_fetched_ahead_survives_its_removal(root, trainer, worker):
    end = worker.attend(Deadline(WAIT_S))
    _, arrival = publish(trainer, weights(1), 1)
    end.stage(1, None, Deadline(WAIT_S))
    shutil.rmtree(root / "weight_v000001")
    assert dict(end.receive(arrival, {}, Deadline(WAIT_S)))["w19"][0] == 1


class TestDamage:
    @pytest.fixture
    def folder(self, root, trainer):
        trainer.send_weights("policy", weights(1))
        return root / "weight_v000001"

    def test_a_flipped_bit_names_tensor_and_file_and_changes_nothing(self, folder, worker):
        flip(folder / "model-00010-of-00010.safetensors", -1)
        held = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        with pytest.raises(IntegrityError, match=r"'w19' in .*model-00010-of-00010\.safetensors is damaged"):
            worker.receive_weights(0.0, weights=held)
        assert all(not tensor.any() for tensor in held.values())

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda path: os.truncate(path, path.stat().st_size - 8), "bytes instead of the"),
            (lambda path: path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:]), "claims a header"),
            (lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"')), "cannot be read"),
            (lambda path: path.unlink(), "is missing"),
        ],
        ids=["truncated", "a huge header", "an unknown dtype", "missing"],
    )
    def test_a_shard_is_refused_before_the_first_tensor_when_it_is(self, folder, worker, damage, said):
        damage(folder / "model-00010-of-00010.safetensors")
        end = worker.attend(Deadline(WAIT_S))
        for read in (worker.receive_weights, lambda _: end.stage(1, None, Deadline(WAIT_S))):
            with pytest.raises(IntegrityError, match=rf"model-00010-of-00010\.safetensors.*{said}"):
                read(0.0)

    @pytest.mark.parametrize("file", ["manifest.json", "model-00010-of-00010.safetensors"])
    @pytest.mark.parametrize("kind", ["a pipe", "a device", "a link out", "a folder", "a large file"])
    def test_what_is_no_file_of_the_root_is_refused_at_once(self, root, folder, worker, file, kind):
        path = folder / file
        path.rename(root.parent / "elsewhere")
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind == "a large file":
            path.touch()
            os.truncate(path, 1 << 40)
        else:
            path.symlink_to("/dev/zero" if kind == "a device" else "../../elsewhere")
        said = "not a regular file|a link to|1,099,511,627,776 bytes|cannot be read"
        with pytest.raises(IntegrityError, match=f"{file} .*({said})"):
            worker.receive_weights(0.0)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda m: m["params"][0].__setitem__(2, [50]), "does not hold"),
            (lambda m: m["full"].reverse(), "does not hold"),
            (lambda m: m["files"].update({"model-00001-of-00010.safetensors": 9}), "9, as in the manifest"),
            (lambda m: m.update(version=7), "says that it is version 7"),
        ],
    )
    def test_a_manifest_that_tells_of_other_files_is_refused(self, folder, worker, change, said):
        rewrite(folder / "manifest.json", change)
        with pytest.raises(IntegrityError, match=said):
            worker.receive_weights(0.0)

    def test_a_version_that_is_not_there_is_named(self, folder, worker):
        end = worker.attend(Deadline(WAIT_S))
        with pytest.raises(StoreError, match=r"holds no version 5, and none came .*newest here is 1"):
            end.stage(5, None, Deadline(WAIT_S))
