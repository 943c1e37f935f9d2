"""Trainers of several ranks and tensor-parallel engines: each worker gets its slices from the ranks that hold them.

Ranks and engines are processes; an engine (`tests.transports.sharded_engine`) has two workers.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

import torchrl_ext as tx
from tests.processes import WAIT_S, running_python
from tests.transports.members import beside
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.kernels.base import LINEAR, POSITION
from torchrl_ext.testing import free_port
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.sharded import rounds
from torchrl_ext.transports.sharded import trainer as trainer_module
from torchrl_ext.transports.sharded.plans.plan import make_plan
from torchrl_ext.transports.sharded.rounds import RoundReceiver
from torchrl_ext.weights.source import MappingSource, WeightSource

ENGINE = "from tests.transports.sharded_engine import serve; serve(2)"

PRELUDE = """
import datetime, json, sys, torch, torch.distributed as dist, torchrl_ext as tx
from torch import nn
from torch.distributed.fsdp import fully_shard
from tests.transports import sharded_engine
from tests.transports.sharded_engine import LineEngine
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource, as_source

rank, world, port, ports = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
)
torch.set_num_threads(1)

def policy():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 80), nn.LayerNorm(80), nn.Linear(80, 64, bias=False))
    for part in (made[1], made[3], made):
        fully_shard(part)
    return made

def step(made):
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter += 0.5 + number

def engines():
    return Pool([LineEngine(one, 2) for one in ports]) if rank == 0 else None

def expected(made, dtype=torch.float32):
    return sharded_engine.expected({name: tensor.to(dtype) for name, tensor in as_source(made)})  # gathers

def sender_of(made, transport, **more):
    sender = tx.WeightSender(transport, engines(), rank=rank, **more)
    sender.register_model(made)
    return sender
"""


@contextmanager
def engines(count=1):
    """Engines in processes of their own; yields their ports and processes."""
    with ExitStack() as stack:
        children = [stack.enter_context(running_python(ENGINE)) for _ in range(count)]
        yield [int(child.stdout.readline()) for child in children], children


def run_ranks(code, ports, world=2):
    """What each rank printed, once all have ended well."""
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(running_python(PRELUDE + code, rank, world, port, json.dumps(ports)))
            for rank in range(world)
        ]
        statuses = [child.wait(WAIT_S) for child in ranks]
        said = [child.stdout.read() for child in ranks]
    assert statuses == [0] * world, said
    return said


SLICES = """
made = policy()
sender = sender_of(made, tx.make_transport("sharded", bucket_bytes=8192, carrier=CARRIER))
for version in (1, 2, 3):
    step(made)
    report = sender.update_weights()
    wanted = expected(made)
    if rank == 0:
        for engine in sender.engine.each():
            state = engine.state()
            assert state["held"] == wanted and state["version"] == version and not state["paused"], state
        assert report.verified and report.proof == "in place", report
        print(json.dumps([report.rank_bytes, report.worker_bytes, report.model_bytes]), flush=True)
    else:
        assert report.version == version
for version, only in ((4, {"1.weight", "2.bias"}), (5, None), (6, {"3.weight"})):
    before = expected(made)
    step(made)
    after = expected(made)
    report = sender.update_weights(only=None if only is None else sorted(only))
    if rank == 0:
        metas = [meta for meta in as_source(made).params() if only is None or meta.name in only]
        named = {meta.name for meta in metas}
        wanted = [{name: (new if name in named else old)[name] for name in old} for old, new in zip(before, after)]
        for engine in sender.engine.each():
            assert engine.state()["held"] == wanted and engine.state()["version"] == version
        needed = sum(meta.nbytes * (1 if len(meta.shape) > 1 else 2) for meta in metas)  # vectors go to both workers
        assert (report.part, report.bytes) == (only is not None, needed), (report, needed)
        assert sum(report.worker_bytes) < 1.05 * needed + 512  # and what frames them
sender.shutdown()
"""


@pytest.mark.parametrize(("world", "carrier"), [(2, "nixl"), (4, "group")])
def test_every_worker_gets_its_slices_and_no_more(world, carrier):
    if carrier == "nixl":
        pytest.importorskip("nixl_cu12", reason="pip install torchrl_ext[nixl]")
    with engines() as (ports, _):
        said = run_ranks(f"CARRIER = {carrier!r}\n{SLICES}", ports, world)
    for line in said[0].splitlines():
        sent, received, model = json.loads(line)
        assert len(sent) == world and len(received) == 2
        assert max(sent) <= 1.10 * sum(sent) / world
        assert sum(received) == sum(sent)
        assert max(received) < 0.55 * model


ELASTIC = """
made, every, costs = policy(), list(ports), []
ports[:] = every[:1]
sender = sender_of(made, tx.make_transport("sharded", bucket_bytes=8192, timeout_s=20), dtype=torch.bfloat16)
for served in (every[:1], every[:2], every[1:]):
    if rank == 0 and served != ports:
        ports[:] = served
        sender._connect_to(engines())
    dist.barrier()
    step(made)
    report = sender.update_weights()
    wanted = expected(made, torch.bfloat16)
    if rank == 0:
        assert [engine.state()["held"] for engine in sender.engine.each()] == [wanted] * len(served), report
        assert len(report.worker_bytes) == 2 * len(served) and max(report.worker_bytes) < 0.6 * report.model_bytes
        costs.append(sum(report.rank_bytes))
assert max(costs, default=0) <= 1.10 * min(costs, default=0)
sender.shutdown()
"""


def test_equal_engines_that_join_or_leave_cost_the_trainer_no_more_than_one():
    with engines(4) as (ports, _):
        run_ranks(ELASTIC, ports)


BAD = """
class Wrong(WeightSource):
    def __init__(self, kind):
        self.kind = kind
    def params(self):
        shape = (5, 6) if self.kind == "shapes" and rank == 1 else (5, 4)
        name = "theirs" if self.kind == "names" and rank == 1 else "ours"
        return (ParamMeta("first", torch.float32, (4, 4)), ParamMeta(name, torch.float32, shape))
    def __iter__(self):
        raise AssertionError("nothing is gathered")
    def shards(self):
        for meta in self.params():
            rows = meta.shape[0]
            first, stop = (0, 2) if rank == 0 else (2, rows)
            if self.kind == "a hole" and meta.name == "ours" and rank == 1:
                first = 3
            block = Block((first, 0), (stop, meta.shape[1]))
            yield Shard(meta, block, lambda block=block: torch.full(block.shape, 1.0 + rank))
sender = tx.WeightSender(tx.make_transport("sharded", timeout_s=20), engines(), rank=rank)
for kind in ("names", "shapes", "a hole"):
    wrong = Wrong(kind)
    try:
        sender.update_weights(wrong)
        print(json.dumps("accepted"), flush=True)
    except WeightSyncError as error:
        print(json.dumps(str(error)), flush=True)
right = Wrong("nothing")
report = sender.update_weights(right)
if rank == 0:
    assert report.verified, report
    assert not any(engine.state()["paused"] for engine in sender.engine.each())
sender.shutdown()
"""


def test_ranks_that_disagree_and_holes_are_named_on_every_rank_and_cost_nothing():
    with engines() as (ports, _):
        said = run_ranks(BAD, ports)
    for lines in said:
        names, shapes, hole = map(json.loads, lines.splitlines())
        assert "theirs" in names and "ours" in names
        assert "[5, 6]" in shapes and "[5, 4]" in shapes
        assert "ours" in hole and "nobody holds" in hole


@pytest.fixture
def ends():
    """A trainer of one rank and a worker, connected, in this process."""
    port = free_port()
    made = [
        tx.ShardedTransport("127.0.0.1", port, worker=worker, workers=1, timeout_s=20, bucket_bytes=4096)
        for worker in (None, 0)
    ]
    assert beside(*(partial(end.init_all_workers_group, {}) for end in made)) == [None, None]
    yield made
    for end in made:
        end.shutdown()


def sent(ends, weights):
    """What each side returned or raised."""
    trainer, worker = ends
    return beside(lambda: trainer.send_weights(weights), lambda: worker.receive_weights(WAIT_S))


def test_rows_that_a_worker_cannot_read_end_the_update_on_both_sides_before_a_byte_moves(ends, monkeypatch):
    hand_out = trainer_module.hand_out

    def damaged(group, number, plan):
        hand_out(group, number, plan)
        group.notes.put(f"{group.generation}/plan/{number}/1", {"table": 7})

    monkeypatch.setattr(trainer_module, "hand_out", damaged)
    outcome, received = sent(ends, {"first": torch.ones(4, 4), "second": torch.ones(8)})
    assert isinstance(received, tx.WeightSyncError), received
    assert "a transfer plan that cannot be read" in str(received)
    assert isinstance(outcome, tx.WeightSyncError) and "rank 1 (pid" in str(outcome), outcome


def test_a_plan_is_kept_from_update_to_update_and_made_again_for_other_tensors(ends, monkeypatch):
    made = []
    monkeypatch.setattr(trainer_module, "make_plan", lambda *args, **more: made.append(1) or make_plan(*args, **more))
    weights = {"first": torch.ones(4, 4), "second": torch.ones(8)}
    for update, (names, plans) in enumerate([("first second", 1), ("first second", 1), ("second", 2), ("second", 2)]):
        some = {name: weights[name] + update for name in names.split()}
        outcome, received = sent(ends, some)
        assert outcome is None and received.keys() == some.keys(), (outcome, received)
        assert all(torch.equal(received[name], tensor) for name, tensor in some.items()) and len(made) == plans


@pytest.fixture(params=[LINEAR, POSITION])
def known(request, monkeypatch):
    monkeypatch.setattr("torchrl_ext.transports.sharded.worker.LINEAR", request.param)
    return request.param


def test_both_sides_take_the_digest_that_the_worker_knows(known, ends, monkeypatch):
    taken, block_words = set(), rounds.block_words
    monkeypatch.setattr(rounds, "block_words", lambda *of: taken.add(of[-1]) or block_words(*of))
    weights = {"first": torch.arange(16.0).reshape(4, 4)}
    outcome, received = sent(ends, weights)
    assert outcome is None and torch.equal(received["first"], weights["first"]), (outcome, received)
    assert taken == {known}


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
    own = RoundReceiver._round

    def damaged(self):
        own(self)
        for tensor, _ in self._targets.values():
            tensor.view(-1)[:1] += 1

    monkeypatch.setattr(RoundReceiver, "_round", damaged)
    outcome, received = sent(ends, {"first": torch.ones(4, 4)})
    assert isinstance(received, IntegrityError) and "'first'" in str(received)
    assert isinstance(outcome, tx.WeightSyncError) and "'first'" in str(outcome)


def test_what_an_end_moves_in_a_round_begins_in_one_call(ends, monkeypatch):
    begun, open_calls = {0: [], 1: []}, {0: False, 1: False}  # over NCCL such a call is a group

    @contextmanager
    def together(self):
        begun[self.rank].append([])
        open_calls[self.rank] = True
        yield
        open_calls[self.rank] = False

    def counted(own):
        def move(self, flat, peer):
            assert open_calls[self.rank], "a transfer outside of any round"
            begun[self.rank][-1].append(flat.numel())
            return own(self, flat, peer)

        return move

    monkeypatch.setattr(Group, "together", together)
    for name in ("send", "receive"):
        monkeypatch.setattr(Group, name, counted(getattr(Group, name)))
    outcome, received = sent(ends, {name: torch.ones(700) for name in "abcd"})  # of which a bucket holds one
    assert outcome is None, (outcome, received)
    assert begun == {0: [[2800]] * 4 + [[64]], 1: [[2800]] * 4 + [[64]]}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"carrier": "post"}, "there is no carrier 'post'"),
        ({"carrier": "nixl", "backend": "gloo"}, "takes no backend 'gloo'"),
        ({"backend": "nixl"}, "takes no backend 'nixl'"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"worker": 2, "workers": 2}, "worker 2 does not exist among 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        tx.ShardedTransport(**settings)
