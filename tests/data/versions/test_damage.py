"""Deltas made worse: each is refused with an error of ours, or read as what was published, in bounded memory.

Checksums are made anew, so that what is behind them is reached too.
"""

import base64
import collections
import json
import random
import sys
import traceback
from dataclasses import replace

import pytest
import torch
import xxhash
import zstandard

from tests.hostile import at_most_more_bytes, worse_bytes, worse_json
from torchrl_ext.base.errors import ManifestError, WeightSyncError
from torchrl_ext.base.registry import encodings
from torchrl_ext.data.deltas import streams
from torchrl_ext.data.deltas.blocks import KINDS
from torchrl_ext.data.stores.chain import Chain, Route
from torchrl_ext.data.stores.manifest import END, MANIFEST, Manifest, version_name
from torchrl_ext.data.stores.store import MemoryStore
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.open_route import OpenRoute
from torchrl_ext.data.versions.owned import Owned
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import any_bits, same_bits

MOST_BYTES = 256 << 20
FOLDER = version_name(2)
COLUMNS = ("changed", "digests", "base_digests", "blocks")


def model(new):
    found = {
        "a": any_bits(torch.bfloat16, 30, 50),
        "b": any_bits(torch.float32, 300),
        "c": any_bits(torch.bfloat16, 7),
        "d": any_bits(torch.complex64, 5, 4),
        "e": torch.arange(200, dtype=torch.uint8),
        "f": torch.zeros(0, 3),
        "g": torch.ones(()),
    }
    for number, tensor in enumerate(found.values() if new else ()):
        bits = tensor.view(-1).view(torch.uint8).view(-1)
        bits[number :: 41 - number] += 1
    return found


OLD, NEW = model(False), model(True)


class Published:
    """A delta from ``old`` tensors to ``new`` ones, with its files in memory, by name."""

    def __init__(self, manifest, files, old, new):
        self.manifest, self.files, self.old, self.new = manifest, files, old, new
        self.data = whole(manifest).to_bytes()
        self.text = zstandard.decompress(self.data)
        assert all(same_bits(tensor, new[name]) for name, tensor in self.read(manifest, files).items())

    def read(self, manifest, files):
        """What a reader that holds `old` makes of a delta; what it compares before is compared."""
        if manifest.params != MappingSource(self.old).params():
            raise ManifestError("another model")
        opened, held = route_of(manifest, files), {}
        for name, tensor in opened.at_end((meta.name, self.old[meta.name].clone()) for meta in manifest.params):
            opened.verify(name, tensor)
            held[name] = tensor
        return held

    def judge(self, manifest, files):
        """Whether a delta was refused or read; a tensor with a published digest has to be the published one."""
        try:
            held = self.read(manifest, files)
        except WeightSyncError as error:
            assert str(error)
            return "refused when it was read"
        assert held.keys() == self.new.keys()
        for name, tensor in held.items():
            if manifest.hex_digests[name] == position_digest(self.new[name]).hex():
                assert same_bits(tensor, self.new[name]), name
        return "read"


def published(encoding, old=OLD, new=NEW):
    """The delta from one model to another."""
    store, block_units = MemoryStore(), streams.BLOCK_UNITS
    own = Owned(encodings.make(encoding), KeptTensors())
    writer = ChainWriter(Chain(store, "r"), own, keyframe_every=0, base=None, keep_files=True)
    writer.publish(MappingSource(old), 1)
    writer.acknowledge()
    streams.BLOCK_UNITS = 512  # streams of several blocks
    try:
        manifest = writer.publish(MappingSource(new), 2)
    finally:
        streams.BLOCK_UNITS = block_units
    return Published(manifest, {name: store.get(f"{FOLDER}/{name}") for name in manifest.files}, old, new)


def route_of(manifest, files):
    """The route over one delta."""
    chain = Chain(MemoryStore())
    chain.known[2] = whole(manifest)
    for name, data in {**files, MANIFEST: b""}.items():
        chain.store.put(f"{FOLDER}/{name}", data)
    route = Route(start=("r", 1), keyframe=None, deltas=((FOLDER, manifest),), nbytes=0)
    return OpenRoute(chain, route, 2, None, ("r", 1), None)


def whole(delta):
    """The manifest of a version that is this delta alone."""
    return Manifest(version=delta.version, run_id=delta.run_id, params=delta.params, files=delta.files, delta=delta)


def signed(body):
    """The text of a manifest, given without its last brace, with a checksum that fits."""
    return body + END % xxhash.xxh3_128_hexdigest(body).encode()


def worse_manifest(own, chance):
    """Make a manifest worse: its bytes as they are, or what is behind the frame and the checksum."""
    kind = chance.randrange(4)
    if kind == 0:
        data = worse_bytes(own.data, chance)
    else:
        body = own.text[: -len(END) - 30]
        if kind == 1:
            body = worse_bytes(body, chance)
        else:
            document = json.loads(body + b"}")
            if kind == 2:
                document = worse_json(document, chance)
            else:
                name = chance.choice(COLUMNS)
                column = worse_bytes(base64.b64decode(document["delta"][name]), chance)
                document["delta"][name] = base64.b64encode(column).decode()
            body = json.dumps(document)[:-1].encode()
        data = signed(body)
        data = zstandard.compress(data, 1) if chance.random() < 0.5 else data
    try:
        found = Manifest.from_bytes(data, "here")
    except WeightSyncError as error:
        assert "here" in str(error)
        return "refused"
    if kind == 0:
        assert found.to_bytes() == own.data
    return own.judge(found.delta, own.files) if found.delta else "refused"


def worse_block(own, chance):
    """Make one block worse, with a checksum that fits, as a writer gone wrong would."""
    number, blocks = chance.randrange(own.manifest.blocks.size), own.manifest.blocks.copy()
    row = blocks[number]
    (name,) = own.files
    payload = own.files[name][int(row["offset"]) :][: int(row["nbytes"])]
    bad = worse_bytes(payload, chance)
    data = own.files[name] + bad
    row["offset"], row["nbytes"] = len(own.files[name]), len(bad)
    row["checksum"] = xxhash.xxh3_64_intdigest(bad)
    return own.judge(replace(own.manifest, blocks=blocks, files={name: len(data)}), {name: data})


def worse_file(own, chance):
    """Make a file worse, of which the manifest knows better."""
    files = {name: worse_bytes(data, chance) for name, data in own.files.items()}
    return own.judge(own.manifest, files)


WAYS = {"manifests": (worse_manifest,), "blocks": (worse_block, worse_block, worse_block, worse_file)}


def many(what, count, seed, own):
    """How often each outcome came, of ``count`` deltas; "wrong" is one that fails an assertion or crashes."""
    outcomes = collections.Counter()
    with at_most_more_bytes(MOST_BYTES):
        for number in range(count):
            chance = random.Random(f"{seed} {number}")
            try:
                outcomes[chance.choice(WAYS[what])(chance.choice(own), chance)] += 1
            except Exception:  # noqa: BLE001, which is what is looked for
                outcomes["wrong"] += 1
                if outcomes["wrong"] < 20:
                    print(f"number {number} of seed {seed}:\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
    return outcomes


@pytest.fixture(scope="module")
def own():
    return [*map(published, KINDS)]


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("what", WAYS)
def test_damaged_delta_is_refused_or_reads_as_published(what, count, own):
    outcomes = many(what, count, 1, own)
    assert not outcomes["wrong"]
    assert outcomes["read"] and sum(outcomes.values()) - outcomes["read"] > count // 2
