"""Two writers on a bucket: whatever happens between two of their requests, no published version is lost or changed."""

from __future__ import annotations

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from tests.processes import WAIT_S, running_python
from torchrl_ext.errors import StoreError, WeightSyncError
from torchrl_ext.stores import Chain, open_store, owners
from torchrl_ext.stores.object import ObjectStore
from torchrl_ext.stores.versions import version_name, version_number

RUNS = 500
PATIENCE = (300.0, 1e-9)  # seconds until an owner counts as dead: long enough here, and taken over at every turn
WRITER = threading.local()


class Killed(BaseException):
    """The writer's process is gone: nothing of it runs any more, no cleanup either."""


class Turns:
    """Lets one thread run at a time, and decides at each request of a writer who goes on and what befalls him.

    Args:
        seed: of all decisions.
        check: called after each request that took effect.
    """

    def __init__(self, seed, check):
        self.random, self.check = random.Random(seed), check
        self.switching = self.random.choice((0.5, 0.15, 0.05))
        self.objects = {}
        self.gates, self.running, self.calm = [], [], False

    def run(self, *writers):
        self.gates = [threading.Semaphore(0) for _ in writers]
        self.running = list(range(len(writers)))
        self.failed = []
        with ThreadPoolExecutor(len(writers)) as threads:
            lives = [threads.submit(self._life, *pair) for pair in enumerate(writers)]
            self.gates[self.random.choice(self.running)].release()
            for life in lives:
                life.result(WAIT_S)
        assert not self.failed, self.failed

    def _life(self, me, writer):
        assert self.gates[me].acquire(timeout=WAIT_S)
        WRITER.turns, WRITER.me, WRITER.dead, WRITER.reading = self, me, False, False
        try:
            writer()
        except Killed:
            pass
        finally:
            self.running.remove(me)
            if self.running:
                self.gates[self.random.choice(self.running)].release()

    def step(self, request):
        """One request: perhaps others go first, perhaps it fails before or after it took effect, or its writer dies."""
        if WRITER.reading:
            return request()
        if WRITER.dead:
            raise Killed
        to = self.random.choice(self.running)
        if to != WRITER.me and self.random.random() < self.switching:
            self.gates[to].release()
            assert self.gates[WRITER.me].acquire(timeout=WAIT_S)
        fate = 1.0 if self.calm else self.random.random()
        if fate < 0.007:
            raise OSError("the connection was reset")
        result = request()
        try:
            self.check()
        except AssertionError as error:  # clients' errors become our own, and ours are survived
            self.failed.append(error)
            raise Killed from error
        if fate < 0.014:
            raise OSError("the answer was lost")
        if fate < 0.018:
            WRITER.dead = True
            raise Killed
        return result


class Upload:
    """An object that is there when it is closed, as one that is uploaded in parts."""

    def __init__(self, fs, path):
        self.fs, self.path, self.content = fs, path, bytearray()

    def write(self, data):
        self.content += data

    def close(self):
        self.fs.pipe_file(self.path, bytes(self.content))

    def discard(self):
        self.content.clear()


class Shaken(MemoryFileSystem):
    """Objects in memory; every request is a step of its writer."""

    protocol = "shaken"
    cachable = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = WRITER.turns
        self.store, self.pseudo_dirs = self.turns.objects, []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("shaken://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return self.turns.step(lambda: MemoryFileSystem.pipe_file(self, path, value, mode=mode))

    def open(self, path, mode="rb", block_size=None, **kwargs):
        if block_size is not None:
            return Upload(self, self._strip_protocol(path))
        return super().open(path, mode, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self.turns.step(lambda: MemoryFileSystem.cat_file(self, path, start, end))

    def ls(self, path, detail=True, **kwargs):
        return self.turns.step(lambda: MemoryFileSystem.ls(self, path, detail=detail))

    def find(self, path, **kwargs):
        return self.turns.step(lambda: MemoryFileSystem.find(self, path))

    def rm_file(self, path):
        return self.turns.step(lambda: MemoryFileSystem._rm(self, path))


register_implementation("shaken", Shaken)


class Bucket:
    """What two writers do to a bucket, and what a reader sees of it after each of their requests."""

    def __init__(self, seed):
        self.turns = Turns(seed, self.check)
        self.published, self.owners = {}, {}
        self.newest = 0
        self.refused = 0

    def objects(self):
        return {key.removeprefix("/root/"): value.getvalue() for key, value in self.turns.objects.items()}

    def check(self):
        objects = self.objects()
        complete = [version_number(key.split("/")[0]) for key in objects if key.endswith("/manifest.json")]
        newest = max(complete, default=0)
        for number in {newest, max(self.published, default=0), *self.published.keys() & complete} - {0}:
            folder = version_name(number)
            manifest = objects.get(f"{folder}/manifest.json")
            assert manifest is not None, f"version {number} is lost"
            assert objects.get(f"{folder}/data") == manifest, f"version {number} is damaged"
            assert self.published.get(number, manifest) == manifest, f"version {number} was changed"
        newest = newest if "latest" in objects else 0
        if newest != int(objects.get("latest", 0)):  # what a reader makes of it
            WRITER.reading = True
            assert Chain(ObjectStore("shaken://root")).latest() == newest
            WRITER.reading = False
        assert newest >= self.newest, f"readers went back from {self.newest} to {newest}"
        self.newest = newest

    def write(self):
        """A trainer that begins anew whenever it has lost the root, twice at most."""
        for _ in range(2):
            with suppress(WeightSyncError):
                store = ObjectStore("shaken://root")
                store.own()
                for _ in range(2):
                    self.publish(store)
                store.disown()

    def publish(self, store):
        versions, content = Chain(store), uuid.uuid4().hex.encode()
        number = versions.newest() + 1
        try:
            with store.draft(version_name(number)) as draft:
                with draft.append("data") as append:
                    append(content)
                draft.write("manifest.json", content)
            versions.advance(number)
        except StoreError:
            self.refused += 1
            raise
        assert number not in self.published
        self.published[number] = content
        self.owners[number] = store._owners.number
        assert sorted(self.owners.values()) == [self.owners[n] for n in sorted(self.owners)], (
            "an owner of before came back"
        )
        versions.prune(before=number)

    def finish(self):
        """One more trainer, alone: whatever the two left, its version is the newest, by the pointer too."""

        def write():
            store = ObjectStore("shaken://root")
            store.own()
            self.publish(store)
            numbers.append(Chain(store).latest())

        numbers = []
        self.turns.calm = True
        self.turns.run(write)
        assert numbers == [max(self.published)] == [int(self.objects()["latest"])]


def test_no_interleaving_of_two_writers_loses_or_changes_a_version(monkeypatch):
    counts = {patience: [0, 0] for patience in PATIENCE}
    for seed in range(RUNS):
        patience = PATIENCE[seed % 2]
        monkeypatch.setattr(owners, "OWNED_S", patience)
        bucket = Bucket(seed)
        bucket.turns.run(bucket.write, bucket.write)
        counts[patience][0] += len(bucket.published)
        counts[patience][1] += bucket.refused
        if seed % 5 == 0:
            monkeypatch.setattr(owners, "OWNED_S", PATIENCE[1])
            bucket.finish()
    for published, refused in counts.values():
        assert published > RUNS // 2  # the test is worth something
        assert refused > RUNS // 10


class TestOwners:
    def test_a_trainer_that_is_forgotten_leaves_its_root(self):
        url = f"memory://{uuid.uuid4().hex}/root"
        open_store(url).own()
        open_store(url).own()

    def test_a_killed_trainer_does_not_keep_its_root(self, s3):
        url = f"s3://bucket/{uuid.uuid4().hex}"
        store = open_store(url, s3)
        with running_python(OWNER, url, s3["endpoint_url"]) as child:
            assert child.stdout.readline() == "owned\n"
            with pytest.raises(StoreError, match=f"process {child.pid} on"):
                store.own()
        store.own()

    def test_one_that_was_taken_for_dead_publishes_no_more(self, monkeypatch):
        url = f"memory://{uuid.uuid4().hex}/root"
        first, second = open_store(url), open_store(url)
        first.own()
        monkeypatch.setattr(owners, "OWNED_S", PATIENCE[1])
        second.own()
        with pytest.raises(StoreError, match="has another owner now"), first.draft("folder"):
            raise AssertionError("the block ran")
        assert second.list("folder") == [] and second.list() == ["owners"]
        first.disown()
        with second.draft("folder") as draft:
            draft.write("manifest.json", b"1")
        assert second.list("folder") == ["manifest.json"]

    @pytest.mark.parametrize(
        "until", ["Infinity", "NaN", "1e300", "9" * 400, '"soon"', "true", "null", "[]", "-1", "1e11"]
    )
    def test_an_owner_that_says_nothing_usable_keeps_nobody_out(self, until):
        store = open_store(f"memory://{uuid.uuid4().hex}/root")
        store.put("owners/000007", f'{{"until": {until}}}'.encode())
        store.put("owners/notes", b"")
        store.own()
        assert store.list("owners") == ["000008", "notes"]

    def test_a_writer_that_fails_leaves_what_another_published(self):
        url = f"memory://{uuid.uuid4().hex}/root"
        first, second = open_store(url), open_store(url)
        with pytest.raises(StoreError, match="exists already"), first.draft("folder"), second.draft("folder"):
            raise AssertionError("the block ran")
        with pytest.raises(StoreError, match="another writer put"), first.draft("folder") as draft:
            draft.write("one", b"1")
            second.put("folder/manifest.json", b"2")  # one that knows nothing of claims
            draft.write("manifest.json", b"3")
        assert second.list("folder") == ["manifest.json"]
        assert second.get("folder/manifest.json") == b"2"


OWNER = """
import sys
from torchrl_ext.stores import open_store
store = open_store(sys.argv[1], {"endpoint_url": sys.argv[2], "key": "k", "secret": "s"})
store.own()
print("owned", flush=True)
sys.stdin.read()
"""


class Heedless(MemoryFileSystem):
    """Takes the condition, and puts."""

    protocol = "heedless"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("heedless://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        MemoryFileSystem.pipe_file(self, path, value)


register_implementation("heedless", Heedless)


@pytest.mark.parametrize("url", ["heedless://{}", "local:///{}"])
def test_a_store_that_cannot_create_exclusively_is_told_apart(url, tmp_path, caplog):
    url, options = url.format(tmp_path), {"auto_mkdir": True} if url.startswith("local") else {}
    first, second = ObjectStore(url, **options), ObjectStore(url, **options)
    first.own()
    assert "cannot create a key only if it is absent" in caplog.text
    with pytest.raises(StoreError, match="another trainer"):  # who looks before the other begins still sees it
        second.own()
    with first.draft("folder") as draft:
        draft.write("manifest.json", b"1")
    with pytest.raises(StoreError, match="exists already"), second.draft("folder"):
        raise AssertionError("the block ran")
    assert first.get("folder/manifest.json") == b"1"
