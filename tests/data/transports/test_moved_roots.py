"""Roots that are emptied, replaced, or links that are moved while a trainer publishes into them."""

import os
import shutil
from pathlib import Path

import pytest

import torchrl_ext as tx
from tests.data.transports.chains import same, step, weights
from torchrl_ext.base.errors import StoreError
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.sync.local.inprocess import InProcessEngine


@pytest.fixture
def link(tmp_path):
    """A root that is a link to a directory."""
    (tmp_path / "first").mkdir()
    (tmp_path / "root").symlink_to("first")
    return tmp_path / "root"


def emptied(link, **_):
    for path in link.resolve().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def made_again(link, **_):
    folder = link.resolve()
    shutil.rmtree(folder)
    folder.mkdir()


def flipped(link, **_):
    (link.parent / "second").mkdir()
    (link.parent / "new").symlink_to("second")
    os.replace(link.parent / "new", link)


def flipped_to_another_run(link, transport, count):
    flipped(link)
    with tx.make_transport(transport, root=link) as other:
        for number in range(count):
            other.send_weights(weights(seed=100 + number))


WAYS = [emptied, made_again, flipped, flipped_to_another_run]


@pytest.mark.parametrize("transport", ["delta", "disk"])
@pytest.mark.parametrize(("way", "count"), [*((way, 4) for way in WAYS), (emptied, 1), (flipped_to_another_run, 1)])
@pytest.mark.parametrize("driven", [False, True], ids=["alone", "by a sender"])
def test_readers_and_engines_go_on_where_the_root_is_now(link, way, count, transport, driven):
    trainer, held = (tx.make_transport(transport, root=link) for _ in range(2))
    own, served = weights(), weights(seed=7)
    sender = tx.WeightSender(trainer, InProcessEngine(served), finite=False)
    for version in range(1, count + 3):
        if version == count + 1:
            way(link, transport=transport, count=count)
        step(own, version)
        if driven:
            report = sender.update_weights(own)
            assert report.verified and report.version >= version and same(served, own)
        else:
            trainer.send_weights(own)
        late = tx.make_transport(transport, root=link)
        for reader in (held, late):
            assert same(reader.receive_weights(0.0), own)
            assert reader.received_version == (report.version if driven else version)
    assert Path(link, f"weight_v{late.received_version:06d}").is_dir()
    sender.shutdown()


@pytest.mark.parametrize("transport", ["delta", "disk"])
@pytest.mark.parametrize("way", [made_again, flipped])
def test_a_trainer_is_refused_where_its_root_is_anothers_now(link, way, transport):
    first, second, held = (tx.make_transport(transport, root=link) for _ in range(3))
    own, others = weights(), weights(seed=9)
    first.send_weights(own)
    assert same(held.receive_weights(0.0), own)
    way(link)
    for number in (1, 2):
        step(others, number)
        second.send_weights(others)
        before = sorted(link.rglob("*"))
        with pytest.raises(StoreError, match="another trainer publishes into"):
            first.send_weights(own)
        assert sorted(link.rglob("*")) == before
        assert same(held.receive_weights(0.0), others)
    second.shutdown()
    step(own, 3)
    first.send_weights(own)  # as soon as the other one has left
    for reader in (held, tx.make_transport(transport, root=link)):
        assert same(reader.receive_weights(0.0), own)
    first.shutdown()


def test_writer_refuses_change_in_directory_it_did_not_lock(link):
    store, other = LocalStore(link), LocalStore(link)
    store.own()
    flipped(link)
    other.own()
    other.put("latest", b"1")
    for change in (lambda: store.put("latest", b"2"), lambda: store.delete("latest")):
        with pytest.raises(StoreError, match="is another directory now"):
            change()
    assert other.get("latest") == b"1"
    other.disown()
    assert store.own() and not store.own()
    store.disown()
