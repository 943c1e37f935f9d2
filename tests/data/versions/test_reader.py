"""Host copies beside an engine, which follow after the pause; and a worker that reads only the blocks that it needs."""

from dataclasses import replace

import pytest
import torch

from tests.data.transports.chains import checkpoint, published, same, trainer_at
from tests.data.versions.test_damage import NEW, OLD, route_of
from tests.data.versions.test_damage import published as published_delta
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.deltas import streams
from torchrl_ext.data.deltas.bits import Piece
from torchrl_ext.data.deltas.blocks import KINDS, decode_block
from torchrl_ext.data.landing.patcher import Patcher, compare
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.versions import open_route
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.digests import PositionDigest, position_digest
from torchrl_ext.testing import any_bits


@pytest.fixture(params=["ulp", "context"])
def chain(request, tmp_path):
    """A reader that holds version 1 of 4 with host copies of everything, and what each version is."""
    _, _, history = published(tmp_path / "root", 4, encoding=request.param, keyframe_every=0)
    store = LocalStore(tmp_path / "root")
    reader = ChainReader(Chain(store), copies=lambda name: True)
    assert same(dict(reader.tensors(reader.open(1), {})), history[1])
    return reader, history


def test_host_copies_follow_when_the_next_version_is_looked_for(chain):
    reader, history = chain
    second = reader.changes(2)
    reader.advance(second)
    assert same(reader.mirror, history[1])
    later = reader.changes(3)
    assert same(reader.mirror, history[2]) and later.held == reader.held
    reader.advance(later)
    assert same(dict(reader.tensors(reader.open(4), {})), history[4])
    assert reader.changes(4) is not None and same(reader.mirror, history[4])
    with pytest.raises(IntegrityError, match="version 1 is not the one held"):
        reader.advance(second)
    assert reader.changes(4) is None
    assert same(dict(reader.tensors(reader.open(4), {})), history[4])


@pytest.mark.parametrize("error", [IntegrityError("a payload went bad"), MemoryError()], ids=["damage", "no memory"])
def test_copies_that_stopped_half_way_are_not_built_on(chain, error):
    reader, history = chain
    second = reader.changes(2)

    def breaking(wanted):
        yield next(iter(second.patches(wanted)))
        raise error

    reader.advance(replace(second, patches=breaking))
    if isinstance(error, MemoryError):
        with pytest.raises(MemoryError):
            reader.changes(3)
    assert reader.changes(3) is None
    assert reader.held is None
    assert same(dict(reader.tensors(reader.open(3), {})), history[3])
    assert same(reader.mirror, history[3])
    assert reader.changes(4) is not None


@pytest.mark.parametrize("at", [0, 1, 2])
def test_reader_with_partial_digests_begins_at_the_base(tmp_path, at):
    """Version 1 changes only what has no digest, so nobody can tell it from the base; version 2 is read in full."""
    own, history = {"read": torch.zeros(50), "packed": torch.zeros(50)}, []
    base, trainer = checkpoint(tmp_path / "base", own), None
    for name in (None, "packed", "read"):
        if name is not None:
            own[name][3 * len(history)] += 1
            trainer = trainer or trainer_at(tmp_path / "root", base=base, keyframe_every=0)
            trainer.send_weights("policy", own)
        history.append({name: tensor.clone() for name, tensor in own.items()})
    reader = ChainReader(Chain(LocalStore(tmp_path / "root")), str(base), copies="packed".__eq__)
    reader.adopt(2, lambda: {"read": position_digest(history[at]["read"]).hex()})
    if at == 2:
        assert reader.held is None and reader.changes(2) is None
        return
    assert reader.held is not None and reader.held[1] == 0
    assert same(reader.mirror, {"packed": history[0]["packed"]})
    assert same(dict(reader.changes(2).whole(["packed"])), {"packed": own["packed"]})


@pytest.mark.parametrize("kind", KINDS)
def test_delta_decodes_each_range_once_for_any_tensor_order(kind, monkeypatch):
    one, decoded = published_delta(kind), []
    monkeypatch.setattr(open_route, "decode_block", lambda *args: decoded.append(args[3:5]) or decode_block(*args))
    for names in (list(OLD), list(OLD)[::-1], sorted(OLD, key=lambda name: OLD[name].numel())):
        decoded.clear()
        route = route_of(one.manifest, one.files)
        assert same(dict(route.at_end((name, OLD[name].clone()) for name in names)), NEW)
        assert len(decoded) == len(set(decoded)) == one.manifest.blocks.size
        assert same(dict(route.whole(OLD, names)), NEW)


WORKERS = 8


def rows(tensor, number):
    """The rows that worker ``number`` holds of a tensor; of one with one dimension, all."""
    whole = Block.whole(tensor.shape)
    if tensor.dim() < 2:
        return whole
    size = tensor.shape[0] // WORKERS
    return Block((number * size, *whole.start[1:]), ((number + 1) * size, *whole.stop[1:]))


class Worker:
    """Holds rows of each tensor, reads the blocks that it needs, and lands them."""

    def __init__(self, root, number):
        chain = Chain(LocalStore(root))
        self.blocks = {
            meta.name: rows(torch.empty(meta.shape, device="meta"), number) for meta in chain.version(1).params
        }
        self.reader = ChainReader(chain, slices={name: (block,) for name, block in self.blocks.items()})
        own = dict(self.reader.tensors(self.reader.open(1), {}))
        self.live, pieces = self.part(own), {}
        for name, tensor in own.items():
            offset = self.blocks[name].start[0] * tensor.stride(0)
            pieces[name] = [Piece(destination=self.live[name], offset=offset, strides=tensor.stride())]
        self.patcher = Patcher(pieces)

    def part(self, tensors):
        blocks = self.blocks.items()
        return {name: tensors[name][block.within(Block.whole(tensors[name].shape))].clone() for name, block in blocks}

    def follow(self, version):
        """Land a version; return the digests of what this worker holds then, and those of the trainer."""
        changes = self.reader.changes(version)
        found = self.patcher.stage(changes)
        self.patcher.commit()
        self.reader.advance(changes)
        return found, changes.digests


def test_worker_reads_and_lands_only_the_blocks_of_its_rows(tmp_path, monkeypatch):
    """Workers catch up over versions 2 and 3 at once, then follow to 4; their digests add up to the trainer's."""
    monkeypatch.setattr(streams, "BLOCK_UNITS", 1 << 12)
    trainer, generator = trainer_at(tmp_path, encoding="ulp", keyframe_every=0), torch.Generator().manual_seed(0)
    own = {"up": any_bits(torch.bfloat16, 512, 320), "norm": any_bits(torch.bfloat16, 40)}
    own |= {"down": any_bits(torch.bfloat16, 320, 512), "gate": any_bits(torch.float32, 512, 256)}
    trainer.send_weights("policy", own)
    workers = [Worker(tmp_path, number) for number in range(WORKERS)]
    for version in (2, 3, 4):
        for tensor in own.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.05] = version
        trainer.send_weights("policy", own)
        if version == 2:
            continue
        sums = {name: PositionDigest() for name in own}
        for worker in workers:
            found, expected = worker.follow(version)
            assert same(worker.live, worker.part(own))
            for name, digest in found.items():
                sums[name] = sums[name] + digest if own[name].dim() > 1 else digest
        compare(sums, expected)
    delta, read = Chain(LocalStore(tmp_path)).version(4).delta, [worker.reader.read_bytes for worker in workers]
    total, largest = sum(delta.files.values()), int(delta.blocks["nbytes"].max())
    assert all(0 < nbytes <= total / WORKERS + len(delta.params) * largest for nbytes in read) and sum(read) >= total
