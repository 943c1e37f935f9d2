"""Who takes part in a fleet: engines that are added, or listed by a function."""

from __future__ import annotations

import threading

import pytest

import torchrl_ext as tx
from tests.control.test_fleet import Scripted
from tests.fakes import FakeEngine
from tests.processes import WAIT_S
from torchrl_ext.base.errors import ConfigError, EngineError
from torchrl_ext.control.discovery import as_engine
from torchrl_ext.control.fleet import Fleet


def test_fleet_discovers_listed_engines_and_skips_absent_ones(caplog):
    with FakeEngine("vllm") as first, FakeEngine("sglang") as second:
        listed = [first.url, "127.0.0.1:9"]
        fleet = tx.connect(members=lambda: listed)
        assert fleet.members() == fleet.members() == (first.url,)
        assert caplog.text.count("http://127.0.0.1:9 changes nothing") == 1 and fleet.url == first.url
        listed = [second.url]
        assert fleet.members() == (second.url,) and fleet.info().kind == "fleet"
        assert [one.kind for one in fleet.each()] == ["sglang"]
        with pytest.raises(ConfigError, match="decides who takes part"):
            fleet.add(first.url)
        fleet.close()


def test_an_engine_that_hangs_is_not_waited_for_twice(monkeypatch):
    monkeypatch.setattr("torchrl_ext.control.fleet._PROBE_S", 0.05)
    leave, made = threading.Event(), Scripted("http://new")

    def make(url):
        leave.wait(WAIT_S)
        return made

    fleet = Fleet([Scripted("a")], make=make)
    fleet.add("new")
    assert fleet.members() == fleet.members() == ("a",)
    leave.set()
    monkeypatch.setattr("torchrl_ext.control.fleet._PROBE_S", WAIT_S)
    while fleet.members() == ("a",):  # its answer counts as soon as it is there
        pass
    assert fleet.engines[1] is made


def test_another_client_of_an_address_is_another_engine():
    first, again = Scripted("a"), Scripted("a")
    fleet = Fleet([first, Scripted("b")])
    fleet.members()
    fleet.lose(first, EngineError("it is gone"))
    fleet.remove("a")
    fleet.add(again)
    assert fleet.members() == ("b", "a") and [row.error for row in fleet.look()] == [None, None]
    assert fleet.engines[1] is again


def test_fleet_of_clients_alone_refuses_addresses():
    """A fleet without `make` refuses an address and adds nothing of the call; `as_engine` makes fleets with it."""
    fleet = Fleet([Scripted("a")])
    with pytest.raises(ConfigError, match=r"cannot make a client for 'b:1'.*torchrl_ext.connect"):
        fleet.add(Scripted("c"), "b:1")
    assert fleet.members() == ("a",)
    with FakeEngine("vllm") as fake:
        listed = as_engine([Scripted("a"), Scripted("b")])
        listed.add(fake.url)
        listed.reconcile(WAIT_S)
        assert listed.members() == ("a", "b", fake.url)
