from __future__ import annotations

import pytest
import torch

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores import Chain, LocalStore, Manifest, Placed, version_name, version_number
from torchrl_ext.stores.manifest import read_manifest
from torchrl_ext.types import ParamMeta


@pytest.fixture
def versions(tmp_path):
    return Chain(LocalStore(tmp_path))


def manifest(version, **changes):
    placed = Placed(meta=ParamMeta("a.b", torch.bfloat16, (2, 3)), file="model.safetensors", checksum="0" * 32)
    fields = {"version": version, "run_id": "run", "params": (placed,), "files": {"model.safetensors": 12}}
    return Manifest(**(fields | changes))


def publish(versions, number):
    with versions.store.draft(version_name(number)) as draft:
        draft.write("manifest.json", manifest(number).to_bytes())
    versions.advance(number)


@pytest.mark.parametrize("number", [0, 7, 999_999, 1_000_000, 123_456_789])
def test_a_version_number_survives_its_name(number):
    assert version_number(version_name(number)) == number


@pytest.mark.parametrize("name", ["weight_v7", "weight_v0000007", "weight_v00000x", "weight_v000007.tmp", "latest", ""])
def test_other_names_are_no_versions(name):
    assert version_number(name) is None


def test_versions_are_listed_oldest_first_whatever_their_digits(versions):
    for number in (999_999, 3, 1_000_000):
        (versions.store.root / version_name(number)).mkdir()
    (versions.store.root / "other").mkdir()
    assert versions.numbers() == [3, 999_999, 1_000_000]


def test_the_pointer_only_moves_forward(versions):
    assert versions.latest() == 0
    versions.advance(5)
    versions.advance(5)
    with pytest.raises(StoreError, match="go back from version 5 to 4"):
        versions.advance(4)
    assert versions.latest() == 5


@pytest.mark.parametrize("text", [b"", b"-1", b"1.5", b"weight_v000001", b"9" * 30, b"9" * 19])
def test_a_pointer_that_is_no_number_is_refused(versions, text):
    versions.store.put("latest", text)
    with pytest.raises(IntegrityError, match="a version number"):
        versions.latest()


def test_the_newest_number_counts_versions_that_the_pointer_never_reached(versions):
    publish(versions, 2)
    (versions.store.root / version_name(3)).mkdir()
    assert (versions.latest(), versions.newest()) == (2, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, manifest(1).to_bytes()[:-20]],
    ids=["empty", "a list", "no fields", "null", "not utf-8", "deep", "truncated"],
)
def test_bytes_that_are_no_manifest_are_refused_by_name(content):
    with pytest.raises(IntegrityError, match="here is damaged"):
        read_manifest(content, "here")
