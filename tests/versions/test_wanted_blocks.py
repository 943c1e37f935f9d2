"""A worker that holds a part of a model reads those blocks of a delta that it needs, and lands all that is its own."""

from __future__ import annotations

import pytest
import torch

from tests.transports.chains import flip, same
from torchrl_ext.codecs import streams
from torchrl_ext.errors import IntegrityError
from torchrl_ext.kernels.base import Piece
from torchrl_ext.landing.patcher import Patcher, compare
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.testing import any_bits
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.versions import payloads
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.weights.digests import PositionDigest
from torchrl_ext.weights.shards.blocks import Block

WORKERS = 8


class Counting(LocalStore):
    """A directory that counts the bytes of payloads that are read, and reads nothing beside them."""

    read = 0

    def ranges(self, key, spans):
        found = super().ranges(key, spans)
        self.read += sum(map(len, found))
        return found


def weights():
    return {
        "up": any_bits(torch.bfloat16, 512, 320, seed=1),
        "norm": any_bits(torch.bfloat16, 40, seed=2),
        "down": any_bits(torch.bfloat16, 320, 512, seed=3),
        "gate": any_bits(torch.float32, 512, 256, seed=4),
    }


def step(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        where = torch.rand(flat.shape, generator=generator) < 0.05
        flat[where] = torch.randn(flat.shape, generator=generator).to(flat.dtype)[where]


def part(shape, dim, number):
    """Return what worker ``number`` holds of a tensor, which is split along ``dim`` unless it has one dimension."""
    whole = Block.whole(shape)
    if len(shape) < 2:
        return whole
    size = shape[dim] // WORKERS
    start, stop = list(whole.start), list(whole.stop)
    start[dim], stop[dim] = number * size, (number + 1) * size
    return Block(tuple(start), tuple(stop))


class Worker:
    """Holds a part of each tensor, reads the blocks that it needs, and lands them."""

    def __init__(self, root, dim, number):
        self.store = Counting(root)
        self.reader = ChainReader(Chain(self.store), lambda *full: PublishedVersion(self.store, *full))
        self.dim, self.number = dim, number

    def begin(self, version):
        own = dict(self.reader.tensors(self.reader.open(version), {}))
        self.blocks = {name: part(tensor.shape, self.dim, self.number) for name, tensor in own.items()}
        self.reader.want({name: (block,) for name, block in self.blocks.items()})
        self.live, pieces = {}, {}
        for name, tensor in own.items():
            block = self.blocks[name]
            self.live[name] = tensor[block.within(Block.whole(tensor.shape))].clone()
            offset = sum(at * stride for at, stride in zip(block.start, tensor.stride(), strict=True))
            pieces[name] = [Piece(destination=self.live[name], offset=offset, strides=tensor.stride())]
        self.patcher = Patcher(pieces)

    def follow(self, version):
        """Land a version; return the digests of what this worker holds then, and those of the trainer."""
        changes = self.reader.changes(version)
        self.store.read = 0
        found = self.patcher.stage(changes)
        self.patcher.commit()
        self.reader.advance(changes)
        return found, changes.digests

    def holds(self, tensors):
        whole = {name: Block.whole(tensor.shape) for name, tensor in tensors.items()}
        parts = {name: tensors[name][block.within(whole[name])] for name, block in self.blocks.items()}
        return same(self.live, parts)


def followed(root, dim, **options):
    """Publish versions, let every worker follow them; return the manifest of the last one, and what each worker read.

    They catch up over versions 2 and 3 at once, and then follow to version 4.
    Each worker is checked against the trainer, and the digests of all against those in the manifest.
    """
    trainer, own = DeltaTransport(root, encoding="ulp", keyframe_every=0, **options), weights()
    trainer.send_weights("policy", own)
    workers = [Worker(root, dim, number) for number in range(WORKERS)]
    for worker in workers:
        worker.begin(1)
    for version in (2, 3, 4):
        step(own, version)
        trainer.send_weights("policy", own)
        if version == 2:
            continue
        sums = {name: PositionDigest() for name in own}
        for worker in workers:
            found, expected = worker.follow(version)
            assert worker.holds(own)
            for name, digest in found.items():
                sums[name] = sums[name] + digest if own[name].dim() > 1 else digest
        compare(sums, expected)
    return Chain(LocalStore(root)).version(4).delta, [worker.reader.read_bytes for worker in workers]


def test_a_worker_reads_the_blocks_in_which_its_rows_are(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 12)
    monkeypatch.setattr(payloads, "_GAP_BYTES", 0)
    delta, read = followed(tmp_path, 0)
    total, largest = sum(delta.files.values()), int(delta.blocks["nbytes"].max())
    assert all(0 < nbytes <= total / WORKERS + len(delta.params) * largest for nbytes in read) and sum(read) >= total


def test_a_worker_that_holds_columns_reads_all_and_lands_what_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(payloads, "_GAP_BYTES", 0)
    delta, read = followed(tmp_path, 1)
    assert read == [sum(delta.files.values())] * WORKERS


def test_a_damaged_block_is_named_by_the_workers_that_read_it_and_harms_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 12)
    monkeypatch.setattr(payloads, "_GAP_BYTES", 0)
    trainer, own = DeltaTransport(tmp_path, encoding="ulp", keyframe_every=0), weights()
    trainer.send_weights("policy", own)
    first, last = (Worker(tmp_path, 0, number) for number in (0, WORKERS - 1))
    for worker in (first, last):
        worker.begin(1)
    step(own, 2)
    trainer.send_weights("policy", own)
    delta = Chain(LocalStore(tmp_path)).version(2).delta
    stream, segment = (places[delta.table.number["gate"]] for places in delta.table.place)
    start = int(delta.table.streams[stream].first[segment])
    there = (delta.blocks["stream"] == stream) & (delta.blocks["start"] + delta.blocks["size"] > start)
    row = delta.blocks[there][0]  # of its first rows
    flip(tmp_path / "weight_v000002" / [*delta.files][row["file"]], int(row["offset"]) + 9)
    before = {name: live.clone() for name, live in first.live.items()}
    with pytest.raises(IntegrityError, match=r"tensor 'gate' in .* is damaged"):
        first.follow(2)
    assert same(first.live, before)
    last.follow(2)
    assert last.holds(own)
