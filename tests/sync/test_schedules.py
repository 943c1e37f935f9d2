"""Engines join, leave, die and return under load, in schedules drawn from seeds (`tests.schedules`)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import psutil
import pytest

from tests.processes import forking
from tests.schedules import Schedule, checkpoint
from torchrl_ext.control.http import HTTP, run

SEEDS = {"delta": (), "collective": (8,)}
RUNS = [
    pytest.param(name, seed, marks=() if seed in few else pytest.mark.exhaustive)
    for name, few in SEEDS.items()
    for seed in range(100)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"))


def held():
    """What this process has that a schedule may leave: threads and sockets, without those that all clients share."""
    gc.collect()  # errors hold frames, and these what they worked with
    threads = {thread for thread in threading.enumerate() if thread.name != HTTP}
    return threads, {(one.laddr, one.raddr) for one in psutil.Process().net_connections("inet") if one.laddr}


@pytest.fixture
def nothing_left(caplog):
    """Whatever a schedule begins, it ends."""
    forking()
    run(asyncio.sleep(0))
    threads, sockets = held()
    yield
    caplog.get_records("call").clear()  # with the errors
    until = time.monotonic() + 20
    while time.monotonic() < until:
        more = [sorted(map(str, now - then)) for now, then in zip(held(), (threads, sockets), strict=True)]
        if not any(more):
            return
        time.sleep(0.05)
    pytest.fail(f"left behind: {more}")


@pytest.mark.parametrize(("transport", "seed"), RUNS)
def test_no_request_is_lost_no_version_mixed_and_nothing_hangs(transport, seed, model_dir, tmp_path, nothing_left):
    faults = Schedule(seed, transport, model_dir, tmp_path).run()
    assert not faults, faults
    left = [path.name for path in tmp_path.rglob("*") if path.name.startswith(".") or "tmp" in path.name]
    assert not left
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
