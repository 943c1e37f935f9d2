"""Chains in slime's first format while they are written: when a version counts, and what becomes of a part of one."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.compat.test_slime_chains import renumber, settle, write_slime
from tests.transports.chains import checkpoint, folder, published, same, step, trainer_at, weights
from torchrl_ext.compat.slime import foreign
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores import open_store
from torchrl_ext.testing import WAIT_S
from torchrl_ext.transports.base import Arrival


class TestFilesThatCome:
    """The first format has no last file: what says that a version is complete is the next one, a file `DONE`, or quiet.

    Nothing here is quiet by the time that passes, unless a test says so; `settle` makes a folder look old.
    """

    @pytest.fixture(autouse=True)
    def busy(self, monkeypatch):
        monkeypatch.setattr(foreign, "SETTLE_S", 3600.0)

    @pytest.fixture
    def made(self, tmp_path):
        """A chain of versions 1 to 3 of two flush files each, its history, and the checkpoint that it begins with."""
        _, _, history = published(tmp_path / "made", 4, encoding="deltas", keyframe_every=0)
        for version in (2, 3, 4):
            renumber(folder(tmp_path / "made", version), folder(tmp_path / "chain", version - 1), version - 1)
        return tmp_path / "chain", history, checkpoint(tmp_path / "base", history[1])

    def test_a_version_is_taken_when_all_of_it_is_there_and_never_before(self, made, root):
        source, history, base = made
        reader, late = trainer_at(root, base=base), None
        for version in (1, 2, 3):
            folder(root, version).mkdir(parents=True)
            before = reader.receive_weights(0.0)
            assert before is None if version == 1 else same(before, history[version])
            for file in sorted(folder(source, version).iterdir()):
                partly = folder(root, version) / f"{file.name}.tmp"
                partly.write_bytes(file.read_bytes()[:100])
                assert reader.receive_weights(0.0) is None
                partly.unlink()
                shutil.copy(file, folder(root, version))
                assert reader.receive_weights(0.0) is None, file.name
                late = trainer_at(root, base=base).receive_weights(0.0)
                assert late is None if version == 1 else same(late, history[version])
        (folder(root, 3) / "DONE").touch()
        assert same(reader.receive_weights(WAIT_S), history[4])
        assert same(trainer_at(root, base=base).receive_weights(WAIT_S), history[4])

    def test_who_was_told_of_a_version_before_all_of_it_was_there_gets_all_of_it_when_told_again(self, made, root):
        source, history, base = made
        engine = trainer_at(root, base=base).attend(Deadline(WAIT_S))
        files = sorted(folder(source, 1).iterdir())
        folder(root, 1).mkdir(parents=True)
        for count, file in enumerate(files, 1):
            shutil.copy(file, folder(root, 1))
            changes = engine.stage(1, lambda _: {}, Deadline(WAIT_S))
            assert changes is None  # what it holds under this number, if anything, is something else
            received = dict(engine.receive(Arrival(version=1, params=()), {}, Deadline(WAIT_S)))
            assert same(received, history[2]) == (count == len(files))
        changes = engine.stage(1, lambda _: {}, Deadline(WAIT_S))
        assert changes.held == changes.reached

    def test_what_came_last_says_whether_a_folder_is_quiet(self, made, root):
        source, _, base = made
        shutil.copytree(folder(source, 1), folder(root, 1))
        for recent in (folder(root, 1), *folder(root, 1).iterdir()):
            settle(root, 1)
            os.utime(recent)
            assert trainer_at(root, base=base).receive_weights(0.0) is None, recent.name
        settle(root, 1)
        (folder(root, 1) / "rank0001_flush000000.safetensors.tmp").touch()
        settle(root, 1)
        assert trainer_at(root, base=base).receive_weights(0.0) is None

    @pytest.mark.parametrize("place", ["a directory with clocks that differ", "an object store"])
    def test_without_times_to_go_by_a_folder_is_quiet_as_long_as_its_reader_looks(self, made, root, place, monkeypatch):
        source, history, base = made
        url = str(root) if place.startswith("a directory") else f"memory://{root}"
        store = open_store(url)
        for file in sorted(folder(source, 1).iterdir()):
            store.put(f"weight_v000001/{file.name}", file.read_bytes())
            if place.startswith("a directory"):
                settle(root, 1, at_s=2**32)
        reader = trainer_at(url, base=base)
        assert reader.receive_weights(0.0) is None
        monkeypatch.setattr(foreign, "SETTLE_S", 0.1)
        assert trainer_at(url, base=base).receive_weights(0.0) is None  # it has only begun to look
        assert same(reader.receive_weights(WAIT_S), history[2])

    def test_a_reader_that_took_a_part_of_a_version_reads_all_of_it_when_the_rest_has_come(self, made, root):
        source, history, base = made
        shutil.copytree(folder(source, 1), folder(root, 1))
        settle(root, 1)
        reader = trainer_at(root, base=base)
        assert same(reader.receive_weights(WAIT_S), history[2])
        first, second = sorted(folder(source, 2).iterdir())
        folder(root, 2).mkdir()
        shutil.copy(first, folder(root, 2))
        settle(root, 2)
        partly = reader.receive_weights(WAIT_S)
        assert reader.received_version == 2 and not same(partly, history[3]) and not same(partly, history[2])
        coming = folder(root, 2) / f"{second.name}.tmp"
        shutil.copy(second, coming)
        assert reader.receive_weights(0.0) is None  # and it does not go back to version 1
        coming.rename(folder(root, 2) / second.name)
        assert reader.receive_weights(0.0) is None
        settle(root, 2)
        assert same(reader.receive_weights(WAIT_S), history[3])
        assert same(trainer_at(root, base=base).receive_weights(0.0), history[3])
        assert reader.received_version == 2 and reader.receive_weights(0.0) is None
        shutil.copytree(folder(source, 3), folder(root, 3))
        settle(root, 3)
        assert same(reader.receive_weights(WAIT_S), history[4])

    def test_a_part_that_was_taken_is_made_good_when_the_next_version_is_there_already(self, made, root):
        source, history, base = made
        for then in ("begun", "complete"):
            shutil.rmtree(root, ignore_errors=True)
            first, second = sorted(folder(source, 1).iterdir())
            folder(root, 1).mkdir(parents=True)
            shutil.copy(first, folder(root, 1))
            settle(root, 1)
            reader = trainer_at(root, base=base)
            assert not same(reader.receive_weights(WAIT_S), history[2])
            shutil.copy(second, folder(root, 1))
            shutil.copytree(folder(source, 2), folder(root, 2))
            if then == "complete":
                settle(root, 2)
            assert same(reader.receive_weights(WAIT_S), history[2 if then == "begun" else 3])

    @pytest.mark.parametrize("left", ["a gap", "a temporary"])
    def test_a_version_that_was_left_unfinished_is_named(self, made, root, left):
        source, _, base = made
        shutil.copytree(source, root)
        first = min(folder(root, 2).iterdir())
        if left == "a gap":
            first.unlink()
        else:
            first.rename(f"{first}.tmp")
        with pytest.raises(IntegrityError, match=r"weight_v000002.*rank0000_flush000000"):
            (folder(root, 3) / "DONE").touch()
            trainer_at(root, base=base).receive_weights(WAIT_S)

    def test_a_sync_without_changes_leaves_an_empty_folder_and_is_a_version(self, made, root):
        source, history, base = made
        reader = trainer_at(root, base=base)
        folder(root, 1).mkdir(parents=True)
        for version in (1, 2, 3):
            renumber(folder(source, version), folder(root, version + 1), version + 1)
        folder(root, 5).mkdir()
        assert same(reader.receive_weights(WAIT_S), history[4])
        assert reader.received_version == 4
        (folder(root, 5) / "DONE").touch()
        assert same(reader.receive_weights(WAIT_S), history[4])
        assert reader.received_version == 5
        assert same(trainer_at(root, base=base).receive_weights(WAIT_S), history[4])

    def test_an_empty_folder_in_another_format_is_no_version(self, tmp_path, root):
        own, old = weights(), weights()
        base = checkpoint(tmp_path / "base", own)
        step(own, 1)
        write_slime(folder(root, 1), 1, old, own, "xor", "xxh3-128")
        folder(root, 2).mkdir()
        assert same(trainer_at(root, base=base).receive_weights(WAIT_S), own)
        write_slime(folder(root, 3), 3, own, own, "xor", "xxh3-128")
        with pytest.raises(IntegrityError, match=r"weight_v000002.*is missing"):
            trainer_at(root, base=base).receive_weights(WAIT_S)
