"""Chains written anew in other layouts: byte for byte where a format says so, and every version bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save

from tests.transports.chains import checkpoint, flip, folder, same, step, trainer_at, weights
from torchrl_ext.compat.convert import LAYOUTS, Rebuilt, convert, rebuilt
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores import open_store
from torchrl_ext.versions.others import Reader

CONFIG = {"config.json": b'{"model_type": "tiny"}'}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A chain of ours: keyframe, delta, a version without changes, keyframe with its delta, delta; and its weights."""
    root = tmp_path_factory.mktemp("made") / "root"
    trainer = trainer_at(root, encoding="ulp", keyframe_every=3, keep_files=True, files=CONFIG)
    own, history = weights(), {}
    for version in range(1, 6):
        if version not in (1, 3):
            step(own, version)
        trainer.send_weights("policy", own)
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
    trainer.shutdown()
    checkpoint(root.parent / "base", weights())
    (root.parent / "base" / "config.json").write_bytes(CONFIG["config.json"])
    return root, root.parent / "base", history


@pytest.fixture(scope="module")
def converted(made, tmp_path_factory):
    """That chain in every layout, by its name."""
    root, base, _ = made
    out = tmp_path_factory.mktemp("converted")
    for layout in LAYOUTS:
        written(root, out / layout, layout, base)
    return out


def rebuilt_from(root, base):
    return rebuilt(Reader(open_store(root), base and str(base)))


def written(source, target, layout, base=None):
    return convert(rebuilt_from(source, base), target, layout, base and str(base))


def whole_then_deltas(*given):
    """Versions from 1 on, the first one whole."""
    return [Rebuilt(number=number, whole=number == 1, tensors=tensors) for number, tensors in enumerate(given, 1)]


def every_version(root, base):
    return {version.number: {name: tensor.clone() for name, tensor in version} for version in rebuilt_from(root, base)}


def header_of(data):
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


class TestThereAndBack:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_version_is_bit_for_bit_what_it_was(self, made, converted, tmp_path, layout):
        _, base, history = made
        written(converted / layout, tmp_path / "back", "ours", base)
        for root in (converted / layout, tmp_path / "back"):
            found = every_version(root, base)
            assert found.keys() == history.keys()
            assert all(same(found[version], history[version]) for version in history)

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "skyrl"])
    def test_readers_follow_it_and_whole_versions_stay_complete_checkpoints(self, made, converted, layout):
        _, base, history = made
        reader = trainer_at(converted / layout, base=base)
        assert same(reader.receive_weights(0.0), history[5]) and reader.received_version == 5
        for version in range(1, 6):
            inside = folder(converted / layout, version)
            assert (inside / "model.safetensors").exists() == (version in (1, 4))
            if version in (1, 4):
                assert same(load_file(inside / "model.safetensors"), history[version])
                assert (inside / "config.json").read_bytes() == CONFIG["config.json"]
        if layout != "ours":
            assert not list((converted / layout).rglob("manifest.json"))
        if layout == "slime":
            assert not (converted / layout / "latest").exists() and not list((converted / layout).rglob(".*"))

    @pytest.mark.parametrize("layout", ["ours", "slime", "slime-first", "skyrl"])
    def test_a_chain_of_deltas_alone_stays_one(self, made, converted, tmp_path, layout):
        _, base, history = made
        written(converted / "skyrl", tmp_path / "out", layout, base)
        assert not list((tmp_path / "out").rglob("model.safetensors")) or layout == "slime-first"
        found = every_version(tmp_path / "out", base)
        assert all(same(found[version], history[version]) for version in history)


class TestBytes:
    """Each file is put together here once more, of what the format says, by the reference libraries."""

    @pytest.fixture
    def small(self, tmp_path):
        """Two versions of two parameters, of which one changes in two elements."""
        root = tmp_path / "root"
        trainer = trainer_at(root, encoding="ulp", keyframe_every=0)
        own = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, -0.0]], dtype=torch.bfloat16), "b": torch.arange(3)}
        old = checkpoint(tmp_path / "base", {name: tensor.clone() for name, tensor in own.items()})
        trainer.send_weights("policy", own)
        own["a.weight"][0, 1], own["a.weight"][1, 1] = 5.0, 0.0
        trainer.send_weights("policy", own)
        trainer.shutdown()
        return root, old

    OLD, NEW = bytes.fromhex("803f 0040 4040 0080"), bytes.fromhex("803f a040 4040 0000")
    SUM = xxhash.xxh3_128_hexdigest(NEW)
    PAYLOAD = zstandard.ZstdCompressor(level=1).compress(bytes(a ^ b for a, b in zip(OLD, NEW, strict=True)))
    ENTRY = torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8)

    def test_slimes_current_files_and_index(self, small, tmp_path):
        written(small[0], tmp_path / "run", "slime")
        files = {file.name: file.read_bytes() for file in folder(tmp_path / "run", 2).iterdir()}
        assert files == {
            "model-00000-of-00001.safetensors": save({"a.weight": self.ENTRY}, metadata={"a.weight": self.SUM}),
            "model.safetensors.index.json": b'{"metadata": {"version": "000002", "base_version": "000001", '
            b'"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}, '
            b'"weight_map": {"a.weight": "model-00000-of-00001.safetensors"}}',
        }

    def test_skyrls_payloads_and_manifest(self, small, tmp_path):
        root, base = small
        written(root, tmp_path / "out", "skyrl", base)
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["delta-00000001", "delta-00000002"]
        first = {file.name: file.read_bytes() for file in (tmp_path / "out" / "delta-00000001").iterdir()}
        assert first == {
            "manifest.json": b'{"version": 1, "base_version": 0, "tensors": [], "total_uncompressed_num_bytes": 0, '
            b'"total_compressed_num_bytes": 0, "payload_files": []}'
        }
        second = {file.name: file.read_bytes() for file in (tmp_path / "out" / "delta-00000002").iterdir()}
        size = len(self.PAYLOAD)
        assert second == {
            "delta-rank00000-file000000.safetensors": save({"a.weight": self.ENTRY}),
            "manifest.json": (
                '{"version": 2, "base_version": 1, "tensors": [{"name": "a.weight", "dtype": "bfloat16", "shape": '
                f'[2, 2], "uncompressed_num_bytes": 8, "compressed_num_bytes": {size}, "payload_file": '
                '"delta-rank00000-file000000.safetensors", "payload_key": "a.weight", "checksum": '
                f'"{self.SUM}", "checksum_algorithm": "xxh3-128"}}], "total_uncompressed_num_bytes": 8, '
                f'"total_compressed_num_bytes": {size}, "payload_files": ["delta-rank00000-file000000.safetensors"]}}'
            ).encode(),
        }

    def test_skyrls_payloads_roll_over_into_files_and_no_tensor_is_cut(self, made, tmp_path, monkeypatch):
        monkeypatch.setattr("torchrl_ext.compat.skyrl.deltas.PAYLOAD_BYTES", 100)
        root, base, history = made
        written(root, tmp_path / "out", "skyrl", base)
        names = [path.name for path in sorted((tmp_path / "out" / "delta-00000002").glob("*.safetensors"))]
        assert names == ["delta-rank00000-file000000.safetensors", "delta-rank00000-file000001.safetensors"]
        for name in names:
            with safe_open(tmp_path / "out" / "delta-00000002" / name, "pt") as opened:
                assert len(list(opened.keys())) == 1 and opened.metadata() is None
        assert same(every_version(tmp_path / "out", base)[5], history[5])


class TestWhatALayoutCannotTake:
    @pytest.fixture
    def gap(self, made, tmp_path):
        """A chain from which a version was left out: 1 and, on it, 3."""
        root, _, history = made
        versions = [one for one in rebuilt(Reader(open_store(root), None)) if one.number != 2]
        del versions[2:]
        return versions, history

    def test_a_version_whose_number_does_not_follow_is_whole(self, gap, tmp_path):
        versions, _ = gap
        rows = convert(versions, tmp_path / "out", "slime", None)
        assert [(row["version"], row["kind"]) for row in rows] == [(1, "keyframe"), (3, "keyframe")]

    def test_an_unchanged_version_that_slimes_first_format_could_not_show_is_whole(self, tmp_path):
        one, other = {"a": torch.zeros(9)}, {"a": torch.ones(9)}
        for name, given, kinds in (
            ("none", [one, one], ["keyframe", "keyframe"]),
            ("some", [one, other, other, other], ["keyframe", "delta", "delta", "delta"]),
        ):
            rows = convert(whole_then_deltas(*given), tmp_path / name, "slime-first", None)
            assert [row["kind"] for row in rows] == kinds
            reader = trainer_at(tmp_path / name)
            assert same(reader.receive_weights(0.0), given[-1]) and reader.received_version == len(given)

    def test_a_model_of_another_shape_begins_anew(self, tmp_path):
        one, other = {"a": torch.zeros(9)}, {"a": torch.ones(8)}
        for layout in ("ours", "slime", "slime-first"):
            rows = convert(whole_then_deltas(one, other), tmp_path / layout, layout, None)
            assert [row["kind"] for row in rows] == ["keyframe", "keyframe"]
            assert same(trainer_at(tmp_path / layout).receive_weights(0.0), other)
        with pytest.raises(ConfigError, match=r"version 1 holds a float32\[9\]"):
            convert(whole_then_deltas(one, other), tmp_path / "skyrl", "skyrl", str(checkpoint(tmp_path / "base", one)))

    def test_skyrl_leaves_no_number_out_and_needs_the_base(self, gap, made, tmp_path):
        versions, _ = gap
        with pytest.raises(ConfigError, match="'skyrl' has no full versions"):
            convert(versions, tmp_path / "none", "skyrl", None)
        with pytest.raises(ConfigError, match="version 3 follows on version 1"):
            convert(versions, tmp_path / "out", "skyrl", str(made[1]))
        assert not (tmp_path / "none").exists()
        other = checkpoint(tmp_path / "other", {**weights(), "b.weight": torch.zeros(299)})
        with pytest.raises(ConfigError, match=r"b.weight float32\[299\]"):
            written(made[0], tmp_path / "based", "skyrl", other)

    def test_a_directory_with_something_in_it_is_left_alone(self, made, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("here")
        with pytest.raises(ConfigError, match="exists already"):
            written(made[0], tmp_path / "out", "slime")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]

    def test_a_damaged_version_is_not_passed_on(self, converted, made, tmp_path):
        written(converted / "slime", tmp_path / "bad", "slime", made[1])
        flip(folder(tmp_path / "bad", 2) / "model-00000-of-00001.safetensors", -3)
        with pytest.raises(IntegrityError, match="weight_v000002"):
            written(tmp_path / "bad", tmp_path / "out", "skyrl", made[1])
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["delta-00000001"]
