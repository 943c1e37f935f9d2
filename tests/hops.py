"""How far one weight travels: the functions of this package that run in a second update of one tensor.

    python -m tests.hops                 # a line per transport
    python -m tests.hops delta --list    # the functions too, in the order in which they first run

What is counted: a `WeightSender` carries ``nn.Linear(64, 64, bias=False)`` in float32, of which four elements have
changed, to an `InProcessEngine` of this process over one transport with its default settings, so that the trainer's end
and the worker's are both seen. `sys.setprofile` (and `threading.setprofile`, before the first thread of either end
starts) notes every Python function whose file lies in the package, each once however often it runs; lambdas,
comprehensions and generators are functions as Python sees them. The first update, what it connects and imports, and
what a first delta compiles are left out: the same is done twice, and the second time is counted.

At commit d41cfed: memory 95, collective 154, disk 209, delta 331 (Python 3.11; reviewers counted 95, 152, 208 and 320).
It runs against another commit as ``PYTHONPATH=THAT_CHECKOUT python tests/hops.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

import torchrl_ext as tx
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.engines.inprocess import InProcessEngine

TRANSPORTS = ("memory", "collective", "disk", "delta")
_PACKAGE = str(Path(tx.__file__).parent)


class _Noted:
    """A profile function that notes each function of the package once, in the order of their first calls."""

    def __init__(self) -> None:
        self.functions: dict[object, None] = {}

    def __call__(self, frame, event, _) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self.functions.setdefault(frame.f_code)


def functions_of(name, **settings):
    """The code objects of the package that run in a second update over the transport ``name``."""
    _second_update(name, settings)
    return _second_update(name, settings)


def _second_update(name, settings):
    noted = _Noted()
    threading.setprofile(noted)
    try:
        with tempfile.TemporaryDirectory() as root:
            torch.manual_seed(0)
            policy, served = (nn.Linear(64, 64, bias=False) for _ in range(2))
            transport = tx.make_transport(name, **_where(name, root), **settings)
            sender = tx.WeightSender(transport, InProcessEngine(served))
            sender.register_model(policy)
            sender.update_weights()
            with torch.no_grad():
                policy.weight[3, 5:9] += 1
            noted.functions.clear()
            sys.setprofile(noted)
            try:
                sender.update_weights()
            finally:
                sys.setprofile(None)
            found = list(noted.functions)
            assert torch.equal(policy.weight, served.weight)
            sender.shutdown()
            return found
    finally:
        threading.setprofile(None)


def _where(name, root):
    if name == "collective":
        return {"master_address": "127.0.0.1", "master_port": free_port(), "rank": 0, "world_size": 2}
    return {"root": root} if name in ("disk", "delta") else {}


def _main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transports", nargs="*", default=TRANSPORTS)
    parser.add_argument("--list", action="store_true", help="print every function")
    given = parser.parse_args()
    for name in given.transports or TRANSPORTS:
        found = functions_of(name)
        files = {code.co_filename for code in found}
        print(f"{name:12s}{len(found):4d} functions in {len(files)} files")
        for code in found if given.list else ():
            where = Path(code.co_filename).relative_to(_PACKAGE)
            print(f"    {where}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    _main()
