"""The tiers of the tests, and servers of other makers that several folders need."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from tests.beside import longest_first, scheduler
from tests.forking import MODULES
from tests.processes import WAIT_S, forking
from tests.ranks import outcomes_of
from torchrl_ext.control.serving.processes import free_port

collect_ignore = ["third_party"]  # a package of its own, whose tests run where it is installed


def pytest_addoption(parser):
    group = parser.getgroup("tiers")
    group.addoption(
        "--engines",
        action="store_true",
        help="what runs on real vLLM, SGLang and routers, and nothing else; they are installed once per machine",
    )
    group.addoption("--exhaustive", action="store_true", help="also further settings of what the other tests show")
    group.addoption(
        "--kind-results", help="file that gets a line per kind of model, for tests.real_engines.compatibility"
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads it
def pytest_cmdline_main(config):
    """Two processes run a whole tier, unless ``-n`` says otherwise; one runs real engines, or a part that is chosen."""
    if not config.pluginmanager.has_plugin("xdist"):
        return
    option = config.option
    chosen = option.engines or option.markexpr or option.keyword or option.usepdb or option.collectonly
    if _all(config) and not chosen and "PYTEST_XDIST_WORKER" not in os.environ and option.numprocesses is None:
        option.numprocesses = 2 if (os.cpu_count() or 1) > 1 else 0
    if option.numprocesses and option.dist == "no":
        option.dist = "loadgroup"
        option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before xdist makes its own
def pytest_xdist_make_scheduler(config, log):
    return scheduler(config, log) if config.option.dist == "loadgroup" else None


settings.register_profile("default tier", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("exhaustive", settings.get_profile("default tier"), max_examples=1000)


def pytest_configure(config):
    settings.load_profile("exhaustive" if config.getoption("--exhaustive") else "default tier")
    if not config.getoption("--engines"):
        # no environment can be made, by this process or by a child: a test that needs one belongs to the other tier
        os.environ["TORCHRL_EXT_CACHE"] = str(Path(__file__) / "tests-without-engines-install-none")
        # and no name server is asked (resolv.conf(5); glibc reads this at the first look-up of a process): `TCPStore`
        # wants the name of every address, and waits five seconds for a name server that lost the question
        os.environ.setdefault("RES_OPTIONS", "attempts:0")
        # and no process of many has a thread per core, which wait for each other by spinning
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if _of_all(config):
        if not config.getoption("--engines"):  # before the other one, whose socket it must not hold a copy of
            site = runpy.run_path(str(Path(__file__).parent / "real_engines/site/sitecustomize.py"))
            site["fork_from_a_helper"](MODULES)
        forking()


def _of_all(config):
    """Whether this process runs all tests of a tier: then what forks children imports while they are collected.

    So does what forks those that would be spawned. Alone, a file of tests spawns them, as users do.
    """
    here = config.getoption("dist", "no") == "no" and not config.option.collectonly
    return here and _all(config)


def _all(config):
    return config.args_source is config.ArgsSource.TESTPATHS


def pytest_collection_modifyitems(config, items):
    """Keep one tier: the tests on real engines, or all others."""
    engines, exhaustive = config.getoption("--engines"), config.getoption("--exhaustive")
    kept, left = [], []
    for item in items:
        fits = bool(item.get_closest_marker("engine")) == engines
        fits = fits and (exhaustive or not item.get_closest_marker("exhaustive"))
        (kept if fits else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)
    if config.getoption("loadgroup", False):
        longest_first(items)


def pytest_report_header(config):
    """Which tier this is, for whoever wonders where a test is."""
    tier = "real engines alone" if config.getoption("--engines") else "no real engines, for which there is --engines"
    further = "" if config.getoption("--exhaustive") else "; further settings need --exhaustive"
    return f"tier: {tier}{further}"


@pytest.fixture
def lag():
    """Device ``lag:0`` of `tests.lag`, as this machine's accelerator; skips where there is no compiler, but in CI."""
    from tests.lag import device  # imports torch
    from tests.lag.build import Unbuilt

    try:
        device.load()
    except Unbuilt as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with device.here() as found:
        yield found


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Outcomes of the scenarios of a module (`tests.ranks`) on as many ranks as are asked for."""

    @functools.cache
    def run(world):
        items = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
        chosen = [item for item in items if hasattr(item.obj, "scenario") and item.callspec.params["world"] == world]
        return outcomes_of([item.obj.scenario for item in chosen], world, tmp_path_factory.mktemp("ranks"))

    return run


@pytest.fixture(scope="session")
def s3():
    """A server that lives as long as the session, which clients and child processes find in the environment."""
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
                httpx.get(url, timeout=5, verify=False)
                break
            except httpx.TransportError:
                continue
        httpx.put(f"{url}/bucket", timeout=30).raise_for_status()
        with pytest.MonkeyPatch.context() as patch:
            for name, found in (("ENDPOINT_URL", url), ("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s")):
                patch.setenv(f"AWS_{name}", found)
            yield
    finally:
        child.kill()
        child.wait(WAIT_S)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """An embedded engine with the weights of `tests.models.tiny_model`, which no test updates or kills."""
    from tests.engines.embedded import EmbeddedServer
    from tests.models import tiny_checkpoint

    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running
