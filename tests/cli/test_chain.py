"""``torchrl-ext chain`` on real roots."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import torchrl_ext as tx
from tests.data.transports.chains import checkpoint, step, weights
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


@pytest.mark.parametrize(("version", "file"), [(3, "model.safetensors"), (4, "delta-*.safetensors")])
def test_what_is_damaged_is_named_and_not_unpacked(root, tmp_path, capsys, version, file):
    (root / "weight_v000005").mkdir()  # which somebody began to write
    assert [row["version"] for row in asked(capsys, "ls", root)["versions"]] == [1, 2, 3, 4]
    (path,) = (root / f"weight_v{version:06d}").glob(file)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    error = asked(capsys, "materialize", root, version, tmp_path / "out", status=1)["error"]
    assert path.name in error and not (tmp_path / "out").exists()


def test_a_delta_on_a_checkpoint_is_unpacked_from_it(tmp_path, capsys):
    own, root = weights(), tmp_path / "root"
    base = checkpoint(tmp_path / "base", own)
    with tx.make_transport("delta", root=root, base=base, keyframe_every=3) as trainer:
        step(own, 1)
        trainer.send_weights("policy", own)
    assert "--base" in asked(capsys, "materialize", root, 1, tmp_path / "out", status=2)["error"]
    asked(capsys, "materialize", root, 1, tmp_path / "out", "--base", base)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bits(found[name], tensor) for name, tensor in own.items())


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
