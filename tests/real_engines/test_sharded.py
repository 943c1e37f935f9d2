"""Real engines of two workers follow a trainer of two FSDP2 ranks: each worker gets its slices, from both ranks.

An engine starts with one checkpoint and gets two others. It then says what the trainer says, as near as when it
started.
"""

import datetime
import json
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import torchrl_ext as tx
from tests.kinds import kind_model
from tests.processes import calling, running_python
from tests.real_engines.cells import TP_2, by, sglang, vllm
from tests.real_engines.test_kinds import made, started
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.testing import free_port

pytestmark = pytest.mark.engine

WAIT_S = 300
CELLS = (
    vllm("qwen3", **TP_2, proofs=("rehearsed",)),
    vllm("qwen3-moe", **TP_2, proofs=("rehearsed",)),
    sglang("qwen3", **TP_2, proofs=("in place",)),
    sglang("qwen3-moe", parallel="ep 2", proofs=("in place",), **by(tensor_parallel_size=2, flags=("--ep-size", "2"))),
)
USUAL = {"sglang-qwen3-moe-ep 2"}  # vLLM by slices: tests.real_engines.test_turns and test_vllm_api


def be_a_rank(rank, port, engine, url, kind):
    """A trainer's rank of two, which updates twice; rank 0 reports each update, and waits for a line."""
    torch.set_num_threads(1)
    where, within = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=within)
    client = tx.make_engine(engine, url=url) if rank == 0 else None
    sender = tx.WeightSender(tx.make_transport("sharded", timeout_s=120), client, rank=rank)
    for seed in (1, 2):
        model = kind_model(kind, seed, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        report = sender.update_weights(model)
        if rank == 0:
            print(json.dumps(report.to_json()), flush=True)
            sys.stdin.readline()
        dist.barrier()
    sender.shutdown()
    dist.barrier()


def marked(cell):
    return pytest.param(cell, id=cell.name, marks=() if cell.name in USUAL else pytest.mark.exhaustive)


@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_two_worker_engine_matches_two_rank_trainer(cell, tmp_path):
    with started(cell, tmp_path) as engine:
        cold = engine.gap(made(cell, 0))
        for seed, report in zip((1, 2), followed(cell, engine), strict=True):
            gap = engine.gap(made(cell, seed))
            print(f"{cell.name}: {report['version']}, {report['proof']}, gap {gap:.2g}, cold {cold:.2g}")
            assert gap <= max(1e-4, 1.5 * cold)
            assert report["verified"] and report["proof"] in cell.proofs
            assert_slices(report, made(cell, seed))


def followed(cell, engine):
    """The reports of two updates, each yielded while the engine serves it."""
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                running_python(calling(be_a_rank, rank, port, cell.engine, engine.served.url, cell.kind))
            )
            for rank in range(2)
        ]
        for _ in range(2):
            line = ranks[0].stdout.readline()
            assert line, f"a rank ended: {[child.poll() for child in ranks]}"
            yield json.loads(line)
            ranks[0].stdin.write("\n")
            ranks[0].stdin.flush()
        assert [child.wait(WAIT_S) for child in ranks] == [0, 0]


def assert_slices(report, model):
    """Each worker got what it holds, and hardly more; both ranks sent about the same."""
    sent, received = report["rank_bytes"], report["worker_bytes"]
    assert len(sent) == len(received) == 2 and not report["whole"]
    assert sum(sent) == sum(received) and max(sent) <= 1.10 * sum(sent) / 2
    held = 0
    for name, tensor in as_source(model):  # norms and routers are whole on both workers
        held += tensor.nbytes if tensor.dim() < 2 or name.endswith("mlp.gate.weight") else tensor.nbytes / 2
    assert max(received) <= 1.02 * held
