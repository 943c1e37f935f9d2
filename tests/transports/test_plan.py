"""Plans of transfers: each element that a worker needs comes once, in bounded rounds, from ranks that share a load."""

from __future__ import annotations

import base64
import itertools
import random
import zlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transports.plans import Layout, carry_out, member_of, random_case, shares, stretch
from torchrl_ext.errors import ConfigError, ManifestError, TransportError
from torchrl_ext.transports.sharded.agreement import Needs
from torchrl_ext.transports.sharded.plans.plan import MemberPlan, Share, TransferPlan, make_plan
from torchrl_ext.transports.sharded.plans.shares import packed, unpacked
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block

MODEL = [
    ParamMeta(f"layers.{layer}.{name}", torch.bfloat16, shape)
    for layer in range(7)
    for name, shape in {"norm": (64,), "q": (512, 256), "gate": (8, 32), "down": (256, 512), "post": (48,)}.items()
]


def layout(members: int, how) -> Layout:
    return [[how(meta.shape, member) for meta in MODEL] for member in range(members)]


WHOLE = lambda shape, _: [Block.whole(shape)]  # noqa: E731 - a table of layouts
FSDP_4 = layout(4, lambda shape, rank: stretch(shape, 0, rank, 4))
HSDP_2X2 = layout(4, lambda shape, rank: stretch(shape, 0, rank % 2, 2))
REPLICATED_4 = layout(4, WHOLE)
TP_2 = layout(2, lambda shape, worker: stretch(shape, 1, worker, 2) if len(shape) > 1 else WHOLE(shape, 0))


def plan_of(held: Layout, needed: Layout, bucket_bytes: int = 1 << 20, params=MODEL) -> TransferPlan:
    return make_plan(params, shares(held), shares(needed), bucket_bytes=bucket_bytes)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_each_worker_gets_each_element_that_it_needs_once_within_the_bounds(rng):
    params, held, needed, bucket_bytes = random_case(rng)
    carry_out(plan_of(held, needed, bucket_bytes, params), held, needed)


def joined(first: list[list[Block]], second: list[list[Block]]) -> list[list[Block]]:
    return [[*one, *other] for one, other in zip(first, second, strict=True)]


QUARTERS = layout(2, lambda shape, worker: stretch(shape, 0, worker, 4))  # of the first half


@pytest.mark.parametrize(
    ("held", "needed"),
    [(FSDP_4, TP_2), (HSDP_2X2, TP_2), (REPLICATED_4, TP_2), (REPLICATED_4, [*QUARTERS, joined(*QUARTERS)])],
    ids=["FSDP 4", "HSDP 2x2", "replicated 4", "few workers"],
)
@pytest.mark.parametrize("bucket_bytes", [1 << 13, 1 << 18, 1 << 30])
def test_no_rank_sends_a_tenth_more_than_the_mean(held, needed, bucket_bytes):
    plan = plan_of(held, needed, bucket_bytes)
    carry_out(plan, held, needed)
    assert plan.rank_bytes.max() <= 1.1 * plan.rank_bytes.mean()


def test_a_rank_that_holds_all_shares_the_load_with_ranks_that_hold_parts():
    held = [REPLICATED_4[0], joined(*FSDP_4[:2]), *FSDP_4[2:]]
    plan = plan_of(held, TP_2)
    carry_out(plan, held, TP_2)
    assert plan.rank_bytes.min() > 0


def test_equal_workers_form_a_chain_and_cost_the_trainer_one_send():
    alone, four = plan_of(FSDP_4, TP_2), plan_of(FSDP_4, [*TP_2, *TP_2, *TP_2, *TP_2])
    assert np.array_equal(alone.rank_bytes, four.rank_bytes)
    assert np.array_equal(four.worker_bytes, np.tile(alone.worker_bytes, 4))
    workers = [member_of(four, 1 + worker) for worker in range(8)]
    assert [one.successor for one in workers] == [3, 4, 5, 6, 7, 8, None, None]
    assert [one.source for one in workers] == [None, None, 1, 2, 3, 4, 5, 6]
    for number, one in enumerate(workers):
        assert all(list(one.links(at)) == list(workers[number % 2].links(at)) for at in range(four.rounds))
    assert all(set(dict(member_of(four, 0).links(at))) <= {1, 2} for at in range(four.rounds))


def test_parameters_go_in_order_and_the_chunks_of_a_large_one_in_rounds_that_follow_each_other():
    plan = plan_of(FSDP_4, TP_2, 1 << 13)
    first = member_of(plan, 0)
    spans = [first.span(at) for at in range(plan.rounds)]
    assert spans == sorted(spans) and all(a[1] - 1 <= b[0] for a, b in itertools.pairwise(spans))
    rounds = {at for at in range(plan.rounds) for _, sent in first.links(at) for one in sent if one.param == 1}
    assert len(rounds) > 1 and rounds == set(range(min(rounds), max(rounds) + 1))
    least = max(plan.rank_bytes.max(), plan.worker_bytes.max()) / plan.bucket_bytes
    assert least <= plan.rounds <= 1.5 * least


def test_ranks_that_hold_whole_experts_send_at_the_same_time():
    experts = [ParamMeta(f"experts.{at}", torch.bfloat16, (64, 32)) for at in range(32)]
    held = [[[Block.whole((64, 32))] if at // 8 == rank else [] for at in range(32)] for rank in range(4)]
    needed = [[stretch((64, 32), 0, worker, 16) for _ in experts] for worker in range(16)]
    plan = plan_of(held, needed, 2 * experts[0].nbytes, experts)
    assert carry_out(plan, held, needed).max(axis=1).sum() == plan.rank_bytes.max()  # not four times that


def test_the_rows_of_a_member_are_small_where_many_parameters_are_held_and_needed_alike():
    layers = [ParamMeta(f"{at}.{meta.name}", meta.dtype, meta.shape) for at in range(200) for meta in MODEL]
    held, needed = ([member * 200 for member in layout] for layout in (FSDP_4, TP_2))
    many = plan_of(held, needed, params=layers)
    assert all(len(many.rows(at)) <= 2 * len(plan_of(FSDP_4, TP_2).rows(at)) for at in range(6))
    assert len(many.schedule) < 4 * len(layers)


@pytest.mark.parametrize(
    ("of", "change"),
    [
        (0, {"chunk": bytes(4 * 35)}),  # without chunks that have rows
        (0, {"param": np.full(35, 35, "<i4").tobytes()}),  # of more parameters
        (0, {"starts": bytes(3)}),
        (0, {"param": np.array([-1], "<i4").tobytes()}),
        (1, {"table": bytes(8)}),
        (1, {"source": "two"}),
    ],
)
def test_a_malformed_plan_is_refused(of, change):
    plan = plan_of(FSDP_4, TP_2)
    notes = [plan.schedule, plan.rows(1)]
    MemberPlan(MODEL, *notes)
    notes[of] = text_of(struct_of(notes[of]) | change)
    with pytest.raises(TransportError, match="trainer rank 0 sent a transfer plan that cannot be read"):
        MemberPlan(MODEL, *notes)


def test_elements_that_nobody_holds_are_named_even_where_nobody_needs_them():
    held = [[list(blocks) for blocks in member] for member in FSDP_4]
    held[2][6] = [Block((256, 0), (384, 100))]
    with pytest.raises(ManifestError, match=r"nobody holds elements \[256:384, 100:256\] of layers\.1\.q bfloat16"):
        plan_of(held, [[[] for _ in MODEL]])


def test_what_is_no_part_of_a_parameter_is_refused_by_name():
    needed = [[list(blocks) for blocks in member] for member in TP_2]
    needed[1][6] = [Block((0, 0), (513, 1))]
    with pytest.raises(ManifestError, match=r"worker 1 names the block from \[0, 0\] to \[513, 1\] of layers\.1\.q"):
        plan_of(FSDP_4, needed)
    needed[1][6] = [Block((1, 1), (3, 3)), Block((0, 0), (2, 2))]
    with pytest.raises(ManifestError, match=r"worker 1 names elements of layers\.1\.q bfloat16\[512, 256\] twice"):
        plan_of(FSDP_4, needed)
    with pytest.raises(ManifestError, match="trainer rank 3 has a share of 34 parameters"):
        plan_of([*FSDP_4[:3], FSDP_4[3][:-1]], TP_2)
    with pytest.raises(ManifestError, match="worker 1 has a share of 34 parameters"):
        plan_of(FSDP_4, [TP_2[0], TP_2[1][:-1]])
    with pytest.raises(ConfigError, match="bucket_bytes is 1"):
        plan_of(FSDP_4, TP_2, 1)
    with pytest.raises(ConfigError, match="needs trainer ranks and workers"):
        plan_of(FSDP_4, [])


def test_a_model_without_parameters_or_that_nobody_needs_has_no_rounds():
    assert plan_of([[]], [[]], params=[]).rounds == 0
    idle = plan_of(FSDP_4, [[[] for _ in MODEL]])
    assert idle.rounds == 0 and not idle.rank_bytes.any()


def test_a_share_says_equal_patterns_once():
    share = Share.of_blocks([[Block((0,), (2,)), Block((4,), (4,))], [], [Block((0,), (2,))]])
    assert share.patterns == ((Block((0,), (2,)),), ()) and share.indices.tolist() == [0, 1, 0]
    assert share.blocks(0) == (Block((0,), (2,)),) and share.blocks(1) == ()
    shuffled = [[random.Random(0).sample(blocks, len(blocks)) for blocks in member] for member in HSDP_2X2]
    assert shares(shuffled) == shares(HSDP_2X2) and len(set(shares(shuffled))) == 2


def struct_of(text):
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)))


def text_of(fields):
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(fields))).decode()


TWO = [ParamMeta("a", torch.float32, (4, 4)), ParamMeta("b", torch.float32, (2,))]
GOOD = {"patterns": [[[[0, 0], [2, 4]]], [[[0], [2]]]], "of": np.array([0, 1], "<i4").tobytes()}


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "no base64",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(bytes(1 << 27))).decode(),
        *(text_of(GOOD | {"of": np.array(of, "<i4").tobytes()}) for of in ([0, 2], [0, -1])),
        text_of(GOOD | {"of": bytes(7)}),
        text_of(GOOD | {"patterns": [[[[at], [at + 1]] for at in range(5000)]] * 2}),
    ],
)
def test_a_malformed_share_is_refused_in_the_name_of_its_sender(text):
    with pytest.raises(TransportError, match="trainer rank 3 sent a share that cannot be read"):
        unpacked(text, Share, "trainer rank 3 sent a share")


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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_plan_for_damaged_needs_is_refused_or_moves_what_lies_within_the_parameters(data):
    whole = Share.of_blocks([[Block.whole(meta.shape)] for meta in TWO])
    try:
        share = unpacked(text_of(damaged(struct_of(text_of(GOOD)), data)), Share, "worker 0 sent needs")
        plan = make_plan(TWO, [whole], [share], bucket_bytes=1 << 10)
    except (ManifestError, TransportError):
        return
    carry_out(plan, [[whole.blocks(at) for at in range(2)]], [[share.blocks(at) for at in range(2)]])


def test_a_parameter_for_which_a_worker_did_not_join_is_named():
    one, other = TWO
    needs = Needs(Share.of_blocks([[Block((0, 0), (2, 4))]]), {"a": "why"})
    assert unpacked(packed(needs), Needs, "worker 1 sent needs") == needs
    assert needs.of([one], [one]).blocks(0) == (Block((0, 0), (2, 4)),)
    with pytest.raises(ManifestError, match=r"joined without b float32\[2\]"):
        needs.of(TWO, [one])
    assert Needs(None, {}).of([other], []).blocks(0) == (Block.whole(other.shape),)
