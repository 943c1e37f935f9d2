"""Shard to shard, for published decoders: shapes that add up, layouts that cover them, and bytes over every link."""

from __future__ import annotations

import json

import numpy as np
import pytest

from torchrl_ext.cli.main import main
from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.layouts import Layout
from torchrl_ext.planning.shapes import DECODERS, Decoder, Latent
from torchrl_ext.planning.sharded import CASES, PUBLISHED, sharded_cost

SMALL = {
    "grouped": Decoder(hidden=32, vocab=96, layers=4, heads=8, kv_heads=2, head_size=4, experts=8, expert_size=16),
    "latent": Decoder(
        hidden=32, vocab=96, layers=4, heads=8, latent=Latent(q_rank=8, kv_rank=4, nope=2, rope=2, value=2),
        dense_layers=1, dense_size=48, experts=8, expert_size=16, shared_experts=1, bias=True,
    ),
}  # fmt: skip
LAYOUTS = ["fsdp4", "tp4", "tp2-dp4-ep8", "tp2-pp2-dp2-ep4", "fsdp4-tp2-ep2", "dp4-ep4", "tp8-x3"]


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-235b-a22b", 235.1e9), ("deepseek-v3", 671.0e9), ("kimi-k2", 1.026e12)]
)
def test_shapes_add_up_to_what_is_published(name, parameters):
    parts = DECODERS[name].parts()
    assert sum(part.meta.numel for part in parts) == pytest.approx(parameters, rel=1e-3)
    assert len({part.meta.name for part in parts}) == len(parts)


@pytest.mark.parametrize("decoder", SMALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_members_of_a_layout_have_the_model_between_them(decoder, layout):
    parts, found = SMALL[decoder].parts(), Layout.of(layout)
    shares = found.shares(parts)
    assert len(shares) == found.size * found.copies
    for index, part in enumerate(parts):
        times = np.zeros(part.meta.shape, dtype=int)
        for share in shares[: found.size]:
            for block in share.blocks(index):
                times[tuple(slice(*edges) for edges in zip(block.start, block.stop, strict=True))] += 1
        assert times.min() > 0
        assert times.max() == 1 or not found.sharded or layout == "fsdp4-tp2-ep2"  # where tp holds norms whole
        assert times.max() <= found.size // found.pp


def test_a_layout_cuts_as_its_name_says():
    parts = SMALL["grouped"].parts()
    index = {part.meta.name: at for at, part in enumerate(parts)}
    key, down = index["model.layers.0.self_attn.k_proj.weight"], index["model.layers.0.mlp.experts.5.down_proj.weight"]
    of_key = [share.blocks(key)[0] for share in Layout.of("tp4").shares(parts)]
    assert [(block.start, block.stop) for block in of_key] == [((0, 0), (4, 32))] * 2 + [((4, 0), (8, 32))] * 2
    of_down = [share.blocks(down) for share in Layout.of("tp4").shares(parts)]
    assert [block[0].start for block in of_down] == [(0, 0), (0, 4), (0, 8), (0, 12)]
    dealt = [bool(share.blocks(down)) for share in Layout.of("tp2-pp2-dp2-ep4").shares(parts)]
    assert dealt == [False, False, True, False, False, False, False, False]


@pytest.mark.parametrize("text", ["", "tp0", "8tp", "tp2-tp4", "fsdp2-dp2", "tp2 pp2", "ep3-tp2", "tp9999999"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ConfigError):
        Layout.of(text)


def test_bytes_of_links_are_those_of_the_plan(monkeypatch):
    monkeypatch.setattr("torchrl_ext.planning.sharded.DECODERS", SMALL)
    one = sharded_cost("grouped", "fsdp4", "tp2", nic_bytes_s=1e6)
    assert one["worker_bytes"] >= one["share_bytes"] == one["bytes"] / 2
    assert one["sent_bytes"] >= one["bytes"] and one["rank_bytes"] >= one["sent_bytes"] / 4
    assert one["link_bytes"] <= one["worker_bytes"] and one["link_bytes"] >= one["sent_bytes"] / 8
    assert one["seconds"] == one["worker_bytes"] / 1e6 <= one["lockstep_seconds"] < one["broadcast_seconds"]
    four = sharded_cost("grouped", "fsdp4", "tp2-x4", nic_bytes_s=1e6)
    assert four["workers"] == 8 and four["rank_bytes"] == one["rank_bytes"]
    for given in (("other", "fsdp4", "tp2"), ("grouped", "fsdp4", "tp2", 0.0)):
        with pytest.raises(ConfigError):
            sharded_cost(*given)


def test_every_known_case_can_be_planned_and_those_that_are_published_are_among_them():
    assert CASES.keys() == DECODERS.keys()
    known = {(name, Layout.of(trainer).size, engine) for name, those in CASES.items() for trainer, engine in those}
    assert PUBLISHED.keys() <= known
    for name, those in CASES.items():
        for trainer, engine in those:
            shares = [Layout.of(text).shares(SMALL["latent"].parts()) for text in (trainer, engine)]
            assert all(shares), name


def test_the_command_prints_a_table_of_bytes_and_seconds(monkeypatch, capsys):
    monkeypatch.setattr("torchrl_ext.planning.sharded.DECODERS", SMALL | {"qwen3-235b-a22b": SMALL["grouped"]})
    options = ["plan", "--sharded", "--decoder", "qwen3-235b-a22b"]
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["trainer"], row["engine"]) for row in told["rows"]] == [*CASES["qwen3-235b-a22b"]]
    assert [row["published_seconds"] for row in told["rows"]] == [3.3, 6.1, None, None] and len(told["published"]) == 3
    assert main([*options, "--trainer-layout", "fsdp2", "--engine-layout", "tp2-x2", "--nic-bytes-s", "1M"]) == 0
    page = capsys.readouterr().out
    for words in ("at 1 MB/s", "fsdp2", "tp2-x2", "busiest trainer rank", "sharded_rdt"):
        assert words in page
    assert "…" not in page  # no column is cut


def test_one_layout_alone_is_refused(capsys):
    assert main(["plan", "--sharded", "--trainer-layout", "fsdp2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["type"] == "ConfigError"
