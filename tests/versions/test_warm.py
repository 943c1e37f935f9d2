"""Compiled loops are ready when ends are connected: no update waits for a compiler."""

from __future__ import annotations

import subprocess
import threading

import pytest
import torch
from numba.core import event
from torch import nn

import torchrl_ext as tx
from tests.processes import calling, python
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.kernels.jit import LOOPS
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions import warm

WAIT_S = 120.0
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.int64)


def compiled():
    """What is compiled in this process, in all; an update that compiles adds to it."""
    return {(loop.__module__, loop.__name__): set(loop.signatures) for loop in LOOPS}


def update_after_connect(encoding, root):
    sizes = {"small": 900, "large": (1 << 20) + 9}
    kinds = [("small", dtype) for dtype in DTYPES] + [("large", DTYPES[0])]
    policy, served = (
        {f"{kind}.{dtype}": torch.zeros(sizes[kind], dtype=dtype) for kind, dtype in kinds}
        | {"matrix": torch.zeros(30, 40, dtype=torch.bfloat16)}
        for _ in range(2)
    )
    sender = tx.WeightSender(tx.DeltaTransport(root, encoding=encoding), InProcessEngine(served))
    sender.register_model(policy)
    sender.init_all_workers_group({name: (tensor.dtype, tensor.shape) for name, tensor in policy.items()})
    before = compiled()
    assert before and any(before.values())
    for density in (1.0, 0.01, 0.0, 0.3, 0.97):
        for tensor in policy.values():
            tensor[torch.rand(tensor.shape) < density] += 1
        assert sender.update_weights().verified
        assert all(torch.equal(policy[name], served[name]) for name in policy)
    more = {loop: made - before.get(loop, set()) for loop, made in compiled().items() if made - before.get(loop, set())}
    assert not more, more
    sender.shutdown()


FURTHER = sorted({*tx.DeltaTransport.encodings()} - {"auto", "context"})


@pytest.mark.parametrize(
    "encoding", ["auto", "context", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)]
)
def test_no_update_compiles_after_connect(encoding, tmp_path):
    python(calling(update_after_connect, encoding, str(tmp_path)))


def warm_up(asks):
    """Be an engine that warms up, which asks another process to compile or finds everything in the cache."""
    compiling, asked, run = event.RecordingListener(), [], subprocess.run
    event.register("numba:compile", compiling)
    warm.subprocess.run = lambda command, **how: asked.append(command) or run(command, **how)
    params = [ParamMeta("x", torch.bfloat16, (4,))]
    assert warm.Warming(make_codec("overwrite"), params, beside=True).wait(WAIT_S)
    assert LOOPS and not compiling.buffer and len(asked) == asks


@pytest.mark.exhaustive
def test_an_engine_with_an_empty_cache_compiles_nothing_itself(tmp_path):
    """The second process finds what the one beside the first left, and needs no other one."""
    for asks in (1, 0):
        python(calling(warm_up, asks), prefix=("env", f"NUMBA_CACHE_DIR={tmp_path}"))
    assert list(tmp_path.rglob("*.warm"))


MASK = """
import sys, numba, numpy as np
if sys.argv[1]:
    numba.__version__ = sys.argv[1]
from torchrl_ext.codecs.block_loops import set_mask
set_mask(np.arange(4, dtype=np.int32), np.zeros(1, np.uint64))
hits, misses = (sum(counts.values()) for counts in (set_mask.stats.cache_hits, set_mask.stats.cache_misses))
assert hits + misses == 1
print("kept" if hits else "compiled")
"""
"""Code, as the version has to be another one before anything of ours is imported."""


def test_versions_of_the_compiler_that_share_a_folder_keep_each_others_code(tmp_path):
    """A trainer's environment and an engine's: each comes back and finds what it compiled."""
    for version, expected in (("", "compiled"), ("0.0", "compiled"), ("", "kept")):
        found = python(MASK, version, prefix=("env", f"NUMBA_CACHE_DIR={tmp_path}"))
        assert found.split() == [expected], version


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_only_the_first_engine_whose_cache_is_not_complete_asks_another_process(
    beside, complete, monkeypatch, tmp_path
):
    done = []
    monkeypatch.setattr(warm, "_WARM", {})
    monkeypatch.setattr(warm, "_stamp", lambda codec, widths: tmp_path / "stamp")
    monkeypatch.setattr(warm.subprocess, "run", lambda command, **how: done.append(command[1:3]))
    monkeypatch.setattr(warm, "rehearse", lambda codec, widths: done.extend(widths))
    if complete:
        (tmp_path / "stamp").touch()
    params = [ParamMeta(str(dtype), dtype, (3,)) for dtype in DTYPES]
    for _ in range(2):
        assert warm.Warming(make_codec("ulp"), params, beside=beside).wait(WAIT_S)
    asked = [["-m", "torchrl_ext.versions.warm"]] if beside and not complete else []
    assert [each for each in done if isinstance(each, list)] == asked
    assert sorted(each for each in done if isinstance(each, int)) == [1, 2, 4, 8]


def test_a_rehearsal_that_fails_or_takes_long_keeps_nobody_from_an_update(monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "_WARM", {})
    go_on = threading.Event()

    def broken(codec, widths):
        assert go_on.wait(WAIT_S)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warm, "rehearse", broken)
    policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
    late = warm.Warming(make_codec("ulp"), [ParamMeta("x", torch.float32, (4,))], beside=False)
    assert not late.wait(0.01)
    go_on.set()
    assert late.wait(WAIT_S)
    sender = tx.WeightSender(tx.DeltaTransport(tmp_path, encoding="ulp"), InProcessEngine(served))
    for _ in range(2):
        assert sender.update_weights(policy).verified
        assert torch.equal(policy.weight, served.weight)
    sender.shutdown()
