"""A worker that holds a part of a model reads those blocks of a delta that it needs, and lands all that is its own."""

from __future__ import annotations

import torch

from tests.data.transports.chains import same, trainer_at
from torchrl_ext.data.deltas import streams
from torchrl_ext.data.deltas.bits import Piece
from torchrl_ext.data.landing.patcher import Patcher, compare
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.digests import PositionDigest
from torchrl_ext.testing import any_bits

WORKERS = 8


def rows(tensor, number):
    """The rows that worker ``number`` holds of a tensor; of one with one dimension, all."""
    whole = Block.whole(tensor.shape)
    if tensor.dim() < 2:
        return whole
    size = tensor.shape[0] // WORKERS
    return Block((number * size, *whole.start[1:]), ((number + 1) * size, *whole.stop[1:]))


class Worker:
    """Holds rows of each tensor, reads the blocks that it needs, and lands them."""

    def __init__(self, root, number):
        self.reader = ChainReader(Chain(LocalStore(root)))
        own = dict(self.reader.tensors(self.reader.open(1), {}))
        self.blocks = {name: rows(tensor, number) for name, tensor in own.items()}
        self.reader.want({name: (block,) for name, block in self.blocks.items()})
        self.live, pieces = self.part(own), {}
        for name, tensor in own.items():
            offset = self.blocks[name].start[0] * tensor.stride(0)
            pieces[name] = [Piece(destination=self.live[name], offset=offset, strides=tensor.stride())]
        self.patcher = Patcher(pieces)

    def part(self, tensors):
        blocks = self.blocks.items()
        return {name: tensors[name][block.within(Block.whole(tensors[name].shape))].clone() for name, block in blocks}

    def follow(self, version):
        """Land a version; return the digests of what this worker holds then, and those of the trainer."""
        changes = self.reader.changes(version)
        found = self.patcher.stage(changes)
        self.patcher.commit()
        self.reader.advance(changes)
        return found, changes.digests


def test_worker_reads_and_lands_only_the_blocks_of_its_rows(tmp_path, monkeypatch):
    """Workers catch up over versions 2 and 3 at once, then follow to 4; their digests add up to the trainer's."""
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 12)
    trainer, generator = trainer_at(tmp_path, encoding="ulp", keyframe_every=0), torch.Generator().manual_seed(0)
    own = {"up": any_bits(torch.bfloat16, 512, 320), "norm": any_bits(torch.bfloat16, 40)}
    own |= {"down": any_bits(torch.bfloat16, 320, 512), "gate": any_bits(torch.float32, 512, 256)}
    trainer.send_weights("policy", own)
    workers = [Worker(tmp_path, number) for number in range(WORKERS)]
    for version in (2, 3, 4):
        for tensor in own.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.05] = version
        trainer.send_weights("policy", own)
        if version == 2:
            continue
        sums = {name: PositionDigest() for name in own}
        for worker in workers:
            found, expected = worker.follow(version)
            assert same(worker.live, worker.part(own))
            for name, digest in found.items():
                sums[name] = sums[name] + digest if own[name].dim() > 1 else digest
        compare(sums, expected)
    delta, read = Chain(LocalStore(tmp_path)).version(4).delta, [worker.reader.read_bytes for worker in workers]
    total, largest = sum(delta.files.values()), int(delta.blocks["nbytes"].max())
    assert all(0 < nbytes <= total / WORKERS + len(delta.params) * largest for nbytes in read) and sum(read) >= total
