"""Names of classes: whose error is whose, and transports that another package brings."""

from __future__ import annotations

import pytest

import torchrl_ext as tx
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import Registry
from torchrl_ext.sync import inspection

PIGEON = """
from torchrl_ext.data.transports.disk import DiskTransport

class PigeonTransport(DiskTransport):
    name = "pigeon"
"""


OURS = {"disk": ("data.transports.disk:DiskTransport", "files"), "memory": ("data.transports.memory:Transprt", "typo")}


@pytest.mark.parametrize("settings", [{}, {"root": "a", "weight": 2}, {"keep_files": True}])
def test_unknown_settings_are_a_config_error_naming_known_ones(settings):
    words = r"transport 'disk' does not take these settings.*Expected: some of root, keep_files"
    with pytest.raises(ConfigError, match=words):
        tx.make_transport("disk", **settings)


def test_a_constructors_own_error_is_its_own():
    with pytest.raises(TypeError) as raised:
        tx.make_transport("disk", root=3)
    assert not isinstance(raised.value, ConfigError)


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """A table of ours beside a package, as an installer leaves it in a directory; this process finds it too."""
    folder = tmp_path / "birds-1.0.dist-info"
    folder.mkdir()
    (tmp_path / "birds.py").write_text(PIGEON)
    (tmp_path / "that_raises.py").write_text("raise RuntimeError('no licence')")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    names = {"pigeon": "birds:PigeonTransport", "disk": "birds:PigeonTransport", "dodo": "birds:DodoTransport"}
    names |= {"lost": "nowhere:Transport", "unlicensed": "that_raises:Transport", "bare": "birds"}
    points = "\n".join(["[torchrl_ext.transports]", *(f"{name} = {found}" for name, found in names.items())])
    (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("transport", OURS, group="torchrl_ext.transports")


def test_names_of_other_packages_are_known_and_take_none_of_ours(ours):
    summaries = dict(ours.names())
    assert {name for name, summary in summaries.items() if summary == "of package birds"} == summaries.keys() - {*OURS}
    assert summaries["disk"] == "files" and "pigeon" in summaries
    assert ours.load("pigeon").name == "pigeon" and ours.load("disk") is tx.DiskTransport


@pytest.mark.parametrize("name", ["dodo", "lost", "unlicensed", "bare", "memory"])
def test_transport_that_cannot_be_imported_is_named(ours, monkeypatch, name):
    with pytest.raises(ConfigError, match=f"transport '{name}' cannot be imported: ") as raised:
        ours.load(name)
    assert (
        "the package that the message names" in raised.value.hint if name == "lost" else "release" in raised.value.hint
    )
    monkeypatch.setattr(inspection.registry, "transports", ours)
    assert {*inspection.followed()} >= {"disk", "pigeon"} and name not in inspection.followed()
