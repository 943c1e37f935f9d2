"""Every public class shows its use in a few lines, and the lines run as they are printed."""

from __future__ import annotations

import doctest
import inspect
from contextlib import nullcontext

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_model
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.testing.tiny import make_tiny_lm

CLASSES = sorted(name for name in tx.__all__ if inspect.isclass(getattr(tx, name)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_lm(tmp_path_factory.mktemp("lm"))


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_a_class_runs_as_it_is_printed(name, checkpoint, tmp_path):
    """With a module ``policy``, a causal LM ``lm``, a directory ``root``, a ``port``, and an engine's ``address``."""
    own = getattr(tx, name)
    [example] = doctest.DocTestFinder(recurse=False).find(own, name)
    assert example.examples, f"{name} has no example"
    names = {"tx": tx, "torch": torch, "policy": torch.nn.Linear(4, 2), "root": str(tmp_path / "root")}
    said = []
    with EmbeddedServer(checkpoint) if "address" in example.docstring else nullcontext() as server:
        address = "" if server is None else server.url[7:]
        example.globs = names | {"lm": tiny_model(0), "port": free_port(), "address": address}
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        failed, _ = runner.run(example, out=said.append)
    assert not failed, "".join(said)
