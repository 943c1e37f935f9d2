from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from tests.codecs.contract import CodecContract
from tests.codecs.data import bytes_of, pairs
from torchrl_ext.codecs import pipeline
from torchrl_ext.codecs.base import Codec, codec_from_json, encodings, make_codec
from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.codecs.pipeline import decode_tensors, encode_tensor, encode_tensors
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.types import ParamMeta

SMALL_BLOCKS = {"block_log2": 12}
CASES = [(name, {}) for name in encodings.names()] + [(name, SMALL_BLOCKS) for name in ("ulp", "context", "dense")]


@pytest.fixture(params=CASES, ids=lambda case: case[0] + ("-blocks" if case[1] else ""))
def codec(request) -> Codec:
    name, settings = request.param
    return make_codec(name, **settings)


class TestEveryCodec(CodecContract):
    pass


@pytest.mark.parametrize("name", ["ulp", "context", "dense"])
def test_a_flipped_bit_anywhere_is_found_and_so_is_another_end(name):
    meta, old, new = list(pairs(torch.bfloat16, (4097,)))[4]
    coded = encode_tensor(make_codec(name), meta, old, new)
    for at in range(len(coded.payload)):
        bad = bytearray(coded.payload)
        bad[at] ^= 0x10
        for payload in (bytes(bad), coded.payload[:at] or b"\0", coded.payload + b"\0"):
            with pytest.raises(IntegrityError, match=r"bfloat16\.4097"):
                coded.codec.decode(payload, meta, old)


def test_a_payload_is_refused_by_a_tensor_of_another_size():
    old, new = torch.zeros(5000), torch.ones(5000)
    coded = encode_tensor(make_codec("ulp"), ParamMeta.of("w", old), old, new)
    with pytest.raises(IntegrityError, match=r"'v'.*5000 units.*6000"):
        coded.codec.decode(coded.payload, ParamMeta("v", torch.float32, (6000,)))


def test_context_finds_another_base_where_the_changes_do_not_fit_it():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(50_000, generator=generator).to(torch.bfloat16)
    new = (old.view(torch.int16) + (torch.rand(50_000, generator=generator) < 0.5)).view(torch.bfloat16)
    meta = ParamMeta.of("w", old)
    coded = encode_tensor(make_codec("context"), meta, old, new)
    with pytest.raises(IntegrityError, match="'w'"):
        coded.codec.decode(coded.payload, meta, torch.full_like(old, 3.0))


def test_a_codec_that_nobody_knows_is_refused_with_the_names_that_exist():
    with pytest.raises(ManifestError, match="brotli"):
        codec_from_json({"name": "brotli"})
    with pytest.raises(ManifestError, match="settings"):
        codec_from_json({"name": "ulp", "speed": 11})
    with pytest.raises(ManifestError):
        codec_from_json({"name": "ulp", "block_log2": 99})
    with pytest.raises(ManifestError):
        codec_from_json(["ulp"])


def test_dtypes_that_are_no_plain_bytes_are_refused():
    old = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)
    with pytest.raises(ConfigError, match="qint8"):
        encode_tensor(make_codec("ulp"), ParamMeta("w", old.dtype, (4,)), old, old)


@pytest.mark.parametrize("name", ["ulp", "context", "dense", "auto", "xor", "indices"])
def test_tensors_stream_through_threads_in_order_and_equal_to_one_thread(name):
    generator = torch.Generator().manual_seed(2)
    model = []
    for row, size in enumerate((10, 1_500_000, 0, 300_000, 900_000, 5, 1_100_000)):
        old = torch.randn(size, generator=generator).to(torch.bfloat16)
        new = (old.view(torch.int16) + (torch.rand(size, generator=generator) < 0.01)).view(torch.bfloat16)
        model.append((f"t{row}", old, new))
    codec = make_codec(name, block_log2=18) if name in ("ulp", "context", "dense") else make_codec(name)
    coded = list(encode_tensors(iter(model), codec, threads=3))
    assert [one.meta.name for one in coded] == [name for name, _, _ in model]
    for one, (_, old, new) in zip(coded, model, strict=True):
        assert one.payload == encode_tensor(codec, one.meta, old, new).payload
        assert one.changed == int((old.view(torch.int16) != new.view(torch.int16)).sum())
    copies = [(name, old.clone(), new) for name, old, new in model]
    followed = encode_tensors(copies, codec, threads=2, follow=True)
    assert [one.payload for one in followed] == [one.payload for one in coded]
    assert all(bytes_of(old) == bytes_of(new) for _, old, new in copies)
    calls = [
        partial(one.codec.decode, one.payload, one.meta, old) for one, (_, old, _) in zip(coded, model, strict=True)
    ]
    for threads in (1, 3):
        for patch, (_, old, new) in zip(decode_tensors(calls, threads=threads), model, strict=True):
            landed = old.clone()
            apply_patch(patch, landed)
            assert bytes_of(landed) == bytes_of(new)


@pytest.mark.parametrize("threads", [2, 16, 64])
def test_the_bytes_taken_ahead_are_bounded_however_many_threads_there_are(threads, monkeypatch):
    monkeypatch.setattr(pipeline, "_AHEAD", 16 << 20)
    monkeypatch.setattr(pipeline, "_SMALL", 1 << 18)
    sizes = [1 << 20, 1 << 10, 3 << 20, 1 << 17, 1 << 17, 1 << 17, 2 << 20] * 8
    live = most = 0

    def gone(nbytes):
        nonlocal live
        live -= nbytes

    def model():
        nonlocal live, most
        for number, size in enumerate(sizes):
            old, new = torch.zeros(1).bfloat16().expand(size), torch.zeros(size, dtype=torch.bfloat16)
            live += new.nbytes
            most = max(most, live)
            weakref.finalize(new, gone, new.nbytes)
            yield f"w{number}", old, new

    assert len(list(encode_tensors(model(), make_codec("ulp"), threads=threads))) == len(sizes)
    assert sum(2 * size for size in sizes) > 6 * pipeline._AHEAD
    assert most <= pipeline._AHEAD + 3 * 2 * max(sizes) + 2 * 2 * pipeline._SMALL  # one more, and two being coded


def test_an_error_in_a_worker_reaches_the_caller_and_a_stopped_stream_leaves_no_thread():
    import threading

    before = threading.active_count()
    good = (torch.zeros(2_000_000), torch.zeros(2_000_000))
    with pytest.raises(ManifestError, match="'bad'"):
        list(encode_tensors([("good", *good), ("bad", torch.zeros(3), torch.zeros(4))], make_codec("ulp"), threads=2))
    stream = encode_tensors((("t", *good) for _ in range(100)), make_codec("ulp"), threads=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_auto_prefers_dense_on_a_fast_link_and_deltas_on_a_slow_one():
    generator = torch.Generator().manual_seed(4)
    old = torch.randn(1 << 18, generator=generator).to(torch.bfloat16)
    other = torch.randn(1 << 18, generator=generator).to(torch.bfloat16)
    few = (old.view(torch.int16) + (torch.rand(1 << 18, generator=generator) < 0.01)).view(torch.bfloat16)
    meta = ParamMeta.of("w", old)
    assert encode_tensor(make_codec("auto", link_bytes_s=1e11), meta, old, other).codec.name == "dense"
    assert encode_tensor(make_codec("auto", link_bytes_s=3e9), meta, old, few).codec.name == "ulp"
    slow = make_codec("auto", link_bytes_s=1e6)
    chosen = encode_tensor(slow, meta, old, few)
    assert chosen.codec.name in ("context", "ulp")
    assert encode_tensor(make_codec("auto", link_bytes_s=1e6, whole_base=False), meta, old, few).codec.name == "ulp"
    assert len(chosen.payload) <= len(encode_tensor(make_codec("ulp"), meta, old, few).payload) * 1.05
