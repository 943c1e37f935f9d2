"""What is listed on a device is published byte for byte as the host's own pass over old and new publishes it."""

import itertools

import pytest
import torch

from tests.codecs.data import DTYPES, bytes_of, pairs, random_bits, small_steps
from tests.landing.changes import Listed
from torchrl_ext.codecs.base import encodings, make_codec
from torchrl_ext.codecs.patch import fold
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.codecs.units import units
from torchrl_ext.errors import ConfigError
from torchrl_ext.kernels.base import kernels
from torchrl_ext.landing.patcher import Patcher, identity
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import position_digest


def codec_of(name):
    return make_codec(name, block_log2=12) if name in ("ulp", "context", "dense") else make_codec(name)


def told(encoded):
    return [(one.meta, one.codec, one.changed, one.payload) for one in encoded]


def published(codec, model, own, device):
    """Both ways over the same pairs; old tensors follow."""
    expected = list(encode_tensors(model, codec, threads=1))
    moved = [(name, old.clone().to(device), new.to(device)) for name, old, new in model]
    found = list(encode_tensors(iter(moved), codec, threads=1, follow=True, kernels=own, look=True))
    for (name, old, new), (_, followed, _), one in zip(model, moved, found, strict=True):
        assert bytes_of(followed.cpu()) == bytes_of(new), name
        if one.digest is not None:
            assert position_digest(old).plus(one.digest) == position_digest(new), name
        if new.is_floating_point():
            finite = new.double().isfinite().view(-1).numpy()
            assert finite.all() <= one.finite <= finite[units(old) != units(new)].all(), name
        told_by_lists = one.codec.reads in ("changed", "all") or (one.codec.reads == "either" and not own.on_host)
        assert (one.digest is not None) == (told_by_lists or not old.numel()), name
    return told(found), told(expected)


def test_every_encoding_publishes_the_same_bytes(way):
    own, device = way
    model = [
        (f"{meta.name}.{row}", old, new) for row, (meta, old, new) in enumerate(pairs(torch.bfloat16, (0, 63, 4500)))
    ]
    for name in encodings.names():
        found, expected = published(codec_of(name), model, own, device)
        assert found == expected, name


def test_every_dtype_publishes_the_same_bytes(way):
    own, device = way
    for dtype in DTYPES:
        model = [(f"{meta.name}.{row}", old, new) for row, (meta, old, new) in enumerate(pairs(dtype, (2500,)))]
        found, expected = published(codec_of("ulp"), model, own, device)
        assert found == expected, dtype


def test_auto_chooses_by_the_same_units_and_so_the_same(way):
    own, device = way
    generator = torch.Generator().manual_seed(1)
    model = []
    for size in (0, 100, 32_768, 32_769, 70_001):
        old = random_bits(size, torch.bfloat16, generator)
        for density in (0.0, 0.01, 0.9):
            where = torch.rand(size, generator=generator) < density
            model.append((f"{size}.{density}", old, small_steps(old, where, generator)))
    found, expected = published(make_codec("auto"), model, own, device)
    assert found == expected
    assert {codec.name for _, codec, _, _ in found} >= {"ulp", "dense"}


def test_a_tensor_cut_into_parts_is_listed_as_one(way, monkeypatch):
    from torchrl_ext.codecs import pipeline

    own, device = way
    monkeypatch.setattr(pipeline, "_RANGE", 1000)
    generator = torch.Generator().manual_seed(4)
    old = random_bits(9001, torch.float32, generator)
    model = [("w", old, small_steps(old, torch.rand(9001, generator=generator) < 0.1, generator))]
    for name in ("ulp", "xor", "deltas"):
        found, expected = published(codec_of(name), model, own, device)
        assert found == expected


def test_strided_tensors_are_listed_by_their_values(way):
    own, device = way
    generator = torch.Generator().manual_seed(6)
    old = random_bits(6000, torch.bfloat16, generator).reshape(60, 100)
    new = small_steps(old.reshape(-1), torch.rand(6000, generator=generator) < 0.1, generator).reshape(60, 100)
    turned = new.t().contiguous().to(device).t()
    assert not turned.is_contiguous()
    held = old.clone().to(device)
    found = list(encode_tensors([("w", held, turned)], codec_of("ulp"), threads=1, follow=True, kernels=own))
    assert told(found) == told(encode_tensors([("w", old, new)], codec_of("ulp"), threads=1))
    assert bytes_of(held.cpu()) == bytes_of(new)


def test_an_old_tensor_that_cannot_follow_is_refused():
    held = torch.zeros(4, 6).t()
    with pytest.raises(ConfigError, match="contiguous"):
        list(encode_tensors([("w", held, held)], codec_of("ulp"), follow=True, kernels=kernels.make("torch")))


def test_steps_of_several_versions_land_as_one_on_the_device(way):
    """The catch-up: payloads decoded without a base, folded, and resolved against what the parameters hold."""
    own, device = way
    generator = torch.Generator().manual_seed(8)
    chain = [random_bits(5000, torch.bfloat16, generator).reshape(50, 100)]
    for _ in range(3):
        where = torch.rand(5000, generator=generator) < 0.1
        chain.append(small_steps(chain[-1].reshape(-1), where, generator).reshape(50, 100))
    meta, codec = ParamMeta.of("w", chain[0]), codec_of("ulp")
    steps = [(meta.name, old.to(device), new.to(device)) for old, new in itertools.pairwise(chain)]
    patches = [one.codec.decode(one.payload, meta) for one in encode_tensors(steps, codec, threads=1, kernels=own)]
    live = {"w": chain[0].to(device)}
    patcher = Patcher(identity(live), own)
    staged = patcher.stage(Listed(fold(patches)))
    assert bytes_of(live["w"].cpu()) == bytes_of(chain[0])
    patcher.commit()
    assert bytes_of(live["w"].cpu()) == bytes_of(chain[-1])
    assert staged == {"w": position_digest(chain[-1])}
    assert patcher.held() == staged
