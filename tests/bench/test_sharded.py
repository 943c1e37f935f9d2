"""``torchrl-ext bench sharded`` on a small model: bytes and memory are held against their bounds, times are not."""

from __future__ import annotations

import json
import sys

import pytest

from torchrl_ext.cli.main import main


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(sys.stdout, "write", lines.append)
        status = main(["bench", "sharded", "--size", "small", "--repeats", "1", "--bucket-bytes", "1048576", "--json"])
    assert status == 0
    return json.loads("".join(lines))


def test_a_worker_receives_its_own_parameters_and_no_more(found):
    assert sum(found["needed_bytes"]) < 1.02 * found["model_bytes"]
    for case in ("fsdp2", "fsdp4"):
        assert 1 <= found[case]["received"]["found"] <= found[case]["received"]["target"] == 1.02
    assert found["replicas"]["received"]["met"] and len(found["replicas"]["worker_bytes"]) == 8


def test_ranks_send_alike_and_equal_engines_cost_no_more_than_one(found):
    assert [len(found[case]["rank_bytes"]) for case in ("fsdp2", "fsdp4", "replicas")] == [2, 4, 2]
    balance, sent = found["fsdp4"]["balance"], found["replicas"]["sent"]
    assert 1 <= balance["found"] <= balance["target"] == 1.10
    assert 0 < sent["found"] <= sent["target"] == 1.10


def test_memory_is_held_against_two_buckets_and_the_largest_piece(found):
    for case in ("fsdp2", "fsdp4"):
        for end in ("rank_extra", "worker_extra"):
            one = found[case][end]
            assert one["met"] == (None if one["found"] is None else one["found"] <= one["target"])


def test_both_transports_take_turns(found):
    compared = found["fsdp2"]["vs_collective"]
    assert {way: len(taken) for way, taken in found["fsdp2"]["seconds"].items()} == {"collective": 1, "sharded": 1}
    assert 0 < compared["low"] <= compared["high"] and compared["target"] == 0.6
