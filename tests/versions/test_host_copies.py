"""Host copies in files: they follow like those in memory, and nothing is left of them, however a reader ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from tests.processes import WAIT_S, calling, maps_of, running_python
from torchrl_ext.errors import StoreError
from torchrl_ext.testing import same_bits
from torchrl_ext.versions.reader import host_copy


def read_and_wait(root, local):
    tx.DeltaTransport(root, local_dir=local).receive_weights(30)
    maps = maps_of(os.getpid()).splitlines()
    print(sum(local in line and "(deleted)" in line for line in maps), flush=True)
    sys.stdin.read()


def test_a_copy_has_the_same_bits_and_no_name(tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8):
        for shape in ((3, 5), (), (0, 4)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            copied = host_copy(tensor, tmp_path / "made" / "here")
            assert same_bits(copied, tensor) and not list(tmp_path.rglob("*.*")), (dtype, shape)
            assert not copied.nbytes or copied.data_ptr() != tensor.data_ptr()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=rf"{tmp_path}/file/copies cannot take a copy of 12 bytes"):
        host_copy(torch.ones(3), tmp_path / "file" / "copies")


def test_a_reader_with_copies_in_files_follows_and_nothing_is_left_when_it_is_killed(tmp_path):
    root, local = tmp_path / "root", tmp_path / "local"
    own = {"x": torch.randn(1000), "y": torch.randn(20, 30).bfloat16()}
    trainer, reader = tx.DeltaTransport(root), tx.DeltaTransport(root, local_dir=local)
    for step in range(4):
        own["x"][step * 7] += 1
        own["y"][step] *= 2
        trainer.send_weights(own)
        found = reader.receive_weights(WAIT_S)
        assert all(same_bits(found[name], tensor) for name, tensor in own.items())
    with running_python(calling(read_and_wait, str(root), str(local))) as child:
        assert child.stdout.readline() == "2\n"
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT_S)
    assert not list(Path(local).iterdir())
