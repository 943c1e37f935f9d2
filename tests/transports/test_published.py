"""What an engine takes from the call by which slime's first trainer announces flush files."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest

from tests.compat.test_slime_chains import renumber
from tests.transports.chains import checkpoint, folder, published, same
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.messages import Finish, Join, Load, Prefetch, Reset, Start, stamped
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.published import PublishedRoot


@pytest.fixture
def chain(tmp_path):
    """Two versions of two flush files each; returns the folder, and it as a root."""
    made, root = tmp_path / "made", tmp_path / "root"
    _, _, history = published(made, 3, encoding="deltas", keyframe_every=0)
    for version in (1, 2):
        renumber(folder(made, version + 1), folder(root, version), version)
    return root, PublishedRoot(root, str(checkpoint(tmp_path / "base", history[1])))


def located(path):
    root, version = PublishedRoot.of_path(str(path))
    return root.root, version


def test_of_a_root_the_newest_version_that_is_known_to_be_complete_is_taken(chain):
    place, root = chain
    assert located(place) == (str(place), 1)
    (folder(place, 2) / "DONE").touch()
    assert located(place) == located(folder(place, 2)) == (str(place), 2)
    assert {row[0] for row in root.contents(2)[0]} == {"a.weight", "b.weight", "c.count"}


def test_a_call_brings_a_whole_version_or_in_a_pause_some_of_its_files(chain):
    place, root = chain
    first, second = names = sorted(path.name for path in folder(place, 2).iterdir())
    assert root.contents(2, names)[0]
    for lacking in (names[:1], names[1:]):
        with pytest.raises(WeightSyncError, match="names only a part of version 2"):
            root.contents(2, lacking)
    (folder(place, 2) / second).rename(place / "late")
    assert root.contents(2, [first], parts=True)[0]
    with pytest.raises(StoreError, match="publish every file of a version before"):
        root.contents(2, names)
    (place / "late").rename(folder(place, 2) / second)
    params, own = root.contents(2, [second, first], parts=True)
    assert params and own == names
    with pytest.raises(StoreError, match="not rank9999_flush000000"):
        root.contents(2, [second, "rank9999_flush000000.safetensors"])
    for files in ("rank", [], [1], {"a": 1}):
        with pytest.raises(ConfigError, match="files is malformed"):
            root.contents(2, files)
    shutil.rmtree(folder(place, 2))
    with pytest.raises(StoreError, match="holds no version 2"):
        root.contents(2)


class Packed(TensorsLoader):
    """Nothing of the model can be written in place, so that host copies of all of it follow the versions."""

    def patchable(self, name):
        return False


@pytest.mark.parametrize("loaded_past_us", [False, True])
def test_a_label_stands_for_versions_without_changes_unless_the_engine_loaded_by_itself(tmp_path, loaded_past_us):
    made, root = tmp_path / "made", tmp_path / "root"
    _, _, history = published(made, 3, encoding="deltas", keyframe_every=0)
    base = str(checkpoint(tmp_path / "base", history[1]))
    renumber(folder(made, 2), folder(root, 1), 1)
    held = {name: tensor.clone() for name, tensor in history[1].items()}
    receiver = WeightReceiver(Packed(held))

    def lands(version, label):
        files = sorted(path.name for path in folder(root, version).iterdir())
        prefetch = Prefetch(version=version, files=files, label=label)
        for message in (prefetch, Start(), Load(version=version, handoff={}), Finish(version=version)):
            receiver.handle(stamped(message, receiver.connection))

    theirs = PublishedRoot(root, base)
    with closing(theirs):
        receiver.connect(Join.of(theirs.invite(theirs.contents(1)[0])))
    lands(1, "0")
    assert same(held, history[2])
    shutil.rmtree(folder(root, 1))
    renumber(folder(made, 3), folder(root, 3), 3)  # version 2 left no folder
    if not loaded_past_us:
        lands(3, "2")
        assert same(held, history[3])
        return
    receiver.handle(Reset(weights="reloaded"))  # version 2, as a checkpoint that we did not see
    with pytest.raises((WeightSyncError, FileNotFoundError), match="weight_v000002"):
        lands(3, "2")
