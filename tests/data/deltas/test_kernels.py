"""What every implementation of the kernels has to do, held against numpy's words for it, and what digests see."""

import itertools
import random

import numpy as np
import pytest
import torch

from tests.data.deltas.data import random_bits
from torchrl_ext.data.deltas import loops, torch_ops
from torchrl_ext.data.deltas.bits import BITS, Piece, Places, Range, Writes, flat_bits, linear_keys, unsigned
from torchrl_ext.data.weights.digests import PositionDigest, position_digest

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


def random_piece(rng, width, generator):
    """Bits on the host, a copy's sizes and strides there, its place and strides in the tensor, and both of elements."""
    sizes = [rng.choice((1, 2, 3, 15, 16, 17, 70)) for _ in range(rng.randint(0, 3))]
    while np.prod(sizes) > 9000:
        sizes.remove(max(sizes))
    if rng.random() < 0.05:
        sizes.append(0)
    strides, to = random_strides(rng, sizes), random_strides(rng, sizes)
    offset = rng.choice((0, 1, 17, 8195, (1 << 33) + 3))
    positions, places = offset + spread(sizes, strides), spread(sizes, to)
    memory = bits(int(places.max(initial=0)) + 1 + rng.randrange(9), width, generator)
    return memory, (sizes, to), (offset, tuple(strides)), positions, places


def spread(sizes, strides):
    """Where each element of a view lies, in C order."""
    found = np.zeros((), np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = found[..., None] + np.arange(size) * stride
    return found.reshape(-1)


def random_strides(rng, sizes):
    """Of a tensor with its dimensions in any order, some with gaps after them."""
    found, reach = [0] * len(sizes), 1
    for dim in rng.sample(range(len(sizes)), len(sizes)):
        reach *= rng.choice((1, 1, 1, 2, 3))
        found[dim], reach = reach, reach * max(1, sizes[dim])
    return found


def test_random_pieces_are_digested_and_changed_in_place(way):
    """Segments have none, one or several pieces; changes are new bits, or steps of integers or floats."""
    own, device = way
    for seed in range(80):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        width, ordered = rng.choice(WIDTHS), rng.choice((None, False, True))
        made = [[random_piece(rng, width, generator) for _ in range(rng.choice((0, 1, 1, 2)))] for _ in range(4)]
        segments, sizes, every = [], [], []
        for segment in made:
            pieces = []
            for memory, view, (offset, strides), *_ in segment:
                live = memory.clone().to(device).as_strided(*view)
                pieces.append(Piece(destination=live, offset=offset, strides=strides))
            segments.append(pieces)
            sizes.append(5000 + max([0, *(piece.end for piece in pieces)]))
        first = np.array([0, *itertools.accumulate(sizes)])
        for number, (segment, pieces) in enumerate(zip(made, segments, strict=True)):
            for (memory, *_, positions, places), piece in zip(segment, pieces, strict=True):
                assert piece.end == positions.max(initial=piece.offset - 1) + 1, seed
                assert words_of(own, piece) == [summed(positions, memory[places])], seed
                every += (first[number] + positions[rng.random() < 0.1 :: rng.choice((1, 2, 7))]).tolist()
        listed = np.unique(np.array(every, np.int64))
        payload = bits(listed.size, width, generator)
        changes = Range(range(4), first, listed, unsigned(payload), ordered)
        names = [f"segment {number}" for number in range(4)]
        writes, runs = own.land(Places(segments, names), changes), []
        for name, begin, segment, pieces in zip(names, first, made, segments, strict=False):
            for (memory, *_, positions, places), piece in zip(segment, pieces, strict=True):
                inside = np.isin(begin + positions, listed)
                where, old = positions[inside], memory[places[inside]]
                assert torch.equal(piece.memory.cpu(), memory[: piece.memory.numel()]), seed
                come = payload[np.searchsorted(listed, begin + where)]
                memory[places[inside]] = new = come if ordered is None else moved(old, come, ordered)
                if where.size:
                    words = zip(summed(where, new), summed(where, old), strict=True)
                    runs.append((name, [(a - b) % 2**64 for a, b in words], added_up(places[inside], new)))
        if writes is None:
            assert not runs, seed
            continue
        words = [[one % 2**64 for one in row] for row in writes.words.tolist()]
        assert [*zip(writes.names, words, writes.sums.tolist(), strict=True)] == runs, seed
        assert torch_ops.sums(writes).tolist() == own.exchange(writes).tolist() == writes.sums.tolist(), seed
        assert torch_ops.sums(writes).tolist() == own.exchange(writes).tolist(), seed
        assert own.exchange(writes).tolist() == writes.sums.tolist(), seed
        for segment, pieces in zip(made, segments, strict=True):
            for (memory, *_), piece in zip(segment, pieces, strict=True):
                assert torch.equal(piece.memory.cpu(), memory[: piece.memory.numel()]), seed


def test_a_change_beside_all_pieces_is_nothing_to_write(way):
    own, device = way
    piece = Piece(destination=torch.zeros(4, dtype=torch.int16, device=device), offset=5, strides=(1,))
    change = Range(range(1), np.array([0, 9]), np.array([3]), np.ones(1, np.uint16), None)
    assert own.land(Places([[piece]], ["w"]), change) is None


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
def test_sums_of_what_stands_there_show_a_lost_value(way, width):
    own, device = way
    target = torch.zeros(9, dtype=BITS[width], device=device)
    offsets = torch.tensor([4, 7, 4], dtype=torch.int32, device=device)  # one element cannot hold two values
    own.scatter(target, offsets[:2], target.new_tensor([1, 2]))
    assert target.tolist() == [0, 0, 0, 0, 1, 0, 0, 2, 0]
    values, one = target.new_tensor([5, 6, 3]), (target.data_ptr(), 3)
    table = [torch.tensor([number]) for number in one]
    writes = Writes(["w"], [target], *table, offsets, values, torch.zeros(1, 2, dtype=torch.int64), table[0])
    wanted, held = values.clone(), added_up([4, 7, 4], target.new_tensor([3, 6, 3]))
    assert own.exchange(writes).tolist() == [held] != [added_up([4, 7, 4], wanted)]


def added_up(offsets, values):
    """The formula of `Writes.sums`, by Python's integers."""
    total, every = 0, (1 << 8 * values.element_size()) - 1
    for place, value in zip(map(int, offsets), values.tolist(), strict=True):
        key, value = (place + 1) * 0x9E3779B97F4A7C15 % 2**64, value & every
        total += ((value ^ value >> 32) + 1) * (key ^ key >> 32 | 1)
    return (total + 2**63) % 2**64 - 2**63


def test_what_works_is_chosen_by_the_device():
    assert torch_ops.kernels_on(torch.device("cpu")) is loops
    assert torch_ops.kernels_on(torch.device("meta")) is torch_ops


def test_digest_keys_are_nonzero_and_distinct_under_shifts():
    """So that no two elements of a row count alike; as text, a digest has 32 digits."""
    assert PositionDigest(1, 2).hex() == f"{1:016x}{2:016x}" and position_digest(torch.empty(0)) == PositionDigest()
    for row in linear_keys().astype(np.uint64):
        shifted = row << np.arange(0, 32, 8, dtype=np.uint64)[:, None]
        assert row.size == 2048 and row.all() and np.unique(shifted).size == shifted.size


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float32))
def test_signs_rows_columns_shifts_and_zeros_are_seen(dtype):
    """Regular errors, of which a sum of products could miss some: all differences are alike or end with zeros."""
    size = 4 * 4096
    tensor = random_bits(size, dtype, torch.Generator().manual_seed(1))
    raw = tensor.view(torch.uint8).reshape(size, -1)
    signs, one_pair = raw.clone(), raw.clone()
    signs[:, -1] ^= 0x80
    one_pair[[5, 4096 + 5], -1] ^= 0x80
    same = torch.zeros(size, dtype=torch.uint8)
    crossed = raw.clone().reshape(4, 4096, -1)
    crossed[0, [1, 2]], crossed[1, [1, 2]] = crossed[1, [1, 2]].clone(), crossed[0, [1, 2]].clone()
    others = [
        signs,
        one_pair,
        raw.roll(1, 0),
        raw.roll(4096, 0),
        raw.flip(0),
        raw.reshape(4, 4096, -1).transpose(0, 1),
        crossed,
        raw.clone().copy_(torch.zeros_like(raw)),
    ]
    found = [position_digest(other.reshape(-1).contiguous().view(dtype)) for other in (raw, *others)]
    assert len({*found, PositionDigest()}) == len(found) + 1
    found = [position_digest(same[:count]) for count in range(0, size, 511)]
    assert len(set(found)) == len(found)
