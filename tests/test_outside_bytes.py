"""Every parser of bytes from outside, thousands of times: an error of ours or what is right, in bounded memory."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
import zstandard
from safetensors.torch import save

from tests.data.deltas.data import diff
from tests.data.transports.chains import weights
from tests.data.versions.test_damage import published, signed
from tests.hostile import HOSTILE, at_most_more_bytes, refused_or_right, worse_bytes, worse_json, worse_text
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.base.types import ParamMeta, dtype_from_name
from torchrl_ext.compat.slime.first import build_flush, parse_flush
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.stores.manifest import Manifest
from torchrl_ext.data.stores.tensorfile import TensorFile
from torchrl_ext.data.weights.checkpoint import CheckpointSource, with_dtype

BYTES = 512 << 20

OLD = {name: tensor for name, tensor in weights().items() if name != "c.count"}
NEW = {name: tensor.clone() for name, tensor in OLD.items()}
for _tensor in NEW.values():
    _tensor.view(-1)[::37] = 1.5
METAS = {name: ParamMeta.of(name, tensor) for name, tensor in OLD.items()}


@pytest.fixture
def chance():
    return random.Random(20)


@pytest.fixture(autouse=True)
def in_bounded_memory():
    published("ulp", OLD, NEW)  # compiled before, since compilers take what they take
    with at_most_more_bytes(BYTES):
        yield


def header_of(data):
    """A safetensors file as (header, body)."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(text, body):
    return len(text).to_bytes(8, "little") + text + body


def worse_file(data, chance):
    """A safetensors file with a worse header, body or length; and inside its metadata, JSON as strings is JSON too."""
    if chance.random() < 0.3:
        return worse_bytes(data, chance)
    header, body = header_of(data)
    inner = header.get("__metadata__", {})
    if "params" in inner and chance.random() < 0.7:
        inner["params"] = worse_text(json.loads(inner["params"]), chance).decode(errors="replace")
        return with_header(json.dumps(header).encode(), body)
    return with_header(worse_text(header, chance), body)


def test_words_and_rows():
    chance, refused = random.Random(1), 0
    rows = [meta.to_json() for meta in METAS.values()]
    for value in HOSTILE:
        refused_or_right(dtype_from_name, value, right=lambda found: isinstance(found, torch.dtype))
        refused_or_right(ParamMeta.from_json, value)
    for _ in range(1000):
        refused += refused_or_right(
            ParamMeta.from_json,
            worse_json(chance.choice(rows), chance),
            right=lambda meta: ParamMeta.from_json(json.loads(json.dumps(meta.to_json()))) == meta,
        )
    assert refused > 500


def test_safetensors_files_and_what_lies_in_them(tmp_path, chance):
    data = save(OLD, {"format": "pt"})
    for _ in range(500):
        bad = worse_file(data, chance)
        (tmp_path / "model.safetensors").write_bytes(bad)
        refused_or_right(read_all, tmp_path / "model.safetensors")
        refused_or_right(lambda: dict(CheckpointSource(tmp_path)))


def read_all(path):
    file = TensorFile(path)
    return [file.read(meta.name) for meta in file.params()]


def test_indexes_and_configs(tmp_path, chance):
    full = {"metadata": {"total_size": 3, "version": "000007"}, "weight_map": dict.fromkeys(OLD, "model.safetensors")}
    (tmp_path / "model.safetensors").write_bytes(save(OLD))
    for _ in range(300):
        bad = worse_text(full, chance)
        (tmp_path / "model.safetensors.index.json").write_bytes(bad)
        refused_or_right(
            lambda: CheckpointSource(tmp_path).params(), right=lambda params: {*params} <= {*METAS.values()}
        )
        bad = worse_text({"dtype": "float32", "hidden_size": 8}, chance)
        refused_or_right(with_dtype, {"config.json": bad}, torch.bfloat16)


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
def test_flush_files(encoding, chance):
    meta, table, refused = METAS["a.weight"], ParamTable.of(METAS.values()), 0
    patch = diff(meta, OLD["a.weight"], NEW["a.weight"])
    data = build_flush([patch], encoding, current_version="7")
    plain = zstandard.decompress(data) if encoding == "deltas_zstd" else data
    for _ in range(1000):
        bad = worse_file(plain, chance)
        if encoding == "deltas_zstd":
            bad = zstandard.compress(bad) if chance.random() < 0.7 else worse_bytes(data, chance)
        refused += refused_or_right(parse_flush, bad, "f", table, right=lambda file: lands(file.patches))
    assert refused > 500


def lands(patches):
    """Whether patches that were believed can be written."""
    for patch in patches:
        patch.apply(units(OLD[patch.meta.name].clone()))
    return True


def test_sizes_beyond_any_memory_are_refused_unread():
    """Of a tensor, of a compressed stream with or without its length, and of a header."""
    change = diff(METAS["a.weight"], OLD["a.weight"], NEW["a.weight"])
    for encoding, shape in itertools.product(("indices", "deltas_zstd"), ((2**31,), (2**31 - 1, 2), (1 << 28,))):
        data = build_flush([change], encoding, current_version="7")
        table = ParamTable.of([ParamMeta("a.weight", torch.bfloat16, shape)])
        for payload in (data, zstandard.compress(bytes(1 << 24)), zstandard.compress(data)):
            with pytest.raises(WeightSyncError, match="the file"):
                parse_flush(payload, "the file", table)
    chunk = bytes(1 << 24)
    for settings in ({}, {"size": 128 << 24}):  # 2 GiB
        stream = zstandard.ZstdCompressor(level=1).compressobj(**settings)
        bomb = b"".join(stream.compress(chunk) for _ in range(128)) + stream.flush()
        assert refused_or_right(parse_flush, bomb, "f", ParamTable.of(METAS.values()), right=lambda found: False)
    params = json.dumps({"__metadata__": {"params": "[]," * (12 << 20)}}).encode()
    for text in (b'{"a":[' + b"[]," * (12 << 20) + b"[]]}", params):
        bomb = zstandard.compress(with_header(text, b""))
        with pytest.raises(WeightSyncError, match="header"):
            parse_flush(bomb, "f", table)  # of a tensor for which so much may be unpacked


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
def test_files_and_manifests_of_deltas_in_other_layouts(encoding, chance):
    """Blocks and their manifests: `tests.data.versions.test_damage`."""
    own, refused, number = published(encoding, OLD, NEW), 0, 700
    document = json.loads(own.text)
    del document["content"]
    for _ in range(number):
        held, found = dict(own.files), own.manifest
        if chance.random() < 0.5:
            file = chance.choice(sorted(held))
            held[file] = worse_file_of(held[file], chance)
        else:
            try:
                found = Manifest.from_bytes(signed(worse_text(document, chance)[:-1]), "m").delta
            except WeightSyncError:
                refused += 1
                continue
        refused += own.judge(found, held) != "read" if found else 1
    assert refused > number // 3


def worse_file_of(data, chance):
    if data[:4] == zstandard.FRAME_HEADER:
        return zstandard.compress(worse_file(zstandard.decompress(data), chance))
    return worse_file(data, chance) if data[8:9] == b"{" else worse_text(json.loads(data), chance)
