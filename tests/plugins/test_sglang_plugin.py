"""What reaches SGLang's environment, seen from an interpreter that has only that; and how its workers agree."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import python
from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.engines.sglang import SGLangServer
from torchrl_ext.launch.processes import free_port
from torchrl_ext.launch.server import make_overlay

LOOK = """
import sys
sys.path.insert(0, {overlay!r})
from importlib.metadata import entry_points
(found,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "torchrl_ext"][:1]
before = set(sys.modules)
found.load()
import torchrl_ext.sync.receiver, torchrl_ext.landing.placement, torchrl_ext.weights.checkpoint
import torchrl_ext.transports.disk, torchrl_ext.transports.collective.transport, torchrl_ext.plugins.workers
new = set(sys.modules) - before
print(sorted(new & {{"torchrl", "tensordict", "transformers", "ray", "httpx", "requests", "sglang"}}))
print(torchrl_ext.__file__)
"""


def test_the_overlay_brings_the_plugin_and_nothing_of_the_trainers(tmp_path):
    make_overlay(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(overlay=str(tmp_path))], capture_output=True, text=True, check=True
    )
    imported, home = done.stdout.split("\n")[:2]
    assert imported == "[]" and home.startswith(str(tmp_path))


def test_a_model_that_does_not_exist_is_refused_before_anything_is_installed(tmp_path):
    with pytest.raises(ConfigError, match="no directory"):
        SGLangServer(tmp_path / "nothing", python="/no/python")


TOGETHER = """
import os, sys, torch
from torch import distributed
from torchrl_ext.plugins.workers import agree, combine
from torchrl_ext.types import ParamMeta
from torchrl_ext.landing.patcher import Patcher, Piece
from torchrl_ext.weights.digests import position_digest

rank = int(sys.argv[1])
store = distributed.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = distributed.group.WORLD
assert agree("" if rank else "cannot", group) == ["cannot", ""]
assert agree("x" * 5000, group)[1] == "x" * 4096

full = torch.arange(24, dtype=torch.float32).reshape(4, 6)
rows = full[2 * rank : 2 * rank + 2].clone()
columns = full[:, 3 * rank : 3 * rank + 3].clone()
pieces = {
    "rows": [Piece(destination=rows, offset=12 * rank, strides=(6, 1))],
    "columns": [Piece(destination=columns, offset=3 * rank, strides=(6, 1))],
    "both": [Piece(destination=full.clone(), offset=0, strides=(6, 1))],
    "half": [Piece(destination=full[:2].clone(), offset=0, strides=(6, 1))],
}
params = [ParamMeta.of(name, full) for name in ("packed on one", *pieces)]
pieces |= {} if rank else {"packed on one": []}  # the other one cannot tell what it holds of this one
found = combine(Patcher(pieces).held(), pieces, params, group)
assert {name: digest.hex() for name, digest in found.items()} == dict.fromkeys(
    ("rows", "columns", "both"), position_digest(full).hex()
), found
distributed.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def test_workers_agree_and_their_shares_add_up():
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: python(TOGETHER, str(rank), port), range(2)))
