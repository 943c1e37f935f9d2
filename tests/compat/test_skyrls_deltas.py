"""What SkyRL publishes, converted: every version bit for bit, and nothing that its manifests do not confirm."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from tests.compat.layouts import edit_manifest, write_skyrl
from tests.hostile import refused_or_right, worse_bytes, worse_text
from tests.transports.chains import checkpoint, same, step, weights
from torchrl_ext.compat.convert import rebuilt
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores import open_store
from torchrl_ext.stores.base import MemoryStore
from torchrl_ext.versions.others import Reader

PAYLOAD = "delta-rank00000-file000000.safetensors"


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
def base(tmp_path):
    return str(checkpoint(tmp_path / "base", weights()))


@pytest.fixture
def history():
    own, found = weights(), {0: weights()}
    for version in (1, 2):
        step(own, version)
        found[version] = copied(own)
    return {**found, 3: found[2]}


@pytest.fixture
def root(tmp_path, history):
    """Three deltas on the base: the second one is checked by SHA-256, the third one changes nothing."""
    for version, algorithm in ((1, "xxh3-128"), (2, "sha256"), (3, "xxh3-128")):
        write_skyrl(tmp_path / "sync", version, history[version - 1], history[version], algorithm)
    return tmp_path / "sync"


def read(root, base):
    return {one.number: copied(dict(one)) for one in rebuilt(Reader(open_store(root), base))}


def test_versions_are_read_with_either_checksum_up_to_the_newest_manifest_and_on_their_base_alone(
    root, base, history, tmp_path
):
    found = read(root, base)
    assert found.keys() == {1, 2, 3} and all(same(found[version], history[version]) for version in found)
    other = checkpoint(tmp_path / "other", weights(seed=7))
    with pytest.raises(IntegrityError, match=r"delta-00000001.*check --base"):
        read(root, str(other))
    with pytest.raises(ConfigError, match="--base"):
        read(root, None)
    (root / "delta-00000003" / "manifest.json").unlink()
    assert read(root, base).keys() == {1, 2}


def test_rows_of_older_releases_are_read(root, base, history):
    def earlier(document):
        for row in document["tensors"]:
            row["sha256"] = row.pop("checksum")
            del row["payload_key"], row["checksum_algorithm"]

    edit_manifest(root / "delta-00000002", earlier)
    assert same(read(root, base)[2], history[2])


@pytest.mark.parametrize("lost", ["delta-00000001", "delta-00000002/manifest.json", f"delta-00000002/{PAYLOAD}"])
def test_what_is_missing_before_the_newest_version_is_named(root, base, lost):
    shutil.rmtree(root / lost) if "/" not in lost else (root / lost).unlink()
    with pytest.raises(IntegrityError, match="delta-00000002"):
        read(root, base)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda document: document.update(version=1), "version 1"),
        (lambda document: document.update(base_version=0), "version 2 on 0"),
        (lambda document: document["tensors"][0].update(checksum="0" * 64), "a.weight"),
        (lambda document: document["tensors"][0].update(checksum_algorithm="xxh3-128"), "a.weight"),
        (lambda document: document["tensors"][0].update(payload_key="other"), "under another name"),
        (lambda document: document["tensors"][0].update(name="other", payload_key="other"), "unknown"),
        (lambda document: document["tensors"][0].update(payload_file="../x.safetensors"), "not a plain file name"),
        (lambda document: document["tensors"].append(document["tensors"][0]), "twice"),
        (lambda document: document["tensors"].pop(), r"differ in \['b.weight'\]"),
    ],
)
def test_a_manifest_that_is_not_that_of_its_files_is_refused(root, base, change, why):
    edit_manifest(root / "delta-00000002", change)
    with pytest.raises(IntegrityError, match=why):
        read(root, base)


def test_whatever_becomes_of_its_files_what_is_read_is_a_version_of_it(root, base, history):
    chance, refused = random.Random(5), 0
    manifest, payload = root / "delta-00000002" / "manifest.json", root / "delta-00000002" / PAYLOAD
    text, data = manifest.read_bytes(), payload.read_bytes()
    for turn in range(160):
        manifest.write_bytes(worse_text(json.loads(text), chance) if turn % 2 else text)
        payload.write_bytes(data if turn % 2 else worse_bytes(data, chance))
        refused += refused_or_right(
            lambda: read(root, base),
            right=lambda found: all(same(one, history[version]) for version, one in found.items()),
        )
    assert refused > 60


def test_a_bucket_is_read_in_the_same_way_and_a_root_of_ours_is_none_of_theirs(root, base, history):
    store = MemoryStore()
    assert not list(rebuilt(Reader(store, base)))
    for file in root.rglob("*.*"):
        store.put(str(file.relative_to(root)), file.read_bytes())
    assert [one.number for one in rebuilt(Reader(store, base))] == [1, 2, 3]
