"""Servers of other makers that several folders need."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest

from tests.processes import WAIT_S
from torchrl_ext.launch.processes import free_port


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="also what is marked exhaustive: further engine settings"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked exhaustive, unless it is asked for."""
    if not config.getoption("--exhaustive"):
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``: real engines run one after the other, in one process, with their servers."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneProcessForEngines(LoadFileScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return "engine" if scope.startswith("tests/engine/") else scope

    return OneProcessForEngines(config, log)


@pytest.fixture(scope="session")
def s3():
    """Address of a server that lives as long as the session."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + WAIT_S
        while True:
            assert child.poll() is None and time.monotonic() < until
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.TransportError:
                continue
        httpx.put(f"{url}/bucket", timeout=30).raise_for_status()
        yield {"endpoint_url": url, "key": "k", "secret": "s"}
    finally:
        child.kill()
        child.wait(WAIT_S)
