"""Names of classes: whose error is whose, and transports that another package brings."""

from __future__ import annotations

import pytest

import torchrl_ext as tx
from tests.control.servers import KNOWN, running
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import Registry, transports
from torchrl_ext.sync import inspection

PIGEON = """
from torchrl_ext.data.transports.disk import DiskTransport

class PigeonTransport(DiskTransport):
    name = "pigeon"
"""


class Strict:
    def __init__(self, size, *, colour="red"):
        self.area = size * size
        self.colour = colour


@pytest.fixture
def registry():
    registry = Registry("box")
    registry.register("strict", f"{__name__}:Strict", "a box")
    return registry


@pytest.mark.parametrize("settings", [{}, {"size": 1, "weight": 2}, {"colour": "blue"}])
def test_unknown_settings_are_a_config_error_naming_known_ones(registry, settings):
    with pytest.raises(ConfigError, match=r"box 'strict' does not take these settings.*Expected: some of size, colour"):
        registry.make("strict", **settings)


def test_a_constructors_own_error_is_its_own(registry):
    with pytest.raises(TypeError, match="can't multiply") as raised:
        registry.make("strict", size="large")
    assert not isinstance(raised.value, ConfigError)
    assert registry.make("strict", size=3).area == 9


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory with a package, as an installer leaves it there; this process finds it too."""
    site = tmp_path / "site"
    (site / "birds-1.0.dist-info").mkdir(parents=True)
    (site / "birds.py").write_text(PIGEON)
    (site / "birds-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    names = {"pigeon": "PigeonTransport", "disk": "PigeonTransport", "dodo": "DodoTransport"}
    points = "\n".join(["[torchrl_ext.transports]", *(f"{name} = birds:{found}" for name, found in names.items())])
    (site / "birds-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(site)
    return site


def test_names_of_other_packages_are_known_and_take_none_of_ours(site):
    ours = Registry("transport", group="torchrl_ext.transports")
    ours.register("disk", "torchrl_ext.data.transports.disk:DiskTransport", "files")
    assert ours.names() == {"disk": "files", "pigeon": "of package birds", "dodo": "of package birds"}
    assert ours.load("pigeon").name == "pigeon" and ours.load("disk") is tx.DiskTransport


@pytest.mark.parametrize("module", ["birds:DodoTransport", "nowhere:Transport", "that_raises:Transport", "birds"])
def test_transport_that_cannot_be_imported_is_named(site, monkeypatch, module):
    (site / "that_raises.py").write_text("raise RuntimeError('no licence')")
    ours = Registry("transport")
    ours.register("lost", module, "of package birds")
    ours.register("disk", "torchrl_ext.data.transports.disk:DiskTransport", "files")
    with pytest.raises(ConfigError, match="transport 'lost' cannot be imported: ") as raised:
        ours.load("lost")
    assert "nowhere" in module or f"package that has {module}" in str(raised.value)
    monkeypatch.setattr(inspection.registry, "transports", ours)
    assert inspection.followed() == ["disk"]


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_a_package_whose_files_are_damaged_hides_no_other(site, file, caplog):
    broken = site / "ants-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_text("[torchrl_ext.transports]\nant = ants:AntTransport\n")
    (broken / file).write_bytes(b"Name: \xff\n")
    ours = Registry("transport", group="torchrl_ext.transports")
    assert ours.names().keys() == {"pigeon", "dodo", "disk"} and ours.load("pigeon")
    (record,) = caplog.records
    assert "transports of one package are left out: 'utf-8' codec" in record.getMessage()


def test_engine_does_not_list_a_transport_of_the_trainer():
    transports.register("here alone", "tests.base.test_registry:Strict", "of this process")
    try:
        with running() as server:
            assert set(tx.discover(server.url)[0].transports) == set(KNOWN)
            assert set(tx.connect(server.url).info().transports) == set(KNOWN)
    finally:
        del transports._entries["here alone"]
