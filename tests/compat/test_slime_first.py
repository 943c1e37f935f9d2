from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load

from tests.data.deltas.data import patch_of
from tests.data.transports.chains import folder, published, rewrite, trainer_at
from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.compat.slime.first import build_flush, flush_buckets, flush_name, parse_flush
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable
from torchrl_ext.testing import WAIT_S

A = ParamMeta("a.weight", torch.bfloat16, (300, 300))
B = ParamMeta("b.weight", torch.bfloat16, (7,))


def patch(meta: ParamMeta, indices: list[int], values: list[float]) -> StreamPatch:
    bits = torch.tensor(values).to(meta.dtype).view(torch.int16).numpy().view(np.uint16)
    return patch_of(meta, np.array(indices, np.int32), bits)


PATCHES = [patch(A, [5, 6, 70_000], [1.0, -2.0, float("nan")]), patch(B, [0, 6], [0.5, -0.0])]


def header_of(data: bytes) -> tuple[dict, bytes]:
    """The header of a file, its parameters' rows in it, and what follows."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["params"] = json.loads(header["__metadata__"]["params"])
    return header, data[8 + length :]


def joined(header: dict, rest: bytes) -> bytes:
    """The file of an edited header, whose checksum still fits."""
    header["__metadata__"]["params"] = json.dumps(header["__metadata__"]["params"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def test_index_file_is_int32_and_matches_the_slime_layout():
    data = build_flush(PATCHES, "indices", current_version="7")
    tensors, (header, _) = load(data), header_of(data)
    metadata = header["__metadata__"]
    assert tensors["__positions__"].numpy().view("<i4").tolist() == [5, 6, 70_000, 0, 6]
    assert tensors["__values__"].dtype == torch.bfloat16
    assert tensors["__values__"].view(torch.int16).tolist()[:2] == [0x3F80, 0xC000 - 0x10000]
    assert metadata["params"] == [
        {"name": "a.weight", "dtype": "bfloat16", "shape": [300, 300], "pos_start": 0, "pos_end": 12}
        | {"pos_width": 4, "val_start": 0, "val_end": 3},
        {"name": "b.weight", "dtype": "bfloat16", "shape": [7], "pos_start": 12, "pos_end": 20}
        | {"pos_width": 4, "val_start": 3, "val_end": 5},
    ]
    first = int(torch.hash_tensor(tensors["__positions__"]).view(torch.int64)) % 2**64
    second = int(torch.hash_tensor(tensors["__values__"]).view(torch.int64)) % 2**64
    assert metadata["checksum"] == str(first ^ (second << 1))
    assert (metadata["current_version"], metadata["encoding"]) == ("7", "indices")


def test_delta_positions_take_four_bytes_only_for_large_gaps():
    plain, packed = (build_flush(PATCHES, name, current_version="7") for name in ("deltas", "deltas_zstd"))
    assert packed[:4] == b"\x28\xb5\x2f\xfd"
    for data in (plain, zstandard.ZstdDecompressor().decompress(packed)):
        raw = load(data)["__positions__"].numpy().tobytes()
        assert [row["pos_width"] for row in header_of(data)[0]["__metadata__"]["params"]] == [4, 2]
        assert np.frombuffer(raw[:12], "<u4").tolist() == [5, 0, 69_993]
        assert np.frombuffer(raw[12:], "<u2").tolist() == [0, 5]


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
def test_a_file_reads_back_with_nan_and_signed_zero(encoding):
    file = parse_flush(build_flush(PATCHES, encoding, current_version="7"), "f", ParamTable.of([A, B]))
    assert (file.encoding, file.current_version) == (encoding, "7")
    for found, meant in zip(file.patches, PATCHES, strict=True):
        assert found.meta == meant.meta
        assert found.positions.tolist() == meant.positions.tolist()
        assert found.values.tolist() == meant.values.tolist()


def test_flush_buckets_hold_one_dtype_and_a_bounded_size():
    other = ParamMeta("h", torch.float16, (100,))
    halves = [patch_of(other, np.arange(10), np.zeros(10, np.uint16))] * 2
    large = patch(A, list(range(1000)), [1.0] * 1000)
    small = patch(B, [1], [1.0])
    stream = [small, halves[0], large, small, halves[1]]
    buckets = list(flush_buckets(stream, "indices", buffer_bytes=200))
    assert [[one.meta.name for one in bucket] for bucket in buckets] == [
        ["b.weight"],
        ["a.weight"],
        ["b.weight"],
        ["h", "h"],
    ]
    with pytest.raises(ConfigError, match="one dtype"):
        build_flush([small, halves[0]], "indices", current_version="1")
    assert flush_name(2, 13) == "rank0002_flush000013.safetensors"


def test_what_the_format_cannot_carry_is_refused():
    huge = ParamMeta("huge", torch.bfloat16, (2**32,))
    with pytest.raises(ConfigError, match="huge"):
        build_flush([patch_of(huge, np.array([0]), np.zeros(1, np.uint16))], "indices", current_version="1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows, header: rows[0].update(pos_end=2**60), "a.weight"),
        (lambda rows, header: rows[0].update(pos_width=3), "a.weight"),
        (lambda rows, header: rows[0].update(dtype="float4711"), "float4711"),
        (lambda rows, header: rows[0].update(shape=[10]), "a.weight"),
        (lambda rows, header: rows[1].update(pos_start=4, pos_end=12, val_start=1, val_end=3), "b.weight"),
        (lambda rows, header: rows[1].update(name="../../etc/passwd"), "passwd"),
        (lambda rows, header: rows[1].update(name="a.weight", shape=[300, 300]), "a.weight"),
        (lambda rows, header: rows.pop(), "end at"),
        (lambda rows, header: header["__metadata__"].update(encoding="brotli"), "brotli"),
        (lambda rows, header: header["__metadata__"].update(checksum="12"), "checksum"),
        (lambda rows, header: header["__positions__"].update(dtype="I32", shape=[5]), "__positions__"),
    ],
)
def test_a_hostile_file_is_refused_with_file_and_tensor_named(change, why):
    header, rest = header_of(build_flush(PATCHES, "indices", current_version="7"))
    change(header["__metadata__"]["params"], header)
    with pytest.raises(IntegrityError, match=why) as caught:
        parse_flush(joined(header, rest), "weight_v000007/rank0000_flush000000", ParamTable.of([A, B]))
    assert "rank0000_flush000000" in str(caught.value)


@pytest.mark.parametrize("codecs", [[], [{"name": "ulp"}], [{"name": "morse"}]], ids=str)
def test_manifest_without_a_known_file_encoding_is_refused(tmp_path, codecs):
    published(tmp_path, 2, encoding="deltas", keyframe_every=0)
    rewrite(folder(tmp_path, 2) / "manifest.json", lambda document: document["delta"].update(codecs=codecs))
    with pytest.raises(ManifestError, match=r"weight_v000002 (has an unknown encoding|is coded as)"):
        trainer_at(tmp_path).receive_weights(WAIT_S)
