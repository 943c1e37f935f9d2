"""Chains in the files of another library: ours read by its reader, and its own read by us."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file

from tests.hostile import refused_or_right, worse_text
from tests.transports.chains import checkpoint, folder, published, rewrite, same, step, trainer_at, weights
from torchrl_ext.compat.slime.first import build_flush, parse_flush
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.testing import WAIT_S
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest

METAS = [ParamMeta.of(name, tensor) for name, tensor in weights().items()]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


class TestFilesOfOthers:
    """Written and read here with the reference libraries, as the formats' authors do."""

    def test_a_chain_in_slimes_current_format_is_what_its_reader_expects(self, root):
        _, _, history = published(root, 4, encoding="xor", keyframe_every=0)
        held = load_file(folder(root, 1) / "model.safetensors")
        for version in (2, 3, 4):
            apply_slime(folder(root, version), held, version)
            assert same(held, history[version])

    @pytest.mark.parametrize("encoding", ["xor", "overwrite"])
    @pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
    def test_a_chain_that_slime_wrote_is_followed_from_its_checkpoint(self, tmp_path, root, encoding, checksum):
        own, reader = weights(), None
        base = checkpoint(tmp_path / "base", own)
        for version in range(1, 5):
            old = {name: tensor.clone() for name, tensor in own.items()}
            if version != 3:
                step(own, version)
            write_slime(folder(root, version), version, old, own, encoding, checksum)
            reader = reader or trainer_at(root, base=base)
            assert same(reader.receive_weights(WAIT_S), own)
            assert same(trainer_at(root, base=base).receive_weights(WAIT_S), own)
        assert reader.receive_weights(0.0) is None

    def test_a_new_run_in_the_emptied_folder_is_followed_from_the_base(self, tmp_path, root):
        base, reader = checkpoint(tmp_path / "base", weights()), None
        for run, count in ((1, 3), (2, 4), (3, 4)):
            shutil.rmtree(root, ignore_errors=True)
            own = weights()
            for version in range(1, count + 1):
                old = {name: tensor.clone() for name, tensor in own.items()}
                step(own, 10 * run + version)
                write_slime(folder(root, version), version, old, own, "xor", "xxh3-128")
            reader = reader or trainer_at(root, base=base)
            assert same(reader.receive_weights(WAIT_S), own)

    def test_a_full_version_in_the_middle_is_enough_to_join(self, root):
        own = weights()
        checkpoint(folder(root, 3), own)
        old = {name: tensor.clone() for name, tensor in own.items()}
        step(own, 1)
        write_slime(folder(root, 4), 4, old, own, "xor", "xxh3-128")
        assert same(trainer_at(root).receive_weights(WAIT_S), own)

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_full_version_that_another_one_of_the_same_size_replaces_is_read_again(self, root, indexed):
        name = "model-00001-of-00001.safetensors" if indexed else "model.safetensors"
        reader = trainer_at(root)
        for seed in (4, 5):
            own, made = weights(seed), root / "made"
            folder(root, 3).mkdir(parents=True, exist_ok=True)
            if indexed:
                index = {"metadata": {}, "weight_map": dict.fromkeys(own, name)}
                (folder(root, 3) / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file(own, made)
            made.rename(folder(root, 3) / name)
            assert same(reader.receive_weights(0.0), own), seed
            assert reader.receive_weights(0.0) is None

    def test_another_base_is_noticed_by_the_checksum(self, tmp_path, root):
        own, other = weights(), weights(5)
        old = {name: tensor.clone() for name, tensor in own.items()}
        step(own, 1)
        write_slime(folder(root, 1), 1, old, own, "xor", "xxh3-128")
        with pytest.raises(IntegrityError, match=r"'[ab].weight' in .*model-00000-of-00001"):
            trainer_at(root, base=checkpoint(tmp_path / "base", other)).receive_weights(WAIT_S)
        with pytest.raises(ConfigError, match="base="):
            trainer_at(root).receive_weights(WAIT_S)

    @pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
    def test_flush_files_without_a_manifest_are_followed_from_the_base(self, tmp_path, root, encoding):
        made = tmp_path / "made"
        _, _, history = published(made, 4, encoding=encoding, keyframe_every=0)
        base = checkpoint(tmp_path / "base", history[1])
        for version in (2, 3, 4):  # renumbered: the seed counts from the first delta
            shutil.copytree(folder(made, version), folder(root, version))
            (folder(root, version) / "manifest.json").unlink()
        checkpoint(folder(root, 1), history[1])
        settle(root, 4)
        assert same(trainer_at(root).receive_weights(WAIT_S), history[4])
        del base
        shutil.rmtree(folder(root, 2))
        with pytest.raises(IntegrityError, match="weight_v000002"):
            trainer_at(root).receive_weights(WAIT_S)


class TestIndexes:
    @pytest.fixture
    def chain(self, tmp_path, root):
        """Two deltas on a checkpoint."""
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        for version in (1, 2):
            old = {name: tensor.clone() for name, tensor in own.items()}
            step(own, version)
            write_slime(folder(root, version), version, old, own, "xor", "xxh3-128")
        return base

    def test_a_delta_is_no_checkpoint_to_begin_with(self, chain, root):
        with pytest.raises(IntegrityError, match="holds changes of"):
            trainer_at(root, base=folder(root, 1)).receive_weights(WAIT_S)

    @pytest.mark.parametrize("number", [2, 3, 7])
    def test_a_base_that_is_not_an_earlier_version_is_refused(self, chain, root, number):
        edit_index(root, 2, lambda index: index["metadata"].update(base_version=f"{number:06d}"))
        with pytest.raises(IntegrityError, match=r"weight_v000002/model.safetensors.index.json.*base"):
            trainer_at(root, base=chain).receive_weights(WAIT_S)

    def test_whatever_becomes_of_an_index_what_is_received_is_a_version_of_the_chain(self, chain, root):
        received, chance, refused = [], random.Random(3), 0
        for version in (1, 2):
            (root / "latest").write_text(f"{version}")
            received.append(trainer_at(root, base=chain).receive_weights(WAIT_S))
        path = folder(root, 2) / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        for _ in range(200):
            path.write_bytes(worse_text(index, chance))
            refused += refused_or_right(
                lambda: trainer_at(root, base=chain).receive_weights(0.0),
                right=lambda found: found is None or any(same(found, dict(one.items())) for one in received),
            )
        assert refused > 100

    def test_a_full_version_is_taken_when_every_file_that_its_index_names_is_there(self, chain, root):
        own, index = weights(4), {"metadata": {"total_size": 1}, "weight_map": {}}
        folder(root, 3).mkdir()
        reader = trainer_at(root, base=chain)
        assert reader.receive_weights(WAIT_S) is not None
        for number, (name, tensor) in enumerate(own.items(), 1):
            index["weight_map"][name] = f"model-{number:05d}-of-00003.safetensors"
            save_file({name: tensor}, folder(root, 3) / index["weight_map"][name])
        late = folder(root, 3) / "model-00002-of-00003.safetensors"
        moved = late.rename(root / "late")
        (folder(root, 3) / "model.safetensors.index.json").write_text(json.dumps(index))
        assert reader.receive_weights(0.0) is None
        moved.rename(late)
        assert same(reader.receive_weights(WAIT_S), own)
        index["weight_map"]["c.count"] = late.name
        (folder(root, 3) / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(IntegrityError, match=rf"{late.name} does not hold 'c.count'"):
            trainer_at(root).receive_weights(WAIT_S)


@pytest.mark.parametrize("codecs", [[], [{"name": "ulp"}], [{"name": "deltas"}]], ids=str)
def test_a_manifest_that_names_no_encoding_of_its_files_is_refused(root, codecs):
    published(root, 2, encoding="xor", keyframe_every=0)
    rewrite(folder(root, 2) / "manifest.json", lambda document: document.update(codecs=codecs))
    with pytest.raises(ManifestError, match=r"does not describe a codec|weight_v000002 is coded as"):
        trainer_at(root).receive_weights(WAIT_S)


def renumber(source, target, version):
    """Copy a version of the first format without our manifest, under another number."""
    target.mkdir(parents=True)
    for file in source.glob("rank*"):
        content = parse_flush(file.read_bytes(), file.name, {meta.name: meta for meta in METAS})
        data = build_flush(content.patches, content.encoding, current_version=str(version))
        (target / file.name).write_bytes(data)


def settle(root, version, at_s=0.0):
    """Nothing of a version changed since: its folder and files say so by their times."""
    for path in (*folder(root, version).iterdir(), folder(root, version)):
        os.utime(path, (at_s, at_s))


def edit_index(root, version, change):
    path = folder(root, version) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def write_slime(path, version, old, new, encoding, algorithm):
    import zlib

    import numpy as np
    import xxhash

    payloads, sums = {}, {}
    for name, tensor in new.items():
        before, after = raw(old[name]), raw(tensor)
        where = np.flatnonzero(before != after).astype("<u4")
        if where.size:
            data = (before ^ after).tobytes()
            if encoding == "overwrite":
                data = np.uint32(where.size).tobytes() + where.tobytes() + after[where].tobytes()
            packed = zstandard.ZstdCompressor(level=1).compress(data)
            payloads[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            digest = xxhash.xxh3_128_hexdigest(after) if algorithm != "adler32" else f"{zlib.adler32(after):08x}"
            sums[name] = digest
    path.mkdir(parents=True)
    file = "model-00000-of-00001.safetensors"
    if payloads:
        save_file(payloads, path / file, metadata=sums)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(payloads, file)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def apply_slime(path, held, version):
    """What slime's reader does with a version."""
    from safetensors import safe_open

    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert (index["metadata"]["version"], index["metadata"]["base_version"]) == (f"{version:06d}", f"{version - 1:06d}")
    assert (index["metadata"]["delta_encoding"], index["metadata"]["compression_format"]) == ("xor", "zstd")
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(path / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                difference = zstandard.ZstdDecompressor().decompress(opened.get_tensor(name).numpy().tobytes())
                flat = held[name].view(-1).view(torch.uint8)
                flat ^= torch.frombuffer(bytearray(difference), dtype=torch.uint8)
                assert opened.metadata()[name] == tensor_digest(held[name])
