"""Payloads of formats 1 to 3, as a release before format 4 wrote them, are read, and no bytes are trusted."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import xxhash

from tests.codecs.data import bytes_of
from tests.codecs.old_rows import CASES, pair
from tests.hostile import at_most_more_bytes
from torchrl_ext.codecs.patch import StepPatch, apply_patch
from torchrl_ext.codecs.rows import row_codec
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.types import ParamMeta

PAIRS = {name: rest for name, *rest in (pair(*case) for case in CASES)}
with zipfile.ZipFile(Path(__file__).with_name("rows_before_4.zip")) as _file:
    ROWS = {name: _file.read(name) for name in _file.namelist()}
rows = pytest.mark.parametrize("row", ROWS)


def parts(row):
    """What reads a row; its payload, parameter, old and new tensor."""
    kind, name = row.split("/")
    return row_codec({"name": kind, "block_log2": 13}), ROWS[row], *PAIRS[name]


def sealed(data):
    """Damaged bytes with the checksum that they should have."""
    return data[:-8] + xxhash.xxh3_64_digest(data[:-8])[::-1]


@rows
def test_every_bit_survives(row):
    codec, payload, meta, old, new = parts(row)
    patch, landed = codec.decode(payload, meta, old if codec.whole_base else None), old.clone()
    assert isinstance(patch, StepPatch) == (codec.name != "dense")
    apply_patch(patch, landed)
    assert bytes_of(landed) == bytes_of(new)
    assert codec.decode(b"", meta, old).changed == 0


@pytest.mark.parametrize("row", ["ulp/uint8.9000.40", "context/bfloat16.9000.9", "dense/int64.300.1"])
def test_a_flipped_bit_anywhere_is_found_and_so_is_another_end(row):
    codec, payload, meta, old, _ = parts(row)
    for at in range(0, len(payload), 3):
        bad = bytearray(payload)
        bad[at] ^= 0x10
        for data in (bytes(bad), payload[:at] or b"\0", payload + b"\0"):
            with pytest.raises(IntegrityError, match="'w'"):
                codec.decode(data, meta, old)


@pytest.mark.parametrize("name", ["ulp", "context", "dense"])
def test_a_payload_for_a_tensor_that_nobody_could_hold_takes_no_memory(name):
    codec, held = row_codec({"name": name}), torch.zeros(4)
    with at_most_more_bytes(512 << 20):
        for shape in ((2**31,), (2**40,), (1 << 28,), (2**62, 4)):
            meta = ParamMeta("w", torch.bfloat16, shape)
            for log2 in (12, 28):
                for body in (b"\1", b"\2", b"\3", b"\3" + bytes(10), b"\1" + bytes(40)):
                    head = (
                        bytes((2, log2)) + varint(meta.numel) + bytes((len(body),)) * min(300, -(-meta.numel >> log2))
                    )
                    with pytest.raises((IntegrityError, ManifestError), match="'w'"):
                        codec.decode(sealed(head + 300 * body + bytes(8)), meta, held)


def varint(number):
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def test_what_a_payload_is_not_for_is_refused():
    codec, payload, meta, *_ = parts("ulp/bfloat16.9000.9")
    with pytest.raises(IntegrityError, match=r"'w'.*9000 units"):
        codec.decode(payload, ParamMeta("w", torch.bfloat16, (6000,)))
    context, payload, *_ = parts("context/bfloat16.20000.2")
    with pytest.raises(ConfigError, match="base"):
        context.decode(payload, meta)
    other = PAIRS["bfloat16.20000.2"][0]
    with pytest.raises(IntegrityError, match="'w'"):
        context.decode(payload, other, torch.full((20_000,), 3.0, dtype=torch.bfloat16))
    for info in ({"name": "brotli"}, ["ulp"], {}):
        with pytest.raises(ManifestError, match="encoding"):
            row_codec(info)
