"""What every implementation of the kernels has to do, held against numpy's words for it."""

import itertools

import numpy as np
import pytest
import torch

from tests.data.deltas.data import random_bits
from torchrl_ext.data.deltas import loops, torch_ops
from torchrl_ext.data.deltas.bits import BITS, Piece, Places, Range, Writes, flat_bits, linear_keys, unsigned

WIDTHS = (1, 2, 4, 8)


def bits(count, width, generator):
    return flat_bits(random_bits(count, BITS[width], generator))


def summed(positions, found):
    """The formula of `torchrl_ext.data.weights.digests`, by numpy."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[found.element_size()]
    wide, positions = found.cpu().numpy().view(unsigned).astype(np.uint64), np.asarray(positions).astype(np.uint64)
    byte, keys, one = positions * np.uint64(found.element_size()), linear_keys().astype(np.uint64), np.uint64(1)
    word, shift = byte // np.uint64(4), byte % np.uint64(4) * np.uint64(8)
    terms = ((wide & np.uint64(0xFFFFFFFF)) + one << shift) * keys[:, word % np.uint64(2048)]
    if found.element_size() == 8:
        terms += ((wide >> np.uint64(32)) + one) * keys[:, (word + one) % np.uint64(2048)]
    words = [term * (factor | one) for term, factor in zip(terms, mixed(word // np.uint64(2048)), strict=True)]
    return tuple(int(word.sum(dtype=np.uint64)) for word in words)


def mixed(rows):
    """Two words for each row of keys, as splitmix64 mixes them."""
    z = rows * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(b"linear64", "little"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    y = (z ^ (z >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return z, y ^ (y >> np.uint64(29))


def words_of(kernels, *pieces):
    """What kernels say that the elements of pieces add to a digest, as `summed` does."""
    return [(one % 2**64, two % 2**64) for one, two in kernels.words(pieces).tolist()]


def difference(after, before):
    return tuple((a - b) % 2**64 for a, b in zip(after, before, strict=True))


PLACES = {
    "whole": ((40, 30), 0, (30, 1), (30, 1)),
    "rows of a fused one": ((40, 30), 600, (30, 1), (30, 1)),
    "columns": ((40, 30), 10, (70, 1), (30, 1)),
    "into columns": ((40, 30), 5, (30, 1), (90, 1)),
    "turned": ((30, 40), 0, (1, 30), (40, 1)),
    "turned, of two rows": ((2, 40), 0, (40, 1), (1, 2)),
    "turned in heads": ((20, 2, 30), 7, (90, 30, 1), (2, 1, 40)),
    "heads": ((4, 2, 6), 48, (36, 6, 1), (12, 6, 1)),
    "every other one": ((600,), 1, (2,), (3,)),
    "one": ((), 17, (), ()),
    "of size one": ((1, 20, 1), 3, (999, 1, 5), (20, 1, 7)),
    "none": ((0, 5), 0, (5, 1), (5, 1)),
}


def piece_of(name, memory):
    """The piece that begins where the memory does."""
    shape, offset, strides, to = PLACES[name]
    return Piece(destination=memory.as_strided(shape, to), offset=offset, strides=strides)


def memory_of(name, width, generator):
    """What a piece and some others lie in."""
    shape, _, _, to = PLACES[name]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, to, strict=True))
    return bits(reach + 10, width, generator)


def positions_of(name):
    """Position in the flat checkpoint tensor of every element, in C order."""
    shape, offset, strides, _ = PLACES[name]
    found = torch.full((), offset, dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = found[..., None] + torch.arange(size) * stride
    return found.reshape(-1)


def test_words_of_a_piece_are_those_of_its_positions(way):
    own, device = way
    for name, width in itertools.product(PLACES, WIDTHS):
        memory = memory_of(name, width, torch.Generator().manual_seed(1))
        view = piece_of(name, memory).destination.reshape(-1)
        expected = summed(positions_of(name).numpy(), view)
        assert words_of(own, piece_of(name, memory.to(device))) == [expected], (name, width)


@pytest.mark.parametrize("stride", (153, pytest.param(152, marks=pytest.mark.exhaustive)))
def test_words_of_a_large_transposed_piece_match_its_positions(way, stride):
    """Its positions reach over several rows of keys."""
    own, device = way
    positions = torch.arange(1030)[:, None] * stride + torch.arange(150) + 3
    for width in WIDTHS:
        memory = bits(150 * 1030, width, torch.Generator().manual_seed(5))
        turned = memory.reshape(150, 1030).t()
        piece = Piece(destination=memory.to(device).reshape(150, 1030).t(), offset=3, strides=(stride, 1))
        expected = summed(positions.reshape(-1).numpy(), turned.reshape(-1))
        assert words_of(own, piece) == [expected], width


def test_words_of_runs_of_every_width_offset_and_tail(way, monkeypatch):
    """Runs begin and end anywhere in words and in rows of keys, and many are summed at once."""
    own, device = way
    monkeypatch.setattr(torch_ops, "_CHUNK_BYTES", 4 * 8192)
    for width in WIDTHS:
        row, generator = 8192 // width, torch.Generator().manual_seed(6)
        places = itertools.product(
            (0, 1, 2, 3, 5, row - 1, row, 3 * row + 2), (0, 1, 2, 3, 4, 7, row - 2, row, 2 * row + 5)
        )
        runs = [(offset, bits(size, width, generator)) for offset, size in places]
        runs.append((9, bits(11 * row + 3, width, generator)))  # in several parts
        pieces = []
        for number, (offset, run) in enumerate(runs):  # memory itself begins anywhere, too
            memory = torch.cat([run[:0].new_zeros(number % 4), run]).to(device)
            pieces.append(Piece(destination=memory[number % 4 :], offset=offset, strides=(1,)))
        expected = [summed(np.arange(offset, offset + run.numel()), run) for offset, run in runs]
        assert words_of(own, *pieces) == expected, width
        whole = bits(2 * row + 1, width, generator).to(device)[1:]  # rows of words that begin within one
        piece = Piece(destination=whole, offset=0, strides=(1,))
        assert words_of(own, piece) == [summed(np.arange(2 * row), whole)], width


@pytest.mark.parametrize("ordered", (None, False, True), ids=("bits", "steps of integers", "steps of floats"))
def test_changes_land_where_the_view_has_them(way, ordered):
    own, device = way
    for name, width in itertools.product(PLACES, WIDTHS):
        if name == "none":
            continue
        generator = torch.Generator().manual_seed(2)
        memory = memory_of(name, width, generator)
        piece = piece_of(name, memory)
        positions = torch.arange(piece.offset, piece.end)
        positions = positions[torch.rand(positions.shape, generator=generator) < 0.7].to(torch.int32)
        payload = bits(positions.numel(), width, generator)
        inside = dict(
            zip(
                positions_of(name).tolist(),
                piece_of(name, torch.arange(memory.numel())).destination.reshape(-1).tolist(),
                strict=True,
            )
        )
        chosen = [k for k, position in enumerate(positions.tolist()) if position in inside]
        where = [inside[positions[k].item()] for k in chosen]
        expected = memory.clone()
        expected[where] = payload[chosen] if ordered is None else moved(memory[where], payload[chosen], ordered)
        listed = positions[chosen].numpy()
        words = difference(summed(listed, expected[where]), summed(listed, memory[where]))
        target = memory.to(device)
        piece = piece_of(name, target)
        landed = landed_by(own, [[piece]], [piece.end], positions, payload, ordered)
        case = (name, width)
        (found,) = landed.words.tolist()
        assert torch.equal(target.cpu(), memory) and tuple(one % 2**64 for one in found) == words, case
        assert sorted(landed.offsets.tolist()) == sorted(where), case
        assert landed.sums.tolist() == [added_up(landed.offsets, landed.values)], case
        own.scatter(piece.memory, landed.offsets, landed.values)
        assert torch.equal(target.cpu(), expected), case


def landed_by(kernels, segments, sizes, positions, payload, ordered):
    firsts = np.array([0, *itertools.accumulate(sizes)])
    changes = Range(range(len(segments)), firsts, positions.numpy(), unsigned(payload), ordered)
    return kernels.land(Places(segments, [""] * len(segments)), changes)


@pytest.mark.parametrize("ordered", (None, True), ids=("bits", "steps"))
def test_changes_land_in_many_pieces_of_many_segments(way, ordered):
    """Each segment has its own pieces: none, several, with and without gaps; some share positions."""
    own, device = way
    names = [[], ["turned"], ["columns", "rows of a fused one"], ["whole"], ["whole", "whole"], ["heads"]]
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(8)
        memories = [[memory_of(name, width, generator) for name in own_names] for own_names in names]
        live = [[memory.clone().to(device) for memory in own_memories] for own_memories in memories]
        segments = [[piece_of(*one) for one in zip(*both, strict=True)] for both in zip(names, live, strict=True)]
        sizes = [max([5000, *(piece.end for piece in own_pieces)]) for own_pieces in segments]
        positions = torch.arange(sum(sizes))
        positions = positions[torch.rand(positions.shape, generator=generator) < 0.4].to(torch.int32)
        payload = bits(positions.numel(), width, generator)
        landed = landed_by(own, segments, sizes, positions, payload, ordered)
        own.write(landed)
        alone, first = [], 0
        for pieces, own_names, own_memories, size in zip(segments, names, memories, sizes, strict=True):
            inside = (positions >= first) & (positions < first + size)
            for name, piece, memory in zip(own_names, pieces, own_memories, strict=True):
                single = piece_of(name, memory.clone().to(device))
                changes = positions[inside] - first, payload[inside]
                expected = landed_by(own, [[single]], [size], *changes, ordered)
                own.scatter(single.memory, expected.offsets, expected.values)
                assert torch.equal(piece.memory, single.memory), (name, width)
                alone += expected.words.tolist()
            first += size
        assert landed.words.tolist() == alone, width


def moved(before, steps, ordered):
    """Steps on the ordered line, by Python's integers."""
    width = 8 * before.element_size()
    top, every = 1 << (width - 1), (1 << width) - 1

    def one(old, step):
        if not ordered:
            return (old + step) & every
        line = (((old ^ every) if old & top else (old ^ top)) + step) & every
        return line ^ top if line & top else line ^ every

    found = [one(a & every, b & every) for a, b in zip(before.tolist(), steps.tolist(), strict=True)]
    signed = [value - (1 << width) if before.dtype != torch.uint8 and value & top else value for value in found]
    return torch.tensor(signed, dtype=before.dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_one_list_is_written_into_many_tensors(way, width, index):
    own, device = way
    generator = torch.Generator().manual_seed(3)
    memory = bits(9000, width, generator)
    expected, live, lists = memory.clone(), memory.to(device), []
    for first, size in ((0, 5000), (5001, 1), (5002, 0), (6000, 3000)):  # of one storage, with gaps between them
        offsets = torch.arange(size)[torch.rand(size, generator=generator) < 0.9]
        values = bits(offsets.numel(), width, generator)
        expected[first + offsets] = values
        lists.append((live[first : first + size], offsets.to(index).to(device), values.to(device)))
    writes = listed(lists)
    assert torch.equal(own.write(writes).cpu(), writes.sums)
    assert torch.equal(live.cpu(), expected)
    twice = torch.zeros(2, dtype=index, device=device), live.new_tensor([1, 2])  # one element cannot hold both
    writes = listed([*lists, (live[5000:5001], *twice)])
    assert (own.write(writes).cpu() == writes.sums).tolist() == [True] * 4 + [False]


def listed(runs):
    targets, offsets, values = zip(*runs, strict=True)
    places, ends = [target.data_ptr() for target in targets], [*itertools.accumulate(map(len, values))]
    sums = torch.tensor([added_up(*one) for one in zip(offsets, values, strict=True)])
    words = torch.zeros(len(runs), 2, dtype=torch.int64)
    tables = torch.tensor(places), torch.tensor(ends), torch.cat(offsets), torch.cat(values), words, sums
    return Writes([""] * len(runs), targets, *tables)


def added_up(offsets, values):
    """The formula of `Writes.sums`, by Python's integers."""
    total, every = 0, (1 << 8 * values.element_size()) - 1
    for place, value in zip(offsets.tolist(), values.tolist(), strict=True):
        key, value = (place + 1) * 0x9E3779B97F4A7C15 % 2**64, value & every
        total += ((value ^ value >> 32) + 1) * (key ^ key >> 32 | 1)
    return (total + 2**63) % 2**64 - 2**63


def test_what_works_is_chosen_by_the_device():
    assert torch_ops.kernels_on(torch.device("cpu")) is loops
    assert torch_ops.kernels_on(torch.device("meta")) is torch_ops
