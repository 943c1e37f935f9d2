"""What every codec promises; `tests/codecs/test_codecs.py` runs it over each registered name."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.codecs.data import DTYPES, bytes_of, pairs
from torchrl_ext.codecs.base import Codec, codec_from_json
from torchrl_ext.codecs.patch import apply_patch, diff, fold
from torchrl_ext.codecs.pipeline import encode_tensor
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta


class CodecContract:
    """Give a `codec` fixture and inherit."""

    def test_a_codec_is_rebuilt_from_its_own_json(self, codec: Codec):
        assert codec_from_json(codec.to_json()) == codec

    def test_every_bit_of_every_dtype_survives(self, codec: Codec):
        for dtype in DTYPES:
            for meta, old, new in pairs(dtype):
                try:
                    coded = encode_tensor(codec, meta, old, new)
                except ConfigError:
                    assert dtype == torch.complex128  # the one dtype that safetensors has no name for
                    continue
                assert coded.changed == diff(meta, old, new).changed, meta
                assert bool(coded.payload) == (bytes_of(old) != bytes_of(new)), meta
                if codec.name in ("ulp", "context", "dense", "auto"):  # ours, whose framing is small
                    assert len(coded.payload) <= meta.nbytes * 1.01 + 64, meta
                landed = old.clone()
                patch = coded.codec.decode(coded.payload, meta, old)
                assert patch.changed >= coded.changed, meta
                apply_patch(patch, landed)
                assert bytes_of(landed) == bytes_of(new), meta

    def test_what_a_reader_needs_of_the_base_is_what_the_codec_says(self, codec: Codec):
        for meta, old, new in pairs(torch.bfloat16, (5000,)):
            coded = encode_tensor(codec, meta, old, new)
            if coded.codec.needs == "all":
                with pytest.raises(ConfigError, match=r"bfloat16\.5000"):
                    coded.codec.decode(coded.payload, meta)
                continue
            patch, landed = coded.codec.decode(coded.payload, meta), old.clone()
            apply_patch(patch, landed)
            assert bytes_of(landed) == bytes_of(new)

    def test_a_pair_of_different_shape_or_dtype_is_refused_by_name(self, codec: Codec):
        meta = ParamMeta("w", torch.float32, (4,))
        for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)):
            with pytest.raises(ManifestError, match="'w'"):
                encode_tensor(codec, meta, torch.zeros(4), other)

    def test_a_chain_folds_into_one_patch(self, codec: Codec):
        generator = torch.Generator().manual_seed(5)
        chain = [torch.randn(3000, generator=generator).to(torch.bfloat16)]
        for _ in range(4):
            where = torch.rand(3000, generator=generator) < 0.05
            step = torch.randint(-2, 3, (3000,), dtype=torch.int16, generator=generator)
            chain.append((chain[-1].view(torch.int16) + step * where).view(torch.bfloat16))
        meta = ParamMeta.of("w", chain[0])
        patches = []
        for old, new in itertools.pairwise(chain):
            coded = encode_tensor(codec, meta, old, new)
            base = old if coded.codec.needs == "all" else None
            patches.append(coded.codec.decode(coded.payload, meta, base))
        landed = chain[0].clone()
        apply_patch(fold(patches), landed)
        assert bytes_of(landed) == bytes_of(chain[-1])
