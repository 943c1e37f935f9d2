"""Manifests: compact, readable as plain JSON too, and never trusted."""

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
from torchrl_ext.data.stores.manifest import (
    BLOCK,
    BLOCKS,
    DIGEST,
    END,
    DeltaManifest,
    Manifest,
    version_name,
    version_number,
)

SHAPE = (1024, 256)


def delta(count=5, streams=None, share=4):
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
    found = DeltaManifest(
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
    return Manifest(version=7, run_id="a" * 32, params=tuple(metas), files=found.files, delta=found)


def shared(count=5, ranks=4):
    """Each rank has every fourth tensor, in a stream of its own."""
    return delta(count, [list(range(count))[rank::ranks] for rank in range(ranks)])


def full(count=5, **more):
    """A full version of ``count`` parameters, and a delta as well where ``more`` has one."""
    params = tuple(ParamMeta(f"w{row}", torch.float32, (2, 3)) for row in range(count))
    own = {"version": 7, "run_id": "r", "params": params, "files": {"m.safetensors": 24 * count}, **more}
    return Manifest(**own, full=tuple(("m.safetensors", f"{row:032x}") for row in range(count)))


def both(count=5):
    of = delta(count)
    files = {"m.safetensors": 9, **of.files}
    return full(count, run_id=of.run_id, params=of.params, files=files, delta=of.delta)


MADE = {"streams": delta, "shared": shared, "full": full, "both": both}
MAKERS = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def unpacked(found):
    return zstandard.decompress(found.to_bytes())


def document(found):
    """The JSON of a manifest, without its checksum."""
    made = json.loads(unpacked(found))
    del made["content"]
    return made


def signed(made):
    """The bytes of a document, with the checksum of its text."""
    body = json.dumps(made)[:-1].encode()
    return body + END % xxh3_128_hexdigest(body).encode()


def read(data):
    return Manifest.from_bytes(data, "here")


@MAKERS
def test_manifest_reads_back_from_its_bytes_and_plain_json(make):
    original = make()
    for data in (original.to_bytes(), unpacked(original), signed(document(original))):
        assert read(data).to_bytes() == original.to_bytes()
    assert original.full_bytes + (sum(original.delta.files.values()) if original.delta else 0) == sum(
        original.files.values()
    )


@MAKERS
def test_what_is_no_manifest_is_always_our_own_error(make):
    made, chance = document(make()), random.Random(1)
    worse = (signed(worse_json(made, chance)) for _ in range(1500))
    assert sum(refused_or_right(read, text, right=sound) for text in worse) > 750


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
    version, run, files = draw(st.integers(1, 2**40)), draw(st.text(max_size=5)), {"d.bin": 12}
    part = DeltaManifest(
        version=version,
        base_version=0,
        run_id=run,
        base_run_id="b",
        container=BLOCKS,
        codecs=({"name": "ulp"},),
        files=files,
        table=table,
        changed=np.array(draw(st.lists(words, min_size=len(metas), max_size=len(metas))), DIGEST),
        digests=digests,
        base_digests=digests if based else np.empty((0, 2), DIGEST),
        blocks=np.array(rows, BLOCK),
    )
    kept = draw(st.sampled_from([None, tuple(("m", "0" * 32) for _ in metas)]))
    return Manifest(version=version, run_id=run, params=table.params, files={**files, "m": 8}, full=kept, delta=part)


@given(manifests())
def test_every_manifest_survives_its_bytes(original):
    found = read(original.to_bytes())
    assert found.to_bytes() == original.to_bytes() and found.full == original.full
    assert found.delta.table.lays_out_as(original.delta.table)
    for column in ("changed", "digests", "base_digests", "blocks"):
        assert np.array_equal(getattr(found.delta, column), getattr(original.delta, column))


@given(st.one_of(manifests(), st.just(full())), st.data())
def test_a_byte_that_changed_is_noticed_or_changes_nothing(original, data):
    bad = bytearray(data.draw(st.sampled_from([original.to_bytes(), unpacked(original)])))
    at = data.draw(st.integers(0, len(bad) - 1))
    bad[at] ^= data.draw(st.integers(1, 255))
    refused_or_right(read, bytes(bad), right=lambda found: found.to_bytes() == original.to_bytes())


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, full().to_bytes()[:-20]],
    ids=["empty", "a list", "no fields", "null", "not utf-8", "deep", "truncated"],
)
def test_bytes_that_are_no_manifest_are_refused_by_name(content):
    with pytest.raises(IntegrityError, match="here is damaged"):
        read(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "torchrl_ext.other"}, "is format 'torchrl_ext.other'"),
        ({"format_number": 2}, "use the same torchrl_ext version"),
        ({"version": 6}, "its base is version 6"),
        ({"files": {}}, "here is damaged"),
        ({"files": {"../d.bin": 9999}}, r"\.\./d\.bin"),
        ({"files": {"d.bin": 900, "m.safetensors": 9}}, "block 0 lies outside"),
        ({"params": [["a", "float32", [1]], ["a", "float32", [1]]]}, "listed twice"),
        ({"params": [["a", "float32", [-1]]]}, "here is damaged"),
        ({"params": [["a", "load", [1]]]}, "here is damaged"),
        ({"full": []}, "it places 0 of 5 parameters"),
        ({"full": [["../m.safetensors", "0" * 32]] * 5}, "a file that is not listed"),
        ({"full": [["m.safetensors", "0"]] * 5}, "here is damaged"),
        ({"full": None, "delta": None}, "neither a full version nor a delta"),
        ({"delta.digests": ""}, "0 digests of 5 parameters"),
        ({"delta.codecs": [{}]}, "a codec has no name"),
        ({"delta.codecs": []}, "a block is of codec 0"),
        ({"delta.files": []}, "a block is of file 0"),
        ({"delta.files": ["other"]}, "here is damaged"),
        ({"delta.changed": ""}, "0 counts of 5 parameters"),
        ({"delta.digests": "AAAAAAAAAAA="}, "8 bytes of digests of 5 parameters"),
        ({"delta.blocks": "AAAA"}, "here is damaged"),
        ({"delta.streams": [["0"]]}, "here is damaged"),
        ({"delta.streams": [[0]]}, "0 streams have model.layers.0.mlp.part_1"),
        ({"delta.placed": {"nobody": "d.bin"}}, "'nobody'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, said):
    made = document(both())
    for name, value in change.items():
        part, _, field = name.rpartition(".")
        (made[part] if part else made)[field] = value
    with pytest.raises(IntegrityError, match=said):
        read(signed(made))


@given(st.integers(0, 10**9))
def test_a_version_number_survives_its_name(number):
    name = version_name(number)
    assert version_number(name) == number
    for other in (f"{name}.tmp", name.replace("_v", "_v0" if number < 10**6 else "_"), f"x{name}"):
        assert version_number(other) is None


COLUMNS = {"stream": [1], "file": [1], "codec": [1], "start": [0, 2**64 - 1], "size": [0, 2**64 - 1]}
COLUMNS |= {"changed": [0, 2**63], "offset": [2**64 - 1], "nbytes": [2**64 - 1]}


@pytest.mark.parametrize(("column", "value"), [(column, value) for column in COLUMNS for value in COLUMNS[column]])
def test_blocks_that_cannot_be_are_refused(column, value):
    made, found = document(delta()), delta().delta.blocks.copy()
    found[1][column] = value
    made["delta"]["blocks"] = base64.b64encode(found.tobytes()).decode()
    with pytest.raises(IntegrityError, match="block"):
        read(signed(made))


@MAKERS
def test_cut_extended_or_unsigned_manifest_is_refused(make):
    """A manifest that is cut, extended, or lacks its checksum is refused as damaged."""
    text = unpacked(make())
    cut = json.dumps(document(make())).encode()
    again = cut[:-1] + END % (b"0" * 32)
    for other in (text[:-40], text + b" ", cut, again, text.replace(b'"content"', b'"Content"')):
        with pytest.raises(IntegrityError, match="here is damaged"):
            read(other)


class TestBombs:
    def test_frames_that_grow_without_bound_are_refused_unread(self):
        honest = delta().to_bytes()
        huge = zstandard.ZstdCompressor().compress(b" " * (1 << 28) + b" ")
        streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * 100)
        for data in (huge, streamed, honest[:-9], honest + b"more", honest[:4]):
            with at_most_more_bytes(128 << 20), pytest.raises(IntegrityError, match="here is damaged"):
                read(data)

    @pytest.mark.parametrize("unit", ["[]", "{}", "0", '""', "[[[[[[[[[[]]]]]]]]]]", '{"a":{"a":{"a":0}}}'])
    def test_a_small_file_takes_little_memory(self, unit):
        text = b"[" + ",".join([unit] * 100_000).encode() * 100 + b"]"
        frame = zstandard.ZstdCompressor(level=19).compress(b'{"params": ' + text[: 1 << 27] + b"}")
        assert len(frame) < 100_000
        with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="here is damaged"):
            read(frame)

    def test_a_dense_file_takes_little_memory(self):
        for unit in (b"[],", b'"",'):
            with at_most_more_bytes(256 << 20), pytest.raises(IntegrityError, match="which no manifest has"):
                read(b'{"params": [' + unit * 3_000_000 + b"0]}")

    def test_large_models_are_none(self):
        alike, zeros = delta(20_000), {"digests": np.zeros((20_000, 2), DIGEST), "changed": np.zeros(20_000, DIGEST)}
        alike = replace(alike, delta=replace(alike.delta, **zeros))
        for found in (both(30_000), shared(30_000, 8), full(30_000), full(0), alike):
            assert read(found.to_bytes()).to_bytes() == found.to_bytes()
