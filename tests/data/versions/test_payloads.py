"""Memory for what is read of a chain is bounded in bytes, and collection in between does no harm."""

import uuid
import weakref

import pytest
import torch

from tests.data.transports.chains import same
from torchrl_ext.data.deltas.table import units
from torchrl_ext.data.stores import remote
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.stores.remote import RemoteStore, _RemoteFile
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.versions import payloads
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.testing import any_bits

VERSIONS, TENSORS = 13, 12


class Tracked(bytearray):
    """Bytes of which the store learns when nobody holds them any more."""


class Counting:
    """Counts the bytes that a store handed out and that are still in memory."""

    live = most = read = 0

    def ranges(self, key, spans):
        found = [Tracked(data) for data in super().ranges(key, spans)]
        for data in found:
            self.live += len(data)
            self.read += len(data)
            weakref.finalize(data, self._gone, len(data))
        self.most = max(self.most, self.live)
        return found

    def _gone(self, nbytes):
        self.live -= nbytes


class CountingStore(Counting, LocalStore):
    """A directory."""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A reader that holds version 1 of 13 with host copies of everything, its store, and what each version is."""
    monkeypatch.setattr(payloads, "HELD_BYTES", 64 << 10)
    trainer = DeltaTransport(tmp_path / "root", keyframe_every=0)
    own, history = {f"t{n}": any_bits(torch.bfloat16, 6000, seed=n) for n in range(TENSORS)}, {}
    for version in range(1, VERSIONS + 1):
        trainer.send_weights("policy", own)
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
        for tensor in own.values():
            tensor[torch.rand(tensor.shape) < 0.3] += 1
    trainer.shutdown()
    store = CountingStore(tmp_path / "root")
    reader = ChainReader(Chain(store), copies=lambda name: True)
    assert same(dict(reader.tensors(reader.open(1), {})), history[1])
    return reader, store, history


def assert_bounded(store, route_bytes):
    assert store.read == route_bytes > 3 * payloads.HELD_BYTES
    assert store.most <= payloads.HELD_BYTES  # of which threads decode some blocks right now


def test_changes_over_many_versions_are_read_in_bounded_memory(chain):
    reader, store, history = chain
    changes = reader.changes(VERSIONS)
    tensors = {name: tensor.clone() for name, tensor in history[1].items()}
    for patch in changes.patches(lambda name: True):
        for own in patch.split():
            own.apply(units(tensors[own.meta.name]))
    assert same(tensors, history[VERSIONS])
    assert_bounded(store, reader.read_bytes)
    reader.advance(changes)
    assert reader.changes(VERSIONS) is not None and same(reader.mirror, history[VERSIONS])


def test_joining_reader_streams_the_deltas_after_the_keyframe(chain):
    _, store, history = chain
    joined = ChainReader(Chain(store))
    route = joined.open(VERSIONS)
    assert store.read == 0
    assert same(dict(joined.tensors(route, {})), history[VERSIONS])
    assert_bounded(store, joined.read_bytes)


@pytest.mark.parametrize("at", [2, 3, 15, 20], ids=["the manifest", "one on the way", "the keyframe", "a payload"])
def test_reader_of_removed_versions_takes_the_newest_keyframe(chain, monkeypatch, at):
    """They are removed as it opens this."""
    _, store, history = chain
    opened, newest = [], {name: tensor + 1 for name, tensor in history[VERSIONS].items()}

    def overtaken(self, key, open_key=LocalStore.open):
        opened.append(key)
        if len(opened) == at:
            DeltaTransport(store.root).send_weights("policy", newest)
        return open_key(self, key)

    monkeypatch.setattr(LocalStore, "open", overtaken)
    reader = DeltaTransport(store.root)
    assert same(reader.receive_weights(5.0), newest)
    assert reader.received_version == VERSIONS + 1 and Chain(store).numbers() == [VERSIONS + 1]


class CountingRemote(Counting, RemoteStore):
    """A remote store from which no whole value but a manifest can be read."""

    def get(self, key, at_most=None):
        assert at_most is not None, key
        return super().get(key, at_most)


def test_remote_keyframe_is_read_in_ranges(monkeypatch):
    monkeypatch.setattr(remote, "_AHEAD_BYTES", 4 << 10)
    monkeypatch.setattr(_RemoteFile, "chunk_bytes", 16 << 10)
    sizes, dtypes = [3, 700, 100_000, 1, 5000, 0, 9000, 20_001, 12] * 2, [torch.bfloat16, torch.float32, torch.int8]
    own = {f"t{n}": any_bits(dtypes[n % 3], size, seed=n) for n, size in enumerate(sizes)}
    store, folder = CountingRemote(f"memory://{uuid.uuid4().hex}/root"), "weight_v000001"
    DeltaTransport(store.url, shard_bytes=60 << 10).send_weights("policy", own)
    reader, held = ChainReader(Chain(store)), {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    route, store.most = reader.open(1), 0
    assert same(dict(reader.tensors(route, held)), own) and same(held, own)
    files = [name for name in store.list(folder) if name.endswith(".safetensors")]
    assert store.most <= (len(files) + 4) * _RemoteFile.chunk_bytes < sum(tensor.nbytes for tensor in own.values()) / 2
    route = reader.open(1)
    store.delete(folder)
    with pytest.raises(FileNotFoundError):
        list(reader.tensors(route, {}))
