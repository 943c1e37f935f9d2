import errno
import itertools
import os
import resource
import signal
import sys
from contextlib import contextmanager

import pytest

from tests.processes import WAIT_S, calling, running_python
from torchrl_ext.base.errors import StoreError
from torchrl_ext.data.stores.local import PROBE, LocalStore


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.own()
    yield store
    store.disown()


def names(store):
    return sorted(os.listdir(store.root))


def put_for_ever(root):
    store = LocalStore(root)
    print("ready", flush=True)
    for number in itertools.count():
        store.put("key", bytes([number % 256]) * 100_000)


def test_readers_never_see_half_a_value(store):
    store.put("key", bytes(100_000))
    with running_python(calling(put_for_ever, str(store.root))) as child:
        assert child.stdout.readline() == "ready\n"
        seen = set()
        while len(seen) < 8:  # each of them read many times
            value = store.get("key")
            assert len(value) == 100_000 and len(set(value)) == 1
            seen.add(value[0])


def test_other_processes_join_a_draft_until_it_ends(store):
    other = LocalStore(store.root)
    with pytest.raises(ValueError, match="half-way"), store.draft("weight_v000001") as draft:
        other.join(draft.place).write("two", b"2")
        place = draft.place
        raise ValueError("half-way")
    assert names(store) == []
    for there in (place, "weight_v000001", ".."):
        with pytest.raises(StoreError):
            other.join(there)
    with store.draft("weight_v000001") as draft:
        other.join(draft.place).write("two", b"2")
    with pytest.raises(StoreError, match="abandoned"):
        other.join(draft.place)
    assert store.get("weight_v000001/two") == b"2"


def own_and_fork(root, child_disowns):
    store = LocalStore(root)
    store.own()
    if not (pid := os.fork()):
        signal.alarm(120)  # whatever becomes of the test
        owned = store.owned
        if child_disowns:
            store.disown()
        os.write(1, f"child {owned}\n".encode())
        signal.pause()
    os.write(1, f"pid {pid}\n".encode())
    sys.stdin.readline()
    store.disown()
    print("disowned", flush=True)
    sys.stdin.read()


@pytest.mark.parametrize("killed", [False, True])
def test_a_forked_child_neither_frees_the_lock_nor_keeps_it(store, killed):
    store.disown()
    with running_python(calling(own_and_fork, str(store.root), not killed)) as trainer:
        said = dict(trainer.stdout.readline().split() for _ in range(2))
        assert said["child"] == "False"  # it has no part in the lock
        with pytest.raises(StoreError, match="another trainer"):
            store.own()
        if killed:
            trainer.kill()
            trainer.wait(WAIT_S)
        else:
            trainer.stdin.write("disown\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "disowned\n"
        store.own()  # while the child lives
        store.disown()
        os.kill(int(said["pid"]), signal.SIGKILL)


def test_a_writer_sweeps_temporaries_and_a_new_one_probes(store):
    store.put("kept", b"1")
    for anew in (False, True):
        (store.root / ".kept.tmp-123").write_text("")
        (store.root / ".folder.tmp-456").mkdir()
        (store.root / ".folder.tmp-456" / "file").write_text("")
        (store.root / ".nfs0001").write_text("")
        (store.root / f"{PROBE}789").write_text("")  # of an engine that looks just now
        if anew:
            store.disown()
        store.own()
        assert names(store) == [".nfs0001", *([] if anew else [f"{PROBE}789"]), "kept"]


@contextmanager
def descriptors(free):
    """Leave the process so many file descriptors in the block: renaming takes none, removing a directory takes one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(free + 1)]  # numbers in between may be taken
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_undeleted_folder_is_removed_before_the_next_version(store):
    with store.draft("folder") as draft:
        draft.write("file", b"1")
    with descriptors(0):
        store.delete("folder")
        with pytest.raises(StoreError, match="No space"), store.draft("other"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert store.list() == [] and len(names(store)) == 2
    store.own()
    assert names(store) == []


def test_a_root_whose_temporaries_cannot_be_listed_stays_free(store):
    store.disown()
    with pytest.raises(StoreError, match="cannot open"), descriptors(1):
        store.own()
    other = LocalStore(store.root)
    other.own()
    other.disown()
