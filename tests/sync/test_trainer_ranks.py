"""`WeightSender` on several trainer ranks, real processes over gloo: each finds its way back into step by itself."""

from __future__ import annotations

import pytest

from tests.weights.shards.ranks import outcomes_of, require_passed

WORLD = 2

PRELUDE = """
from contextlib import suppress
import torchrl_ext as tx
from torchrl_ext.errors import ManifestError, UpdateError, WeightSyncError
from torchrl_ext.proof.outputs import Probe
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.weights.source import WeightSource, as_source

class Gathered(WeightSource):
    '''A policy whose every tensor is gathered by all ranks, as FSDP's are.'''

    def __init__(self, tensors):
        self.tensors, self.passes = tensors, 0

    def params(self):
        return as_source(self.tensors).params()

    def __iter__(self):
        self.passes += 1
        for name, tensor in self.tensors.items():
            found = tensor.clone()
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            yield name, found

class Collector:
    version = 0

    def increment_version(self):
        self.version += 1

def plain(step):
    '''Weights that need no gather.'''
    return {"a": torch.full((8,), float(step)), "b": torch.full((4,), float(step))}

def policy(step):
    '''What rank 0 has on step; other ranks hold zeros, which a gather replaces.'''
    value = float(step) if rank == 0 else 0.0
    return Gathered({"a": torch.full((8,), value), "b": torch.full((4,), value)})

served = {"a": torch.zeros(8), "b": torch.zeros(4)}

def made(name="disk", timeout_s=20.0, **settings):
    '''A sender per rank; rank 0's drives an engine, and it counts accepted updates.'''
    for tensor in served.values():
        tensor.zero_()
    root = {} if name == "memory" else {"root": folder}
    receiver = tx.WeightReceiver(served)
    engine = InProcessEngine(receiver) if rank == 0 else None
    sender = tx.WeightSender(tx.make_transport(name, timeout_s=timeout_s, **root), engine, **settings)
    sender.receiver, sender.counted = receiver, Collector()
    sender.register_collector(sender.counted)
    return sender

def serves(step, names=("a", "b")):
    assert rank != 0 or all(bool((served[name] == step).all()) for name in names), (step, served)

def in_step(sender, step, accepted):
    '''The next update reaches all ranks, which met before it, as in training.'''
    dist.barrier()
    sender.update_weights(policy(step))
    serves(step)
    versions = [None] * world
    dist.all_gather_object(versions, (sender.version, sender.counted.version))
    assert len({*versions}) == 1 and versions[0][1] == accepted, versions
"""

SCENARIOS = {
    "all ranks gather, and count the same versions": """
sender = made()
for step in (1, 2, 3):
    in_step(sender, step, step)
    assert sender.version == step
""",
    "a rank that cannot read its weights is named, and is in step with the next update": """
sender = made()
in_step(sender, 1, 1)
class Broken(Gathered):
    def params(self):
        raise ValueError("rank 1 lost its weights")
if rank == 1:
    with suppress(ValueError):
        sender.update_weights(Broken({"a": torch.zeros(8)}))
        raise AssertionError("it was not raised")
else:
    sender.update_weights(plain(2))
in_step(sender, 3, 3)
""",
    "rank 0 that fails before its first order lets nobody wait": """
sender = made()
in_step(sender, 1, 1)
try:
    sender.update_weights(None if rank == 0 else policy(2))  # rank 0 registered no model
except WeightSyncError as error:
    assert rank == 0 and "no weights to send" in str(error), error
else:
    assert rank == 1
in_step(sender, 3, 2)
""",
    "an engine that refuses fails rank 0's call, and no other rank counts it": """
sender = made()
in_step(sender, 1, 1)
if rank == 0:
    load = sender.engine.load
    def refusing(*given):
        sender.engine.load = load
        raise RuntimeError("out of memory")
    sender.engine.load = refusing
    with suppress(UpdateError):
        sender.update_weights(policy(2))
        raise AssertionError("it was not raised")
else:
    assert sender.update_weights(policy(2)).version == 1
in_step(sender, 3, 2)
assert sender.version == 3
""",
    "a rank that misses a call is in step with the next one": """
sender = made()
in_step(sender, 1, 1)
store = dist.distributed_c10d._get_default_store()
class Here(Gathered):
    def __iter__(self):
        store.set("rank 0 leads", "")
        return super().__iter__()
if rank == 0:
    sender.update_weights(plain(2))
    sender.update_weights(Here(plain(3)))
else:
    store.get("rank 0 leads")
    sender.update_weights(policy(3))
serves(3)
assert (sender.version, sender.counted.version) == (3, 3)
in_step(sender, 4, 4)
""",
    "some tensors are sent where every rank names them, and everything after a failure": """
sender = made()
in_step(sender, 1, 1)
source = policy(2)
report = sender.update_weights(source, only="b")
assert source.passes == 1 and (rank != 0 or report.part)
serves(2, "b")
serves(1, "a")
with suppress(ManifestError):
    sender.update_weights(policy(3), only="nothing.*")
    raise AssertionError("it was not raised")
report = sender.update_weights(policy(4), only="b")
assert rank != 0 or report.part, "nothing was sent, so the last version still holds"
sender.receiver.invalidate()
report = sender.update_weights(policy(5), only="b")
assert not report.part
serves(5)
in_step(sender, 6, 5)
""",
    "outputs are compared by all ranks": """
class Answers(InProcessEngine):
    def logprobs(self, prompts):
        return [[-float(served["a"][0])] * (len(prompt) - 1) for prompt in prompts]

def own(prompts):
    value = torch.tensor([float(step) if rank == 0 else 0.0])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)  # as a sharded model's forward pass
    return [[-float(value)] * (len(prompt) - 1) for prompt in prompts]

sender = made(verify="outputs", probe=Probe(prompts=((1, 2, 3),), compute=own))
if rank == 0:
    sender.init_all_workers_group({"a": (torch.float32, (8,)), "b": (torch.float32, (4,))}, Answers(served))
for step in (1, 2):
    report = sender.update_weights(policy(step))
    assert rank != 0 or report.proof == "outputs", report
    serves(step)
step = 9
with suppress(UpdateError):
    sender.update_weights(policy(3))
    assert rank == 1
step = 4
in_step(sender, 4, 3)
""",
    "ranks join before the first update, all of them or rank 0 by itself": """
for everywhere in (True, False):
    for name in ("disk", "memory"):
        sender = made(name)
        sender.register_model(source := policy(1))
        if everywhere or rank == 0:
            sender.init_all_workers_group()
        assert rank != 0 or sender.check_connection()
        sender.update_weights()
        serves(1)
        assert source.passes == 1 and sender.counted.version == 1
""",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of(SCENARIOS, PRELUDE, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_step(scenario, outcomes):
    require_passed(scenario, outcomes, WORLD)
