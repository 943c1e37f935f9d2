"""``torchrl-ext chain`` on real roots."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import torchrl_ext as tx
from tests.data.transports.chains import checkpoint, folder, step, weights
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.cli.main import main
from torchrl_ext.testing import same_bits


@pytest.fixture
def root(tmp_path):
    """Four versions, the third a keyframe with its delta; element 0 of ``a`` moves each time."""
    trainer = tx.make_transport(
        "delta", root=tmp_path / "root", encoding="ulp", keyframe_every=2, keep_files=True, files={"config.json": b"{}"}
    )
    own = {"a": torch.zeros(100), "b": torch.ones(50, dtype=torch.bfloat16)}
    for version in range(1, 5):
        own["a"][0] = version
        trainer.send_weights("policy", own)
    trainer.shutdown()
    return tmp_path / "root"


def asked(capsys, *argv, status=0):
    assert main(["chain", *map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_names_kind_base_bytes_encoding_and_density(root, capsys):
    found = asked(capsys, "ls", root)
    assert found["latest"] == 4
    rows = {row["version"]: row for row in found["versions"]}
    assert [rows[n]["kind"] for n in (1, 2, 3, 4)] == ["keyframe", "delta", "keyframe+delta", "delta"]
    assert [rows[n]["base"] for n in (1, 2, 3, 4)] == [None, 1, 2, 3]
    assert rows[2]["encoding"] == ["ulp"] and rows[2]["density"] == 1 / 150 and 0 < rows[2]["bytes"] < 200
    assert main(["chain", "ls", str(root)]) == 0 and "keyframe+delta" in capsys.readouterr().out


def test_verify_recomputes_and_names_what_is_damaged(root, capsys):
    (root / "weight_v000005").mkdir()  # which somebody began to write
    assert [row["version"] for row in asked(capsys, "ls", root)["versions"]] == [1, 2, 3, 4]
    found = asked(capsys, "verify", root)
    assert found["damaged"] == [] and len(found["versions"]) == 4 and found["incomplete"] == [5]
    file = root / "weight_v000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = asked(capsys, "verify", root, status=1)
    assert found["damaged"][0] == 3
    assert "model.safetensors is damaged" in found["versions"][2]["error"] and "'b'" in found["versions"][2]["error"]


def test_verify_checks_deltas_on_a_checkpoint(tmp_path, capsys):
    """Two deltas on a checkpoint, a full version, and a delta on that; without the base the first two are unchecked."""
    own, root = weights(), tmp_path / "root"
    base = checkpoint(tmp_path / "base", own)
    with tx.make_transport("delta", root=root, base=base, keyframe_every=3, keep_files=True) as trainer:
        for version in range(1, 5):
            step(own, version)
            trainer.send_weights("policy", own)
    assert [row["ok"] for row in asked(capsys, "verify", root, "--base", base)["versions"]] == [True] * 4
    found = asked(capsys, "verify", root, status=1)
    assert (found["damaged"], found["unchecked"]) == ([], [1, 2]) and "--base" in found["versions"][0]["error"]
    (file,) = [path for path in folder(root, 2).iterdir() if path.suffix == ".safetensors"]
    file.write_bytes(file.read_bytes()[:-5] + b"wrong")
    found = asked(capsys, "verify", root, "--base", base, status=1)
    assert (found["damaged"], found["unchecked"]) == ([2], [])
    file.unlink()
    found = asked(capsys, "verify", root, "--base", base, status=1)
    assert found["damaged"] == [2] and f"{file.name} is missing" in found["versions"][1]["error"]


def test_gc_keeps_what_the_newest_keyframes_need(root, capsys):
    assert asked(capsys, "gc", root, "--keep", 2) == {"root": str(root), "removed": [], "kept": [1, 2, 3, 4]}
    assert asked(capsys, "gc", root)["removed"] == [1, 2]
    assert asked(capsys, "verify", root)["damaged"] == []


def test_gc_is_refused_while_a_trainer_publishes(root, capsys):
    trainer = tx.make_transport("delta", root=root)
    trainer.open(1, (), Deadline(60))
    assert "another trainer" in asked(capsys, "gc", root, status=4)["error"]
    trainer.shutdown()


@pytest.mark.parametrize("version", [2, 3])
def test_materialize_writes_the_version_whole(root, tmp_path, capsys, version):
    out = tmp_path / "out" / "model"
    assert asked(capsys, "materialize", root, version, out)["path"] == str(out)
    found = load_file(out / "model.safetensors")
    expected = torch.zeros(100)
    expected[0] = version
    assert same_bits(found["a"], expected) and same_bits(found["b"], torch.ones(50, dtype=torch.bfloat16))
    assert (out / "config.json").read_bytes() == b"{}"
    assert "exists already" in asked(capsys, "materialize", root, version, out, status=2)["error"]
