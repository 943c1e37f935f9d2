"""Encodings by name: one contract for those of blocks; and the differences of whole tensors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.codecs.contract import BlockEncodingContract, block_of
from tests.codecs.data import bytes_of, pairs
from torchrl_ext.codecs.base import codec_from_json, encodings, make_codec
from torchrl_ext.codecs.patch import apply_patch, diff
from torchrl_ext.codecs.pipeline import differences
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.types import ParamMeta

OURS = [name for name in encodings.names() if make_codec(name).container == "blocks"]


class TestEveryEncoding(BlockEncodingContract):
    @pytest.fixture(params=OURS)
    def encoding(self, request):
        return make_codec(request.param)


def test_an_encoding_that_nobody_knows_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match="ulp"):
        make_codec("brotli")
    for info, what in (({"name": "brotli"}, "brotli"), ({"name": "ulp", "speed": 11}, "settings"), (["ulp"], "codec")):
        with pytest.raises(ManifestError, match=what):
            codec_from_json(info)


@pytest.mark.parametrize(("density", "name"), [(0.001, "ulp"), (0.2, "ulp"), (0.5, "bitmap"), (1.0, "ulp")])
def test_auto_is_ulp_or_bitmap_where_that_block_is_shorter(density, name):
    """Bits that change to any others: nothing about their steps is short."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 1 << 16).astype(np.uint16)
    new = np.where(generator.random(old.size) < density, generator.integers(0, 1 << 16, old.size), old)
    found, unit = block_of(old, new.astype(np.uint16)), unit_of(torch.int16)
    coded = {kind: make_codec(kind).encode(unit, found) for kind in ("ulp", "bitmap")}
    assert make_codec("auto").encode(unit, found) == coded[name] == min(coded.values(), key=lambda one: len(one[1]))


def test_reports_say_how_blocks_were_coded(tmp_path):
    weights = {"noise": torch.zeros(1 << 16, dtype=torch.int16), "few": torch.zeros(1 << 16)}
    sender = WeightSender(
        DeltaTransport(tmp_path), InProcessEngine({name: one.clone() for name, one in weights.items()})
    )
    reports = [sender.update_weights(weights)]
    weights["few"][3] = 1
    reports.append(sender.update_weights(weights))
    weights["few"][4] = 1
    noise = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), dtype=torch.int16)
    weights["noise"] = torch.where(torch.rand(1 << 16) < 0.5, noise, weights["noise"])
    reports.append(sender.update_weights(weights))
    sender.shutdown()
    told = [report.encoding for report in reports]
    assert told[:2] == ["", "ulp"] and sorted(told[2].split(", ")) == ["1 of 2 blocks bitmap", "1 of 2 blocks ulp"]


def test_a_pair_of_different_shape_or_dtype_is_refused_by_name():
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)):
        with pytest.raises(ManifestError, match="'w'"):
            diff(ParamMeta("w", torch.float32, (4,)), torch.zeros(4), other)


def test_differences_come_out_in_order_whatever_the_threads_and_copies_follow():
    model = [(meta.name, old, new) for meta, old, new in pairs(torch.bfloat16)]
    for threads in (1, 3):
        copies = [(name, old.clone(), new) for name, old, new in model]
        for (name, old, new), patch in zip(model, differences(iter(copies), threads=threads), strict=True):
            landed = old.clone()
            apply_patch(patch, landed)
            assert patch.meta.name == name and bytes_of(landed) == bytes_of(new)
        assert all(bytes_of(old) == bytes_of(new) for _, old, new in copies)


def test_an_error_in_a_worker_reaches_the_caller_and_a_stopped_stream_leaves_no_thread():
    before, good = threading.active_count(), (torch.zeros(9000), torch.ones(9000))
    with pytest.raises(ManifestError, match="'bad'"):
        list(differences([("good", *good), ("bad", torch.zeros(3), torch.zeros(4))], threads=2))
    stream = differences((("t", *good) for _ in range(100)), threads=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before
