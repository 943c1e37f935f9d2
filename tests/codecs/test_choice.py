"""`auto` of blocks: the kind that lands soonest, and what it expects of each."""

from __future__ import annotations

import math

import pytest
import torch

from tests.codecs.contract import block_of
from torchrl_ext.codecs.base import codec_from_json
from torchrl_ext.codecs.blocks import KINDS
from torchrl_ext.codecs.choice import AutoBlocks, Speed
from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport

UNIT = unit_of(torch.bfloat16)


def changed(density: float, size: int = 1 << 18):
    generator = torch.Generator().manual_seed(0)
    old = torch.empty(size).normal_(0, 0.02, generator=generator).to(torch.bfloat16)
    where = torch.rand(size, generator=generator) < density
    return block_of(units(old), units(torch.where(where, old * 1.02, old)))


def auto(link: float | None, **bytes_s: float) -> AutoBlocks:
    """An `auto` of which every speed is given: nothing is measured."""
    made = AutoBlocks(threads=1)
    for name in ("ulp", "bitmap", "dense"):
        for speeds in (made.writes, made.reads):
            speeds[name].observe(10**6, 10**6 / bytes_s.get(name, 1e9))
    if link:
        made.link.observe(10**6, 10**6 / link)
    return made


def test_a_speed_follows_what_is_observed_and_ignores_what_says_nothing():
    speed = Speed()
    assert speed.bytes_s is None and speed.seconds(100) == 0
    for nbytes, seconds in ((0, 1.0), (1, 0.0), (-1, 1.0), (1, math.inf), (1, math.nan)):
        speed.observe(nbytes, seconds)
    assert speed.bytes_s is None
    speed.observe(100, 1.0)
    assert speed.bytes_s == pytest.approx(100)
    for _ in range(30):
        speed.observe(100, 0.1)
    assert speed.bytes_s == pytest.approx(1000, rel=0.01) and speed.seconds(1000) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("density", "link", "ulp_bytes_s", "expected"),
    [
        (0.01, 1e6, 1e8, "ulp"),  # the link decides
        (0.22, 1e6, 1e8, "ulp"),
        (0.22, None, 1e8, "ulp"),  # nothing is known: the fewest bytes
        (0.22, 1e10, 1e6, "bitmap"),  # the coder decides
        (0.01, 1e10, 1e9, "ulp"),
    ],
)
def test_the_kind_that_lands_soonest_is_picked_with_a_reason(density, link, ulp_bytes_s, expected):
    codec, reason = auto(link, ulp=ulp_bytes_s).choose(UNIT, changed(density))
    assert codec.name == expected and reason.startswith(f"{expected}: ")
    assert ("unknown speed" in reason) == (link is None) and "% changed" in reason


def test_kinds_of_which_nothing_is_known_are_measured_once_on_a_large_block():
    made, found = AutoBlocks(link_bytes_s=1e9), changed(0.05)
    assert made.choose(UNIT, changed(0.05, 1 << 10)).codec.name in KINDS
    speeds = [speed for speeds in (made.writes, made.reads) for speed in speeds.values()]
    assert not any(speed.bytes_s for speed in speeds)
    assert made.choose(UNIT, found).codec.name in KINDS
    known = [speed.bytes_s for speed in speeds]
    assert all(known)
    made.choose(UNIT, found)
    assert known == [speed.bytes_s for speed in speeds]


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_a_link_that_is_faster_than_the_coder_gets_bitmaps(density):
    made, found = AutoBlocks(link_bytes_s=1e12, threads=1), changed(density, 1 << 20)
    for _ in range(3):  # also when what was written has been observed
        kind, payload = made.encode(UNIT, found)
        assert (kind, payload) == ("bitmap", KINDS["bitmap"].encode(UNIT, found))
    assert made.reasons.keys() == {"bitmap"} and "% changed" in made.reasons["bitmap"]


def test_a_link_is_learned_from_what_is_large_unless_it_was_given():
    learned, given = AutoBlocks(), AutoBlocks(link_bytes_s=1e6)
    for made in (learned, given):
        made.observe_link(1000, 1.0)
    assert learned.link.bytes_s is None
    for made in (learned, given):
        made.observe_link(10**9, 1.0)
    assert (learned.link.bytes_s, given.link.bytes_s) == (pytest.approx(1e9), pytest.approx(1e6))
    assert codec_from_json(learned.to_json()).link.bytes_s == pytest.approx(1e9)


@pytest.mark.parametrize("carrier", ["disk", "collective"])
def test_reports_say_what_was_picked_and_how_fast_the_link_is_once_it_is_known(tmp_path, carrier):
    weights = {"w": torch.zeros(1 << 21, dtype=torch.bfloat16), "few": torch.arange(3)}
    transport = DeltaTransport(tmp_path) if carrier == "disk" else DeltaTransport(carrier=carrier)
    sender = WeightSender(transport, InProcessEngine({name: tensor.clone() for name, tensor in weights.items()}))
    reports = []
    for _ in range(3):
        reports.append(sender.update_weights(weights))
        weights["w"] = torch.randn(1 << 21).to(torch.bfloat16)
    sender.shutdown()
    assert all(report.verified for report in reports) and reports[0].encoding == ""
    assert "unknown speed" in reports[1].encoding and " MB/s" in reports[2].encoding
