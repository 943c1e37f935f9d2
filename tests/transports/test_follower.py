"""Host copies beside an engine: they follow after the pause, and what interrupts them is seen by the next update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.transports.chains import published, same
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.transports.follower import Follower
from torchrl_ext.transports.published import PublishedVersion


@pytest.fixture(params=["ulp", "context"])
def chain(request, tmp_path):
    """A follower that holds version 1 of 4 with host copies of everything, and what each version is."""
    _, _, history = published(tmp_path / "root", 4, encoding=request.param, keyframe_every=0)
    store = LocalStore(tmp_path / "root")
    follower = Follower(Chain(store), lambda number, full: PublishedVersion(store, number, full))
    follower.retain(lambda name: True)
    assert same(dict(follower.tensors(follower.open(1), {})), history[1])
    return follower, history


def test_host_copies_follow_when_the_next_version_is_looked_for(chain):
    follower, history = chain
    follower.advance(follower.changes(2))
    assert same(follower.mirror, history[1])
    later = follower.changes(3)
    assert same(follower.mirror, history[2])
    assert later.held == follower.held
    follower.advance(later)
    assert same(dict(follower.tensors(follower.open(4), {})), history[4])
    assert same(follower.mirror, history[4])


def test_changes_on_another_version_are_refused_and_the_next_one_is_read_in_full(chain):
    follower, history = chain
    second = follower.changes(2)
    follower.advance(second)
    with pytest.raises(IntegrityError, match="version 1 is not the one held"):
        follower.advance(second)
    assert follower.changes(3) is None
    assert same(dict(follower.tensors(follower.open(3), {})), history[3])


@pytest.mark.parametrize("error", [IntegrityError("a payload went bad"), MemoryError()], ids=["damage", "no memory"])
def test_copies_that_stopped_half_way_are_not_built_on(chain, error):
    follower, history = chain
    second = follower.changes(2)

    def breaking():
        yield next(iter(second.patches()))
        raise error

    follower.advance(replace(second, patches=breaking))
    if isinstance(error, MemoryError):
        with pytest.raises(MemoryError):
            follower.changes(3)
    assert follower.changes(3) is None
    assert follower.held is None
    assert same(dict(follower.tensors(follower.open(3), {})), history[3])
    assert same(follower.mirror, history[3])
    assert follower.changes(4) is not None
