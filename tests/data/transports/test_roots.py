"""Damaged versions, refused by name before the pause; trainers that are killed; and roots that are moved or emptied."""

import os
import shutil
import signal
from functools import partial

import pytest
import torch

import torchrl_ext as tx
from tests.data.group.members import stop
from tests.data.transports.chains import Spoiled, flip, folder, published, rewrite, same, step, trainer_at, weights
from tests.processes import calling, running_python
from torchrl_ext.base.errors import IntegrityError, ManifestError, StoreError, UpdateError, WeightSyncError
from torchrl_ext.data.stores import local
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.versions import full as checkpoint_writer
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S

DELTA = "delta-00001.safetensors"


def first_block(folder):
    return 8 + int.from_bytes((folder / DELTA).read_bytes()[:8], "little")


def manifest(change):
    return lambda folder: rewrite(folder / "manifest.json", change)


DAMAGES = {
    "a flipped bit": (lambda d: flip(d / DELTA, first_block(d) + 9), rf"'a.weight' in .*weight_v000003/{DELTA}"),
    "a missing payload": (lambda d: (d / DELTA).unlink(), rf"{DELTA} is missing, .*'a.weight'"),
    "a cut manifest": (lambda d: os.truncate(d / "manifest.json", 200), r"weight_v000003/manifest.json is damaged"),
    "a codec nobody knows": (manifest(lambda m: m["delta"]["codecs"].__setitem__(0, "quantum")), "'quantum'"),
    "a digest of other weights": (
        manifest(lambda m: m["delta"].update(digests=m["delta"]["digests"][:24] + "AAAA" * 10)),
        r"'b.weight'",
    ),
    "another base": (manifest(lambda m: m["delta"].update(base_run_id="somebody")), r"version 3 .* of run 'somebody'"),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_delta_is_refused_before_the_pause(self, root, damage, monkeypatch):
        """The error names the damage, engines keep serving the old version, and the next update lands."""
        spoil, words = DAMAGES[damage]
        own, served, pauses, pause = weights(), weights(seed=5), [], InProcessEngine.pause
        monkeypatch.setattr(InProcessEngine, "pause", lambda self: pauses.append(1) or pause(self))
        trainer = Spoiled(root, keyframe_every=0, encoding="ulp")
        trainer.spoils[3] = spoil
        sender = tx.WeightSender(trainer, InProcessEngine(served), finite=False)
        alone = trainer_at(root)
        for version in (1, 2):
            sender.update_weights(own)
            assert same(alone.receive_weights(WAIT_S), own)
            before = {name: tensor.clone() for name, tensor in own.items()}
            step(own, version)
        count = len(pauses)
        with pytest.raises(UpdateError, match=words) as refused:
            sender.update_weights(own)
        assert len(pauses) == count
        assert (refused.value.rows[0].state, refused.value.rows[0].version) == ("serving", 2)
        assert same(served, before)
        into = {name: tensor.clone() for name, tensor in before.items()}
        for reader in (alone, trainer_at(root)):
            with pytest.raises(WeightSyncError, match=words):
                reader.receive_weights(WAIT_S, weights=into)
        assert same(into, before)
        step(own, 9)
        assert sender.update_weights(own).verified and same(served, own)
        for reader in (alone, trainer_at(root)):
            assert same(reader.receive_weights(WAIT_S), own)
        sender.shutdown()

    def test_missing_delta_is_named_and_a_later_keyframe_is_enough(self, root):
        trainer, own, _ = published(root, 4, keyframe_every=0)
        reader = trainer_at(root)
        shutil.rmtree(folder(root, 3))
        with pytest.raises(IntegrityError, match=r"weight_v000003.*is missing"):
            reader.receive_weights(WAIT_S)
        trainer.shutdown()
        trainer_at(root).send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)


def test_a_delta_of_another_model_is_refused_by_name(tmp_path, root):
    published(root, 2, keyframe_every=0)
    other = trainer_at(tmp_path / "other", keyframe_every=0)
    tensors = {"a.weight": torch.randn(3), "z": torch.randn(4)}
    for _ in range(2):
        other.send_weights("policy", tensors)
        tensors["z"] += 1
    reader = trainer_at(root)
    run = Chain(LocalStore(root)).version(1).run_id
    shutil.copytree(folder(tmp_path / "other", 2), folder(root, 3))
    based = {"base_version": 2, "base_run_id": run}
    rewrite(folder(root, 3) / "manifest.json", lambda m: m.update(version=3, delta={**m["delta"], **based}))
    (root / "latest").write_text("3\n")
    with pytest.raises(ManifestError, match=r"a.weight"):
        reader.receive_weights(WAIT_S)


@pytest.mark.parametrize(
    ("transport", "point"),
    [
        *(("delta", point) for point in ("in a delta", "in a full version", "before the rename", "before the pointer")),
        *(("disk", point) for point in ("in a full version", "before the rename", "before the pointer")),
    ],
)
def test_a_trainer_killed_leaves_versions_that_read_and_goes_on(root, transport, point):
    made = partial(tx.make_transport, transport, root=root)
    with running_python(calling(killed_trainer, transport, str(root), point)) as child:
        assert child.stdout.readline() == "now\n"
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT_S)
    expected, reader = {"x": torch.full((500,), 2.0), "y": torch.arange(500.0)}, made()
    assert same(reader.receive_weights(WAIT_S), expected) and reader.receive_weights(0.0) is None
    expected["x"] += 5
    made().send_weights("policy", expected)
    for one in (reader, made()):
        assert same(one.receive_weights(WAIT_S), expected)
    assert not [path for path in root.rglob("*") if ".tmp-" in path.name]


def killed_trainer(transport, root, point):
    own = {"x": torch.full((500,), 1.0), "y": torch.arange(500.0)}
    settings = {"keyframe_every": 2 if point == "in a full version" else 0} if transport == "delta" else {}
    trainer = tx.make_transport(transport, root=root, **settings)
    for _ in range(2):
        trainer.send_weights(own)
        own["x"] += 1
    owner, name = {
        "in a delta": (local._LocalDraft, "write"),
        "in a full version": (checkpoint_writer, "write_shards"),
        "before the rename": (os, "rename"),
        "before the pointer": (Chain, "advance"),
    }[point]
    setattr(owner, name, stop)
    trainer.send_weights(own)


@pytest.fixture
def link(tmp_path):
    """A root that is a link to a directory."""
    (tmp_path / "first").mkdir()
    (tmp_path / "root").symlink_to("first")
    return tmp_path / "root"


def made_again(link):
    folder = link.resolve()
    shutil.rmtree(folder)
    folder.mkdir()


def flipped(link):
    (link.parent / "second").mkdir()
    (link.parent / "new").symlink_to("second")
    os.replace(link.parent / "new", link)


@pytest.mark.parametrize("transport", ["delta", "disk"])
@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("driven", [False, True], ids=["alone", "by a sender"])
def test_readers_and_engines_go_on_in_an_emptied_root(root, count, transport, driven):
    trainer, held = (tx.make_transport(transport, root=root) for _ in range(2))
    own, served = weights(), weights(seed=7)
    sender = tx.WeightSender(trainer, InProcessEngine(served), finite=False)
    for version in range(1, count + 3):
        if version == count + 1:
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        step(own, version)
        if driven:
            assert sender.update_weights(own).verified and same(served, own)
        else:
            trainer.send_weights(own)
        for reader in (held, tx.make_transport(transport, root=root)):
            assert same(reader.receive_weights(0.0), own)
            assert reader.received_version == version
    sender.shutdown()


@pytest.mark.parametrize("transport", ["delta", "disk"])
@pytest.mark.parametrize("way", [made_again, flipped])
def test_a_trainer_whose_root_was_moved_is_refused_until_it_ends(link, way, transport):
    first, second, held = (tx.make_transport(transport, root=link) for _ in range(3))
    own, others = weights(), weights(seed=9)
    first.send_weights(own)
    assert same(held.receive_weights(0.0), own)
    way(link)
    for number in (1, 2):
        step(others, number)
        second.send_weights(others)
        before = sorted(link.rglob("*"))
        with pytest.raises(StoreError, match="is another directory now"):
            first.send_weights(own)
        assert sorted(link.rglob("*")) == before
        assert same(held.receive_weights(0.0), others)
    second.shutdown()
    first.shutdown()
    step(own, 3)
    first.send_weights(own)
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
    other.disown(), store.disown()
