"""Deltas in tiles: the same blocks as if tiles had been compared one by one, and chains with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrl_ext as tx
from tests.codecs.models import flat, models, placed
from tests.transports.chains import same, trainer_at
from torchrl_ext.codecs import choice, streams
from torchrl_ext.codecs.streams import find
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.stores import LocalStore, table
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.delta_manifest import from_json
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, any_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions import warm
from torchrl_ext.versions.containers import code
from torchrl_ext.versions.tiles import Tiles

ENCODINGS = ["ulp", "context", "bitmap", "dense"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(table, "_TILE", 1)
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 8)
    monkeypatch.setattr(warm, "rehearse", lambda codec, widths: None)  # of a million elements: thousands of such blocks


@settings(max_examples=60)
@given(model=models(), tiles=st.integers(2, 5), encoding=st.sampled_from(ENCODINGS))
def test_blocks_are_those_that_a_comparison_of_tiles_finds(model, tiles, encoding):
    old, new = model
    metas = [ParamMeta.of(name, tensor) for name, tensor in old.items()]
    plain, cut, codec = ParamTable.of(metas), ParamTable.of(metas, tiles=tiles), getattr(choice, encoding)()
    slow = find(cut, flat(cut, old), placed(cut, new), lambda found: code(cut, codec, found), threads=2)
    expected = {(block.stream, block.start): block for block in slow if block.payload}
    olds, held = flat(plain, old), {}
    for stream, bits in zip(plain.streams, olds, strict=True):  # tensors in the memory of the streams
        names = [metas[param].name for param in stream.params]
        parts = bits.view(torch.uint8).split([old[name].nbytes for name in names])
        held |= {name: part.view(stream.dtype).view(old[name].shape) for name, part in zip(names, parts, strict=True)}
    assert same(held, old)
    made = Tiles(plain, cut, codec, held.__getitem__)
    looked = find(plain, olds, placed(plain, new), made.route, threads=2, follow=True)
    changed, found = np.zeros(len(metas), np.int64), {}
    for block in made.blocks(looked, 2):
        np.add.at(changed, block.params, block.changed)
        if block.payload:
            assert (block.stream, block.start) not in found
            found[block.stream, block.start] = block
    assert found.keys() == expected.keys()
    for place, block in expected.items():
        own = found[place]
        assert (own.size, own.kind, own.payload, own.total) == (block.size, block.kind, block.payload, block.total)
    assert changed.sum() == sum(block.total for block in expected.values())
    assert same(held, new)


def weights():
    return {
        "up": any_bits(torch.bfloat16, 48, 40, seed=1),
        "bias": any_bits(torch.bfloat16, 40, seed=2),
        "experts": any_bits(torch.float32, 3, 16, 24, seed=3),
        "count": torch.arange(20),
    }


def step(own, seed, share=0.1):
    generator = torch.Generator().manual_seed(seed)
    for name in ("up", "bias", "experts"):
        bits = own[name].view(torch.int16 if own[name].dtype == torch.bfloat16 else torch.int32)
        bits += torch.rand(bits.shape, generator=generator).lt(share).to(bits.dtype) * (seed % 5 - 2)


@pytest.mark.parametrize("encoding", ["auto", *ENCODINGS])
def test_chains_with_and_without_tiles_lead_to_the_same(tmp_path, encoding):
    """A trainer that is started anew may cut otherwise; readers follow, catch up over versions, or begin late."""
    own, reader, late = weights(), trainer_at(tmp_path), trainer_at(tmp_path)
    served = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    for version in range(1, 10):
        if version % 3 == 1:
            tiles = {1: 1, 4: 4, 7: 3}[version]
            trainer = trainer_at(
                tmp_path, encoding=encoding, tiles=tiles, keyframe_every=2 * (version == 4), keep_files=True
            )
            sender = tx.WeightSender(trainer, InProcessEngine(served), finite=False)
        assert sender.update_weights(own).verified and same(served, own)
        assert same(reader.receive_weights(WAIT_S), own)
        if version in (2, 6, 8, 9):
            assert same(late.receive_weights(WAIT_S), own)
            assert same(trainer_at(tmp_path).receive_weights(WAIT_S), own)
        delta = Chain(LocalStore(tmp_path)).version(version).delta
        assert delta is None or delta.table.tiles == tiles
        step(own, version)
        if version % 3 == 0:
            trainer.shutdown()


@pytest.mark.parametrize(
    "options",
    [{"tiles": 0}, {"tiles": True}, {"tiles": 17}]
    + [{"tiles": 2, **more} for more in ({"by_shard": True}, {"encoding": "xor"}, {"carrier": "collective"})],
)
def test_tiles_that_cannot_be_are_refused(tmp_path, options):
    root = None if "carrier" in options else tmp_path
    with pytest.raises(ConfigError, match="tiles"):
        trainer_at(root, **options)


def test_a_table_of_too_many_tiles_is_refused(monkeypatch):
    monkeypatch.setattr(table, "_SEGMENTS", 40)
    metas = [ParamMeta(f"p{number}", torch.float32, (8, 8)) for number in range(3)]
    assert len(ParamTable.of(metas[:2], tiles=4).streams) == 16
    with pytest.raises(ManifestError, match="4 x 4 tiles"):
        ParamTable.of(metas, tiles=4)


@pytest.mark.parametrize(("tiles", "said"), [(b"17", "tiles"), (b"0", "tiles"), (b"3", "a block is of stream 33")])
def test_a_manifest_of_other_tiles_is_refused(tmp_path, tiles, said):
    """The checksum of a document is compared before; here it is left out."""
    trainer, own = trainer_at(tmp_path, encoding="dense", tiles=4), weights()
    trainer.send_weights("policy", own)
    step(own, 4, share=1.0)
    trainer.send_weights("policy", own)
    packed = (tmp_path / "weight_v000002" / "manifest.json").read_bytes()
    text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    assert from_json(text).table.tiles == 4
    with pytest.raises((ValueError, ManifestError), match=said):
        from_json(text.replace(b'"tiles":4', b'"tiles":' + tiles))
