"""The delta transport: what it publishes, who can read it, and what a damaged chain does to whom."""

from __future__ import annotations

import json
import shutil
import signal
import threading

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch import nn

import torchrl_ext as tx
from tests.processes import python, running_python
from tests.transports.contract import WAIT_S, any_bits, same_bits
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, StoreError, UpdateError, WeightSyncError
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.weights.digest import tensor_digest
from torchrl_ext.weights.source import MappingSource, as_source

ENCODINGS = list(tx.DeltaTransport.encodings())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def weights(seed=0):
    return {
        "a.weight": any_bits(torch.bfloat16, 60, 70, seed=seed),
        "b.weight": any_bits(torch.float32, 300, seed=seed + 1),
        "c.count": torch.arange(20),
    }


def step(tensors, seed, share=0.03):
    """Change some elements of each tensor but the last one, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("a.weight", "b.weight"):
        flat = tensors[name].view(-1)
        where = torch.rand(flat.shape, generator=generator) < share
        flat[where] = torch.randn(flat.shape, generator=generator).to(flat.dtype)[where]


def same(received, expected):
    return set(received.keys()) == set(expected) and all(same_bits(received[k], v) for k, v in expected.items())


def trainer_at(root, **settings):
    return tx.make_transport("delta", root=root, **settings)


def published(root, count, **settings):
    """A root with ``count`` versions; returns the trainer, its weights, and what each version was."""
    trainer, own, history = trainer_at(root, **settings), weights(), {}
    for version in range(1, count + 1):
        trainer.send_weights("policy", own)
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
        step(own, version)
    return trainer, own, history


def folder(root, version):
    return root / f"weight_v{version:06d}"


class TestVersions:
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("keyframe_every", [0, 3])
    def test_every_encoding_follows_joins_and_keeps_an_engine(self, root, encoding, keyframe_every):
        policy, served = (nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)).bfloat16() for _ in range(2))
        sender = tx.WeightSender(
            trainer_at(root, encoding=encoding, keyframe_every=keyframe_every), tx.InProcessEngine(served)
        )
        follower = trainer_at(root)
        for version in range(1, 7):
            report = sender.update_weights(policy)
            assert report.verified and report.version == version
            expected = dict(as_source(policy))
            assert same(dict(as_source(served)), expected)
            if version != 3:  # and catches up with two at once
                assert same(follower.receive_weights(WAIT_S), expected)
            assert same(trainer_at(root).receive_weights(WAIT_S), expected)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter[torch.rand_like(parameter.float()) < 0.1] *= 1.01
        assert report.density < 0.5
        sender.shutdown()

    def test_a_version_without_changes_moves_next_to_nothing(self, root):
        trainer, reader, own = trainer_at(root, encoding="xor"), trainer_at(root), weights()
        for _ in range(2):
            trainer.send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)
        assert reader.received_version == 2
        assert sorted(path.name for path in folder(root, 2).iterdir()) == [
            "manifest.json",
            "model.safetensors.index.json",
        ]

    def test_a_model_with_other_parameters_begins_anew(self, root):
        trainer, reader = trainer_at(root), trainer_at(root)
        trainer.send_weights("policy", weights())
        assert same(reader.receive_weights(WAIT_S), weights())
        other = {"x": torch.randn(5)}
        trainer.send_weights("policy", other)
        assert same(reader.receive_weights(WAIT_S), other)

    def test_a_second_trainer_on_the_root_goes_on_with_a_keyframe(self, root):
        trainer, own, _ = published(root, 3, keyframe_every=0)
        reader = trainer_at(root)
        reader.receive_weights(WAIT_S)
        trainer.shutdown()
        second = trainer_at(root)
        second.send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)
        assert reader.received_version == 4
        assert Chain(LocalStore(root)).version(4)[0] is not None

    def test_a_failed_publication_leaves_nothing_and_makes_the_next_one_a_keyframe(self, root):
        class Failing(MappingSource):
            def __iter__(self):
                yield next(super().__iter__())
                raise ValueError("gathering failed")

        trainer, own, _ = published(root, 2, keyframe_every=0)
        before = sorted(path.name for path in root.rglob("*"))
        with pytest.raises(ValueError, match="gathering failed"):
            trainer.send_weights("policy", Failing(own))
        assert sorted(path.name for path in root.rglob("*")) == before
        reader = trainer_at(root)
        reader.receive_weights(WAIT_S)
        trainer.send_weights("policy", own)
        assert (folder(root, 3) / "model.safetensors").exists()
        assert same(reader.receive_weights(WAIT_S), own)

    def test_an_unknown_encoding_is_refused_with_those_there_are(self, root):
        with pytest.raises(ConfigError, match="deltas_zstd"):
            trainer_at(root, encoding="deltaz")

    def test_hooks_see_what_was_written_and_when_it_is_looked_for(self, root):
        CALLS.clear()
        trainer = trainer_at(root, post_write_hook=f"{__name__}:wrote")
        reader = trainer_at(root, pre_read_hook=f"{__name__}:reads")
        trainer.send_weights("policy", weights())
        reader.receive_weights(WAIT_S)
        assert [("wrote", str(root), "weight_v000001", b"1\n"), ("reads", str(root))] == CALLS
        with pytest.raises(ConfigError, match="cannot be imported"):
            trainer_at(root, post_write_hook="nowhere:nothing")


CALLS = []


def wrote(root, name):
    CALLS.append(("wrote", root, name, LocalStore(root).get("latest")))


def reads(root):
    CALLS.append(("reads", root))


class TestFilesOfOthers:
    """Written and read here with the reference libraries, as the formats' authors do."""

    def test_a_chain_in_slimes_current_format_is_what_its_reader_expects(self, root):
        _, _, history = published(root, 4, encoding="xor", keyframe_every=0)
        held = load_file(folder(root, 1) / "model.safetensors")
        for version in (2, 3, 4):
            apply_slime(folder(root, version), held, version)
            assert same(held, history[version])

    def test_files_of_slimes_first_format_hold_positions_and_values(self, root):
        published(root, 2, encoding="deltas_zstd", keyframe_every=0)
        names = sorted(path.name for path in folder(root, 2).glob("rank*"))
        assert names == ["rank0000_flush000000.safetensors", "rank0000_flush000001.safetensors"]
        raw = (folder(root, 2) / names[0]).read_bytes()
        assert raw[:4] == b"\x28\xb5\x2f\xfd"

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

    def test_a_full_version_in_the_middle_is_enough_to_join(self, root):
        own = weights()
        checkpoint(folder(root, 3), own)
        old = {name: tensor.clone() for name, tensor in own.items()}
        step(own, 1)
        write_slime(folder(root, 4), 4, old, own, "xor", "xxh3-128")
        assert same(trainer_at(root).receive_weights(WAIT_S), own)

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
        assert same(trainer_at(root).receive_weights(WAIT_S), history[4])
        del base
        shutil.rmtree(folder(root, 2))
        with pytest.raises(IntegrityError, match="weight_v000002"):
            trainer_at(root).receive_weights(WAIT_S)


def checkpoint(path, tensors):
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


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


class TestBase:
    @pytest.mark.parametrize("encoding", ["auto", "xor"])
    def test_the_first_version_is_a_delta_for_whoever_holds_the_checkpoint(self, tmp_path, root, encoding):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        sender = tx.WeightSender(trainer_at(root, base=base, encoding=encoding), tx.InProcessEngine(served))
        reader = trainer_at(root, base=base)
        for version in (1, 2, 3):
            step(own, version)
            report = sender.update_weights(own)
            assert report.bytes < report.model_bytes / 2
            assert same(served, own)
            assert same(reader.receive_weights(WAIT_S), own)
            assert same(trainer_at(root, base=base).receive_weights(WAIT_S), own)
        assert not list(root.rglob("model.safetensors"))
        sender.shutdown()

    def test_an_engine_with_other_weights_refuses_by_name_and_keeps_them(self, tmp_path, root):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        served["b.weight"][7] = 1.5
        before = {name: tensor.clone() for name, tensor in served.items()}
        sender = tx.WeightSender(trainer_at(root, base=base), tx.InProcessEngine(served))
        step(own, 1)
        with pytest.raises(UpdateError, match=r"'b.weight' of the base") as refused:
            sender.update_weights(own)
        assert refused.value.rows[0].state == "serving"
        assert same(served, before)
        assert sender.update_weights(own).verified  # a keyframe now
        assert same(served, own)

    def test_a_reader_with_another_checkpoint_refuses_by_name(self, tmp_path, root):
        own, other = weights(), weights()
        other["b.weight"][7] = 1.5
        trainer = trainer_at(root, base=checkpoint(tmp_path / "base", own))
        step(own, 1)
        trainer.send_weights("policy", own)
        into = {name: tensor.clone() for name, tensor in other.items()}
        with pytest.raises(IntegrityError, match=r"'b.weight' of the base"):
            trainer_at(root, base=checkpoint(tmp_path / "other", other)).receive_weights(WAIT_S, weights=into)
        assert same(into, other)
        with pytest.raises(IntegrityError, match="weight_v000000"):
            trainer_at(root).receive_weights(WAIT_S)

    def test_a_checkpoint_of_another_model_is_refused_when_the_trainer_starts(self, tmp_path, root):
        base = checkpoint(tmp_path / "base", {"a.weight": torch.zeros(3)})
        with pytest.raises(ConfigError, match=r"a.weight"):
            trainer_at(root, base=base).send_weights("policy", weights())
        assert not [path for path in root.iterdir() if path.name != "latest"]

    def test_an_engine_that_connects_again_is_recognised_and_gets_a_delta(self, tmp_path, root):
        own = weights()
        base = checkpoint(tmp_path / "base", own)
        served = {name: tensor.clone() for name, tensor in own.items()}
        trainer = trainer_at(root, base=base)
        for version in (1, 2):
            step(own, version)
            tx.WeightSender(trainer, tx.InProcessEngine(served)).update_weights(own)
            assert same(served, own)
        assert not list(root.rglob("model.safetensors"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def rewrite(path, change):
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


DAMAGES = {
    "a flipped bit": (lambda d: flip(d / "delta-00001.bin", 20), r"'a.weight' in .*weight_v000003/delta-00001.bin"),
    "a truncated payload": (
        lambda d: (d / "delta-00001.bin").write_bytes((d / "delta-00001.bin").read_bytes()[:30]),
        r"delta-00001.bin has 30 bytes, so that tensor 'a.weight'",
    ),
    "a missing payload": (lambda d: (d / "delta-00001.bin").unlink(), r"delta-00001.bin is missing, .*'a.weight'"),
    "a truncated manifest": (
        lambda d: (d / "manifest.json").write_bytes((d / "manifest.json").read_bytes()[:200]),
        r"weight_v000003/manifest.json is damaged",
    ),
    "a name that leads elsewhere": (
        lambda d: rewrite(d / "manifest.json", lambda m: m["files"].update({"../weight_v000001/x": 3})),
        r"weight_v000003/manifest.json is damaged.*\.\./weight_v000001/x",
    ),
    "a payload beyond its file": (
        lambda d: rewrite(d / "manifest.json", lambda m: m["params"][0].__setitem__(8, 2**62)),
        r"weight_v000003/manifest.json is damaged.*'a.weight'",
    ),
    "an absurd shape": (
        lambda d: rewrite(d / "manifest.json", lambda m: m["params"][0].__setitem__(2, [2**40, 2**20])),
        r"weight_v000003 changes a.weight",
    ),
    "a codec nobody knows": (
        lambda d: rewrite(d / "manifest.json", lambda m: m["codecs"].__setitem__(0, {"name": "quantum"})),
        r"'quantum'",
    ),
    "a container nobody knows": (
        lambda d: rewrite(d / "manifest.json", lambda m: m.update(container="crate")),
        r"weight_v000003 is laid out.*crate",
    ),
    "a digest of other weights": (
        lambda d: rewrite(d / "manifest.json", lambda m: m["params"][1].__setitem__(3, "0" * 32)),
        r"'b.weight'",
    ),
    "another base": (
        lambda d: rewrite(d / "manifest.json", lambda m: m.update(base_run_id="somebody")),
        r"version 3 .* of run 'somebody'",
    ),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_is_refused_before_the_pause_by_name_and_the_next_update_lands(self, root, damage):
        spoil, words = DAMAGES[damage]
        own, served, pauses = weights(), {k: torch.zeros_like(v) for k, v in weights().items()}, []

        class Watched(tx.InProcessEngine):
            def pause(self):
                pauses.append(1)
                super().pause()

        class Spoiled(tx.DeltaTransport):
            def prepare(self, source, version):
                made = super().prepare(source, version)
                if version == 3:
                    spoil(folder(root, 3))
                return made

        sender = tx.WeightSender(Spoiled(root, keyframe_every=0, encoding="ulp"), Watched(served))
        alone = trainer_at(root)
        for version in (1, 2):
            sender.update_weights(own)
            assert same(alone.receive_weights(WAIT_S), own)
            before = {name: tensor.clone() for name, tensor in own.items()}
            step(own, version)
        count = len(pauses)
        with pytest.raises(UpdateError, match=words) as refused:
            sender.update_weights(own)
        assert len(pauses) == count
        assert (refused.value.rows[0].state, refused.value.rows[0].version) == ("serving", 2)
        assert same(served, before)
        into = {name: tensor.clone() for name, tensor in before.items()}
        for reader in (alone, trainer_at(root)):
            with pytest.raises(WeightSyncError, match=words.replace("weight_v000003 changes", "")):
                reader.receive_weights(WAIT_S, weights=into)
        assert same(into, before)
        step(own, 9)
        assert sender.update_weights(own).verified
        assert same(served, own)
        assert same(alone.receive_weights(WAIT_S), own)
        assert same(trainer_at(root).receive_weights(WAIT_S), own)
        sender.shutdown()

    @pytest.mark.parametrize("encoding", ["deltas", "deltas_zstd", "xor"])
    def test_is_found_in_the_files_of_others_too(self, root, encoding):
        published(root, 3, encoding=encoding, keyframe_every=0)
        file = next(folder(root, 3).glob("*0000*.safetensors"))
        flip(file, file.stat().st_size - 5)
        with pytest.raises(IntegrityError, match=file.name):
            trainer_at(root).receive_weights(WAIT_S)

    def test_a_missing_link_is_named_and_a_keyframe_after_it_is_enough(self, root):
        trainer, own, history = published(root, 4, keyframe_every=0)
        reader = trainer_at(root)
        shutil.rmtree(folder(root, 3))
        with pytest.raises(IntegrityError, match=r"weight_v000003.*is missing"):
            reader.receive_weights(WAIT_S)
        trainer.shutdown()
        trainer_at(root).send_weights("policy", own)
        assert same(reader.receive_weights(WAIT_S), own)
        assert history

    def test_a_damaged_keyframe_is_found_before_the_pause(self, root):
        own, served = weights(), {k: torch.zeros_like(v) for k, v in weights().items()}

        class Spoiled(tx.DeltaTransport):
            def prepare(self, source, version):
                made = super().prepare(source, version)
                if version == 1:
                    flip(folder(root, 1) / "model.safetensors", -9)
                return made

        sender = tx.WeightSender(Spoiled(root), tx.InProcessEngine(served))
        with pytest.raises(UpdateError, match=r"model.safetensors is damaged"):
            sender.update_weights(own)
        assert not any(tensor.view(torch.uint8).any() for tensor in served.values())
        assert sender.update_weights(own).verified
        assert same(served, own)

    def test_a_root_on_which_another_trainer_works_is_refused(self, root):
        keep = trainer_at(root)
        keep.send_weights("policy", weights())
        with pytest.raises(AssertionError, match="another trainer publishes into"):
            python("import sys, torchrl_ext as tx; tx.DeltaTransport(sys.argv[1]).send_weights({})", root)


class TestFleet:
    def test_an_engine_that_missed_versions_catches_up_by_one_folded_pass(self, root):
        own = weights()
        first, second = ({k: torch.zeros_like(v) for k, v in own.items()} for _ in range(2))
        trainer, late = trainer_at(root, keyframe_every=0, keep_files=True), trainer_at(root)
        sender = tx.WeightSender(trainer, tx.InProcessEngine(first))
        sender.update_weights(own)
        late.join(info := trainer.open(1, ()).info)
        receiver = tx.WeightReceiver(second)
        receiver.connect({**info, "params": [meta.to_json() for meta in as_source(own).params()]})
        receiver.prefetch(1)
        receiver.start()
        receiver.load({"version": 1, "params": []})
        receiver.finish(1)
        for version in range(2, 6):
            step(own, version)
            sender.update_weights(own)
        receiver.prefetch(5)
        assert receiver._staged is not None
        receiver.start()
        receiver.load({"version": 5, "params": []})
        receiver.finish(5)
        assert same(second, own) and same(first, own)
        changes = sum(
            manifest.changed for version in range(2, 6) for manifest in [Chain(LocalStore(root)).version(version)[1][1]]
        )
        assert changes > 0

    def test_an_engine_that_fails_acknowledges_nothing(self, root):
        own, served = weights(), {k: torch.zeros_like(v) for k, v in weights().items()}

        class Refusing(tx.InProcessEngine):
            fails = False

            def prefetch(self, version):
                if self.fails:
                    raise StoreError("the mount is gone")
                super().prefetch(version)

        engine = Refusing(served)
        sender = tx.WeightSender(trainer_at(root, keyframe_every=2), engine)
        sender.update_weights(own)
        engine.fails = True
        for version in (2, 3):
            step(own, version)
            with pytest.raises(UpdateError, match="the mount is gone"):
                sender.update_weights(own)
        assert folder(root, 1).exists()  # collected only by an acknowledgement
        engine.fails = False
        assert sender.update_weights(own).verified
        assert same(served, own)
        assert not folder(root, 1).exists()


class TestKilled:
    @pytest.mark.parametrize("point", ["in a delta", "in a keyframe", "before the rename", "before the pointer"])
    def test_a_trainer_killed_leaves_a_chain_that_reads_and_goes_on(self, root, point):
        with running_python(KILLED_TRAINER, root, point) as child:
            assert child.stdout.readline() == "now\n"
            child.send_signal(signal.SIGKILL)
            child.wait(WAIT_S)
        expected = {"x": torch.full((500,), 2.0), "y": torch.arange(500.0)}
        assert same(trainer_at(root).receive_weights(WAIT_S), expected)
        trainer, reader = trainer_at(root), trainer_at(root)
        reader.receive_weights(WAIT_S)
        expected["x"] += 5
        trainer.send_weights("policy", expected)
        assert same(reader.receive_weights(WAIT_S), expected)
        assert same(trainer_at(root).receive_weights(WAIT_S), expected)
        assert not [path for path in root.rglob("*") if ".tmp-" in path.name]

    def test_a_reader_killed_under_way_keeps_nothing_but_its_lease(self, root):
        trainer, own, _ = published(root, 2, keyframe_every=0)
        with running_python(KILLED_READER, root) as child:
            assert child.stdout.readline() == "reading\n"
            child.send_signal(signal.SIGKILL)
            child.wait(WAIT_S)
        assert list((root / "readers").iterdir())
        trainer.send_weights("policy", own)
        assert same(trainer_at(root).receive_weights(WAIT_S), own)

    def test_a_full_disk_half_way_costs_one_version(self, root):
        python(LIMITED, root)


KILLED_TRAINER = """
import os, sys, torch, torchrl_ext as tx
from torchrl_ext.stores.versions import Versions
from torchrl_ext.weights.source import MappingSource
root, point = sys.argv[1:]
weights = {"x": torch.full((500,), 1.0), "y": torch.arange(500.0)}
def stop(*_):
    print("now", flush=True)
    sys.stdin.read()
class Hanging(MappingSource):
    def __iter__(self):
        yield next(super().__iter__())
        stop()
trainer = tx.DeltaTransport(root, keyframe_every=3 if point == "in a keyframe" else 0)
trainer.send_weights(weights)
weights["x"] += 1
trainer.send_weights(weights)
weights["x"] += 1
if point.startswith("in"):
    trainer.send_weights(Hanging(weights))
if point == "before the rename":
    os.rename = stop
else:
    Versions.advance = stop
trainer.send_weights(weights)
"""

KILLED_READER = """
import sys, torchrl_ext as tx
from torchrl_ext.stores import LocalStore
real = LocalStore.get
def get(self, key):
    if key.endswith(".bin"):
        print("reading", flush=True)
        sys.stdin.read()
    return real(self, key)
LocalStore.get = get
tx.DeltaTransport(sys.argv[1]).receive_weights(60)
"""

LIMITED = """
import resource, signal, sys, torch, torchrl_ext as tx
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trainer, weights = tx.DeltaTransport(sys.argv[1], keyframe_every=0), {"x": torch.randn(50_000)}
reader = tx.DeltaTransport(sys.argv[1])
trainer.send_weights(weights)
weights["x"] = torch.randn(50_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    trainer.send_weights(weights)
except tx.errors.StoreError as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError("nothing failed")
assert not reader.receive_weights(60)["x"].equal(weights["x"])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trainer.send_weights(weights)
assert reader.receive_weights(60)["x"].equal(weights["x"])
assert tx.DeltaTransport(sys.argv[1]).receive_weights(60)["x"].equal(weights["x"])
"""


class TestCollection:
    def test_never_races_readers_that_join_and_follow(self, root):
        own, stop, failures, seen = weights(), threading.Event(), [], []
        trainer = trainer_at(root, keyframe_every=3)
        trainer.send_weights("policy", own)

        def read(make):
            reader = make()
            try:
                while not stop.is_set():
                    reader = make() if make is not None and len(seen) % 2 else reader
                    received = reader.receive_weights(0.2)
                    if received is not None:
                        assert int(received["c.count"][0]) == reader.received_version
                        seen.append(reader.received_version)
            except Exception as error:  # noqa: BLE001 - a thread hands everything on
                failures.append(error)

        own["c.count"][0] = 1
        stop_at = 60
        own["c.count"][0] = 2
        trainer.send_weights("policy", own)
        threads = [threading.Thread(target=read, args=(lambda: trainer_at(root),)) for _ in range(2)]
        for version in range(3, stop_at):
            if version == 4:
                for thread in threads:
                    thread.start()
            step(own, version)
            own["c.count"][0] = version
            trainer.send_weights("policy", own)
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures, failures
        assert len(set(seen)) > 3
        assert len(list(root.glob("weight_v*"))) <= 6

    def test_a_lease_keeps_versions_and_an_expired_one_does_not(self, root):
        trainer, own, _ = published(root, 2, keyframe_every=2)
        chain = Chain(LocalStore(root))
        with chain.lease(chain.route(2)):
            for version in range(3, 8):
                step(own, version)
                trainer.send_weights("policy", own)
            assert folder(root, 2).exists()
        expired = Chain(LocalStore(root), lease_s=-1.0)
        with expired.lease(expired.route(7)):
            trainer.send_weights("policy", own)
            assert not folder(root, 2).exists()


def test_a_manifest_of_another_version_is_refused(root):
    published(root, 3, keyframe_every=0)
    shutil.rmtree(folder(root, 3))
    shutil.copytree(folder(root, 2), folder(root, 3))
    with pytest.raises(IntegrityError, match="says that it is version 2"):
        trainer_at(root).receive_weights(WAIT_S)


def test_a_delta_of_another_model_is_refused_by_name(tmp_path, root):
    published(root, 2, keyframe_every=0)
    other = trainer_at(tmp_path / "other", keyframe_every=0)
    tensors = {"a.weight": torch.randn(3), "z": torch.randn(4)}
    for _ in range(2):
        other.send_weights("policy", tensors)
        tensors["z"] += 1
    reader = trainer_at(root)
    run = Chain(LocalStore(root)).run_id(1)
    shutil.copytree(folder(tmp_path / "other", 2), folder(root, 3))
    rewrite(folder(root, 3) / "manifest.json", lambda m: m.update(version=3, base_version=2, base_run_id=run))
    (root / "latest").write_text("3\n")
    with pytest.raises(ManifestError, match=r"a.weight"):
        reader.receive_weights(WAIT_S)
