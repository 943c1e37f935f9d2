"""Every parser of bytes from outside, thousands of times: an error of ours or what is right, in bounded memory."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save

from tests.data.transports.chains import weights
from tests.hostile import HOSTILE, at_most_more_bytes, refused_or_right, worse_bytes, worse_json, worse_text
from torchrl_ext.base.types import ParamMeta, dtype_from_name
from torchrl_ext.data.stores.tensorfile import TensorFile
from torchrl_ext.data.weights.checkpoint import CheckpointSource, with_dtype

BYTES = 512 << 20

OLD = {name: tensor for name, tensor in weights().items() if name != "c.count"}
METAS = {name: ParamMeta.of(name, tensor) for name, tensor in OLD.items()}


@pytest.fixture
def chance():
    return random.Random(20)


@pytest.fixture(autouse=True)
def in_bounded_memory():
    with at_most_more_bytes(BYTES):
        yield


def header_of(data):
    """A safetensors file as (header, body)."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def worse_file(data, chance):
    """A safetensors file with a worse header, body or length."""
    if chance.random() < 0.3:
        return worse_bytes(data, chance)
    header, body = header_of(data)
    text = worse_text(header, chance)
    return len(text).to_bytes(8, "little") + text + body


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
