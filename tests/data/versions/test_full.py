"""`DiskTransport` as its readers see it: visibility, and damage, which is named and lands nowhere."""

from __future__ import annotations

import os
import shutil

import msgspec
import pytest
import torch

import torchrl_ext as tx
from tests.data.transports import disk_ends
from tests.data.transports.chains import flip, rewrite
from tests.data.transports.disk_ends import joined, publish, weights
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, ManifestError, StoreError
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.testing import WAIT_S

root, trainer, worker = disk_ends.root, disk_ends.trainer, disk_ends.worker


def test_a_root_that_only_the_trainer_sees_is_named_with_its_path(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(StoreError, match="only the trainer sees") as told:
            joined(tx.DiskTransport(root, seen_at=other))
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

    def test_a_version_that_is_not_what_was_announced_is_refused(self, folder, worker):
        params, end = as_source(weights(1)).params(), worker.attend(Deadline(WAIT_S))
        renamed = (msgspec.structs.replace(params[0], name="other"), *params[1:])
        for arrival, error, said in (
            (Arrival(version=1, params=params, info={"run_id": "another"}), IntegrityError, "published by run"),
            (Arrival(version=1, params=params[:-1]), ManifestError, "nothing was read"),
            (Arrival(version=1, params=renamed), ManifestError, "nothing was read"),
        ):
            with pytest.raises(error, match=said):
                list(end.receive(arrival, {}, Deadline(WAIT_S)))
        with pytest.raises(StoreError, match=r"holds no version 5, and none came .*newest here is 1"):
            end.stage(5, None, Deadline(WAIT_S))
