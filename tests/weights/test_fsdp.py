"""FSDP2 trainers: real gloo ranks, each in a process of its own, gather in lockstep; rank 0 alone talks to engines."""

from __future__ import annotations

import pytest
import torch

from tests.weights.shards.ranks import outcomes_of, require_passed

PRELUDE = """
import torchrl_ext as tx
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import as_source, checked

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.randn(1, 3))  # rank 1 holds nothing of it
        self.other = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("steps", torch.tensor(3))
    def forward(self, x):
        return self.head(self.body(self.embed(x))) + self.one.sum() + self.other.sum()

def plain():
    torch.manual_seed(0)
    return Policy()

def sharded():
    policy = plain()
    fully_shard(policy.body)
    fully_shard(policy)
    return policy

def trained(policy):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return policy
"""

TWO_RANKS = {
    "every rank replays one order and the gathered values are the plain model's": """
policy, reference = sharded(), plain()
source = as_source(policy)
assert source.params() == as_source(reference).params(), (source.params(), as_source(reference).params())
for _ in range(2):
    found = {meta.name: tensor for meta, tensor in checked(source)}
    for name, tensor in as_source(reference):
        assert torch.equal(found[name], tensor), name
assert "head.weight" not in found and "embed.weight" in found
orders = [None] * world
dist.all_gather_object(orders, [meta.name for meta in source.params()])
assert orders[0] == orders[1]
""",
    "rank 0 keeps an engine at the trained weights": """
policy, served = sharded(), plain()
sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(served) if rank == 0 else None, rank=rank)
sender.register_model(policy)
for step in (1, 2):
    trained(policy)
    report = sender.update_weights()
    assert report.version == step == sender.version
reference = dict(as_source(policy))
for name, tensor in as_source(served):
    assert torch.equal(tensor, reference[name]) == (rank == 0 or name == "steps"), (rank, name)
assert report.verified == (rank == 0)
""",
    "rank 0 publishes the whole checkpoint on disk in another dtype": """
policy = trained(sharded())
sender = tx.WeightSender(tx.DiskTransport(folder, shard_bytes=128), rank=rank, dtype=torch.bfloat16)
sender.register_model(policy)
sender.update_weights()
reference = dict(as_source(policy))
dist.barrier()
received = tx.DiskTransport(folder).receive_weights(30)
assert set(received.keys()) == set(reference)
for name, tensor in reference.items():
    assert torch.equal(received[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
""",
    "a failure on rank 0 at any moment leaves no rank waiting": """
from torchrl_ext.errors import TransportError

class Broken(tx.MemoryTransport):
    def __init__(self):
        super().__init__()
        self.stop_after = 0
    def open(self, workers, params, within):
        if self.stop_after is None:
            raise TransportError("cannot open")
        return super().open(workers, params, within)
    def prepare(self, update, within):
        stream = iter(update.source)
        for _ in range(self.stop_after):
            next(stream)
        raise TransportError("cannot prepare")

policy, served = sharded(), plain()
transport = Broken()
sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank)
sender.register_model(policy)
for moment in (None, 0, 1, 4, len(as_source(policy).params())):
    transport.stop_after = moment
    try:
        sender.update_weights()
    except tx.WeightSyncError as error:
        assert rank == 0 and "cannot" in str(error)
    else:
        assert rank == 1
    dist.barrier()
""",
    "a part gathers nothing else, and no rank waits for another one whether it is sent, refused or too much": """
from torch.distributed.tensor import DTensor
from torchrl_ext.errors import TransportError

class Failing(tx.MemoryTransport):
    failing = False
    def prepare(self, update, within):
        if self.failing:
            raise TransportError("cannot prepare")
        return super().prepare(update, within)

gathered = []
whole = DTensor.full_tensor
DTensor.full_tensor = lambda self, **more: gathered.append(tuple(self.shape)) or whole(self, **more)
policy, served = sharded(), plain()
transport = Failing() if rank == 0 else tx.DiskTransport(folder)
sender = tx.WeightSender(transport, InProcessEngine(served) if rank == 0 else None, rank=rank)
sender.register_model(policy)
for step, (only, fails, sent) in enumerate([
    ("body", False, None), ("body.0", False, 2), ("body.2.bias", True, None), ("body.2.bias", False, None),
    (["one", "embed.weight"], False, 2), (None, False, None),
]):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    transport.failing, everything = fails and rank == 0, len(as_source(policy).params()) - 1  # a buffer is no shard
    before = {name: tensor.clone() for name, tensor in as_source(served)}
    gathered.clear()
    try:
        report = sender.update_weights(only=only)
        assert not (fails and rank == 0)
    except tx.WeightSyncError as error:
        assert fails and rank == 0 and "cannot prepare" in str(error), error
    assert len(gathered) == ((1 if fails else everything) if sent is None else sent), (step, gathered)
    if rank == 0 and not fails:
        assert report.part == (sent is not None), step
        now = dict(as_source(policy))
        for name, tensor in as_source(served):
            paths = [only] if isinstance(only, str) else only
            named = sent is None or any(name == path or name.startswith(path + ".") for path in paths)
            assert torch.equal(tensor, now[name] if named else before[name]), (step, name)
    elif not fails:
        dict(as_source(policy))  # rank 0 has gathered once more, for this test
try:
    sender.update_weights(only="nobody")
except tx.errors.ManifestError as error:
    assert "nobody" in str(error)
sender.update_weights()
""",
    "rank 0 leaves no gather and no forward pass, whatever stops it before it sends": """
from torchrl_ext.errors import ConcurrentUpdateError, StoreError
from torchrl_ext.proof.outputs import Probe
from torchrl_ext.transports.base import exclusive

class Down(tx.MemoryTransport):
    down = False
    def latest_version(self):
        if self.down:
            raise StoreError("the store is down")
        return super().latest_version()

def together(prompts):
    once = torch.ones(1)
    dist.all_reduce(once)
    return [[0.0] * (len(prompt) - 1) for prompt in prompts]

class Told(InProcessEngine):
    def logprobs(self, prompts):
        return [[0.0] * (len(prompt) - 1) for prompt in prompts]

policy, served, transport = sharded(), plain(), Down()
engine = Told(served) if rank == 0 else None
sender = tx.WeightSender(
    transport, engine, rank=rank, verify="outputs", probe=Probe(prompts=((1, 2),), compute=together)
)
sender.register_model(policy)
for kind in (StoreError, ConcurrentUpdateError):
    with exclusive(transport, "another sender's update") if kind is ConcurrentUpdateError else torch.no_grad():
        transport.down = rank == 0 and kind is StoreError
        try:
            sender.update_weights()
        except StoreError as error:
            raise AssertionError("the report is lost") from error
        except ConcurrentUpdateError:
            assert kind is ConcurrentUpdateError
        except tx.WeightSyncError as error:
            assert rank == 0 and "is down" in str(error), error
        else:
            assert rank == 1 and kind is StoreError
    transport.down = False
    dist.barrier()
assert sender.update_weights().version == sender.version == 1
""",
    "every rank knows the version in service, and its collectors count accepted updates": """
from dataclasses import replace
from torchrl_ext.errors import TransportError

class Counted:
    version = 0
    def increment_version(self):
        self.version += 1

class Failing(tx.DiskTransport):
    failing = False
    def prepare(self, update, within):
        return replace(super().prepare(update, within), ahead=self.fail)
    def fail(self, within):
        if self.failing:
            raise TransportError("no route there")

for source in (sharded(), plain()):  # gathered, and replicated as under DDP
    folder_of = f"{folder}/{type(source).__name__}"
    if rank == 0:
        early = tx.DiskTransport(folder_of)
        for _ in range(4):
            early.send_weights("policy", nn.Linear(1, 1))
        early.shutdown()
    transport, collector = Failing(folder_of) if rank == 0 else tx.MemoryTransport(), Counted()
    if rank == 0:
        sender = tx.WeightSender(transport, InProcessEngine(plain()), mapper=str)
    else:
        sender = tx.WeightSender(transport, rank=rank)
    sender.register_model(source)
    sender.register_collector(collector)
    sender.init_all_workers_group()
    assert transport.check_connection() == (rank == 0)
    told = []
    for step in range(4):
        transport.failing = step in (0, 2)
        try:
            told.append(sender.update_weights().version)
        except tx.WeightSyncError:
            assert rank == 0 and step in (0, 2)
            told.append(sender.version)
    assert told == [0, 6, 6, 8], told
    assert (sender.version, collector.version) == (8, 2)
    sender.shutdown()
    dist.barrier()
""",
    "a call that fails before anything is sent counts on every rank, and nobody waits for it": """
import time
from torchrl_ext.errors import ConfigError, ManifestError

class Counted:
    version = 0
    def increment_version(self):
        self.version += 1

meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in plain().state_dict().items()}
for source, gathers in ((sharded(), True), (plain(), False)):
    sender = tx.WeightSender(tx.MemoryTransport(timeout_s=600), InProcessEngine(plain()) if rank == 0 else None)
    collector = Counted()
    sender.register_model(source)
    sender.register_collector(collector)
    told = []
    wrongs = [{0: meta}, {0: 3, 1: 3}, {}] + ([] if gathers else [{1: meta}, {1: 3}]) + [{}]
    for wrong in wrongs:
        try:
            told.append(sender.update_weights(wrong.get(rank)).version)
        except (ConfigError, ManifestError):
            assert rank in wrong
            told.append("failed")
        dist.barrier()  # a rank is early, or late; here all are early
    expected = {0: ["failed", "failed", 1], 1: [0, "failed", 1]}[rank]
    if not gathers:
        expected += {0: [2, 3], 1: ["failed", "failed"]}[rank]
    accepted = 2 if gathers else 4
    assert told == [*expected, accepted], told
    assert (sender.version, collector.version) == (accepted, accepted), (sender.version, collector.version)
    sender.shutdown()
    dist.barrier()
""",
    "an update that is refused beside another one says nothing of it to other ranks": """
import threading
from torchrl_ext.errors import ConcurrentUpdateError

class Slow(tx.MemoryTransport):
    def prepare(self, update, within):
        inside.set()
        assert go_on.wait(60)
        return super().prepare(update, within)

inside, go_on, refused = threading.Event(), threading.Event(), []
sender = tx.WeightSender(Slow(), InProcessEngine(plain()) if rank == 0 else None)
policy = plain()

def beside():
    assert inside.wait(60)
    try:
        sender.update_weights(policy)
    except ConcurrentUpdateError:
        refused.append(1)
    go_on.set()

if rank == 0:
    threading.Thread(target=beside).start()
for version in (1, 2):
    assert sender.update_weights(policy).version == version == sender.version
    dist.barrier()
assert len(refused) == (rank == 0)
""",
    "a rank waits as long for rank 0 as the timeout of the transport lets it": """
from torchrl_ext.errors import DeadlineError
sender = tx.WeightSender(tx.MemoryTransport(timeout_s=0.01), InProcessEngine(plain()) if rank == 0 else None)
if rank == 1:
    try:
        sender.update_weights(nn.Linear(1, 1))  # no other scenario has this model
    except DeadlineError as error:
        assert "trainer rank 0 began no update within 0.3 s" in str(error), error
    else:
        raise AssertionError("rank 0 sent nothing")
""",
    "the store keeps no more the longer a trainer runs": """
sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(plain()) if rank == 0 else None)
policy, store, counts = plain(), dist.distributed_c10d._get_default_store(), []
for _ in range(4):
    sender.update_weights(policy)
    dist.barrier()
    counts.append(store.num_keys())
    dist.barrier()
assert counts[1] == counts[-1], counts
""",
    "models that transformers converts travel under the names of their checkpoints": """
from tests.models import converted_model
for kind in ("qwen3_moe", "qwen2_5_vl", "hrm_text"):
    model, reference = converted_model(kind), converted_model(kind)
    inner = getattr(model.model, "language_model", model.model)
    for layer in getattr(inner, "layers", ()):
        fully_shard(layer)
    fully_shard(model)
    source = as_source(model)
    assert source.params() == as_source(reference).params()
    found = {meta.name: tensor for meta, tensor in checked(source)}
    for name, tensor in as_source(reference):
        assert torch.equal(found[name], tensor), name
    assert not source.held()
    served = converted_model(kind, 1)
    sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(served) if rank == 0 else None, rank=rank)
    sender.register_model(model)
    assert sender.update_weights().verified == (rank == 0)
    for name, tensor in as_source(served):
        assert torch.equal(tensor, found[name]) == (rank == 0), (rank, name)
""",
    "what FSDP1 holds in flat pieces is refused on every rank, and nothing is published": """
import os
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrl_ext.errors import ConfigError, ManifestError

def flat(**how):
    torch.manual_seed(0)
    how["device_id"] = torch.device("cpu")
    outside = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)), **how)
    inside = nn.Sequential(nn.Linear(6, 6), FullyShardedDataParallel(nn.Linear(6, 9), **how))
    return outside, inside

for original in (False, True):
    for policy in flat(use_orig_params=original):
        sender = tx.WeightSender(tx.DiskTransport(folder), rank=rank)
        sender.register_model(policy)
        for send in (sender.update_weights, sender.init_all_workers_group, lambda: sender.update_weights(policy)):
            try:
                send()
            except ConfigError as error:
                assert "FSDP1" in str(error) and "fully_shard" in str(error), error
            else:
                raise AssertionError("a flat piece was taken for a checkpoint")
            dist.barrier()  # a rank that comes late takes the newest call of rank 0
        try:
            sender._transport.send_weights("policy", policy)
        except ConfigError as error:
            assert "FSDP1" in str(error), error
        else:
            raise AssertionError("a flat piece was taken for a checkpoint")
        sender.shutdown()
        try:
            as_source(TensorDict.from_module(policy).data).params()
        except ManifestError as error:
            assert "FSDP1" in str(error) and "fully_shard" in str(error), error
        else:
            raise AssertionError("a flat piece was taken for a parameter")
assert not os.path.exists(folder) or not [name for name in os.listdir(folder) if name.startswith("weight_v")]
""",
    "a parameter that diverges from the manifest is named and leaves no rank waiting": """
class Wrong(tx.WeightSource):
    def __init__(self, source):
        self.source = source
    def params(self):
        params = self.source.params()
        return (params[1], params[0], *params[2:]) if rank == 0 else params
    def __iter__(self):
        return iter(self.source)
source = Wrong(as_source(sharded()))
sender = tx.WeightSender(tx.DiskTransport(folder), rank=rank)
try:
    sender.update_weights(source)
except tx.WeightSyncError as error:
    assert rank == 0 and "parameter 0 of the source is" in str(error), error
else:
    assert rank == 1
dist.barrier()
""",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What became of each scenario on each rank; two processes run them one after the other."""
    return outcomes_of(TWO_RANKS, PRELUDE, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("scenario", TWO_RANKS)
def test_with_two_ranks(scenario, outcomes):
    require_passed(scenario, outcomes, 2)
