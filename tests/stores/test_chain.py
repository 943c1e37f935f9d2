"""Chains of versions: the route that costs least, what may go, and a thousand versions on disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.kernels.base import LINEAR
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.delta_manifest import BLOCKS, DIGEST
from torchrl_ext.stores.manifest import DeltaManifest, Manifest
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.stores.versions import version_name, version_number
from torchrl_ext.testing import same_bits
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.versions.writer import ChainWriter, Copies
from torchrl_ext.weights.source import MappingSource

VERSIONS, EVERY = 1000, 40


def delta(version, base=None, run="r", base_run="r", nbytes=10):
    return DeltaManifest(
        version=version,
        base_version=version - 1 if base is None else base,
        run_id=run,
        base_run_id=base_run,
        digest=LINEAR,
        container=BLOCKS,
        codecs=(),
        files={"delta-00001.bin": nbytes},
        table=ParamTable.of(()),
        changed=np.empty(0, DIGEST),
        digests=np.empty((0, 2), DIGEST),
    ).to_bytes()


def full(version, run="r", nbytes=1000):
    return Manifest(version=version, run_id=run, params=(), files={"model.safetensors": nbytes}).to_bytes()


def chain_of(**versions):
    """``f`` full, ``d`` delta, ``b`` both."""
    store = MemoryStore()
    for name, kind in versions.items():
        number = int(name[1:])
        if kind in "fb":
            store.put(f"{version_name(number)}/manifest.json", full(number))
        if kind in "db":
            beside = "delta/" if kind == "b" else ""
            store.put(f"{version_name(number)}/{beside}manifest.json", delta(number))
    store.put("latest", f"{max(int(name[1:]) for name in versions)}\n".encode())
    return Chain(store)


def taken(route):
    return (route.keyframe and route.keyframe.version, [manifest.version for _, manifest in route.deltas])


class TestNumbers:
    @pytest.mark.parametrize("number", [0, 7, 999_999, 1_000_000, 123_456_789])
    def test_a_version_number_survives_its_name(self, number):
        assert version_number(version_name(number)) == number

    @pytest.mark.parametrize(
        "name", ["weight_v7", "weight_v0000007", "weight_v00000x", "weight_v000007.tmp", "latest", ""]
    )
    def test_other_names_are_no_versions(self, name):
        assert version_number(name) is None

    def test_versions_are_listed_oldest_first_whatever_their_digits(self, tmp_path):
        for name in (*map(version_name, (999_999, 3, 1_000_000)), "other"):
            (tmp_path / name).mkdir()
        assert Chain(LocalStore(tmp_path)).numbers() == [3, 999_999, 1_000_000]

    def test_the_pointer_only_moves_forward(self):
        chain = Chain(MemoryStore())
        assert chain.latest() == 0
        chain.advance(5)
        chain.advance(5)
        with pytest.raises(StoreError, match="go back from version 5 to 4"):
            chain.advance(4)
        assert chain.latest() == 5


class TestRoutes:
    def test_one_that_joins_reads_the_newest_keyframe_and_what_follows(self):
        chain = chain_of(v1="f", v2="d", v3="b", v4="d", v5="d")
        assert taken(chain.route(5)) == (3, [4, 5])
        assert taken(chain.route(2)) == (1, [2])
        assert taken(chain.route(3)) == (3, [])

    def test_one_that_follows_reads_deltas_past_a_keyframe(self):
        chain = chain_of(v1="f", v2="d", v3="b", v4="d")
        assert taken(chain.route(4, ("r", 2))) == (None, [3, 4])
        assert taken(chain.route(4, ("r", 4))) == (None, [])

    def test_one_of_another_run_begins_at_a_keyframe(self):
        assert taken(chain_of(v1="f", v2="d", v3="d").route(3, ("other", 2))) == (1, [2, 3])

    def test_a_target_that_is_gone_is_told_apart(self):
        with pytest.raises(FileNotFoundError):
            chain_of(v1="f").route(2)

    def test_a_delta_on_another_runs_version_is_refused(self):
        chain = chain_of(v1="f")
        chain.store.put(f"{version_name(2)}/manifest.json", delta(2, base_run="other"))
        with pytest.raises(IntegrityError, match="'other'"):
            chain.route(2)


class TestCollection:
    def test_keeps_the_newest_keyframe_and_everything_after_it(self):
        chain = chain_of(v1="f", v2="d", v3="b", v4="d", v5="b", v6="d")
        assert chain.collect(keep_keyframes=2) == [1, 2]
        assert chain.collect() == [3, 4]
        assert chain.collect() == []

    def test_without_a_keyframe_nothing_goes(self):
        assert chain_of(v1="d", v2="d").collect() == []


BAD_LEASES = {
    "no version": '{"first": Infinity, "until": 9e9}',
    "a version that is no number": '{"first": NaN, "until": 9e9}',
    "half a version": '{"first": 1.5, "until": 9e9}',
    "a version below nothing": '{"first": -1, "until": 9e9}',
    "yes": '{"first": true, "until": 9e9}',
    "for ever": '{"first": 0, "until": Infinity}',
    "nearly for ever": '{"first": 0, "until": 1e300}',
    "a moment that is no number": '{"first": 0, "until": NaN}',
    "too many digits": '{"first": 0, "until": %s}' % ("9" * 400),
    "digits without end": '{"first": %s, "until": 9e9}' % ("9" * 5000),
    "a list": "[1, 2]",
    "words": "soon",
    "too deep": "[" * 3000,
    "too long": " " * 100_000 + '{"first": 0, "until": 9e9}',
    "for two hours": lambda: '{"first": 0, "until": %f}' % (time.time() + 7200),
    "not unicode": b"\xff",
}


class TestLeases:
    def test_none_that_is_nonsense_stops_a_trainer_or_keeps_what_it_published(self, tmp_path, caplog):
        trainer = tx.make_transport("delta", root=tmp_path, keyframe_every=2)
        weights = {"w": torch.zeros(10)}
        trainer.send_weights(weights)
        (tmp_path / "readers").mkdir()
        for name, content in BAD_LEASES.items():
            content = content() if callable(content) else content
            (tmp_path / "readers" / name).write_bytes(content.encode() if isinstance(content, str) else content)
        os.mkfifo(tmp_path / "readers" / "a pipe")
        (tmp_path / "readers" / "zeros").symlink_to("/dev/zero")
        (tmp_path / "readers" / "a folder").mkdir()
        for _ in range(4):
            trainer.send_weights(weights)
        assert sorted(path.name for path in tmp_path.glob("weight_v*")) == ["weight_v000005"]
        for name in [*BAD_LEASES, "a pipe", "zeros", "a folder"]:
            assert caplog.text.count(f"readers/{name} is no lease") == 1, name
        trainer.shutdown()

    def test_one_that_is_sound_keeps_what_it_names_until_it_ends(self, tmp_path):
        trainer = tx.make_transport("delta", root=tmp_path, keyframe_every=2)
        weights = {"w": torch.zeros(10)}
        trainer.send_weights(weights)
        lease = tmp_path / "readers" / "me"
        lease.parent.mkdir()
        lease.write_text(json.dumps({"first": 1, "until": time.time() + 600}))
        for _ in range(3):
            trainer.send_weights(weights)
        assert Chain(LocalStore(tmp_path)).numbers() == [1, 2, 3, 4]
        lease.write_text(json.dumps({"first": 1, "until": time.time() - 1}))
        trainer.send_weights(weights)
        assert Chain(LocalStore(tmp_path)).numbers() == [5]
        assert not lease.exists()
        trainer.shutdown()


class Counting(LocalStore):
    """A local store that counts the payload bytes that are read through it, and the manifests, which are no payload."""

    nbytes = manifests = 0

    def get(self, key, at_most=None):
        data = super().get(key, at_most)
        self.nbytes += 0 if key.endswith((".json", "latest")) else len(data)
        self.manifests += key.endswith("manifest.json")
        return data

    def ranges(self, key, spans):
        found = super().ranges(key, spans)
        self.nbytes += sum(map(len, found))
        return found

    def open(self, key):
        found = super().open(key)
        self.nbytes += found.nbytes
        return found


def test_a_writer_that_collects_reads_no_manifest_back(tmp_path):
    store = Counting(tmp_path / "root")
    store.own()
    chain, own = Chain(store), {"w": torch.zeros(20)}
    writer = ChainWriter(
        store, chain, "r", container=BLOCKS, full=FullWriter(1 << 20), keyframe_every=3, base=None, keep_files=False,
        baseline=lambda: Copies(make_codec("ulp")),
    )  # fmt: skip
    for version in range(1, 9):
        own["w"][version] += 1
        writer.publish(MappingSource(own), version)
        writer.acknowledge()
    assert (store.manifests, chain.numbers()) == (0, [7, 8])
    Chain(store).collect()  # another process does not know what they are
    assert store.manifests > 0


@pytest.fixture(scope="module")
def thousand():
    """A root with a thousand versions, and what each of some of them was; in memory where that has a filesystem."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield _thousand(Path(folder) / "root")


def _thousand(root):
    generator = torch.Generator().manual_seed(0)
    trainer = tx.make_transport("delta", root=root, encoding="ulp", keyframe_every=EVERY, keep_files=True)
    own, kept = {"w": torch.randn(4000, generator=generator).bfloat16(), "b": torch.zeros(3)}, {}
    for version in range(1, VERSIONS + 1):
        where = torch.randint(0, 4000, (40,), generator=generator)
        own["w"][where] *= 1.01
        own["b"][0] = version
        trainer.send_weights("policy", own)
        if version in (2, VERSIONS) or version % 97 == 1 or version % (5 * EVERY) in (0, 1, EVERY - 1):
            kept[version] = {name: tensor.clone() for name, tensor in own.items()}
    trainer.shutdown()
    return root, kept


def reader_on(root):
    store = Counting(root)
    chain = Chain(store)
    reader = ChainReader(chain, lambda number, manifest: PublishedVersion(store, number, manifest))
    reader.retain(lambda name: True)
    return store, reader


class TestAThousandVersions:
    def test_any_of_them_can_be_joined_within_the_bytes_of_one_keyframe_and_its_deltas(self, thousand):
        root, kept = thousand
        for version, expected in kept.items():
            store, reader = reader_on(root)
            route = reader.open(version)
            needed = reader.chain.route(version).nbytes
            received = dict(reader.tensors(route, {}))
            assert store.nbytes <= 1.2 * needed
            assert all(same_bits(received[name], tensor) for name, tensor in expected.items())

    def test_one_that_follows_reads_only_deltas_however_far_it_is_behind(self, thousand):
        root, kept = thousand
        store, reader = reader_on(root)
        versions = sorted(kept)
        dict(reader.tensors(reader.open(versions[0]), {}))
        for version in versions[1:]:
            before, held = store.nbytes, reader.held
            needed = reader.chain.route(version, held).nbytes
            received = dict(reader.tensors(reader.open(version), {}))
            assert store.nbytes - before <= 1.2 * needed
            assert all(same_bits(received[name], tensor) for name, tensor in kept[version].items())
