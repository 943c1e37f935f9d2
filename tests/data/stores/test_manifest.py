"""Manifests: compact, readable as plain JSON too, and never trusted."""

import json
import random
from dataclasses import replace

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
    DIGEST,
    END,
    DeltaManifest,
    Manifest,
    version_name,
    version_number,
)

KINDS = [(torch.bfloat16, (1024, 256)), (torch.float32, (7,)), (torch.complex64, (3, 1, 2)), (torch.bool, (9,))]


def both(count=5, ranks=0, alike=False):
    """A full version and a delta; a block is a fifth of its stream, and the last one is missing.

    With ``ranks``, each of so many has its tensors in a stream of its own; ``alike`` tensors change, and end, alike.
    """
    kinds = (KINDS[number % max(1, ranks) % 4] for number in range(count))
    metas = [ParamMeta(f"layers.{row // 7}.mlp.part_{row % 7}.weight", *kind) for row, kind in enumerate(kinds)]
    streams = [list(range(count))[rank::ranks] for rank in range(min(ranks, count))] or None
    table, chance, rows, at = ParamTable.of(metas, streams), np.random.default_rng(count), [], 0
    for number, stream in enumerate(table.streams):
        size = max(1, stream.size // 5)
        for start in range(0, 4 * size, size):
            rows.append((number, 0, 0, start, size, 1 + start % size, at, 1000 + start % 7, start + 1))
            at += rows[-1][7]
    digests = chance.integers(0, 1 if alike else 2**64, (count, 2), DIGEST)
    change = DeltaManifest(
        version=7,
        base_version=6,
        run_id="a" * 32,
        base_run_id="b" * 32,
        codecs=("ulp",),
        files={"d.bin": at},
        table=table,
        changed=chance.integers(0, 1 if alike else 9, count).astype(DIGEST),
        digests=digests,
        base_digests=digests[::-1] if ranks else digests[:0],
        blocks=np.array(rows, BLOCK),
    )
    place = tuple(("m.safetensors", f"{row:032x}") for row in range(count))
    files = {"m.safetensors": 9, "d.bin": at}
    return Manifest(version=7, run_id="a" * 32, params=tuple(metas), files=files, full=place, delta=change)


def full(count=5):
    return replace(both(count), files={"m.safetensors": 9}, delta=None)


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


@pytest.mark.parametrize("make", [both, full])
def test_what_is_no_manifest_is_always_our_own_error(make):
    made, chance = document(make()), random.Random(1)
    worse = (signed(worse_json(made, chance)) for _ in range(1500))
    assert sum(refused_or_right(read, text, right=sound) for text in worse) > 750


def sound(found):
    return found.version >= 0 and sum(found.files.values()) >= 0


@pytest.mark.parametrize("made", [both(count, ranks) for count in (0, 1, 5) for ranks in (0, 2)] + [full(), full(0)])
def test_a_manifest_survives_its_bytes_and_plain_json(made):
    for original in (made, replace(made, full=None, files=made.delta.files) if made.delta else made):
        for data in (original.to_bytes(), unpacked(original), signed(document(original))):
            found = read(data)
            assert found.to_bytes() == original.to_bytes() and found.full == original.full
            assert found.full_bytes == (9 if original.full is not None else 0)
            if original.delta:
                assert found.delta.table.lays_out_as(original.delta.table)
                for column in ("changed", "digests", "base_digests", "blocks"):
                    assert np.array_equal(getattr(found.delta, column), getattr(original.delta, column))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "torchrl_ext.other"}, "is format 'torchrl_ext.other'"),
        ({"format_number": 3}, "use the same torchrl_ext version"),
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
        ({"delta.codecs": [{}]}, "here is damaged"),
        ({"delta.codecs": []}, "a block is of codec 0"),
        ({"delta.files": []}, "a block is of file 0"),
        ({"delta.files": ["other"]}, "here is damaged"),
        ({"delta.changed": ""}, "0 counts of 5 parameters"),
        ({"delta.digests": "AAAAAAAAAAA="}, "8 bytes of digests of 5 parameters"),
        ({"delta.blocks": "AAAA"}, "here is damaged"),
        ({"delta.streams": [["0"]]}, "here is damaged"),
        ({"delta.streams": [[0]]}, "0 streams have layers.0.mlp.part_1"),
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


def test_cut_extended_or_unsigned_manifest_is_refused():
    text, cut = unpacked(both()), json.dumps(document(both())).encode()
    again, none = cut[:-1] + END % (b"0" * 32), (b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000)
    for other in (*none, text[:-40], text + b" ", cut, again, text.replace(b'"content"', b'"Content"')):
        with pytest.raises(IntegrityError, match="here is damaged"):
            read(other)


class TestBombs:
    def test_frames_that_grow_without_bound_are_refused_unread(self):
        honest = both().to_bytes()
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
        for found in (both(30_000), both(30_000, ranks=8), full(30_000), full(0), both(20_000, alike=True)):
            assert read(found.to_bytes()).to_bytes() == found.to_bytes()
