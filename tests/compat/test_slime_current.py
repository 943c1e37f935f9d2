from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors.torch import load, save

from torchrl_ext.codecs.base import make_codec
from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.compat.slime.container import build_payloads, parse_safetensors
from torchrl_ext.compat.slime.current import (
    DeltaIndex,
    checksum,
    parse_index,
    parse_shard,
    shard_name,
    split_shards,
)
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.types import ParamMeta

OLD = torch.tensor([[1.0, -0.0], [3.0, 4.0]], dtype=torch.bfloat16)
NEW = torch.tensor([[1.0, 0.0], [3.0, float("nan")]], dtype=torch.bfloat16)
META = ParamMeta.of("w", OLD)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def test_xor_is_the_difference_of_every_byte_in_one_frame():
    payload = make_codec("xor").encode(META, OLD, NEW).payload
    assert zstandard.ZstdDecompressor().decompress(payload) == (raw(NEW) ^ raw(OLD)).tobytes()


def test_overwrite_is_a_count_byte_positions_and_bytes():
    payload = make_codec("overwrite").encode(META, OLD, NEW).payload
    where = np.flatnonzero(raw(NEW) != raw(OLD))
    meant = np.uint32(where.size).tobytes() + where.astype("<u4").tobytes() + raw(NEW)[where].tobytes()
    assert zstandard.ZstdDecompressor().decompress(payload) == meant


@pytest.mark.parametrize("name", ["xor", "overwrite"])
def test_a_frame_without_declared_size_is_read_and_a_bomb_is_not(name):
    codec = make_codec(name)
    content = zstandard.ZstdDecompressor().decompress(codec.encode(META, OLD, NEW).payload)
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    silent, landed = stream.compress(content) + stream.flush(), OLD.clone()
    apply_patch(codec.decode(silent, META, OLD), landed)
    assert raw(landed).tobytes() == raw(NEW).tobytes()
    for frame in (zstandard.compress(bytes(1 << 24)), content, silent + silent, silent[:-1], bytes(9)):
        with pytest.raises(IntegrityError, match="'w'"):
            codec.decode(frame, META, OLD)


@pytest.mark.parametrize("positions", [[8], [2**32 - 1], [3, 3], [5, 1]])
def test_overwrite_positions_outside_or_out_of_order_are_refused(positions):
    body = np.uint32(len(positions)).tobytes() + np.array(positions, "<u4").tobytes() + bytes(len(positions))
    with pytest.raises(IntegrityError, match="'w'"):
        make_codec("overwrite").decode(zstandard.compress(body), META, OLD)


def test_overwrite_refuses_a_count_that_is_not_its_length():
    with pytest.raises(IntegrityError, match="'w'"):
        make_codec("overwrite").decode(zstandard.compress(np.uint32(7).tobytes() + bytes(5)), META, OLD)


def test_checksums_are_written_as_the_format_writes_them():
    data = raw(NEW)
    assert checksum("xxh3-128", data) == xxhash.xxh3_128(data.tobytes()).hexdigest()
    assert checksum("adler32", data) == f"{zlib.adler32(data.tobytes()):08x}"
    assert checksum("adler32", data[:0]) == "00000001"
    with pytest.raises(ConfigError, match="md5"):
        checksum("md5", data)


def test_a_shard_is_a_safetensors_file_of_bytes_with_a_checksum_per_tensor():
    payloads = {"b": b"12345", "a.weight": b"", "ü": b"\0" * 100}
    sums = {name: checksum("xxh3-128", data) for name, data in payloads.items()}
    data = build_payloads(payloads, sums)
    assert {name: tensor.numpy().tobytes() for name, tensor in load(data).items()} == payloads
    shard = parse_shard(data, "f")
    assert {name: bytes(view) for name, view in shard.payloads.items()} == payloads
    assert shard.checksums == sums


def test_a_shard_without_a_checksum_or_with_other_dtypes_is_refused():
    with pytest.raises(IntegrityError, match="f: tensor 'w' has no checksum"):
        parse_shard(save({"w": torch.zeros(2, dtype=torch.uint8)}), "f")
    with pytest.raises(IntegrityError, match="'w'"):
        parse_shard(save({"w": torch.zeros(1, dtype=torch.int16)}, {"w": "0"}), "f")


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
        '{"__metadata__":{"x":3},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        "[" * 100_000,
        "[]",
        "{",
    ],
)
def test_hostile_headers_are_refused(header):
    text = header.encode()
    with pytest.raises(IntegrityError, match=r"^f is damaged"):
        parse_safetensors(len(text).to_bytes(8, "little") + text + b"1234", "f")


def test_an_index_survives_and_names_versions_in_six_digits():
    index = DeltaIndex(version=7, base_version=6, delta_encoding="xor", weight_map={"w": shard_name(0, 2)})
    document = json.loads(index.to_bytes())
    assert document["metadata"]["version"] == "000007"
    assert document["metadata"]["base_version"] == "000006"
    assert document["metadata"]["compression_format"] == "zstd"
    assert document["metadata"]["checksum_format"] == "xxh3-128"
    assert document["weight_map"] == {"w": "model-00000-of-00002.safetensors"}
    assert parse_index(index.to_bytes(), "i") == (index, index.weight_map)
    document["metadata"] |= {"run": "of a later writer", "version": 7}  # some writers take numbers, too
    assert parse_index(json.dumps(document).encode(), "i") == (index, index.weight_map)
    document["metadata"] = {"total_size": 3, "version": "000007"}
    assert parse_index(json.dumps(document).encode(), "i") == (None, index.weight_map)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["weight_map"].update(w="../model.safetensors"),
        lambda d: d["weight_map"].update(w="/etc/model.safetensors"),
        lambda d: d["weight_map"].update(w=3),
        lambda d: d.update(weight_map=[]),
        lambda d: d["metadata"].update(version="-1"),
        lambda d: d["metadata"].update(base_version=-5),
        lambda d: d["metadata"].update(base_version=5.0),
        lambda d: d["metadata"].update(base_version=True),
        lambda d: d["metadata"].pop("delta_encoding"),
        lambda d: d.update(metadata=7),
    ],
)
def test_a_hostile_index_is_refused(change):
    index = DeltaIndex(version=7, base_version=6, delta_encoding="xor", weight_map={"w": shard_name(0, 1)})
    document = json.loads(index.to_bytes())
    change(document)
    with pytest.raises(IntegrityError, match=r"^v7/index"):
        parse_index(json.dumps(document).encode(), "v7/index")
    with pytest.raises(IntegrityError, match=r"^v7/index"):
        parse_index(b"\xff", "v7/index")


def test_names_are_grouped_in_order_into_files_of_a_size():
    sizes = [("a", 5), ("b", 5), ("c", 50), ("d", 1), ("e", 9), ("f", 1)]
    assert split_shards(sizes, 10) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
