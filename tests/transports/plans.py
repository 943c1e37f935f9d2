"""Layouts of trainers and engines for tests of plans: who has what of which tensor; and transfers carried out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from torchrl_ext.transports.sharded.plans.boxes import missing
from torchrl_ext.transports.sharded.plans.plan import Share, TransferPlan
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

Layout = list[list[list[Block]]]
"""Blocks by member and parameter."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def stretch(shape: Sequence[int], axis: int, part: int, parts: int) -> list[Block]:
    """Return one of the parts of a tensor that is cut along one dimension."""
    whole, size = Block.whole(shape), -(-shape[axis] // parts)
    start, stop = (list(edge) for edge in whole)
    start[axis], stop[axis] = min(part * size, shape[axis]), min((part + 1) * size, shape[axis])
    return [Block(tuple(start), tuple(stop))]


def shares(layout: Layout) -> list[Share]:
    return [Share.of_blocks(member) for member in layout]


def random_case(seed: int) -> tuple[list[ParamMeta], Layout, Layout, int]:
    """Return parameters, what ranks hold (with replicas and overlaps), what workers need, and the bytes of a bucket."""
    rng = random.Random(seed)
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


def carry_out(plan: TransferPlan, held: Layout, needed: Layout) -> None:
    """Move every element as the plan says, and hold it against what workers need and what the plan promises."""
    sent = np.zeros((plan.ranks, plan.workers), dtype=np.int64)
    begun: set[int] = set()
    over = {at: set[int]() for at in range(plan.rounds)}  # parameters of which something comes in this round, or later
    got = [[np.zeros(meta.shape, dtype=np.int64) for meta in plan.params] for _ in range(plan.workers)]
    for at in range(plan.rounds):
        in_round = np.zeros_like(sent)
        seen = set()
        for rank in range(plan.ranks):
            for worker in range(plan.workers):
                transfers = plan.link(rank, worker, at)
                assert (worker in plan.receivers(rank, at)) == bool(transfers) == (rank in plan.senders(worker, at))
                assert [one.param for one in transfers] == sorted(one.param for one in transfers)
                for index, block in transfers:
                    meta = plan.params[index]
                    where = block.within(Block.whole(meta.shape))
                    assert _marked(meta.shape, held[rank][index])[where].all()
                    got[worker][index][where] += 1
                    in_round[rank, worker] += block.numel * meta.dtype.itemsize
                    seen.add(index)
        assert max(in_round.sum(axis=0).max(), in_round.sum(axis=1).max()) <= plan.bucket_bytes
        begun |= seen
        first, stop = plan.span(at)
        assert first <= min(seen) and max(begun) < stop
        for earlier in range(at + 1):
            over[earlier] |= seen
        sent += in_round
    assert all(plan.span(at)[0] == min(params) for at, params in over.items())  # what lies before is complete
    assert np.array_equal(sent, plan.link_bytes()) and np.array_equal(sent.sum(axis=1), plan.rank_bytes)
    for worker in range(plan.workers):
        leader = plan.leader(worker)
        assert plan.worker_bytes[worker] == sent[:, leader].sum()
        assert leader == worker or not sent[:, worker].any()
        for index, meta in enumerate(plan.params):  # each element that this worker needs once, and no other
            assert np.array_equal(got[leader][index], _marked(meta.shape, needed[worker][index]))


def _marked(shape: Sequence[int], blocks: Sequence[Block]) -> np.ndarray:
    found = np.zeros(shape, dtype=np.int64)
    for block in blocks:
        found[block.within(Block.whole(shape))] = 1
    return found


def _partition(rng: random.Random, shape: Sequence[int], parts: int) -> list[Block]:
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
    for block in _partition(rng, shape, rng.randint(1, 5)):
        found[rng.randrange(ranks)].append(block)
    for rank in range(ranks):
        if rng.random() < 0.3:
            found[rank] = _partition(rng, shape, rng.randint(1, 3))
        elif rng.random() < 0.3:
            found[rank] = [*found[rng.randrange(ranks)]]
    if missing([block for blocks in found for block in blocks], shape) is not None:
        found[rng.randrange(ranks)] = _partition(rng, shape, 2)
    return found


def _needs(rng: random.Random, shape: Sequence[int], workers: int) -> list[list[Block]]:
    found: list[list[Block]] = []
    for _ in range(workers):
        some = [block for block in _partition(rng, shape, rng.randint(1, 4)) if rng.random() < 0.7]
        found.append([*rng.choice(found)] if found and rng.random() < 0.4 else some)
    return found
