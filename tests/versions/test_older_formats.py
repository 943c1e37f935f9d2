"""Chains of formats 1 to 3, as earlier releases wrote them, are read, followed and continued."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zstandard

import torchrl_ext as tx
from tests.transports.chains import same
from tests.versions.damage import Published, many
from torchrl_ext.stores.delta_manifest import ROWS, DeltaManifest
from torchrl_ext.stores.manifest import read_manifest
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S

CHAINS = Path(__file__).with_name("chains_before_4.zip")
NAMES = sorted({name.split("/")[0] for name in zipfile.ZipFile(CHAINS).namelist()})
DTYPES = [
    (torch.bfloat16, (40, 50)),
    (torch.float32, (64,)),
    (torch.float16, (3, 7, 5)),
    (torch.uint8, (100,)),
    (torch.int64, (9,)),
    (torch.float32, ()),
]


def model(version):
    """The tensors of a version, from 1 to 4, from which the chains were written."""
    found = {}
    for number, (dtype, shape) in enumerate(DTYPES):
        base = (torch.arange(torch.Size(shape).numel()) * 37 + 11 * number) % 127
        for step in range(2, version + 1):
            base[step::7] += step
        scale = 0.015625 if dtype.is_floating_point else 1
        found[f"p{number}"] = (base * scale).to(dtype).reshape(shape)
    return found | {"still": torch.ones(5)}


@pytest.fixture(params=NAMES)
def root(request, tmp_path):
    with zipfile.ZipFile(CHAINS) as file:
        file.extractall(tmp_path, [name for name in file.namelist() if name.startswith(f"{request.param}/")])
    return tmp_path / request.param


def at(root, version):
    (root / "latest").write_text(f"{version}\n")


def test_a_reader_joins_at_any_version_follows_and_catches_up_over_several(root):
    for versions in ((1, 2, 3, 4), (1, 4), (2, 4), (3,)):
        reader = tx.DeltaTransport(root)
        for version in versions:
            at(root, version)
            assert same(dict(reader.receive_weights(WAIT_S).items()), model(version))


def test_the_first_format_is_read(root):
    for path in root.rglob("manifest.json"):
        data = path.read_bytes()
        document = json.loads(zstandard.decompress(data) if data[:1] == b"(" else data)
        del document["content"]
        path.write_text(json.dumps(document | {"format_number": 1}))
    assert same(dict(tx.DeltaTransport(root).receive_weights(WAIT_S).items()), model(4))


@pytest.mark.parametrize("root", [name for name in NAMES if name not in ("xor", "overwrite")], indirect=True)
@pytest.mark.parametrize("version", [2, 3])
def test_a_delta_that_was_made_worse_is_refused_or_is_what_was_published(root, version):
    folder = root / f"weight_v{version:06d}"
    manifest = read_manifest((folder / "manifest.json").read_bytes(), "here")
    assert isinstance(manifest, DeltaManifest) and manifest.container == ROWS
    manifest = replace(manifest, version=2, base_version=1, base_run_id="r")
    files = {name: (folder / name).read_bytes() for name in manifest.files}
    outcomes = many("blocks", 400, version, [Published(manifest, files, model(version - 1), model(version))])
    assert not outcomes["wrong"] and sum(outcomes.values()) - outcomes["read"] > 200


def test_a_trainer_continues_the_chain_with_a_keyframe_and_updates_engines(root):
    own, reader = model(4), tx.DeltaTransport(root)
    served = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    reader.receive_weights(WAIT_S)
    sender = tx.WeightSender(tx.DeltaTransport(root, keep_files=True), InProcessEngine(served))
    for _ in range(3):
        own["p0"][3, 5:20] += 1
        assert sender.update_weights(own).verified and same(served, own)
        assert same(dict(reader.receive_weights(WAIT_S).items()), own)
    kinds = [(root / f"weight_v{version:06d}" / "model.safetensors.index.json").exists() for version in (5, 6, 7)]
    assert kinds == [True, False, False]
