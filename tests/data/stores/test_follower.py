"""A follower finds the newest version, whoever published it, and waits for one that was announced."""

from __future__ import annotations

import pytest

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.follower import Follower
from torchrl_ext.data.stores.manifest import MANIFEST, Manifest, version_name
from torchrl_ext.data.stores.store import MemoryStore


def publish(chain, number, run="r"):
    manifest = Manifest(version=number, run_id=run, params=(), files={}, full=())
    chain.store.put(f"{version_name(number)}/{MANIFEST}", manifest.to_bytes())
    chain.store.put("latest", f"{number} {run}\n".encode())


@pytest.fixture
def chain():
    return Chain(MemoryStore())


@pytest.mark.parametrize(
    ("seen", "new"), [(None, True), (("r", 3), False), (("", 3), False), (("r", 2), True), (("q", 3), True)]
)
def test_a_version_is_new_by_its_number_or_its_run(chain, seen, new):
    assert Follower(chain).newer(chain.version, Deadline(0.0), seen) is None
    publish(chain, 3, "q")
    assert chain.version(3).run_id == "q"
    publish(chain, 3)  # of the run that has the root now
    found = Follower(chain).newer(chain.version, Deadline(0.0), seen)
    assert (found is not None) == new and (found is None or (found.run_id, found.version) == ("r", 3))


def test_an_announced_version_is_waited_for(chain):
    def looks(within):
        yield
        publish(chain, 2)
        yield

    assert Follower(chain, looks).reach(2, chain.version, Deadline(0.0)).version == 2
