"""Manifests of deltas: compact, readable as plain JSON too, and never trusted."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from tests.hostile import at_most_more_bytes, refused_or_right, worse_json
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.data.stores.delta_manifest import BLOCK, BLOCKS, DIGEST, END, DeltaManifest
from torchrl_ext.data.stores.manifest import Manifest, Placed, read_manifest

SHAPE = (1024, 256)


def manifest(count=5, streams=None, share=4):
    """A delta of ``count`` parameters; a block is a fifth of its stream, and the last one is missing."""
    metas = [
        ParamMeta(f"model.layers.{row // 7}.mlp.part_{row % 7}.weight", torch.bfloat16, SHAPE) for row in range(count)
    ]
    table, chance, rows, at = ParamTable.of(metas, streams), np.random.default_rng(count), [], 0
    for number, stream in enumerate(table.streams):
        size = max(1, stream.size // 5)
        for start in range(0, share * size, size):
            rows.append((number, 0, 0, start, size, 1 + start % size, at, 1000 + start % 7, start + 1))
            at += rows[-1][7]
    return DeltaManifest(
        version=7,
        base_version=6,
        run_id="a" * 32,
        base_run_id="b" * 32,
        container=BLOCKS,
        codecs=({"name": "ulp"},),
        files={"d.bin": at},
        table=table,
        changed=chance.integers(0, 9, count).astype(DIGEST),
        digests=chance.integers(0, 2**64, (count, 2), DIGEST),
        blocks=np.array(rows, BLOCK),
    )


def shared(count=5, ranks=4):
    """Each rank has every fourth tensor, in a stream of its own."""
    return manifest(count, [list(range(count))[rank::ranks] for rank in range(ranks)])


def full(count=5):
    metas = [ParamMeta(f"w{row}", torch.float32, (2, 3)) for row in range(count)]
    placed = tuple(Placed(meta=meta, file="m.safetensors", checksum="0" * 32) for meta in metas)
    return Manifest(version=7, run_id="r", params=placed, files={"m.safetensors": 24 * count})


MADE = {"streams": manifest, "shared": shared, "full": full}
MAKERS = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def unpacked(found):
    data = found.to_bytes()
    return zstandard.decompress(data) if data[:1] == b"(" else data


def document(found):
    """The JSON of a manifest, without its checksum."""
    made = json.loads(unpacked(found))
    del made["content"]
    return made


def signed(made):
    """The bytes of a document, with the checksum of its text."""
    body = json.dumps(made)[:-1].encode()
    return body + END % xxh3_128_hexdigest(body).encode()


def same(one, other):
    return one == other or (isinstance(one, DeltaManifest) and one.to_bytes() == other.to_bytes())


@MAKERS
def test_manifest_reads_back_from_its_bytes_and_plain_json(make):
    original = make()
    for data in (original.to_bytes(), unpacked(original), signed(document(original))):
        assert same(read_manifest(data, "here"), original)


@MAKERS
def test_what_is_no_manifest_is_always_our_own_error(make):
    made, chance = document(make()), random.Random(1)
    worse = (signed(worse_json(made, chance)) for _ in range(1500))
    assert sum(refused_or_right(read_manifest, text, "here", right=sound) for text in worse) > 750


def sound(found):
    return found.version >= 0 and sum(found.files.values()) >= 0


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.complex128, torch.bool])


@st.composite
def manifests(draw):
    """Manifests of small models, in a stream per dtype or per parameter."""
    kinds = draw(st.lists(st.tuples(DTYPES, SHAPES), max_size=6))
    metas = [ParamMeta(f"p.{number}", *kind) for number, kind in enumerate(kinds)]
    alone = [[number] for number in range(len(metas))]
    table = ParamTable.of(metas, draw(st.sampled_from([None, alone])))
    words = st.integers(0, 2**64 - 1)
    rows = []
    for number, stream in enumerate(table.streams):
        cuts = sorted(draw(st.sets(st.integers(0, stream.size), max_size=4)))
        for start, end in pairwise(cuts):
            changed = draw(st.integers(1, end - start))
            rows.append((number, 0, 0, start, end - start, changed, draw(st.integers(0, 9)), 3, draw(words)))
    pairs = st.lists(st.tuples(words, words), min_size=len(metas), max_size=len(metas))
    digests, based = np.array(draw(pairs), DIGEST).reshape(-1, 2), draw(st.booleans())
    return DeltaManifest(
        version=draw(st.integers(1, 2**40)),
        base_version=0,
        run_id=draw(st.text(max_size=5)),
        base_run_id="b",
        container=BLOCKS,
        codecs=({"name": "ulp"},),
        files={"d.bin": 12},
        table=table,
        changed=np.array(draw(st.lists(words, min_size=len(metas), max_size=len(metas))), DIGEST),
        digests=digests,
        base_digests=digests if based else np.empty((0, 2), DIGEST),
        blocks=np.array(rows, BLOCK),
    )


@given(manifests())
def test_every_manifest_survives_its_bytes(original):
    found = read_manifest(original.to_bytes(), "here")
    assert found.to_bytes() == original.to_bytes()
    assert found.table.lays_out_as(original.table)
    for column in ("changed", "digests", "base_digests", "blocks"):
        assert np.array_equal(getattr(found, column), getattr(original, column))


@given(manifests(), st.data())
def test_a_byte_that_changed_is_noticed_or_changes_nothing(original, data):
    bad = bytearray(data.draw(st.sampled_from([original.to_bytes(), unpacked(original), unpacked(full())])))
    at = data.draw(st.integers(0, len(bad) - 1))
    bad[at] ^= data.draw(st.integers(1, 255))
    refused_or_right(read_manifest, bytes(bad), "here", right=lambda found: found.to_bytes() == original.to_bytes())


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
        ({"format_number": 2}, "use the same torchrl_ext version"),
        ({"base_version": 7}, "its base is version 7"),
        ({"digests": ""}, "0 digests of 5 parameters"),
        ({"codecs": [{}]}, "a codec has no name"),
        ({"codecs": []}, "a block is of codec 0"),
        ({"files": {}}, "a block is of file 0"),
        ({"files": {"../d.bin": 9999}}, r"\.\./d\.bin"),
        ({"files": {"d.bin": 900}}, "block 0 lies outside"),
        ({"changed": ""}, "0 counts of 5 parameters"),
        ({"digests": "AAAAAAAAAAA="}, "8 bytes of digests of 5 parameters"),
        ({"blocks": "AAAA"}, "here is damaged"),
        ({"streams": [["0"]]}, "here is damaged"),
        ({"streams": [[0]]}, "0 streams have model.layers.0.mlp.part_1"),
        ({"placed": {"nobody": "d.bin"}}, "'nobody'"),
        ({"params": [["a", "float32", [1]], ["a", "float32", [1]]]}, "listed twice"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, said):
    with pytest.raises(IntegrityError, match=said):
        read_manifest(signed(document(manifest()) | change), "here")


COLUMNS = {"stream": [1], "file": [1], "codec": [1], "start": [0, 2**64 - 1], "size": [0, 2**64 - 1]}
COLUMNS |= {"changed": [0, 2**63], "offset": [2**64 - 1], "nbytes": [2**64 - 1]}


@pytest.mark.parametrize(("column", "value"), [(column, value) for column in COLUMNS for value in COLUMNS[column]])
def test_blocks_that_cannot_be_are_refused(column, value):
    made, found = document(manifest()), manifest().blocks.copy()
    found[1][column] = value
    with pytest.raises(IntegrityError, match="block"):
        read_manifest(signed(made | {"blocks": base64.b64encode(found.tobytes()).decode()}), "here")


@MAKERS
def test_cut_extended_or_unsigned_manifest_is_refused(make):
    """A manifest that is cut, extended, or lacks its checksum is refused as damaged."""
    text = unpacked(make())
    cut = json.dumps(document(make())).encode()
    again = cut[:-1] + END % (b"0" * 32)
    for other in (text[:-40], text + b" ", cut, again, text.replace(b'"content"', b'"Content"')):
        with pytest.raises(IntegrityError, match="here is damaged"):
            read_manifest(other, "here")


class TestBombs:
    def test_frames_that_grow_without_bound_are_refused_unread(self):
        honest = manifest().to_bytes()
        huge = zstandard.ZstdCompressor().compress(b" " * (1 << 28) + b" ")
        streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * 100)
        for data in (huge, streamed, honest[:-9], honest + b"more", honest[:4]):
            with at_most_more_bytes(128 << 20), pytest.raises(IntegrityError, match="here is damaged"):
                read_manifest(data, "here")

    @pytest.mark.parametrize("unit", ["[]", "{}", "0", '""', "[[[[[[[[[[]]]]]]]]]]", '{"a":{"a":{"a":0}}}'])
    def test_a_small_file_takes_little_memory(self, unit):
        text = b"[" + ",".join([unit] * 100_000).encode() * 100 + b"]"
        frame = zstandard.ZstdCompressor(level=19).compress(b'{"params": ' + text[: 1 << 27] + b"}")
        assert len(frame) < 100_000
        with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="here is damaged"):
            read_manifest(frame, "here")

    def test_a_dense_file_takes_little_memory(self):
        for unit in (b"[],", b'"",'):
            with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="which no manifest has"):
                read_manifest(b'{"params": [' + unit * 3_000_000 + b"0]}", "here")

    def test_large_models_are_none(self):
        for found in (manifest(30_000), shared(30_000, 8), full(30_000), full(0)):
            assert same(read_manifest(found.to_bytes(), "here"), found)
        alike = replace(manifest(20_000), digests=np.zeros((20_000, 2), DIGEST), changed=np.zeros(20_000, DIGEST))
        assert same(read_manifest(alike.to_bytes(), "here"), alike)
