"""Plans of transfers: each element that a worker needs comes once, in bounded rounds, from ranks that share a load."""

import base64
import json
import random
import zlib
from collections.abc import Sequence
from copy import deepcopy

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sharded.shard_ranks import chunk
from torchrl_ext.base.errors import ConfigError, ManifestError, TransportError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.sharded.plan import Agreement, Blocks, MemberPlan, Shares, TransferPlan, group_rank, make_plan
from torchrl_ext.data.weights.blocks import Block

Layout = list[list[list[Block]]]
"""Blocks by member and parameter."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


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


MODEL = [
    ParamMeta(f"layers.{layer}.{name}", torch.bfloat16, shape)
    for layer in range(7)
    for name, shape in {"norm": (64,), "q": (512, 256), "gate": (8, 32), "down": (256, 512), "post": (48,)}.items()
]


def layout(members: int, how) -> Layout:
    return [[how(meta.shape, member) for meta in MODEL] for member in range(members)]


WHOLE = lambda shape, _: [Block.whole(shape)]  # noqa: E731 - a table of layouts
FSDP_4 = layout(4, lambda shape, rank: [chunk(shape, 0, rank, 4)])
HSDP_2X2 = layout(4, lambda shape, rank: [chunk(shape, 0, rank % 2, 2)])
REPLICATED_4 = layout(4, WHOLE)
TP_2 = layout(2, lambda shape, worker: [chunk(shape, 1, worker, 2)] if len(shape) > 1 else WHOLE(shape, 0))


def plan_of(held: Layout, needed: Layout, bucket_bytes: int = 1 << 20, params=MODEL) -> TransferPlan:
    return make_plan(params, shares(held), shares(needed), bucket_bytes=bucket_bytes)


@settings(max_examples=120)
@given(st.randoms(use_true_random=False))
def test_plan_delivers_each_needed_element_once_within_bounds(rng):
    params, held, needed, bucket_bytes = random_case(rng)
    carry_out(plan_of(held, needed, bucket_bytes, params), held, needed, bucket_bytes)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_part_is_planned_by_what_members_said_of_the_model(rng):
    params, *layouts, bucket_bytes = random_case(rng)
    agreement = agreed(params, *map(shares, layouts), bucket_bytes)
    for part in ([at for at in range(len(params)) if rng.random() < share] for share in (1, 0.6, 0.3)):
        own = [params[at] for at in part]
        held, needed = ([[member[at] for at in part] for member in layout] for layout in layouts)
        plan = plan_of(held, needed, bucket_bytes, own)
        assert agreement.plan(own, plan.digest).plan.digest == plan.digest
        rank = rng.randrange(len(held))
        for other, share in enumerate(shares(held)):
            assert agreement.holds(rank, own, share) == (share == shares(held)[rank]), other
        absent = [*own, ParamMeta("absent", torch.float32, ())]
        assert not agreement.holds(rank, absent, shares(held)[rank])
        with pytest.raises(ManifestError, match="absent"):
            agreement.plan(absent)
    with pytest.raises(TransportError, match="rank 0 made another transfer plan than rank 1"):
        agreement.plan(params, "another")


def agreed(params, held, needed, bucket_bytes) -> Agreement:
    """What the member of rank 1 reads."""
    texts = [tuple(share.to_text() for share in members) for members in (held, needed)]
    note = json.dumps(Shares(held=texts[0], needed=texts[1], bucket_bytes=bucket_bytes).to_json())
    return Agreement(Shares.from_json(json.loads(note)), tuple(params), 1)


def test_plans_that_differ_have_other_digests():
    needed = deepcopy(TP_2)
    needed[1][6] = []
    plans = [plan_of(FSDP_4, TP_2), plan_of(HSDP_2X2, TP_2), plan_of(FSDP_4, needed), plan_of(FSDP_4, TP_2, 1 << 13)]
    plans += [plan_of(FSDP_4, [*TP_2, TP_2[0]]), plan_of(FSDP_4, [*TP_2, TP_2[1]])]
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize("held", [FSDP_4, HSDP_2X2, REPLICATED_4], ids=["FSDP 4", "HSDP 2x2", "replicated 4"])
def test_ranks_that_hold_the_same_take_turns(held):
    loads = carry_out(plan_of(held, TP_2, 1 << 18), held, TP_2, 1 << 18)
    assert loads[:, :4].sum(axis=0).all()


def test_what_is_no_part_of_a_parameter_is_refused_by_name():
    needed = deepcopy(TP_2)
    twice = [Block((1, 1), (3, 3)), Block((0, 0), (2, 2))]
    for blocks, words in (
        ([Block((0, 0), (513, 1))], r"names the block from \[0, 0\] to \[513, 1\] of layers\.1\.q"),
        (twice, r"asks for elements of layers\.1\.q bfloat16\[512, 256\] twice"),
    ):
        needed[1][6] = blocks
        with pytest.raises(ManifestError, match=f"worker 1 {words}"):
            plan_of(FSDP_4, needed)
    with pytest.raises(ManifestError, match="trainer rank 3 has a share of 34 parameters"):
        agreed(MODEL, shares([*FSDP_4[:3], FSDP_4[3][:-1]]), shares(TP_2), 1 << 20)
    with pytest.raises(ConfigError, match="bucket_bytes is 1"):
        plan_of(FSDP_4, TP_2, 1)
    with pytest.raises(ConfigError, match="needs trainer ranks and workers"):
        plan_of(FSDP_4, [])


TWO = [ParamMeta("a", torch.float32, (4, 4)), ParamMeta("b", torch.float32, (2,))]
GOOD = {"patterns": [[[[0, 0], [2, 4]]], [[[0], [2]]]], "of": np.array([0, 1], "<i4").tobytes()}


def text_of(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "text", [None, "no base64", base64.b64encode(b"no zlib").decode(), text_of(bytes(1 << 27))], ids=range(4)
)
def test_a_malformed_share_is_refused_in_the_name_of_its_sender(text):
    with pytest.raises(TransportError, match="trainer rank 3 sent a share that cannot be read"):
        Blocks.of_text(text, "trainer rank 3", 2)


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3) | st.binary(max_size=9)
ANY = st.recursive(SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one))


def damaged(value, data):
    """The value with another one in some place of it."""
    at = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not at or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ANY)
    key = data.draw(st.sampled_from(at))
    value[key] = damaged(value[key], data)
    return value


@settings(max_examples=100)
@given(st.data())
def test_plan_for_damaged_needs_is_refused_or_within_bounds(data):
    whole = Blocks.of_blocks([[Block.whole(meta.shape)] for meta in TWO])
    try:
        text = text_of(msgspec.msgpack.encode(damaged(deepcopy(GOOD), data)))
        share = Blocks.of_text(text, "worker 0", 2)
        plan = make_plan(TWO, [whole], [share], bucket_bytes=1 << 10)
    except (ManifestError, TransportError):
        return
    carry_out(plan, [[whole.blocks(at) for at in range(2)]], [[share.blocks(at) for at in range(2)]], 1 << 10)
