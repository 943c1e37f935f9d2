"""Compiled loops are ready when ends are connected: no update waits for a compiler."""

import time

import pytest
import torch
from numba.core.dispatcher import Dispatcher

import torchrl_ext as tx
from tests.processes import calling, python
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas import codec_loops
from torchrl_ext.data.deltas import loops as host_loops
from torchrl_ext.data.versions import compiled
from torchrl_ext.sync.local.inprocess import InProcessEngine

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.int64)


def loops():
    """What is compiled in this process, in all; an update that compiles adds to it."""
    values = (vars(codec_loops) | vars(host_loops)).values()
    found = (value for value in values if isinstance(value, Dispatcher))
    return {(loop.__module__, loop.__name__): set(loop.signatures) for loop in found}


def update_after_connect(encoding, root):
    kinds = [(dtype, (900,)) for dtype in DTYPES] + [(torch.bfloat16, shape) for shape in (((1 << 20) + 9,), (30, 40))]
    policy, served = (
        {f"w{number}": torch.zeros(shape, dtype=dtype) for number, (dtype, shape) in enumerate(kinds)} for _ in range(2)
    )
    sender = tx.WeightSender(tx.DeltaTransport(root, encoding=encoding), InProcessEngine(served))
    sender.register_model(policy)
    sender.init_all_workers_group({name: (tensor.dtype, tensor.shape) for name, tensor in policy.items()})
    before = loops()
    assert before and any(before.values())
    for density in (1.0, 0.01, 0.0, 0.3, 0.97):
        for tensor in policy.values():
            tensor[torch.rand(tensor.shape) < density] += 1
        assert sender.update_weights().verified
        assert all(torch.equal(policy[name], served[name]) for name in policy)
    more = {loop: made - before.get(loop, set()) for loop, made in loops().items() if made - before.get(loop, set())}
    assert not more, more
    sender.shutdown()


FURTHER = sorted({*tx.DeltaTransport.encodings()} - {"auto", "context"})


@pytest.mark.parametrize(
    "encoding", ["auto", "context", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)]
)
def test_no_update_compiles_after_connect(encoding, tmp_path):
    python(calling(update_after_connect, encoding, str(tmp_path)))


MASK = """
import sys, numba, numpy as np
if sys.argv[1]:
    numba.__version__ = sys.argv[1]
from torchrl_ext.data.deltas.codec_loops import set_mask
set_mask(np.arange(4, dtype=np.int32), np.zeros(1, np.uint64))
hits, misses = (sum(counts.values()) for counts in (set_mask.stats.cache_hits, set_mask.stats.cache_misses))
assert hits + misses == 1
print("kept" if hits else "compiled")
"""
"""Code, as the version has to be another one before anything of ours is imported."""


def test_compiler_versions_share_a_cache_folder(tmp_path):
    """A trainer's environment and an engine's: each comes back and finds what it compiled."""
    for version, expected in (("", "compiled"), ("0.0", "compiled"), ("", "kept")):
        found = python(MASK, version, prefix=("env", f"NUMBA_CACHE_DIR={tmp_path}"))
        assert found.split() == [expected], version


@pytest.mark.parametrize("encoding", ["ulp", "deltas_zstd"])
def test_loops_compile_in_inference_mode(encoding):
    compiled._compile.cache_clear()
    with torch.inference_mode():
        compiled.compile_loops(encoding, [ParamMeta("w", torch.bfloat16, (3,))])


@pytest.mark.parametrize("slow", [True, False])
def test_a_compilation_that_takes_long_is_announced(slow, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "_QUICK_S", 0.0 if slow else 60.0)
    monkeypatch.setattr(compiled, "_compile", lambda encoding, width: time.sleep(0.2))
    compiled.compile_loops("context", [ParamMeta("w", torch.bfloat16, (3,))])
    words = "compiling the loops of encoding 'context' for elements of 2 byte(s)"
    assert (words in caplog.text) is slow
