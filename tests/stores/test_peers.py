"""Roots of SkyRL, read by our reader; nothing of theirs is written to."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing

import pytest

from tests.compat.layouts import edit_manifest, write_skyrl
from tests.hostile import refused_or_right, worse_bytes, worse_text
from tests.transports.chains import checkpoint, same, step, trainer_at, weights
from torchrl_ext.compat.slime.foreign import ForeignVersions
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores import Chain, open_store
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.stores.peers import as_chain
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Arrival, Worker
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.transports.published import PublishedRoot


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


class TestSkyRL:
    @pytest.fixture
    def base(self, tmp_path):
        return checkpoint(tmp_path / "base", weights())

    @pytest.fixture
    def root(self, tmp_path):
        """Two deltas on the base, of which the second one is checked by SHA-256."""
        own, root = weights(), tmp_path / "sync"
        for version, algorithm in ((1, "xxh3-128"), (2, "sha256")):
            old = copied(own)
            step(own, version)
            write_skyrl(root, version, old, own, algorithm)
        return root

    @staticmethod
    def history():
        own, found = weights(), {0: weights()}
        for version in (1, 2, 3):
            step(own, version)
            found[version] = copied(own)
        return found

    def test_a_reader_follows_every_version_and_one_that_comes_late_gets_the_newest(self, root, base):
        history, early = self.history(), trainer_at(root, base=base)
        assert same(early.receive_weights(WAIT_S), history[2])
        write_skyrl(root, 3, history[2], history[3])
        assert same(early.receive_weights(WAIT_S), history[3])
        write_skyrl(root, 4, history[3], history[3])  # nothing changed: no payload file
        assert same(early.receive_weights(WAIT_S), history[3]) and early.received_version == 4
        late = trainer_at(root, base=base)
        assert same(late.receive_weights(WAIT_S), history[3]) and late.received_version == 4

    def test_a_new_run_in_the_emptied_root_is_followed_from_the_base(self, root, base):
        reader, own = trainer_at(root, base=base), weights()
        assert reader.receive_weights(WAIT_S) is not None
        for folder in root.iterdir():
            shutil.rmtree(folder)
        for version in (1, 2, 3):
            old = copied(own)
            step(own, 10 + version)
            write_skyrl(root, version, old, own)
        assert same(reader.receive_weights(WAIT_S), own)

    def test_rows_of_an_earlier_release_have_sha256_alone(self, root, base):
        def earlier(document):
            for row in document["tensors"]:
                row["sha256"] = row.pop("checksum")
                del row["checksum_algorithm"], row["payload_key"]

        edit_manifest(root / "delta-00000002", earlier)
        assert same(trainer_at(root, base=base).receive_weights(WAIT_S), self.history()[2])

    @pytest.mark.parametrize("missing", ["manifest.json", "delta-rank00000-file000000.safetensors"])
    def test_a_version_that_is_being_written_is_not_there_yet(self, root, base, missing):
        file = root / "delta-00000002" / missing
        moved = file.rename(root / missing)
        reader = trainer_at(root, base=base)
        assert same(reader.receive_weights(WAIT_S), self.history()[1])
        moved.rename(file)
        assert same(reader.receive_weights(WAIT_S), self.history()[2])

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda document: document.update(version=1), "version 1"),
            (lambda document: document.update(base_version=2), "base is version 2"),
            (lambda document: document["tensors"][0].update(checksum="0" * 64), "a.weight"),
            (lambda document: document["tensors"][0].update(payload_key="other"), "delta-00000002/manifest.json"),
            (lambda document: document["tensors"][0].update(payload_file="../x.safetensors"), "no plain file name"),
            (lambda document: document["tensors"][0].update(checksum_algorithm="xxh3-128"), "manifest.json is damaged"),
            (lambda document: document["tensors"].append(document["tensors"][0]), "twice"),
            (lambda document: document["tensors"].pop(), "b.weight"),
        ],
    )
    def test_a_manifest_that_is_not_that_of_its_files_is_refused(self, root, base, change, why):
        edit_manifest(root / "delta-00000002", change)
        with pytest.raises(IntegrityError, match=why):
            trainer_at(root, base=base).receive_weights(WAIT_S)

    def test_whatever_becomes_of_its_files_what_is_received_is_a_version_of_it(self, root, base):
        chance, refused, history = random.Random(5), 0, self.history()
        folder = root / "delta-00000002"
        manifest, payload = folder / "manifest.json", next(folder.glob("*.safetensors"))
        text, data = manifest.read_bytes(), payload.read_bytes()
        for turn in range(160):
            manifest.write_bytes(worse_text(json.loads(text), chance) if turn % 2 else text)
            payload.write_bytes(data if turn % 2 else worse_bytes(data, chance))
            refused += refused_or_right(
                lambda: trainer_at(root, base=base).receive_weights(0.0),
                right=lambda found: found is None or any(same(found, one) for one in history.values()),
            )
        assert refused > 60

    def test_nothing_is_written_to_a_root_of_theirs(self, root):
        before = sorted(root.rglob("*"))
        with pytest.raises(StoreError, match="belongs to SkyRL"):
            trainer_at(root).send_weights("policy", weights())
        with pytest.raises(StoreError, match="belongs to SkyRL"):
            open_store(root).delete("weight_v000001")
        assert sorted(root.rglob("*")) == before


def test_an_engine_that_is_told_to_load_from_a_root_of_theirs_lands_its_newest_version(tmp_path):
    own, base = weights(), str(checkpoint(tmp_path / "base", weights()))
    root = tmp_path / "run"
    for version in (1, 2):
        old = copied(own)
        step(own, version)
        write_skyrl(root, version, old, own)
    before = sorted(root.rglob("*"))
    found, version = PublishedRoot.of_path(str(root), base)
    with closing(found):
        info = found.invite(found.contents(version)[0])
        within = Deadline(WAIT_S)
        worker = DeltaTransport.join(info, Worker(rank=1), within)
        landed = dict(worker.receive(Arrival(version=version, params=()), {}, within))
        worker.close()
    assert version == 2 and same(landed, own)
    assert sorted(root.rglob("*")) == before  # the probe is gone


def test_a_root_of_ours_is_opened_as_it_is(tmp_path):
    trainer_at(tmp_path / "root").send_weights("policy", weights())
    (tmp_path / "root" / "updates").mkdir()
    (tmp_path / "root" / "delta-00000009").mkdir()
    assert same(trainer_at(tmp_path / "root").receive_weights(WAIT_S), weights())


def test_a_bucket_of_theirs_is_seen_in_the_same_way(tmp_path):
    own, store = weights(), MemoryStore()
    old = copied(own)
    step(own, 1)
    for file in write_skyrl(tmp_path, 1, old, own).iterdir():
        store.put(f"delta-00000001/{file.name}", file.read_bytes())
    seen = as_chain(store)
    assert (seen.list(), Chain(seen, foreign=ForeignVersions(seen, "/base")).latest()) == (["weight_v000001"], 1)
    for name, size in seen.sizes("weight_v000001").items():
        assert len(seen.get(f"weight_v000001/{name}")) == size
    assert as_chain(seen) is seen and as_chain(MemoryStore()).list() == []
