"""Layouts of trainers and engines for tests of plans: who holds what of which tensor; and plans carried out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.sharded.plan import Blocks, MemberPlan, TransferPlan, group_rank
from torchrl_ext.data.weights.blocks import Block

Layout = list[list[list[Block]]]
"""Blocks by member and parameter."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def stretch(shape: Sequence[int], axis: int, part: int, parts: int) -> list[Block]:
    """Return one of the parts of a tensor that is cut along one dimension."""
    whole, size = Block.whole(shape), -(-shape[axis] // parts)
    start, stop = (list(edge) for edge in whole)
    start[axis], stop[axis] = min(part * size, shape[axis]), min((part + 1) * size, shape[axis])
    return [Block(tuple(start), tuple(stop))]


def shares(layout: Layout) -> list[Blocks]:
    return [Blocks.of_blocks(member) for member in layout]


def random_case(rng: random.Random) -> tuple[list[ParamMeta], Layout, Layout, int]:
    """Return parameters, what ranks hold (with replicas and overlaps), what workers need, and the bytes of a bucket."""
    ranks, workers = rng.randint(1, 5), rng.randint(1, 5)
    params: list[ParamMeta] = []
    held: Layout = [[] for _ in range(ranks)]
    needed: Layout = [[] for _ in range(workers)]
    for _ in range(rng.randint(0, 6)):
        shape = tuple(0 if rng.random() < 0.03 else rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
        dtype, has, wants = rng.choice(DTYPES), _holders(rng, shape, ranks), _needs(rng, shape, workers)
        for _ in range(rng.randint(1, 3)):  # parameters that are held and needed alike
            params.append(ParamMeta(f"p{len(params)}", dtype, shape))
            for layout, found in ((held, has), (needed, wants)):
                for member, blocks in zip(layout, found, strict=True):
                    member.append(blocks)
    if rng.random() < 0.5:
        needed[-1] = needed[0]
    return params, held, needed, rng.choice([4, 5, 7, 16, 40, 100, 10**6])


def carry_out(plan: TransferPlan, held: Layout, needed: Layout, bucket_bytes: int) -> np.ndarray:
    """Move every element as the members' parts say, and check it against the needs and the promises of the plan.

    Returns:
        The bytes of every round out of each rank and then into each leader, of shape (rounds, ranks + workers).
    """
    ranks = [MemberPlan(plan, group_rank(rank, len(needed))) for rank in range(len(held))]
    workers = [MemberPlan(plan, 1 + worker) for worker in range(len(needed))]
    rounds = len(plan.rounds)
    loads = np.zeros((rounds, len(held) + len(needed)), dtype=np.int64)
    got = [[np.zeros(meta.shape, dtype=np.int64) for meta in plan.params] for _ in needed]
    seen: list[set[int]] = [set() for _ in range(rounds)]
    for at in range(rounds):
        assert len({one.span(at) for one in (*ranks, *workers)}) == 1
        sent = {
            (peer - 1, group_rank(rank, len(needed))): transfers
            for rank, own in enumerate(ranks)
            for peer, transfers in own.links(at)
        }
        for worker, leader in enumerate(plan.leaders):
            expected = {rank: transfers for (one, rank), transfers in sent.items() if one == leader}
            assert dict(workers[worker].links(at)) == expected
        for (worker, peer), transfers in sent.items():
            rank = peer and peer - len(needed)
            assert [one.param for one in transfers] == sorted(one.param for one in transfers)
            for index, block in transfers:
                meta = plan.params[index]
                where = block.within(Block.whole(meta.shape))
                assert _marked(meta.shape, held[rank][index])[where].all()
                got[worker][index][where] += 1
                loads[at, [rank, len(held) + worker]] += block.numel * meta.dtype.itemsize
                seen[at].add(index)
    assert loads.max(initial=0) <= bucket_bytes
    assert loads[:, : len(held)].sum() == plan.nbytes
    for at in range(rounds):  # what lies before a round's parameters is complete, and nothing behind has come
        first, stop = ranks[0].span(at)
        assert first == min(set().union(*seen[at:])) and max(set().union(*seen[: at + 1])) < stop
    for worker, own in enumerate(workers):  # equal workers form a chain, of which the first gets the bytes
        assert (own.source is None) == (plan.leaders[worker] == worker)
        if own.successor is not None:
            assert plan.leaders[own.successor - 1] == plan.leaders[worker]
            assert workers[own.successor - 1].source == 1 + worker
    for worker, leader in enumerate(plan.leaders):
        for index, meta in enumerate(plan.params):  # each element that this worker needs once, and no other
            assert np.array_equal(got[leader][index], _marked(meta.shape, needed[worker][index]))
    return loads


def _marked(shape: Sequence[int], blocks: Sequence[Block]) -> np.ndarray:
    found = np.zeros(shape, dtype=np.int64)
    for block in blocks:
        found[block.within(Block.whole(shape))] = 1
    return found


def partition(rng: random.Random, shape: Sequence[int], parts: int) -> list[Block]:
    """Cut a tensor at random places, again and again."""
    boxes = [Block.whole(shape)]
    for _ in range(parts - 1):
        box = rng.choice(boxes)
        axes = [axis for axis, size in enumerate(box.shape) if size > 1]
        if axes:
            axis = rng.choice(axes)
            middle = rng.randrange(box.start[axis] + 1, box.stop[axis])
            boxes.remove(box)
            boxes.append(Block(box.start, (*box.stop[:axis], middle, *box.stop[axis + 1 :])))
            boxes.append(Block((*box.start[:axis], middle, *box.start[axis + 1 :]), box.stop))
    return boxes


def _holders(rng: random.Random, shape: Sequence[int], ranks: int) -> list[list[Block]]:
    found: list[list[Block]] = [[] for _ in range(ranks)]
    for block in partition(rng, shape, rng.randint(1, 5)):
        found[rng.randrange(ranks)].append(block)
    for rank in range(ranks):
        if rng.random() < 0.3:
            found[rank] = partition(rng, shape, rng.randint(1, 3))
        elif rng.random() < 0.3:
            found[rank] = [*found[rng.randrange(ranks)]]
    if not _marked(shape, [block for blocks in found for block in blocks]).all():
        found[rng.randrange(ranks)] = partition(rng, shape, 2)
    return found


def _needs(rng: random.Random, shape: Sequence[int], workers: int) -> list[list[Block]]:
    found: list[list[Block]] = []
    for _ in range(workers):
        some = [block for block in partition(rng, shape, rng.randint(1, 4)) if rng.random() < 0.7]
        found.append([*rng.choice(found)] if found and rng.random() < 0.4 else some)
    return found
