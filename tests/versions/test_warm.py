"""Compiled loops are ready when ends are connected: no update waits for a compiler."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.processes import python
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


OTHERS = [name for name in tx.DeltaTransport.encodings() if name not in ("auto", "context")]


@pytest.mark.parametrize(
    "encoding", ["auto", "context", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_no_update_compiles_after_connect(encoding, tmp_path):
    python(AFTER_CONNECT, encoding, tmp_path)


AFTER_CONNECT = """
import sys, torch, torchrl_ext as tx
from tests.versions.test_warm import DTYPES, compiled
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.versions.warm import cache_folder
encoding, root = sys.argv[1:]
sizes = {"small": 900, "large": (1 << 20) + 9}
def model():
    kinds = [("small", dtype) for dtype in DTYPES] + [("large", DTYPES[0])]
    return {f"{kind}.{dtype}": torch.zeros(sizes[kind], dtype=dtype) for kind, dtype in kinds}
policy, served = model(), model()
policy["matrix"], served["matrix"] = (torch.zeros(30, 40, dtype=torch.bfloat16) for _ in range(2))
sender = tx.WeightSender(tx.DeltaTransport(root, encoding=encoding), InProcessEngine(served))
sender.register_model(policy)
sender.init_all_workers_group({name: (tensor.dtype, tensor.shape) for name, tensor in policy.items()})
before = compiled()
assert before and any(before.values())
for density in (1.0, 0.01, 0.0, 0.3, 0.97):
    for tensor in policy.values():
        tensor[torch.rand(tensor.shape) < density] += 1
    report = sender.update_weights()
    assert report.verified
    assert all(torch.equal(policy[name], served[name]) for name in policy)
after = compiled()
more = {loop: after[loop] - before.get(loop, set()) for loop in after if after[loop] - before.get(loop, set())}
assert not more, more
sender.shutdown()
"""


@pytest.mark.exhaustive
def test_an_engine_with_an_empty_cache_compiles_nothing_itself(tmp_path):
    """The second process finds what the one beside the first left, and needs no other one."""
    for first in (True, False):
        python(ENGINE, int(first), prefix=("env", f"NUMBA_CACHE_DIR={tmp_path}"))
    assert list(tmp_path.rglob("*.warm"))


ENGINE = """
import subprocess, sys
from numba.core import event
import torch
from torchrl_ext.codecs.base import make_codec
from torchrl_ext.kernels.jit import LOOPS
from torchrl_ext.versions import warm
from torchrl_ext.types import ParamMeta
first = bool(int(sys.argv[1]))
compiling, asked = event.RecordingListener(), []
event.register("numba:compile", compiling)
run = subprocess.run
warm.subprocess.run = lambda command, **how: asked.append(command) or run(command, **how)
params = [ParamMeta("x", torch.bfloat16, (4,))]
ready = warm.Warming(make_codec("overwrite"), params, beside=True)
assert ready.wait(120)
assert LOOPS and not compiling.buffer, len(compiling.buffer)
assert len(asked) == first
"""


def test_versions_of_the_compiler_that_share_a_folder_keep_each_others_code(tmp_path):
    """A trainer's environment and an engine's: each comes back and finds what it compiled."""
    for count, version in enumerate(("", "0.0", "")):
        told = python(DIGEST, version, prefix=("env", f"NUMBA_CACHE_DIR={tmp_path}"))
        assert told.split() == ["kept" if count >= 2 else "compiled"], (count, version)


DIGEST = """
import sys, numba, numpy as np
if sys.argv[1]:
    numba.__version__ = sys.argv[1]
from torchrl_ext.kernels.host_loops import digest_piece
digest_piece(np.arange(4, dtype=np.uint16), np.array([[4, 1, 1]]), 0, np.zeros(2, np.uint64))
hits, misses = (sum(counts.values()) for counts in (digest_piece.stats.cache_hits, digest_piece.stats.cache_misses))
assert hits + misses == 1
print("kept" if hits else "compiled")
"""


def test_what_two_ends_need_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(warm, "_WARM", {})
    monkeypatch.setattr(warm, "rehearse", lambda codec, widths: made.extend(widths))
    params = [ParamMeta(str(dtype), dtype, (3,)) for dtype in DTYPES]
    both = [warm.Warming(make_codec("ulp"), params, beside=beside) for beside in (False, True)]
    assert all(one.wait(WAIT_S) for one in both)
    assert sorted(made) == [1, 2, 4, 8]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_only_an_engine_whose_cache_is_not_complete_asks_another_process(beside, complete, monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(warm, "_WARM", {})
    monkeypatch.setattr(warm, "_stamp", lambda codec, widths: tmp_path / "stamp")
    monkeypatch.setattr(warm.subprocess, "run", lambda command, **how: done.append(command[1:3]))
    monkeypatch.setattr(warm, "rehearse", lambda codec, widths: done.append("here"))
    if complete:
        (tmp_path / "stamp").touch()
    assert warm.Warming(make_codec("ulp"), [ParamMeta("x", torch.bfloat16, (4,))], beside=beside).wait(WAIT_S)
    other = [["-m", "torchrl_ext.versions.warm"]] if beside and not complete else []
    assert done == [*other, "here"]


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
