"""Trainer ranks that hold blocks of a small model, for tests of deltas that several ranks write."""

import torch
import torch.distributed as dist

from torchrl_ext.data.weights.blocks import Block, Shard
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.testing import any_bits

WHOLE = Block.whole
PARTS = 4


def weights(seed=0):
    return {
        "rows": any_bits(torch.bfloat16, 64, 30, seed=seed),
        "columns": any_bits(torch.float32, 40, 50, seed=seed + 1),
        "uneven": any_bits(torch.float32, 5, 7, seed=seed + 2),
        "corner": any_bits(torch.bfloat16, 12, 16, 8, seed=seed + 3),
        "complex": any_bits(torch.complex64, 9, 8, seed=seed + 4),
        "replica": any_bits(torch.float32, 33, seed=seed + 5),
        "pairs": any_bits(torch.int16, 24, 10, seed=seed + 6),
        "overlap": any_bits(torch.bfloat16, 20, 20, seed=seed + 7),
        "gathered": any_bits(torch.float32, 21, 4, seed=seed + 8),
        "scalar": torch.tensor(3.0),
        "still": torch.arange(90).reshape(9, 10),
        "nothing": torch.empty(0, 4),
    }


def step(tensors, seed, share=0.05):
    """Change some elements of all tensors but ``still``, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name == "still" or not tensor.numel():
            continue
        bits = tensor.view(-1).view(torch.uint8)
        where = torch.rand(bits.shape, generator=generator) < share
        where[seed % bits.numel()] = True
        bits[where] += 1


def chunk(shape, dim, rank, world):
    size = -(-shape[dim] // world)
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
    return Block(tuple(start), tuple(stop))


def blocks(name, shape, rank, world):
    """What a rank holds of a tensor; every name is held in another way."""
    whole = WHOLE(shape)
    if name in ("rows", "uneven", "still", "complex"):
        return [chunk(shape, int(name == "complex"), rank, world)]
    if name == "columns":
        return [chunk(shape, 1, rank, world)]
    if name == "corner":  # two blocks of a rank, inside of the tensor
        first = chunk(shape, 1, rank, world)
        low, high = first.start[1], first.stop[1]
        return [Block((0, low, 0), (12, high, 3)), Block((0, low, 3), (12, high, 8))]
    if name == "pairs":  # replicated over pairs of ranks
        return [chunk(shape, 0, rank // 2, -(-world // 2))]
    if name == "overlap":  # ranks hold blocks of other sizes, that meet
        return [whole] if rank == world - 1 else [Block((0, 3 * rank), (20 - rank, 12 + rank))]
    return [whole]


class Blocks(MappingSource):
    """The blocks of one rank; each tensor that is gathered makes all ranks meet, as a gather does."""

    def __init__(self, tensors, rank=0, world=1, *, of=None, meet=None):
        super().__init__(tensors)
        self._tensors, self._rank, self._world = tensors, rank, world
        self._of = of or blocks
        self._meet = meet or (lambda name: None)

    def __iter__(self):
        for name, tensor in super().__iter__():
            self._meet(name)
            yield name, tensor

    def held(self):
        return {}  # each pass has to be made on every rank

    def shards(self):
        for meta in self.params():
            for block in self._of(meta.name, meta.shape, self._rank, self._world):
                gathers = meta.name == "gathered"
                if block.numel:
                    yield Shard(meta, block, lambda b=block, n=meta.name: self._take(n, b), gathers=gathers)

    def _take(self, name, block):
        if name == "gathered":
            self._meet(name)
        return self._tensors[name][block.within(WHOLE(self._tensors[name].shape))]


def in_parts(name, shape, rank, world):
    """All that four ranks hold, on the only rank that there is."""
    found = [block for part in range(PARTS) for block in blocks(name, shape, part, PARTS)]
    return [Block.whole(shape)] if name in ("gathered", "overlap", "scalar", "replica") else list(dict.fromkeys(found))


def cut(tensors):
    return Blocks(tensors, of=in_parts)


def meet(name):
    """Wait for all ranks, which gather a tensor of this name."""
    lengths = torch.full((1,), len(name))
    dist.all_reduce(lengths)
    assert int(lengths) == len(name) * dist.get_world_size(), "ranks gather different tensors"
