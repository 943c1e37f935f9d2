"""Sources of members, each over what it reads: a file, a router, names of a host; and what a fleet makes of them."""

from __future__ import annotations

import json
import os
import threading

import pytest

import torchrl_ext as tx
from tests.fakes import FakeEngine
from tests.processes import WAIT_S
from tests.rpc.test_pool import Scripted
from tests.rpc.test_router import Earlier, Engine, Gateway, serving
from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.rpc.membership import from_dns, from_file, from_router
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.rpc.router import RouterClient


def test_a_file_lists_an_address_per_line_or_as_json_and_is_read_each_time(tmp_path):
    path = tmp_path / "engines"
    source = from_file(path)
    with pytest.raises(OSError):
        source()
    path.write_text("# those of today\nhost:1\n\n  http://host:2  # the other\n")
    assert source() == ["host:1", "http://host:2"]
    path.write_text(json.dumps(["host:3"]))
    assert source() == ["host:3"]
    path.write_text('["host:3", 4]')
    with pytest.raises(ConfigError, match="a JSON list of addresses"):
        source()


@pytest.mark.parametrize("script", [Earlier, Gateway])
def test_a_router_lists_its_workers(script):
    with serving(script()) as router, serving(Engine()) as engine:
        source = from_router(router.url)
        assert source() == []
        RouterClient(router.url).add(engine.url)
        assert source() == [engine.url]


def test_who_is_only_in_a_routers_list_gets_no_key(caplog):
    """A router takes workers from whoever reaches it; ``localhost`` is a host that nobody named."""
    router_lists = Gateway()
    with serving(router_lists) as router, FakeEngine("vllm") as engine, serving(Engine()) as stranger:
        RouterClient(router.url).add(engine.url)
        far = f"http://localhost:{stranger.port}"
        RouterClient(router.url).add(far)
        asked = len(stranger.keys)
        fleet = tx.connect(members=from_router(router.url), api_key="K")
        assert fleet.members() == fleet.members() == (engine.url,)
        assert stranger.keys[asked:] == [] and caplog.text.count(f"lists {far}, which nobody named") == 1
        fleet.close()
        assert from_router(router.url, hosts=["localhost"])() == [engine.url, far]


def test_a_name_lists_each_of_its_addresses_once(monkeypatch):
    assert "http://127.0.0.1:8000" in from_dns("localhost", 8000)()
    found = [(None, None, None, "", (one, 80)) for one in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")]
    monkeypatch.setattr("socket.getaddrinfo", lambda host, port, **_: found)
    assert from_dns("engines.job", 80, scheme="https")() == [
        "https://10.0.0.1:80",
        "https://10.0.0.2:80",
        "https://[fd00::1]:80",
    ]


def test_a_fleet_discovers_what_its_file_lists_and_does_not_wait_for_what_is_not_up(tmp_path, caplog):
    path = tmp_path / "engines"
    with FakeEngine("vllm") as first, FakeEngine("sglang") as second:
        path.write_text(f"{first.url}\n127.0.0.1:9\n")
        fleet = tx.connect(members=from_file(path))
        assert fleet.members() == fleet.members() == (first.url,)
        assert caplog.text.count("http://127.0.0.1:9 changes nothing") == 1 and fleet.url == first.url
        path.write_text(second.url)
        assert fleet.members() == (second.url,) and fleet.info().kind == "fleet"
        assert [one.kind for one in fleet.each()] == ["sglang"]
        os.remove(path)
        assert fleet.members() == (second.url,)
        fleet.add(first.url.removeprefix("http://"))
        fleet.remove(second.url)
        assert fleet.members() == (first.url,)
        fleet.close()


def test_whole_deployments_come_and_go():
    pool = Pool([Scripted("a0"), Scripted("a1")], data_parallel_size=2)
    for engines in (["b0"], ["a1", "b0"]):
        with pytest.raises(ConfigError):
            pool.add(*map(Scripted, engines))
    with pytest.raises(ConfigError, match="only a part of the deployment a0, a1"):
        pool.remove("a0")
    pool.add(*map(Scripted, ("b0", "b1", "a0", "a1")))
    assert pool.members() == ("a0", "a1", "b0", "b1") and pool.info().world_size == 2
    pool.remove("a0", "a1")
    assert pool.members() == ("b0", "b1")


def test_neither_a_source_nor_an_engine_that_hangs_is_waited_for_twice(monkeypatch):
    monkeypatch.setattr("torchrl_ext.rpc.pool._PROBE_S", 0.05)
    leave = threading.Event()

    def source():
        leave.wait(WAIT_S)
        return ["new"] if leave.is_set() else []

    made = Scripted("http://new")
    pool = Pool([Scripted("a")], members=source, make=lambda url: made)
    assert pool.members() == pool.members() == ("a",)
    leave.set()
    monkeypatch.setattr("torchrl_ext.rpc.pool._PROBE_S", WAIT_S)
    while pool.members() == ("a",):  # its answer counts as soon as it is there
        pass
    assert pool.engines[1] is made


def test_complaints_about_an_engine_leave_with_it_and_another_client_of_its_address_is_another_engine():
    first, again = Scripted("a"), Scripted("a")
    pool = Pool([first, Scripted("b")])
    pool.members()
    pool.lose(first, EngineError("it is gone"))
    pool.remove("a")
    pool.add(again)
    assert pool.members() == ("b", "a") and pool.health.why("a") is None and pool.engines[1] is again


def test_adapters_follow_the_engines_of_their_pool():
    class Adapted(Scripted):
        def adapter(self, name):
            return Scripted(self.url)

    pool = Pool([Adapted("a"), Adapted("b")])
    adapters = pool.adapter("policy")
    pool.add(Adapted("c"))
    pool.remove("a")
    assert adapters.members() == ("b", "c")
