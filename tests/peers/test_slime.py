"""slime's trainer, unchanged, drives engines that run this package: its own writer, its own calls.

``TORCHRL_EXT_SLIME`` names a git repository of THUDM/slime; without it there is nothing to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.peers import slime_trainer
from torchrl_ext.weights.digests import tensor_digest

COMMIT = "624b824a8"
SLIMES = "torchrl_ext.compat.slime.embedded:routes"
REPOSITORY = os.environ.get("TORCHRL_EXT_SLIME")

pytestmark = pytest.mark.skipif(REPOSITORY is None, reason="TORCHRL_EXT_SLIME names no repository of slime")


@pytest.fixture(scope="module")
def slime(tmp_path_factory):
    """A checkout of slime's package."""
    path = tmp_path_factory.mktemp("slime")
    archive = subprocess.run(["git", "-C", REPOSITORY, "archive", COMMIT, "slime"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", path], input=archive.stdout, check=True)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def server(checkpoint):
    with EmbeddedServer(checkpoint, dtype="float32", threads=1, routes=SLIMES) as running:
        yield running


@contextmanager
def trainer(slime, server, checkpoint, disk, local, encoding="xor", checksum="xxh3-128"):
    """A call that sets slime's weights, lets it update, and returns what it saw."""
    args = {
        "update_weight_disk_dir": str(disk),
        "update_weight_local_checkpoint_dir": str(local),
        "update_weight_delta_encoding": encoding,
        "update_weight_delta_checksum": checksum,
        "custom_update_weight_post_write_path": None,
        "hf_checkpoint": str(checkpoint),
    }
    told = json.dumps({"slime": str(slime), "url": server.url, "args": args})
    command = [sys.executable, slime_trainer.__file__, told]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def update(tensors):
            path = disk.parent / "weights.safetensors"
            save_file(tensors, path)
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield update
        finally:
            process.kill()


def moved(tensors, seed):
    """The same tensors, some of whose elements moved; the last one stays."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in sorted(found)[:-1]:
        where = torch.rand(found[name].shape, generator=generator) < 0.05
        found[name][where] += 0.25
    return found


def serves(server, tensors):
    found = httpx.get(f"{server.url}/weights_digest", timeout=60).json()["digests"]
    return {name: found[name] for name in tensors} == {name: tensor_digest(new) for name, new in tensors.items()}


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_slimes_deltas_reach_the_engine_through_its_local_checkpoint(
    slime, server, checkpoint, tmp_path, encoding, checksum
):
    held = load_file(f"{checkpoint}/model.safetensors")
    disk, local = tmp_path / "disk", tmp_path / "local"
    with trainer(slime, server, checkpoint, disk, local, encoding, checksum) as update:
        assert update(held)["published"] == 0  # its first one only takes its baseline, and lets hosts copy theirs
        for version in (1, 2, 3):
            held = moved(held, version) if version != 2 else held  # the second one changes nothing
            assert update(held) == {"published": version, "serves": str(version)}
            assert serves(server, held)
    held = load_file(f"{checkpoint}/model.safetensors")
    with trainer(slime, server, checkpoint, disk, local, encoding, checksum) as update:  # restarted: it counts anew
        update(held)
        for version in (1, 2):
            held = moved(held, 100 + version)
            assert update(held) == {"published": version, "serves": str(version)}
            assert serves(server, held)


def test_an_engine_that_was_restarted_goes_on_from_the_local_checkpoint_of_its_host(slime, checkpoint, tmp_path):
    held = load_file(f"{checkpoint}/model.safetensors")
    disk, local = tmp_path / "disk", tmp_path / "local"
    with (
        EmbeddedServer(checkpoint, dtype="float32", threads=1, routes=SLIMES) as first,
        trainer(slime, first, checkpoint, disk, local) as update,
    ):
        update(held)
        held = moved(held, 1)
        update(held)
        assert serves(first, held)
        port = int(first.url.rpartition(":")[2])
        first.stop()
        with EmbeddedServer(checkpoint, port=port, dtype="float32", threads=1, routes=SLIMES) as second:
            held = moved(held, 2)
            assert update(held) == {"published": 2, "serves": "2"}
            assert serves(second, held)
