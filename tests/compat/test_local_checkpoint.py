"""A checkpoint on an engine's host, held against slime's own pull where its repository is at hand, and cold copies."""

from __future__ import annotations

import concurrent.futures
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import subprocess

import pytest
from safetensors.torch import load_file

from tests.compat.test_slime_chains import write_slime
from tests.processes import calling, finished
from tests.transports.chains import checkpoint, flip, folder, published, same, step, weights
from torchrl_ext.compat.slime import local_checkpoint
from torchrl_ext.compat.slime.local_checkpoint import LocalCheckpoint
from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError, WeightSyncError


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


def write(root, base, count, encoding="xor", seed=0, algorithm="xxh3-128"):
    """Versions of slime on a checkpoint; returns what each was, 0 the checkpoint."""
    own, history = weights(), {}
    for version in range(count + 1):
        old = {name: tensor.clone() for name, tensor in own.items()}
        if version:
            step(own, seed + version)
            write_slime(folder(root, version), version, old, own, encoding, algorithm)
        elif not base.exists():
            (checkpoint(base, own) / "config.json").write_text("{}")
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
    return history


@pytest.fixture
def chain(tmp_path, root):
    """Three versions on a base; returns the base and what each version is."""
    base = tmp_path / "base"
    return base, write(root, base, 3)


def read(directory):
    return load_file(directory / "model.safetensors")


def state(local):
    return json.loads((local / ".weight_sync" / "state.json").read_text())


def number(local):
    """The version that the files are; None where the state does not say so."""
    return int(state(local)["version"]) if (local / ".weight_sync" / "state.json").exists() else None


@pytest.mark.parametrize(("encoding", "algorithm"), [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_slimes_versions_are_pulled_in_any_order_of_numbers(tmp_path, root, local, encoding, algorithm):
    history = write(root, tmp_path / "base", 4, encoding, algorithm=algorithm)
    kept = LocalCheckpoint(local, tmp_path / "base")
    assert number(local) is None
    for version in (0, 1, 3, 3, 4, 2, 0, 4):
        kept.pull(str(root), version)
        assert same(read(local), history[version])
        assert state(local)["version"] == f"{version:06d}"
    assert sorted(path.name for path in local.iterdir()) == [".weight_sync", "config.json", "model.safetensors"]


@pytest.mark.parametrize("encoding", ["auto", "xor", "deltas_zstd"])
def test_versions_of_this_library_are_pulled_whatever_their_encoding(root, local, encoding):
    _, _, history = published(root, 5, encoding=encoding, keyframe_every=3, keep_files=True)
    kept = LocalCheckpoint(local)
    for version in (1, 2, 5, 3):
        kept.pull(str(root), version)
        assert same(read(local), history[version])
    assert not (local / "manifest.json").exists()


def test_what_changes_is_written_in_place_and_nothing_else(chain, root, local):
    base, history = chain
    kept = LocalCheckpoint(local, base)
    kept.pull(str(root), 1)
    inodes = {path.name: path.stat().st_ino for path in local.glob("*.*")}
    (local / "config.json").write_text("mine")
    shutil.rmtree(folder(root, 1))  # as the versions before the one that is held may go
    kept.pull(str(root), 3)
    assert same(read(local), history[3])
    assert {path.name: path.stat().st_ino for path in local.glob("*.*")} == inodes
    assert (local / "config.json").read_text() == "mine"


def test_another_run_under_the_same_or_a_lower_number_is_not_taken_for_the_one_that_is_held(chain, root, local):
    base, _ = chain
    kept = LocalCheckpoint(local, base)
    kept.pull(str(root), 3)
    shutil.rmtree(root)
    history = write(root, base, 3, seed=100)
    for version in (3, 1, 2):
        kept.pull(str(root), version)
        assert same(read(local), history[version])


def test_full_versions_replace_the_files_under_the_same_number_and_only_files_of_a_checkpoint_are_taken(
    root, local, tmp_path
):
    kept, own = LocalCheckpoint(local), weights()
    checkpoint(folder(root, 1), own)
    for name in (".bashrc", "authorized_keys", "run.sh", "vocab.json", ".hidden.json"):
        (folder(root, 1) / name).write_text("{}")
    kept.pull(str(root), 1)
    assert same(read(local), own)
    assert sorted(path.name for path in local.iterdir()) == [".weight_sync", "model.safetensors", "vocab.json"]
    step(own, 1)
    shutil.rmtree(folder(root, 1))
    checkpoint(folder(root, 1), own)  # of another run: same number, same sizes
    kept.pull(str(root), 1)
    assert same(read(local), own) and not (local / "vocab.json").exists()
    (tmp_path / "secret").write_text("content")
    checkpoint(folder(root, 2), own)
    (folder(root, 2) / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(IntegrityError, match="is a link to"):
        kept.pull(str(root), 2)
    assert not (local / "config.json").exists()


def test_bytes_that_are_not_what_the_state_says_are_copied_anew(chain, root, local):
    base, history = chain
    kept = LocalCheckpoint(local, base)
    kept.pull(str(root), 1)
    flip(local / "model.safetensors", os.path.getsize(local / "model.safetensors") - 1000)
    (local / ".weight_sync" / "state.json").write_text(json.dumps(state(local)))
    kept.pull(str(root), 3)
    assert same(read(local), history[3])
    for told in ("{", "[]", '{"version": "000002"}', json.dumps({**state(local), "base": "/other"})):
        (local / ".weight_sync" / "state.json").write_text(told)
        (local / "model.safetensors").write_bytes(b"")
        kept.pull(str(root), 2)
        assert same(read(local), history[2])


def test_a_version_that_is_not_complete_leaves_everything_as_it_was(chain, root, local):
    base, history = chain
    kept = LocalCheckpoint(local, base)
    kept.pull(str(root), 1)
    (folder(root, 2) / "model.safetensors.index.json").rename(root / "late")  # slime's own takes what is there for full
    for version in (2, 3, 9):
        with pytest.raises(WeightSyncError, match="weight_v00000"):
            kept.pull(str(root), version)
    assert same(read(local), history[1])
    assert number(local) == 1
    (root / "late").rename(folder(root, 2) / "model.safetensors.index.json")
    kept.pull(str(root), 3)
    assert same(read(local), history[3])


def test_a_damaged_delta_is_refused_and_never_served_as_a_version(chain, root, local):
    base, history = chain
    kept = LocalCheckpoint(local, base)
    kept.pull(str(root), 1)
    file = folder(root, 2) / "model-00000-of-00001.safetensors"
    good = file.read_bytes()
    flip(file, len(good) - 20)
    with pytest.raises(IntegrityError, match=f"'[ab].weight' in .*weight_v000002/{file.name}"):
        kept.pull(str(root), 2)
    assert number(local) in (None, 1)
    file.write_bytes(good)
    kept.pull(str(root), 2)
    assert same(read(local), history[2])


def test_a_directory_of_somebody_elses_is_refused_and_untouched(chain, root, tmp_path, monkeypatch):
    base, _ = chain
    monkeypatch.chdir(tmp_path)
    for place in ("s3://bucket/local", "file:///tmp/local"):
        with pytest.raises(ConfigError, match="the local checkpoint is"):
            LocalCheckpoint(place, base).pull(str(root), 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    for directory in (other, base, base / "below", root, root / "weight_v000001", tmp_path):
        with pytest.raises(ConfigError):
            LocalCheckpoint(directory, base).pull(str(root), 1)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    assert not (base / ".weight_sync").exists()
    monkeypatch.setenv("TORCHRL_EXT_ROOTS", f"{root}")
    with pytest.raises(ConfigError, match="does not open"):
        LocalCheckpoint(tmp_path / "local", base).pull(str(root), 1)
    assert not (tmp_path / "local").exists()


def test_without_a_base_only_full_versions_can_be_pulled(chain, root, local):
    for version in (0, 1):
        with pytest.raises(ConfigError, match="started with is not a directory"):
            LocalCheckpoint(local, "org/model").pull(str(root), version)
    own = weights(7)
    checkpoint(folder(root, 4), own)
    LocalCheckpoint(local, "org/model").pull(str(root), 4)
    assert same(read(local), own)


def test_several_pull_at_once_and_one_that_cannot_get_in_says_so(chain, root, local):
    base, history = chain
    with concurrent.futures.ThreadPoolExecutor() as threads:
        pulls = [threads.submit(LocalCheckpoint(local, base).pull, str(root), version) for version in (3, 3, 2, 3)]
    assert [pull.result() for pull in pulls] == 4 * [None]
    assert same(read(local), history[number(local)])
    with open(local / ".weight_sync" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="other processes kept changing"):
            LocalCheckpoint(local, base).pull(str(root), 1, timeout_s=0.05)


def pull_and_die(local, base, root, point, version):
    """Pull a version in a process that kills itself before its ``point``-th write."""
    calls = itertools.count()

    def counted(call):
        def counting(*arguments, **settings):
            if next(calls) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **settings)

        return counting

    for name in ("apply_patch", "sync", "_copy"):
        setattr(local_checkpoint, name, counted(getattr(local_checkpoint, name)))
    LocalCheckpoint(local, base).pull(root, version)


def slimes_pull():
    """slime's own pull, out of its patch of SGLang; None without its repository."""
    repository = os.environ.get("TORCHRL_EXT_SLIME")
    if not repository:
        return None
    shown = subprocess.run(
        ["git", "-C", repository, "show", "624b824a8:docker/patch/latest/sglang-pull_weights.patch"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    part = shown.split("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[1].split("\ndiff --git")[0]
    code = "\n".join(line[1:] for line in part.splitlines() if line.startswith("+"))
    namespace = {"__name__": "slime_local_checkpoint"}
    exec(compile(code, "slime_local_checkpoint", "exec"), namespace)
    return namespace["pull"]


def test_killed_at_any_point_the_next_pull_ends_with_the_right_bytes(chain, root, tmp_path):
    base, history = chain
    theirs, points = slimes_pull(), 0
    for point in range(25):
        local = tmp_path / f"local{point}"
        LocalCheckpoint(local, base).pull(str(root), 1)
        found = finished(calling(pull_and_die, str(local), str(base), str(root), point, 3))
        points += found.returncode == -signal.SIGKILL
        if number(local) is not None:
            assert same(read(local), history[number(local)])
        if theirs is not None and point % 2:
            theirs(str(local), str(base), str(root), 3)
        else:
            LocalCheckpoint(local, base).pull(str(root), 3)
        assert same(read(local), history[3])
        if found.returncode == 0:
            break
    assert points >= 5


@pytest.mark.skipif("TORCHRL_EXT_SLIME" not in os.environ, reason="TORCHRL_EXT_SLIME names no repository of slime")
def test_slimes_own_pull_and_ours_make_the_same_files_of_each_others_versions(tmp_path, root):
    theirs, chance = slimes_pull(), random.Random(1)
    made = tmp_path / "made"
    _, _, history = published(made, 4, encoding="xor", keyframe_every=0, keep_files=True)
    write(root, tmp_path / "base", 4)
    for source, base in ((made, folder(made, 1)), (root, tmp_path / "base")):
        ours, own = tmp_path / f"ours-{source.name}", tmp_path / f"theirs-{source.name}"
        for version in sorted(chance.sample(range(1, 5), 3)):
            LocalCheckpoint(ours, base).pull(str(source), version)
            theirs(str(own), str(base), str(source), version)
            assert (ours / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
            assert state(ours)["version"] == state(own)["version"]
    assert same(read(tmp_path / "ours-made"), history[version])
