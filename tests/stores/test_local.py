from __future__ import annotations

import os
import signal

import pytest

from tests.processes import WAIT_S, python, running_python
from torchrl_ext.errors import StoreError
from torchrl_ext.stores import LocalStore


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.own()
    yield store
    store.disown()


def names(store):
    return sorted(os.listdir(store.root))


def test_a_put_replaces_the_value_and_leaves_no_temporary(store):
    for value in (b"old", b"new and longer", b"x"):
        store.put("key", value)
        assert store.get("key") == value
    assert names(store) == ["key"]


def test_readers_never_see_half_a_value(store):
    script = """
import sys
from torchrl_ext.stores import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
for i in range(10**9):
    store.put("key", bytes([i % 256]) * 100_000)
"""
    store.put("key", bytes(100_000))
    with running_python(script, store.root) as child:
        assert child.stdout.readline() == "ready\n"
        seen = set()
        while len(seen) < 8:  # each of them read many times
            value = store.get("key")
            assert len(value) == 100_000
            assert len(set(value)) == 1
            seen.add(value[0])


@pytest.mark.parametrize("key", ["", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "a\0b"])
def test_keys_that_lead_out_of_the_store_are_refused(store, key):
    for call in (store.get, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(StoreError, match="is not a name inside a store"):
            call(key)


def test_a_draft_that_fails_leaves_nothing(store):
    with pytest.raises(KeyError), store.draft("folder") as draft:
        draft.write("one", b"1")
        raise KeyError
    assert names(store) == []


def test_a_name_that_is_taken_is_refused_and_kept(store):
    store.put("folder/one", b"1")
    with pytest.raises(StoreError, match="exists already"), store.draft("folder"):
        raise AssertionError("the block ran")
    assert store.get("folder/one") == b"1"


def test_a_draft_that_cannot_fit_is_refused_before_it_is_written(store):
    with pytest.raises(StoreError, match=f"{1 << 60:,} bytes free"), store.draft("folder", needed_bytes=1 << 60):
        raise AssertionError("the block ran")
    assert names(store) == []


def test_no_space_is_told_where_nobody_knows_what_a_folder_takes(tmp_path):
    said = python(LIMITED, tmp_path)
    assert f"Expected: room for one more version under {tmp_path}, where " in said
    assert "0 bytes free under" not in said
    assert "a quota or a limit on the size of files may be what stands in the way" in said


LIMITED = """
import resource, signal, sys
from torchrl_ext.stores import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    with LocalStore(sys.argv[1]).draft("folder") as draft:
        draft.write("file", bytes(2000))
except OSError as error:
    print("raw", error)
except RuntimeError as error:
    print(error)
"""


def test_a_forked_child_neither_keeps_the_lock_nor_frees_it(store):
    store.disown()
    with running_python(FORKING, store.root, "disown") as trainer:
        said = dict(trainer.stdout.readline().split() for _ in range(2))
        assert said["child"] == "False"  # it has no part in the lock
        with pytest.raises(StoreError, match="another trainer"):
            store.own()
        trainer.stdin.write("disown\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "disowned\n"
        store.own()  # while the child lives
        store.disown()
        os.kill(int(said["pid"]), signal.SIGKILL)


def test_a_forked_child_that_outlives_a_killed_trainer_does_not_keep_the_lock(store):
    store.disown()
    with running_python(FORKING, store.root) as trainer:
        said = dict(trainer.stdout.readline().split() for _ in range(2))
        trainer.kill()
        trainer.wait(WAIT_S)
        store.own()
        os.kill(int(said["pid"]), signal.SIGKILL)


FORKING = """
import os, signal, sys
from torchrl_ext.stores import LocalStore
store = LocalStore(sys.argv[1])
store.own()
if not (pid := os.fork()):
    signal.alarm(120)  # whatever becomes of the test
    owned = store.owned
    if sys.argv[2:]:
        store.disown()
    os.write(1, f"child {owned}\\n".encode())
    signal.pause()
os.write(1, f"pid {pid}\\n".encode())
sys.stdin.readline()
store.disown()
print("disowned", flush=True)
sys.stdin.read()
"""


def test_a_new_writer_sweeps_only_temporaries(store):
    store.put("kept", b"1")
    store.disown()
    (store.root / ".kept.tmp-123").write_text("")
    (store.root / ".folder.tmp-456").mkdir()
    (store.root / ".folder.tmp-456" / "file").write_text("")
    (store.root / ".nfs0001").write_text("")
    store.own()
    assert names(store) == [".nfs0001", "kept"]


def test_a_store_that_cannot_be_written_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        LocalStore(tmp_path / "file").own()


class TestParts:
    def test_another_process_adds_to_a_draft_and_not_to_one_that_is_gone(self, tmp_path):
        store, other = LocalStore(tmp_path), LocalStore(tmp_path)
        with store.draft("weight_v000001") as draft:
            other.add(draft.place, "one", b"1")
            other.add(draft.place, "delta/two", b"2")
            place = draft.place
        assert (store.get("weight_v000001/one"), store.get("weight_v000001/delta/two")) == (b"1", b"2")
        for name in ("late", "delta/late"):
            with pytest.raises(StoreError, match="gave it up"):
                other.add(place, name, b"3")
        for there in ("weight_v000001", "..", f"weight_v000001/{place}"):
            with pytest.raises(StoreError):
                other.add(there, "late", b"3")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["weight_v000001"]
