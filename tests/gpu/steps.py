"""Steps of `tests.gpu.acceptance`. Each takes a scale, and returns figures; ``failures`` are what failed.

Speeds stand beside those of the device's own copy in the same process (``of_copy``).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

import torchrl_ext as tx
from tests.gpu import pairs
from tests.gpu.acceptance import Skipped
from tests.gpu.deltas import WAIT_S, turn
from tests.gpu.ends import FILES, GROUPS, Road, copy_speed, device, small
from tests.processes import running_python
from torchrl_ext.data.versions.compiled import compile_loops
from torchrl_ext.data.weights.derived import as_source

_PACKAGES = ("torch", "triton", "numpy", "numba", "msgspec", "zstandard", "xxhash", "tensordict", "nccl4py")
_LINE_S = 60
_PINNED = 1.25  # times the weights, which are a little more than a power of two


def environment(scale):
    """Packages, the machine, and the compiled loops, which later processes find in the cache."""
    found = {"python": platform.python_version(), "device": str(device())}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device().type == "cuda":
        gpu = torch.cuda.get_device_properties(device())
        found |= {"gpu": gpu.name, "gib": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["copy_gbps"] = round(copy_speed(max(1 << 20, int(scale * (2 << 30)))) / 1e9, 3)
    began = time.perf_counter()
    compile_loops("auto", as_source(small(13, 0)).params())
    return found | {"compiled_s": round(time.perf_counter() - began, 1)}


class _Tests:
    """Runs a file of tests without the conftest of all, and counts."""

    def __init__(self, folder, name, *more):
        import pytest

        self._passed, self._skipped, self._failed = 0, [], []
        alone = ("-q", "-p", "no:cacheprovider", "--confcutdir", folder, "-o", "addopts=")
        self._status = pytest.main([*alone, *more, f"{folder}/{name}"], plugins=[self])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.append(f"{report.nodeid.rpartition('::')[2]}: {str(report.longrepr).splitlines()[-1]}")
        self._passed += report.when == "call" and report.passed
        if report.skipped:
            self._skipped.append(report.longrepr[2])

    def figures(self):
        failed = self._failed or ([] if self._passed else [f"nothing ran: {self._status!r}"])
        return {"passed": self._passed, "skipped": sorted({*self._skipped}), "failures": failed}


def kernels(scale):
    """The suite of the kernels with torch's operators on the device, against numpy's words for what they do."""
    from tests.data.deltas import conftest
    from torchrl_ext.data.deltas import torch_ops

    conftest.WAYS["torch"] = torch_ops, str(device())
    return _Tests("tests/data/deltas", "test_kernels.py", "-k", "torch and not cuda and not lag").figures()


def roads(scale):
    """Every road with small tensors of all dtypes, from stream to stream, and with large ones that a CUDA graph reads.

    And what a trainer pins for deltas of large ones.
    """
    every = (*FILES, "ipc", *GROUPS)
    few = [_road(one, scale, aside=True, versions=2) for one in every]
    large = [_road(one, scale, mib=8192 if one == "ipc" else 1024, graph=True, versions=2) for one in every]
    records = pairs.travel([_road("delta", scale, mib=1152, aside=True), *few, *large], _LINE_S)
    failures = [f"{one['road']}: {one['failed']}" for one in records if "failed" in one]
    share = records[0].get("pinned_share", 0)
    if share > _PINNED:
        failures.append(f"the trainer pins {share} times its weights")
    return {"roads": records, "compared": sum(one.get("compared", 0) for one in records), "failures": failures}


def _road(transport, scale, *, mib=0, few=2000, **how):
    sizes = {"mib": max(6, int(mib * scale))} if mib else {"small": max(200, int(few * scale))}
    return Road(transport=transport, timeout_s=WAIT_S, **sizes, **how)


def deaths(scale):
    """An end killed in the middle of a version: the other one reports it, lives, goes on, and has its memory again."""
    found, failures = _outlived(["worker", "trainer"], ["collective", "sharded"], max(6, int(1024 * scale)))
    before = _free_bytes()
    least = 48 if device().type == "cpu" else 640  # more than the memory takes
    survived, failed = _outlived(["worker"], ["ipc"], max(least, int(1024 * scale)))
    kept_mib = (before - _free_bytes()) >> 20
    if kept_mib > 64:
        failed.append(f"{kept_mib} MiB of the GPU are not free again")
    return {"survived": found + survived, "kept_mib": kept_mib, "failures": failures + failed}


def _free_bytes():
    return torch.cuda.mem_get_info(device())[0] if device().type == "cuda" else 0


def _outlived(victims, transports, mib):
    found, failures = [], []
    for victim in victims:
        try:
            found += pairs.outlived(victim, transports, mib=mib)
        except AssertionError as error:
            failures.append(f"{victim} killed: {error}")
    return found, failures


def nccl(scale):
    """The tests of NCCL's failures: a rank that does not come, an end that is killed, a setting at one end only."""
    if device().type != "cuda":
        raise Skipped("no NCCL: gloo carries host copies here")
    return _Tests("tests/gpu", "test_nccl_failures.py").figures()


_SERVER = """
import sys
from tests.gpu.ends import device
device()
from torchrl_ext.engines.embedded.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def embedded(scale):
    """A trainer and an embedded engine over HTTP, both on the device; each version's outputs are compared."""
    from transformers import AutoModelForCausalLM

    from torchrl_ext.control.serving.processes import free_port
    from torchrl_ext.testing.tiny import make_tiny_lm

    found, failures, generator = {}, [], torch.Generator().manual_seed(1)
    os.environ |= pairs.variables("trainer")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model, port = make_tiny_lm(Path(folder) / "model"), free_port()
        arguments = ("--model", model, "--port", port, "--device", device(), "--threads", 1)
        server = stack.enter_context(running_python(_SERVER, *arguments, prefix=pairs.environment("engine")))
        policy = AutoModelForCausalLM.from_pretrained(model).to(device())
        _require_healthy(server, port)
        for name, how in {"delta": {"root": f"{folder}/root"}, "ipc": {}, "collective": {}, "sharded": {}}.items():
            try:
                transport = tx.make_transport(name, timeout_s=WAIT_S, **how)
                with tx.WeightSender(transport, tx.connect(f"127.0.0.1:{port}"), verify="outputs") as sender:
                    sender.register_model(policy)
                    reports = [_moved(policy, sender, generator) for _ in range(3)]
            except tx.errors.WeightSyncError as error:
                failures.append(f"{name}: {error}")
                continue
            pauses = [round(max(row.pause_s for row in report.engines), 4) for report in reports]
            found[name] = {"pause_s": pauses, "proofs": [report.proof for report in reports]}
            if not all(report.verified and report.proof == "outputs" for report in reports):
                failures.append(f"{name}: proofs are {found[name]['proofs']}")
    return {"roads": found, "failures": failures}


def _moved(policy, sender, generator):
    with torch.no_grad():
        turn(dict(policy.named_parameters()), generator)
    return sender.update_weights()


def _require_healthy(server, port):
    until = time.monotonic() + WAIT_S
    while True:
        assert server.poll() is None, f"the engine ended with status {server.returncode}"
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        assert time.monotonic() < until, "the engine is not healthy in time"
        time.sleep(0.1)
