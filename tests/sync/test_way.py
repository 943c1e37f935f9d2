"""The way of one tensor through the files, from `update_weights` to the end that sends it."""

from __future__ import annotations

import itertools
import re
import traceback

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.processes import ROOT
from tests.test_floors import ROOMS
from torchrl_ext.data.weights.source import LiveSource

PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.fixture
def way(monkeypatch):
    """The files of the calls that lead to the memory of a tensor, as the last one was taken."""
    found, take = [], LiveSource.take

    def taken(self, *given):
        stack = [frame.filename.rpartition("torchrl_ext/")[2] for frame in traceback.extract_stack()]
        found[:] = [file for file, _ in itertools.groupby(stack) if file.partition("/")[0] in ROOMS]
        return take(self, *given)

    monkeypatch.setattr(LiveSource, "take", taken)
    return found


@pytest.mark.parametrize("name", ["memory", "delta"])
def test_a_tensor_passes_few_files_and_climbs_to_no_room(name, way, tmp_path):
    """No call leads to a room of a higher floor, also by way of an object that a lower one was given."""
    settings = {"root": tmp_path} if name == "delta" else {}
    engine = tx.make_engine("inprocess", engine=nn.Linear(3, 2))
    with tx.WeightSender(tx.make_transport(name, **settings), engine, dtype=torch.float32) as sender:
        assert sender.update_weights(nn.Linear(3, 2)).verified
    floors = [ROOMS[file.partition("/")[0]][0] for file in way]
    assert floors == sorted(floors, reverse=True) and (name == "delta" or len({*way}) <= 6)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`, from"))
    assert list(dict.fromkeys(way)) == re.findall(r"`(\w+/[\w/]+\.py)`", row)
