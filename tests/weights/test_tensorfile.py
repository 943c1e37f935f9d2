from __future__ import annotations

import json
import os
import socket

import pytest
import torch
from safetensors.torch import save_file

from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.testing import DTYPES, any_bits, same_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, Layout, TensorFile, plan_shards


def test_it_reads_what_the_reference_library_writes(tmp_path):
    sent = {str(dtype): any_bits(dtype, 5, 3) for dtype in DTYPES} | {"s": torch.tensor(2.0), "e": torch.empty(0, 4)}
    sent["large"] = any_bits(torch.bfloat16, CHUNK_BYTES + 7)
    save_file(sent, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    assert {meta.name for meta in file.params()} == set(sent)
    for name, tensor in sent.items():
        found, checksum = file.read(name)
        assert same_bits(found, tensor), name
        assert checksum == tensor_digest(tensor) == file.checksum(name, torch.empty(1000, dtype=torch.uint8))
        held = torch.zeros_like(tensor)
        assert file.read(name, held)[0] is held
        assert same_bits(held, tensor), name
    file.close()
    file.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["a"].update(data_offsets=[0, 12]),
        lambda header: header["a"].update(data_offsets=[4, 20]),
        lambda header: header["b"].update(data_offsets=[14, 18]),
        lambda header: header["a"].update(data_offsets=[-16, 0]),
        lambda header: header["a"].update(shape=[2**62, 2]),
        lambda header: header["a"].update(shape=[-4]),
        lambda header: header["a"].update(shape=[True, 4]),
        lambda header: header["a"].update(shape="4"),
        lambda header: header["a"].update(shape=[4.0]),
        lambda header: header["a"].update(dtype="F4"),
        lambda header: header["a"].update(dtype=["F32"]),
        lambda header: header["a"].pop("dtype"),
        lambda header: header.update(b=header["a"]),
        lambda header: header.update(b=None),
        lambda header: header.pop("b"),
    ],
)
def test_headers_that_cannot_be_right_are_refused(tmp_path, change):
    header = {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
    }
    change(header)
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    with pytest.raises(IntegrityError, match="file"):
        TensorFile(tmp_path / "file")


def test_a_name_that_stands_twice_is_refused(tmp_path):
    row = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    text = f'{{"a": {row}, "a": {row}}}'.encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(IntegrityError, match="twice"):
        TensorFile(tmp_path / "file")


def stand_in(path, kind):
    """Put something else than a file at ``path``."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(os.path.relpath(path))
        listening.close()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a socket", "a device", "a circle of links"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    stand_in(tmp_path / "file", kind)
    with pytest.raises(IntegrityError, match=r"file (is no regular file|cannot be opened)"):
        TensorFile(tmp_path / "file")


def test_a_link_that_leaves_its_place_is_refused_and_one_within_it_is_followed(tmp_path):
    (tmp_path / "root" / "version").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "root"):
        save_file({"a": torch.zeros(1)}, folder / "own")
    inside, outside = (tmp_path / "root" / "version" / name for name in ("inside", "outside"))
    inside.symlink_to("../own")
    outside.symlink_to("../../own")
    (tmp_path / "mount").symlink_to("root")
    TensorFile(tmp_path / "mount" / "version" / "inside", within=tmp_path / "mount").close()
    TensorFile(outside).close()
    with pytest.raises(IntegrityError, match=r"outside is a link to .*own"):
        TensorFile(outside, within=tmp_path / "root")


def test_dtypes_and_names_that_the_format_lacks_are_refused_by_name():
    for meta in (ParamMeta("x", torch.complex128, (1,)), ParamMeta("__metadata__", torch.float32, (1,))):
        with pytest.raises(ManifestError, match=meta.name):
            Layout.of("file", [meta])


def test_every_tensor_is_aligned_to_its_element_size():
    params = [ParamMeta(str(i), dtype, (2 * i + 1,)) for i, dtype in enumerate(DTYPES * 2)]
    layout = Layout.of("file", params)
    for meta in params:
        assert layout.offsets[meta.name] % meta.dtype.itemsize == 0
    assert layout.params == tuple(params)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, [0]),
        ([10, 10], 20, [2]),
        ([10, 11], 20, [1, 1]),
        ([50, 1, 1, 50, 50], 20, [1, 2, 1, 1]),
        ([0, 0, 20, 0], 20, [4]),
    ],
)
def test_shards_hold_at_most_their_bound_or_one_tensor(sizes, limit, expected):
    shards = plan_shards([ParamMeta(str(i), torch.uint8, (size,)) for i, size in enumerate(sizes)], limit)
    assert [len(shard.params) for shard in shards] == expected
    names = [shard.name for shard in shards]
    assert names == (
        ["model.safetensors"]
        if len(names) == 1
        else [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    )
