"""Converted chains before the readers of slime and SkyRL, and what SkyRL writes before ours.

Each needs a git repository of the program, bare or not: TORCHRL_EXT_SLIME and TORCHRL_EXT_SKYRL name them. Without one
its tests are skipped. What its newest commit holds is unpacked into a temporary directory.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import subprocess
import sys
import tarfile
import types

import pytest
import torch
from safetensors.torch import load_file

from tests.compat.test_convert import converted, every_version, made, written
from tests.transports.chains import checkpoint, folder, same, step, trainer_at, weights
from torchrl_ext.testing import WAIT_S
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["converted", "made"]

PATCH = "docker/patch/latest/sglang-pull_weights.patch"
PULL = "python/sglang/srt/weight_sync/local_checkpoint.py"
FIRST = "9c0751f1c"  # the last release of its first format
NAMES = """
import contextlib, json, math, os
from dataclasses import dataclass
from enum import Enum
from typing import Dict, List, Optional, Tuple
import torch
"""
SYNC = "skyrl/backends/skyrl_train/weight_sync"


def asked(variable, *command):
    """What git answers about the newest commit of a program's repository."""
    return subprocess.run(
        ["git", "-C", os.environ[variable], *command], capture_output=True, check=True, timeout=WAIT_S
    ).stdout


def unpacked(variable, path, into):
    with tarfile.open(fileobj=io.BytesIO(asked(variable, "archive", "HEAD", path))) as archive:
        archive.extractall(into, filter="data")
    return into


def needs(variable):
    return pytest.mark.skipif(variable not in os.environ, reason=f"{variable} names no repository")


@pytest.fixture
def modules():
    """Whatever a test imports is forgotten when it ends."""
    before = dict(sys.modules)
    yield sys.modules
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


@needs("TORCHRL_EXT_SLIME")
class TestSlime:
    @pytest.fixture
    def pull(self, modules):
        """The function that its patch of SGLang adds."""
        patch = asked("TORCHRL_EXT_SLIME", "show", f"HEAD:{PATCH}").decode()
        added = patch.split(f"+++ b/{PULL}\n")[1].split("\ndiff --git ")[0].splitlines()
        module = types.ModuleType("pulled_by_slime")
        exec("\n".join(line[1:] for line in added if line.startswith("+")), module.__dict__)
        return module.pull

    @pytest.fixture
    def lands(self):
        """The receiver of its first format, which a patch of SGLang adds, around a model: takes the paths of files."""
        if subprocess.run(["git", "-C", os.environ["TORCHRL_EXT_SLIME"], "cat-file", "-e", FIRST]).returncode:
            pytest.skip(f"the repository goes back to no commit {FIRST}")
        patch = asked("TORCHRL_EXT_SLIME", "show", f"{FIRST}:docker/patch/latest/sglang.patch").decode()

        def added(begin):
            lines = itertools.takewhile(lambda line: line[:1] == "+", patch[patch.index(f"+{begin}") :].splitlines())
            return "\n".join(line[1:] for line in lines) + "\n"

        code = NAMES + added("class DeltaEncoding") + added("def _param_storage_index")
        module = types.ModuleType("receiver_of_slime")
        code += "class Receiver:\n" + added("    def _decode_delta_one_param")
        sys.modules[module.__name__] = module  # where its dataclasses look for themselves
        exec(code, module.__dict__)
        yield module.Receiver
        del sys.modules[module.__name__]

    def test_its_first_receiver_lands_every_version(self, lands, tmp_path):
        model = torch.nn.ParameterDict({"a": torch.zeros(300, 300), "b": torch.ones(7, dtype=torch.bfloat16)})
        model.requires_grad_(False)
        model.load_weights = lambda pairs: [model[name].copy_(tensor) for name, tensor in pairs]
        own = {name: tensor.clone() for name, tensor in model.items()}
        trainer = trainer_at(tmp_path / "ours", encoding="ulp", keyframe_every=0)
        trainer.send_weights("policy", own)
        receiver, history = lands(), {}
        receiver.model, receiver.device = model, "cpu"
        receiver.server_args = types.SimpleNamespace(
            update_weight_delta_chunk_bytes=1 << 20, update_weight_delta_read_workers=2
        )
        for version in (2, 3):
            own["a"][version, ::7], own["a"][-1, -version], own["b"][version] = version, -version, 0.5
            trainer.send_weights("policy", own)
            history[version] = {name: tensor.clone() for name, tensor in own.items()}
        trainer.shutdown()
        written(tmp_path / "ours", tmp_path / "out", "slime-first")
        for version, expected in history.items():
            done, said = receiver._apply_delta(sorted(map(str, folder(tmp_path / "out", version).glob("rank*"))))
            assert done, said
            assert same(dict(model.items()), expected)

    def test_its_pull_makes_every_version_one_after_the_other_and_at_once(self, pull, made, converted, tmp_path):
        _, base, history = made
        for version in history:
            for local in (tmp_path / "follows", tmp_path / f"joins-{version}"):
                pull(str(local), str(base), str(converted / "slime"), version)
                assert same(load_file(local / "model.safetensors"), history[version])
                assert (local / "config.json").exists()

    def test_its_pull_follows_deltas_on_the_base_alone(self, pull, made, converted, tmp_path):
        _, base, history = made
        written(converted / "skyrl", tmp_path / "out", "slime", base)
        pull(str(tmp_path / "local"), str(base), str(tmp_path / "out"), 5)
        assert same(load_file(tmp_path / "local" / "model.safetensors"), history[5])


@needs("TORCHRL_EXT_SKYRL")
class TestSkyRL:
    @pytest.fixture
    def theirs(self, modules, tmp_path):
        """Its module of delta checkpoints; the packages above it would import Ray and its trainer."""
        parts, path = SYNC.split("/"), unpacked("TORCHRL_EXT_SKYRL", SYNC, tmp_path / "skyrl")
        for count in range(1, len(parts) + 1):
            package = types.ModuleType(".".join(parts[:count]))
            package.__path__ = [str(path.joinpath(*parts[:count]))]
            modules[package.__name__] = package
        return importlib.import_module(f"{'.'.join(parts)}.delta_checkpoint")

    def test_its_store_fetches_every_version_one_after_the_other_and_at_once(self, theirs, made, converted, tmp_path):
        _, base, history = made
        follows = theirs.LocalCheckpointStore(str(base), str(tmp_path / "follows"))
        for version in history:
            joins = theirs.LocalCheckpointStore(str(base), str(tmp_path / f"joins-{version}"))
            for store in (follows, joins):
                store.fetch(version, sync_dir=str(converted / "skyrl"))
                store.validate_ready(version)
                found = theirs.CheckpointIndex(store._current_checkpoint_dir()).iter_tensors()
                assert same(dict(found), history[version])

    @pytest.fixture
    def published(self, theirs, tmp_path):
        """Three versions that its publisher wrote, the second one without changes; and the weights of each."""
        own, history, root = weights(), {}, tmp_path / "sync"
        base = checkpoint(tmp_path / "base", weights())
        own = {meta.name: own[meta.name] for meta in CheckpointSource(base).params()}  # rows are in the sender's order
        publisher = theirs.DeltaCheckpointPublisher(str(base), str(root), str(tmp_path / "staging"))
        for version in (1, 2, 3):
            if version != 2:
                step(own, version)
            chunk = theirs.WeightChunk(
                names=list(own), dtypes=[str(one.dtype) for one in own.values()],
                shapes=[list(one.shape) for one in own.values()], tensors=list(own.values()),
            )  # fmt: skip
            publisher.publish(publisher.create_delta_files([chunk]))
            history[version] = {name: tensor.clone() for name, tensor in own.items()}
        return root, base, history

    def test_what_its_publisher_writes_is_read_here(self, published):
        root, base, history = published
        found = every_version(root, base)
        assert all(same(found[version], history[version]) for version in history)

    def test_by_way_of_slimes_layout_its_files_come_back_byte_for_byte(self, published, tmp_path):
        root, base, _ = published
        written(root, tmp_path / "slime", "slime", base)
        written(tmp_path / "slime", tmp_path / "back", "skyrl", base)

        def files(path):
            return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*") if file.is_file()}

        assert files(tmp_path / "back") == files(root) and len(files(root)) == 5
