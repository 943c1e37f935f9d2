"""Trainers of several ranks and tensor-parallel engines: each worker gets its slices from the ranks that hold them.

Ranks are processes; the engines (`tests.data.sharded.sharded_engine`) have two workers each, in threads of rank 0.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchrl_ext as tx
from tests.data.group.members import beside
from tests.data.sharded import sharded_engine
from tests.data.sharded.shard_ranks import Blocks, chunk
from tests.data.sharded.sharded_engine import Served, SliceLoader, SocketPort, StageLoader
from tests.processes import WAIT_S
from tests.ranks import on_ranks
from torchrl_ext.base.errors import IntegrityError, StaleBaseError
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.group.store import HostedStore
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import MappingSource, WeightSource
from torchrl_ext.testing import free_port


def fsdp_policy():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 80), nn.LayerNorm(80), nn.Linear(80, 64, bias=False))
    for part in (made[1], made[3], made):
        fully_shard(part)
    return made


def step(made):
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter += 0.5 + number


def expected(made):
    return sharded_engine.expected({name: tensor.bfloat16() for name, tensor in as_source(made)})  # gathers


def held(served):
    return [loader.held() for loader in served.loaders]


def client(served):
    return Engine.of(SocketPort(served.listen()))


@contextmanager
def sending(rank, served, dtype=None, **settings):
    """A sender on every rank; rank 0 drives the engines."""
    settings = {"bucket_bytes": 8192, "timeout_s": 20, **settings}
    engines = Fleet([client(one) for one in served]) if rank == 0 else None
    sender = tx.WeightSender(tx.make_transport("sharded", **settings), engines, rank=rank, dtype=dtype, finite=False)
    yield sender
    sender.shutdown()


@on_ranks(2, 4)
def test_every_worker_gets_its_slices_and_no_more(rank, world, folder):
    """Cast to bfloat16, whole and in part; two equal engines cost the trainer's ranks no more than one."""
    made, served, costs = fsdp_policy(), [Served(), Served()], []
    with sending(rank, served[:1], dtype=torch.bfloat16) as sender:
        sender.register_model(made)
        for version, only in enumerate((None, None, {"1.weight", "2.bias"}, None, {"3.weight"}), 1):
            before = expected(made)
            step(made)
            after = expected(made)
            report = sender.update_weights(only=None if only is None else sorted(only))
            assert report.version == version
            if rank != 0:
                continue
            metas = [meta for meta in as_source(made).params() if only is None or meta.name in only]
            named = {meta.name for meta in metas}
            wanted = [old | {name: new[name] for name in named} for old, new in zip(before, after, strict=True)]
            assert held(served[0]) == wanted and (served[0].version, served[0].paused) == (version, False)
            assert (report.verified, report.proof, report.part) == (True, "in place", only is not None), report
            needed = sum(2 * meta.numel * (1 if len(meta.shape) > 1 else 2) for meta in metas)  # vectors go to both
            assert report.bytes == needed and sum(report.worker_bytes) == sum(report.rank_bytes) < 1.05 * needed + 512
            assert len(report.rank_bytes) == world and len(report.worker_bytes) == 2
            if only is None:
                assert max(report.rank_bytes) <= 1.10 * sum(report.rank_bytes) / world
                assert max(report.worker_bytes) < 0.55 * report.model_bytes
                costs = [sum(report.rank_bytes)]
        for now in (served, served[1:]):
            sender.init_all_workers_group(vllm_engine=Fleet([client(one) for one in now]) if rank == 0 else None)
            step(made)
            report, wanted = sender.update_weights(), expected(made)
            if rank == 0:
                assert [held(one) for one in now] == [wanted] * len(now), report
                assert len(report.worker_bytes) == 2 * len(now)
                assert max(report.worker_bytes) < 0.6 * report.model_bytes
                costs.append(sum(report.rank_bytes))
        assert max(costs, default=0) <= 1.10 * min(costs, default=0)


@pytest.mark.parametrize("loader", [SliceLoader, StageLoader])
def test_slices_and_stages_are_proved(loader):
    weights, served = {name: torch.randn(3, 4) for name in "abc"}, Served(loader)
    with sending(0, [served]) as sender:
        report = sender.update_weights(weights)
    assert report.verified and (served.version, served.paused) == (1, False), report
    assert held(served) == sharded_engine.expected(weights, loader)


@on_ranks(2)
def test_shard_mismatch_and_holes_are_named_on_every_rank(rank, world, folder):
    def rows(name, shape, rank, world):
        return [chunk(shape, 0, rank, world)]

    def holed(name, shape, rank, world):
        return [chunk(shape, 0, 3 * rank, 4)] if name == "ours" else rows(name, shape, rank, world)

    def source(name="ours", columns=4, of=rows):
        return Blocks({"first": torch.ones(4, 4), name: torch.ones(8, columns)}, rank, world, of=of)

    served = Served()
    with sending(rank, [served]) as sender:
        for wrong, words in (
            (source("theirs" if rank else "ours"), ("theirs", "ours")),
            (source(columns=6 if rank else 4), ("[8, 6]", "[8, 4]")),
            (source(of=holed), ("ours", "no trainer rank holds")),
        ):
            with pytest.raises(tx.WeightSyncError) as met:
                sender.update_weights(wrong)
            assert all(word in str(met.value) for word in words), met.value
        report = sender.update_weights(source())
        assert rank or (report.verified and not served.paused), report


@on_ranks(2)
def test_shards_that_move_cost_one_more_join_and_no_update(rank, world, folder):
    """Members agree once for each connection, a part needs no word, and ranks whose shards moved agree anew."""

    def source(seed, dim):
        weights = {name: torch.full((8, 4), seed + ord(name)) for name in "abc"}
        return Blocks(weights, rank, world, of=lambda name, shape, rank, world: [chunk(shape, dim, rank, world)])

    served, notes, put = Served(), [], HostedStore.set
    with pytest.MonkeyPatch.context() as patch, sending(rank, [served]) as sender:
        patch.setattr(HostedStore, "set", lambda self, key, *of, **how: notes.append(key) or put(self, key, *of, **how))
        sender.holds(0)  # a part of it begins the connection, and is sent whole
        for seed, dim, only, agreements in ((1, 0, "b", 1), (2, 0, "b", 1), (3, 0, None, 1), (4, 1, "b", 2)):
            report = sender.update_weights(source(seed, dim), only=only)
            if rank == 0:
                assert report.verified and not served.paused and notes.count("shares") == agreements, report
                assert report.part == (seed == 2)
                names = "b" if report.part else "abc"
                wanted = sharded_engine.expected({name: torch.full((8, 4), seed + ord(name)) for name in names})
                assert [{name: one[name] for name in names} for one in held(served)] == wanted


@pytest.fixture
def ends():
    """A trainer of one rank and a worker, connected, in this process."""
    how = {"workers": 1, "timeout_s": 20, "bucket_bytes": 4096}
    port = free_port()
    made = [tx.ShardedTransport("127.0.0.1", port, worker=worker, **how) for worker in (None, 0)]
    assert beside(*(partial(end.init_all_workers_group, {}) for end in made)) == [None, None]
    yield made
    for end in made:
        end.shutdown()


def sent(ends, weights):
    """What each side returned or raised."""
    trainer, worker = ends
    return beside(lambda: trainer.send_weights(weights), lambda: worker.receive_weights(WAIT_S))


@pytest.mark.parametrize(
    "damaged, words",
    [
        (lambda shares: {"table": 7}, "the shares that rank 0 "),
        (lambda shares: shares | {"bucket_bytes": 64}, "made another transfer plan than rank 1 "),
    ],
    ids=["malformed", "other plan"],
)
def test_what_makes_no_plan_ends_the_update_on_both_sides(ends, monkeypatch, damaged, words):
    put = HostedStore.set

    def damage(self, key, value, **how):
        put(self, key, damaged(value) if key == "shares" else value, **how)

    monkeypatch.setattr(HostedStore, "set", damage)
    outcome, received = sent(ends, {"first": torch.ones(4, 4), "second": torch.ones(8)})
    assert isinstance(received, tx.WeightSyncError) and words in str(received), received
    assert isinstance(outcome, tx.WeightSyncError) and "rank 1 (pid" in str(outcome), outcome


def test_other_parameters_end_a_standalone_connection(ends):
    weights = [{name: torch.randn(3, 4)} for name in "ab"]
    assert torch.equal(sent(ends, weights[0])[1]["a"], weights[0]["a"])
    outcome, received = sent(ends, weights[1])
    assert isinstance(outcome, StaleBaseError) and "trainer rank 0 " in str(outcome)
    assert isinstance(received, tx.WeightSyncError) and "connected" in str(received)
    assert beside(*(partial(end.init_all_workers_group, {}) for end in ends)) == [None, None]
    assert torch.equal(sent(ends, weights[1])[1]["b"], weights[1]["b"])


def test_what_a_source_only_makes_whole_goes_whole_and_is_named(ends, monkeypatch):
    prepare, handoffs = ends[0].prepare, []
    monkeypatch.setattr(ends[0], "prepare", lambda *of: handoffs.append(prepare(*of)) or handoffs[-1])

    class Computed(MappingSource):
        def shards(self):
            return WeightSource.shards(self)

    weights = {"first": torch.randn(40, 40), "second": torch.randn(8)}
    outcome, received = sent(ends, Computed(weights))
    assert outcome is None and all(torch.equal(received[name], tensor) for name, tensor in weights.items())
    (stats,) = (handoff.stats for handoff in handoffs)
    assert set(stats.whole) == {"first", "second"} and stats.worker_bytes == stats.rank_bytes


def test_damage_on_the_way_is_named_and_the_version_is_not_taken(ends, monkeypatch):
    send, digests_bytes = Group.send, 64

    def damaged(self, flat, to):
        return send(self, flat if flat.numel() == digests_bytes else flat ^ 1, to)

    monkeypatch.setattr(Group, "send", damaged)
    outcome, received = sent(ends, {"first": torch.ones(4, 5)})
    assert isinstance(received, IntegrityError) and "'first'" in str(received)
    assert isinstance(outcome, tx.WeightSyncError) and "'first'" in str(outcome)
