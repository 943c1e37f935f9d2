"""Manifests of deltas: compact, readable as plain JSON too, and never trusted."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
import zstandard
from xxhash import xxh3_128_hexdigest

from tests.hostile import at_most_more_bytes, worse_json
from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.manifest import DeltaManifest, DeltaParam, DeltaPart, Manifest, Placed, read_manifest
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


def parted(count=5, ranks=3):
    """A delta that ranks wrote: each has a stretch of the rows of every tensor but the fifth, and a file of its own."""
    params, ends = [], {f"rank{rank:05d}-00001.bin": 0 for rank in range(ranks)}
    for row in range(count):
        meta = ParamMeta(name=f"layers.{row}.weight", dtype=torch.bfloat16, shape=(16 * ranks, 256))
        parts = []
        for rank, file in enumerate(ends if row % 5 != 4 else ()):
            nbytes = 100 + 7 * row + rank
            parts.append(
                DeltaPart(
                    start=(16 * rank, 0), sizes=(16, 256), changed=9 + row, codec=0, file=file, offset=ends[file],
                    nbytes=nbytes, checksum="0123456789abcdef" if rank == 1 else "",
                )
            )  # fmt: skip
            ends[file] += nbytes
        params.append(DeltaParam.of_parts(meta, xxh3_128_hexdigest(meta.name.encode()), parts))
    return replace(manifest(0), container="shards", params=tuple(params), files=ends)


def first_format(found):
    """The document of a manifest in the first format, which had no checksum of its own text."""
    data = found.to_bytes()
    document = json.loads(zstandard.decompress(data) if data[:1] == b"(" else data)
    del document["content"]
    return document | {"format_number": 1}


def full(count=5):
    metas = [ParamMeta(name=f"w{row}", dtype=torch.float32, shape=(2, 3)) for row in range(count)]
    placed = tuple(Placed(meta=meta, file="m.safetensors", checksum="0" * 32) for meta in metas)
    return Manifest(version=7, run_id="r", params=placed, files={"m.safetensors": 24 * count})


@pytest.mark.parametrize("checksum", ["", "0123456789abcdef"])
def test_a_manifest_survives_its_bytes_and_plain_json_says_the_same(checksum):
    original = manifest(checksum=checksum)
    data = original.to_bytes()
    text = zstandard.decompress(data)
    assert json.loads(text)["format_number"] == 2
    assert read_manifest(data, "here") == read_manifest(text, "here") == original


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, full().to_bytes()[:-20]],
    ids=["empty", "a list", "no fields", "null", "not utf-8", "deep", "truncated"],
)
def test_bytes_that_are_no_manifest_are_refused_by_name(content):
    with pytest.raises(IntegrityError, match="here is damaged"):
        read_manifest(content, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "torchrl_ext.other"}, "is format 'torchrl_ext.other'"),
        ({"base_version": 7}, "its base is version 7"),
    ],
)
def test_a_manifest_of_another_kind_or_on_a_later_version_is_refused(change, said):
    text = json.dumps(first_format(manifest()) | change).encode()
    with pytest.raises(IntegrityError, match=said):
        read_manifest(text, "here")


def test_payloads_with_a_hole_between_keep_their_places():
    text = first_format(manifest())
    assert [row[7] for row in text["params"] if len(row) > 4] == [None] * 4
    text["params"][1][7], text["files"]["d.bin"] = 5000, 9999
    moved = read_manifest(json.dumps(text).encode(), "here")
    assert [row.offset for row in moved.params[:3]] == [0, 5000, 5000 + moved.params[1].nbytes]
    assert read_manifest(moved.to_bytes(), "here") == moved


def test_a_parameter_takes_a_digest_and_a_few_bytes():
    assert len(manifest(300).to_bytes()) < 300 * 30


def test_frames_that_grow_without_bound_are_refused_unread():
    honest = manifest().to_bytes()
    huge = zstandard.ZstdCompressor().compress(b" " * (1 << 28) + b" ")
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * 100)
    for data in (huge, streamed, honest[:-9], honest + b"more", honest[:4]):
        with pytest.raises(IntegrityError, match="here is damaged"):
            read_manifest(data, "here")


def test_rows_with_parts_are_number_three_and_survive():
    data = parted().to_bytes()
    document = json.loads(zstandard.decompress(data))
    assert document["format_number"] == 3
    assert document["params"][1][4][1] == [
        [16, 0],
        [16, 256],
        10,
        0,
        "rank00001-00001.bin",
        None,
        108,
        "0123456789abcdef",
    ]
    found = read_manifest(data, "here")
    assert found == parted()
    assert [row.changed for row in found.params] == [27, 30, 33, 36, 0]
    assert len(parted(300).to_bytes()) < 300 * 50


@pytest.mark.parametrize(
    "part",
    [
        [[0, 0], [16, 257], 9, 0, "rank00000-00001.bin", 0, 10],
        [[-1, 0], [16, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        [[40, 0], [16, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        [[0], [16], 9, 0, "rank00000-00001.bin", 0, 10],
        [[0, 0], [0, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        [[0, 0], [16.0, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        [[0, 0], [True, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        ["00", "ab", 9, 0, "rank00000-00001.bin", 0, 10],
        [[0, 0], [16, 256], 0, 0, "rank00000-00001.bin", 0, 10],
        [[0, 0], [16, 256], 9, 1, "rank00000-00001.bin", 0, 10],
        [[0, 0], [16, 256], 9, 0, "rank00009-00001.bin", 0, 10],
        [[0, 0], [16, 256], 9, 0, "", 0, 10],
        [[0, 0], [16, 256], 9, 0, "rank00000-00001.bin", 0, 1 << 40],
        [[0, 0], [16, 256], 9, 0, "rank00000-00001.bin", -5, 10],
        [[0, 0], [48, 256], 9, 0, "rank00000-00001.bin", 0, 10],
        [],
    ],
)
def test_parts_that_cannot_be_are_refused(part):
    document = first_format(parted())
    document["params"][0][4][0] = part
    with pytest.raises(IntegrityError, match="here is damaged"):
        read_manifest(json.dumps(document).encode(), "here")
    for rows in ([], None, {}, [part, part]):
        document["params"][0][4:] = [rows]
        with pytest.raises(IntegrityError, match="here is damaged"):
            read_manifest(json.dumps(document).encode(), "here")


@pytest.mark.parametrize("make", [manifest, parted, full])
class TestContent:
    def test_a_manifest_of_the_first_format_is_read_without_a_checksum(self, make):
        assert read_manifest(json.dumps(first_format(make())).encode(), "here") == make()

    def test_any_flipped_bit_is_noticed(self, make):
        text, chance = bytearray(unpacked(make())), random.Random(0)
        for _ in range(300):
            at, bit = chance.randrange(len(text)), 1 << chance.randrange(8)
            text[at] ^= bit
            with pytest.raises(IntegrityError, match="here is "):
                read_manifest(bytes(text), "here")
            text[at] ^= bit
        assert read_manifest(bytes(text), "here") == make()

    def test_a_part_is_no_manifest_and_neither_is_more_or_one_without_its_checksum(self, make):
        text = unpacked(make())
        cut = text[: text.index(b',\n  "content"')] + b"\n}\n"
        again = cut[:-3] + b',\n  "content": "' + b"0" * 32 + b'"\n}\n'
        for other in (text[:-40], text + b" ", cut, again, text.replace(b'"content"', b'"Content"')):
            with pytest.raises(IntegrityError, match="here is damaged"):
                read_manifest(other, "here")

    def test_what_is_no_manifest_is_always_our_own_error(self, make):
        chance, refused, number = random.Random(1), 0, 1500
        for _ in range(number):
            document = worse_json(first_format(make()), chance)
            try:
                found = read_manifest(json.dumps(document).encode(), "here")
            except IntegrityError as error:
                assert "here is" in str(error)
                refused += 1
                continue
            for row in found.params:  # what passed can be worked with
                assert row.meta.nbytes >= 0 and isinstance(row.meta.name, str)
            assert found.version >= 0
            assert sum(found.files.values()) >= 0
        assert refused > number // 2


def unpacked(found):
    data = found.to_bytes()
    return zstandard.decompress(data) if data[:1] == b"(" else data


class TestBombs:
    @pytest.mark.parametrize("unit", ["[]", "{}", "0", '""', "[[[[[[[[[[]]]]]]]]]]", '{"a":{"a":{"a":0}}}'])
    def test_a_small_file_takes_little_memory(self, unit):
        text = b"[" + ",".join([unit] * 100_000).encode() * 100 + b"]"
        frame = zstandard.ZstdCompressor(level=19).compress(b'{"params": ' + text[: 1 << 27] + b"}")
        assert len(frame) < 100_000
        with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="here is damaged"):
            read_manifest(frame, "here")

    def test_a_dense_file_takes_little_memory(self):
        for unit in (b"[],", b"{},", b"0,", b'"",'):
            with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="which no manifest has"):
                read_manifest(b'{"params": [' + unit * 3_000_000 + b"0]}", "here")

    def test_large_models_are_none(self):
        for rows in (manifest(30_000), parted(3_000, 8), full(30_000), full(0)):
            assert read_manifest(rows.to_bytes(), "here") == rows
        alike = replace(
            manifest(0), params=tuple(replace(row, digest="0" * 32) for row in manifest(20_000).params[4::5])
        )
        assert read_manifest(alike.to_bytes(), "here") == alike
