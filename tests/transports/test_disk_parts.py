"""A part that is published as files is a whole checkpoint: unchanged files are links to those of the version before."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_model
from tests.transports.chains import flip
from torchrl_ext.errors import IntegrityError, UpdateError
from torchrl_ext.stores import version_name
from torchrl_ext.stores.manifest import read_manifest
from torchrl_ext.types import Part
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.source import as_source

LAYER = "model.layers.1"
SHARD_BYTES = 200_000  # a layer takes several


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def read_apart(folder):
    """Read every tensor of every file by the reference reader, which names none twice, and the index."""
    found, where = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert name not in found, f"{name} lies in {where[name]} and in {path.name}"
                found[name], where[name] = file.get_tensor(name), path.name
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == where
    return found


def inodes(folder):
    return {path.stat().st_ino: path for path in folder.glob("*.safetensors")}


@pytest.fixture
def published(tmp_path):
    """Publish a model, then one layer of it twice; yields what each version has to hold, and the reports."""
    model = tiny_model(0)
    served = tiny_model(1)
    transport = tx.DiskTransport(tmp_path / "root", shard_bytes=SHARD_BYTES, keep_files=True)
    sender = tx.WeightSender(transport, tx.make_engine("inprocess", engine=served))
    sender.register_model(model)
    held = {name: tensor.clone() for name, tensor in as_source(model)}
    reports, expected = [sender.update_weights()], [dict(held)]
    for _ in range(2):
        change(model)
        reports.append(sender.update_weights(only=LAYER))
        held |= {name: tensor.clone() for name, tensor in as_source(model) if name.startswith(f"{LAYER}.")}
        expected.append(dict(held))
    yield tmp_path / "root", reports, expected, served, sender, model
    sender.shutdown()


def test_each_version_is_a_checkpoint_that_other_readers_load(published):
    from transformers import AutoModelForCausalLM

    root, reports, expected, served, *_ = published
    assert [report.part for report in reports] == [False, True, True]
    for number, tensors in enumerate(expected, 1):
        found = read_apart(root / version_name(number))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert {meta.name for meta in CheckpointSource(root / version_name(number)).params()} == tensors.keys()
    loaded = AutoModelForCausalLM.from_pretrained(root / version_name(3))
    for name, tensor in as_source(loaded):
        assert torch.equal(tensor, expected[-1][name]), name
    for name, tensor in as_source(served):
        assert torch.equal(tensor, expected[-1][name]), name


def test_unchanged_files_are_links_and_the_second_time_a_layer_costs_a_layer(published):
    root, reports, expected, *_ = published
    layer = sum(tensor.nbytes for name, tensor in expected[0].items() if name.startswith(f"{LAYER}."))
    first, second, third = (inodes(root / version_name(number)) for number in (1, 2, 3))
    assert first.keys() & second.keys() and all(first[one].stat().st_nlink > 1 for one in first.keys() & second.keys())
    assert layer < reports[1].bytes < layer + 2 * SHARD_BYTES < reports[1].model_bytes
    assert reports[2].bytes == layer
    written = [path for inode, path in third.items() if inode not in second]
    assert layer <= sum(path.stat().st_size for path in written) < layer + 4096 * len(written)


def test_a_part_outlives_the_version_that_it_was_built_on(tmp_path):
    model, served = tiny_model(0), tiny_model(1)
    sender = tx.WeightSender(
        tx.DiskTransport(tmp_path, shard_bytes=SHARD_BYTES), tx.make_engine("inprocess", engine=served)
    )
    sender.register_model(model)
    for _ in range(3):
        sender.update_weights(only=LAYER)
    assert not (tmp_path / version_name(1)).exists()
    assert read_apart(tmp_path / version_name(3)).keys() == dict(as_source(model)).keys()
    worker = tx.DiskTransport(tmp_path)  # joins late, and gets everything
    assert set(worker.receive_weights(5.0).keys()) == dict(as_source(model)).keys()


def test_files_are_copied_where_the_file_system_has_no_links(published, monkeypatch):
    root, _, expected, _, sender, _ = published

    def link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    assert sender.update_weights(only=LAYER).part
    found = read_apart(root / version_name(4))
    assert found.keys() == expected[0].keys()
    assert not inodes(root / version_name(4)).keys() & inodes(root / version_name(3)).keys()


def test_without_the_version_before_everything_is_sent(published):
    root, *_, sender, _ = published
    (root / version_name(3) / "manifest.json").unlink()
    assert not sender.update_weights(only=LAYER).part


def test_a_damaged_file_of_the_version_before_is_not_carried_over(tmp_path):
    model, served = (nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(2))
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), tx.make_engine("inprocess", engine=served))
    sender.register_model(model)
    sender.update_weights()
    file = tmp_path / version_name(1) / "model.safetensors"
    flip(file, -1)
    report = sender.update_weights(only="0")
    assert report.verified and not report.part, "all of it is sent in its place"
    written = load_file(tmp_path / version_name(report.version) / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("new", [True, False])
def test_workers_check_what_is_new_and_not_the_rest_which_they_have(published, monkeypatch, new):
    root, *_, sender, model = published
    prefetch = tx.WeightReceiver.prefetch

    def damaged(receiver, message):
        before, now = (inodes(root / version_name(message.version - age)) for age in (1, 0))
        for number, path in now.items():
            if (number not in before) == new:
                shutil.copy(path, path.with_suffix(".own")).replace(path)  # other versions have links to it
                flip(path, -1)
        prefetch(receiver, message)

    change(model)
    monkeypatch.setattr(tx.WeightReceiver, "prefetch", damaged)
    with pytest.raises(UpdateError, match="is damaged") if new else nullcontext():
        report = sender.update_weights(only=LAYER)
        assert report.part and report.verified


def test_a_manifest_whose_part_is_none_of_its_parameters_is_damaged(published):
    found = read_manifest((published[0] / version_name(2) / "manifest.json").read_bytes(), "here")
    assert found.part[1].base == 1 and len(found.part[1].names) == 11
    lie = replace(found, part=("x", Part(base=1, names=frozenset("y"))))
    with pytest.raises(IntegrityError, match="none of its parameters"):
        read_manifest(lie.to_bytes(), "here")
