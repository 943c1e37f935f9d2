"""Manifests of deltas: compact, readable as plain JSON too, and never trusted."""

from __future__ import annotations

import json

import pytest
import torch
import zstandard
from xxhash import xxh3_128_hexdigest

from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.deltas import DeltaManifest, DeltaParam, is_delta
from torchrl_ext.stores.manifest import Manifest
from torchrl_ext.types import ParamMeta


def manifest(count=5, checksum=""):
    params, at = [], 0
    for row in range(count):
        name = f"model.layers.{row // 7}.mlp.part_{row % 7}.weight"
        meta = ParamMeta(name=name, dtype=torch.bfloat16, shape=(1024, 256))
        digest, nbytes = xxh3_128_hexdigest(name.encode()), 1000 + row * 37 % 400
        if row % 5 == 4:
            params.append(DeltaParam(meta=meta, digest=digest))
            continue
        params.append(
            DeltaParam(
                meta=meta, digest=digest, changed=900 + row, file="d.bin", offset=at, nbytes=nbytes, checksum=checksum
            )
        )
        at += nbytes
    return DeltaManifest(
        version=7,
        base_version=6,
        run_id="a" * 32,
        base_run_id="b" * 32,
        container="packed",
        codecs=({"name": "ulp", "block_log2": 22},),
        params=tuple(params),
        files={"d.bin": at},
    )


@pytest.mark.parametrize("checksum", ["", "0123456789abcdef"])
def test_a_manifest_survives_its_bytes_and_plain_json_says_the_same(checksum):
    original = manifest(checksum=checksum)
    data = original.to_bytes()
    assert DeltaManifest.from_bytes(data, "here") == original
    text = zstandard.decompress(data)
    assert is_delta(data) and is_delta(text)
    assert DeltaManifest.from_bytes(text, "here") == original
    with pytest.raises(IntegrityError, match=r"is format 'torchrl_ext.delta'"):
        Manifest.from_bytes(data, "here")


def test_payloads_with_a_hole_between_keep_their_places():
    text = json.loads(zstandard.decompress(manifest().to_bytes()))
    assert [row[7] for row in text["params"] if len(row) > 4] == [None] * 4
    text["params"][1][7], text["files"]["d.bin"] = 5000, 9999
    moved = DeltaManifest.from_bytes(json.dumps(text).encode(), "here")
    assert [row.offset for row in moved.params[:3]] == [0, 5000, 5000 + moved.params[1].nbytes]
    assert DeltaManifest.from_bytes(moved.to_bytes(), "here") == moved


def test_a_parameter_takes_a_digest_and_a_few_bytes():
    assert len(manifest(300).to_bytes()) < 300 * 30


def test_frames_that_grow_without_bound_are_refused_unread():
    honest = manifest().to_bytes()
    huge = zstandard.ZstdCompressor().compress(b" " * (1 << 28) + b" ")
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * 100)
    for data in (huge, streamed, honest[:-9], honest + b"more", honest[:4]):
        assert not is_delta(data)
        with pytest.raises(IntegrityError, match="here is damaged"):
            DeltaManifest.from_bytes(data, "here")
