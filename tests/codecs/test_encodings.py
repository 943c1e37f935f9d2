"""Encodings by name: one contract for those of blocks; and the codecs of other libraries, tensor by tensor."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.codecs.contract import BlockEncodingContract, block_of
from tests.codecs.data import DTYPES, bytes_of, pairs
from torchrl_ext.codecs.base import codec_from_json, encodings, make_codec
from torchrl_ext.codecs.patch import apply_patch, same
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.types import ParamMeta

OURS = [name for name in encodings.names() if make_codec(name).container == "blocks"]
others = pytest.mark.parametrize("codec", [make_codec(name) for name in encodings.names() if name not in OURS])


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


@others
def test_every_bit_survives_in_the_codec_of_another_library(codec):
    assert codec_from_json(codec.to_json()) == codec
    for dtype in DTYPES:
        for meta, old, new in pairs(dtype):
            coded, landed = codec.encode(meta, old, new), old.clone()
            assert coded.changed == np.count_nonzero(np.not_equal(*same(meta, old, new))) and coded.meta == meta
            assert bool(coded.payload) == (bytes_of(old) != bytes_of(new)), meta
            apply_patch(codec.decode(coded.payload, meta, old if codec.whole_base else None), landed)
            assert bytes_of(landed) == bytes_of(new), meta
    if codec.whole_base:
        with pytest.raises(ConfigError, match=meta.name):
            codec.decode(coded.payload, meta)


@others
def test_a_pair_of_different_shape_or_dtype_is_refused_by_name(codec):
    meta = ParamMeta("w", torch.float32, (4,))
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)):
        with pytest.raises(ManifestError, match="'w'"):
            codec.encode(meta, torch.zeros(4), other)


@others
def test_tensors_come_out_in_order_whatever_the_threads_and_copies_follow(codec):
    model = [(meta.name, old, new) for meta, old, new in pairs(torch.bfloat16)]
    expected = [codec.encode(ParamMeta.of(name, new), old, new) for name, old, new in model]
    for threads in (1, 3):
        copies = [(name, old.clone(), new) for name, old, new in model]
        assert [*encode_tensors(iter(copies), codec, threads=threads, follow=True)] == expected
        assert all(bytes_of(old) == bytes_of(new) for _, old, new in copies)


def test_an_error_in_a_worker_reaches_the_caller_and_a_stopped_stream_leaves_no_thread():
    before, good, codec = threading.active_count(), (torch.zeros(9000), torch.ones(9000)), make_codec("xor")
    with pytest.raises(ManifestError, match="'bad'"):
        list(encode_tensors([("good", *good), ("bad", torch.zeros(3), torch.zeros(4))], codec, threads=2))
    stream = encode_tensors((("t", *good) for _ in range(100)), codec, threads=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before
