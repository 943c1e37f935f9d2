import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from xxhash import xxh3_128_hexdigest

from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.base.files import LocalFile
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.tensorfile import CHUNK_BYTES, Layout, TensorFile, plan_shards
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.testing import DTYPES, any_bits, same_bits


def test_it_reads_what_the_reference_library_writes(tmp_path):
    sent = {str(dtype): any_bits(dtype, 5, 3) for dtype in DTYPES} | {"s": torch.tensor(2.0), "e": torch.empty(0, 4)}
    sent["large"] = any_bits(torch.bfloat16, CHUNK_BYTES + 7)
    save_file(sent, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    assert {meta.name for meta in file.params()} == set(sent)
    for name, tensor in sent.items():
        found, checksum = file.read(name)
        assert same_bits(found, tensor), name
        expected = xxh3_128_hexdigest(byte_view(tensor).numpy().data)
        assert checksum == expected == file.checksum(name, torch.empty(1000, dtype=torch.uint8))
        held = torch.zeros_like(tensor)
        assert file.read(name, held)[0] is held
        assert same_bits(held, tensor), name
    file.close()
    file.close()


ROW = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "change",
    [
        *({"data_offsets": offsets} for offsets in ([0, 12], [4, 20], [-16, 0], None)),
        *({"shape": shape} for shape in ([2**62, 2], [-4], [True, 4], "4", [4.0], None)),
        *({"dtype": dtype} for dtype in ("F4", ["F32"], None)),
    ],
    ids=str,
)
def test_headers_that_cannot_be_right_are_refused(tmp_path, change):
    row = {key: value for key, value in (ROW | change).items() if value is not None}
    last = {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}
    overlapping = last | {"data_offsets": [14, 18]}
    for header in ({"a": row, "b": last}, {"a": ROW, "b": overlapping}, {"a": ROW, "b": ROW}, {"a": ROW}):
        refused(tmp_path / "file", json.dumps(header))
    refused(tmp_path / "file", f'{{"a": {json.dumps(ROW)}, "a": {json.dumps(ROW)}}}')


def refused(path, header):
    """A file of this header and 20 bytes is refused by name."""
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(20))
    with pytest.raises(IntegrityError, match=path.name):
        TensorFile(path)


def test_link_out_of_the_root_is_refused(tmp_path):
    (tmp_path / "root" / "version").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "root"):
        save_file({"a": torch.zeros(1)}, folder / "own")
    inside, outside = (tmp_path / "root" / "version" / name for name in ("inside", "outside"))
    inside.symlink_to("../own")
    outside.symlink_to("../../own")
    (tmp_path / "mount").symlink_to("root")
    LocalFile(tmp_path / "mount" / "version" / "inside", within=tmp_path / "mount").close()
    TensorFile(outside).close()
    with pytest.raises(IntegrityError, match=r"outside is a link to .*own"):
        LocalFile(outside, within=tmp_path / "root")


METAS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 60)), max_size=8)


@given(METAS, st.integers(1, 100))
def test_shards_are_bounded_and_every_tensor_is_aligned(metas, limit):
    params = [ParamMeta(str(number), dtype, (size,)) for number, (dtype, size) in enumerate(metas)]
    shards = plan_shards(params, limit)
    assert [meta for shard in shards for meta in shard.params] == params
    sizes = [sum(meta.nbytes for meta in shard.params) for shard in shards]
    for shard, size in zip(shards, sizes, strict=True):
        assert size <= limit or sum(meta.nbytes > 0 for meta in shard.params) == 1
        layout = Layout.of("file", shard.params)
        assert all(layout.offsets[meta.name] % meta.dtype.itemsize == 0 for meta in shard.params)
    heads = [shard.params[0].nbytes for shard in shards[1:]]
    assert all(size + head > limit for size, head in zip(sizes, heads, strict=False))  # no shard is left half empty
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert [shard.name for shard in shards] == (names if count > 1 else ["model.safetensors"])


def test_dtypes_and_names_outside_the_format_are_refused():
    with pytest.raises(ManifestError, match=r"x.*a dtype of"):
        Layout.of("file", [ParamMeta("x", torch.complex128, (1,))])
    for name, said in (("__metadata__", "'__metadata__'.*rename"), ("w\udc80", r"'w\\udc80'.*rename")):
        with pytest.raises(ManifestError, match=said):
            Layout.of("file", [ParamMeta(name, torch.float32, (1,))])


def test_a_pointer_of_git_lfs_is_called_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(IntegrityError, match=r"pointer of Git LFS.*git lfs pull"):
        TensorFile(path)
