"""Chains in remote stores: whatever writers, readers and collection do, no version is lost, changed or torn."""

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import torchrl_ext as tx
from tests.data.transports.chains import same
from torchrl_ext.base.errors import StoreError, WeightSyncError
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import version_name, version_number
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.stores.remote import RemoteStore
from torchrl_ext.testing import WAIT_S, any_bits

RUNS = 500


@pytest.fixture(params=["memory"])
def url(request):
    if request.param == "s3":
        request.getfixturevalue("s3")
    return f"{request.param}://bucket/{uuid.uuid4().hex}"


BOTH = pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)


def at(url, **settings):
    return tx.make_transport("delta", root=url, **settings)


def value(number):
    return {"w": torch.full((5,), float(number))}


@BOTH
def test_readers_see_only_whole_versions_at_every_step(url, monkeypatch):
    create, seen, sent = RemoteStore.create, [], []

    def looked(self, key, data):
        look()
        create(self, key, data)
        look()

    def look():
        for reader in (follower, at(url)):
            received = reader.receive_weights(0.0)
            if received is not None:
                assert same(received, sent[reader.received_version - 1])
                seen.append(reader.received_version)

    monkeypatch.setattr(RemoteStore, "create", looked)
    trainer, follower = at(url, keyframe_every=2), at(url)
    own = {"w": any_bits(torch.bfloat16, 3000, seed=1), "b": torch.arange(7)}
    for number in range(4):
        own["w"][number::19] += 1
        sent.append({name: tensor.clone() for name, tensor in own.items()})
        trainer.send_weights("policy", own)
    look()
    assert {1, 2, 3, 4} == {*seen} and trainer.check_connection()
    assert Chain(open_store(url)).numbers() == [3, 4]


def test_older_of_two_trainers_is_refused_and_harms_no_version(url):
    first, second, reader = at(url), at(url), at(url)
    first.send_weights(value(1))
    second.send_weights(value(2))
    for _ in range(2):
        with pytest.raises(StoreError, match="where this trainer published before"):
            first.send_weights(value(3))
        assert same(at(url).receive_weights(WAIT_S), value(2))
    second.send_weights(value(4))
    assert same(reader.receive_weights(WAIT_S), value(4)) and reader.received_version == 3
    second.shutdown()
    first.shutdown()
    first.send_weights(value(5))  # it begins anew
    assert same(reader.receive_weights(WAIT_S), value(5))


@BOTH
def test_of_two_trainers_that_write_one_version_one_is_refused(url, monkeypatch):
    create = RemoteStore.create

    def overtaken(self, key, data):
        if key.endswith("/manifest.json") and not others:
            others.append(key)
            RemoteStore(url).create(key, b"of another one")
        create(self, key, data)

    others = []
    monkeypatch.setattr(RemoteStore, "create", overtaken)
    trainer = at(url)
    with pytest.raises(StoreError, match=r"another trainer put .*weight_v000001/manifest.json"):
        trainer.send_weights(value(1))
    assert open_store(url).get("weight_v000001/manifest.json") == b"of another one"


def test_a_writer_that_fails_after_its_manifest_removes_nothing(url):
    """Readers may have seen the version: a lost connection is no reason to take it from them."""
    store = open_store(url)
    with pytest.raises(StoreError, match="lost"), store.draft("weight_v000001") as draft:
        draft.write("data", b"d")
        draft.write("manifest.json", b"m")
        raise StoreError("the answer was lost")
    assert store.list("weight_v000001") == ["data", "manifest.json"]


def test_a_pointer_that_is_put_late_leads_nobody_back(url):
    trainer, reader = at(url), at(url)
    for number in (1, 2):
        trainer.send_weights(value(number))
        if number == 1:
            before = open_store(url).get("latest")
    open_store(url).put("latest", before)
    assert same(reader.receive_weights(WAIT_S), value(2)) and reader.received_version == 2
    trainer.send_weights(value(3))
    assert same(reader.receive_weights(WAIT_S), value(3)) and open_store(url).get("latest") > before


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
        self.objects, self.gates, self.running, self.calm = {}, [], [], False

    def run(self, *writers):
        self.gates, self.running, self.failed = [threading.Semaphore(0) for _ in writers], [*range(len(writers))], []
        with ThreadPoolExecutor(len(writers)) as threads:
            lives = [threads.submit(self._life, *pair) for pair in enumerate(writers)]
            self.gates[self.random.choice(self.running)].release()
            for life in lives:
                life.result(WAIT_S)
        assert not self.failed, self.failed

    def _life(self, me, writer):
        assert self.gates[me].acquire(timeout=WAIT_S)
        WRITER.me, WRITER.dead = me, False
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


class Shaken:
    """A filesystem in memory; every request is a step of its writer."""

    def __init__(self, turns):
        self.turns, self.within = turns, MemoryFileSystem(skip_instance_cache=True)
        self.within.store, self.within.pseudo_dirs = turns.objects, []

    def __getattr__(self, name):
        return lambda *given, **how: self.turns.step(lambda: getattr(self.within, name)(*given, **how))


class Bucket:
    """What two writers do to a bucket, and what a reader sees of it after each of their requests."""

    def __init__(self, seed):
        self.turns = Turns(seed, self.check)
        self.published, self.removed, self.newest, self.refused = {}, set(), 0, 0

    def objects(self):
        return {key.removeprefix("/root/"): value.getvalue() for key, value in self.turns.objects.items()}

    def check(self):
        objects = self.objects()
        complete = [version_number(key.split("/")[0]) for key in objects if key.endswith("/manifest.json")]
        newest = max(complete, default=0)
        self.removed |= {number for number in self.published.keys() - complete if number < newest}
        for number in {newest, *self.published} - self.removed - {0}:
            folder = version_name(number)
            manifest = objects.get(f"{folder}/manifest.json")
            assert manifest is not None, f"version {number} is lost"
            assert objects.get(f"{folder}/data") == manifest, f"version {number} is damaged"
            assert self.published.get(number, manifest) == manifest, f"version {number} was changed"
        newest = newest if "latest" in objects else 0
        assert newest >= self.newest, f"readers went back from {self.newest} to {newest}"
        self.newest = newest

    def chain(self):
        store = RemoteStore("memory://root")
        store._fs = Shaken(self.turns)
        return Chain(store, uuid.uuid4().hex)

    def write(self):
        """A trainer that begins anew whenever it has lost the root, twice at most."""
        for _ in range(2):
            with suppress(WeightSyncError):
                chain = self.chain()
                for _ in range(2):
                    self.publish(chain)

    def publish(self, chain):
        content = chain.run_id.encode()
        try:
            chain.own()
            number = chain.newest() + 1
            with chain.store.draft(version_name(number)) as draft:
                draft.write("data", content)
                draft.write("manifest.json", content)
            chain.advance(number)
        except StoreError:
            self.refused += 1
            raise
        assert number not in self.published
        self.published[number] = content
        chain.prune(before=number)

    def finish(self):
        """One more trainer, alone: whatever the two left, its version is the newest, by the pointer too."""

        def write():
            chain = self.chain()
            self.publish(chain)
            heads.append(chain.head())

        heads = []
        self.turns.calm = True
        self.turns.run(write)
        number = max(self.published)
        assert heads == [(self.published[number].decode(), number)]
        assert self.objects()["latest"].split() == [b"%d" % number, self.published[number]]


def run_in_the_manifest(chain, number):
    return SimpleNamespace(run_id=chain.store.get(f"{version_name(number)}/manifest.json").decode())


def test_interleaved_writers_lose_or_change_no_version(monkeypatch):
    monkeypatch.setattr(Chain, "_read", run_in_the_manifest)
    published = refused = 0
    for seed in range(RUNS):
        bucket = Bucket(seed)
        bucket.turns.run(bucket.write, bucket.write)
        published, refused = published + len(bucket.published), refused + bucket.refused
        if seed % 5 == 0:
            bucket.finish()
    assert published > RUNS and refused > RUNS // 5  # the test is worth something
