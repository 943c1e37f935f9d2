"""A trainer that knows only vLLM: its factory, its client, its `ModuleSource` under FSDP2; in vLLM's environment.

Rank 0 prints the report of each update, with the server resumed, and waits for a line before the next one.
"""

import datetime
import json
import sys

import requests
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from tests.models import tiny_model
from tests.pages import ROOT, blocks


def main(rank, world, port, url, transport, settings, seeds):
    torch.set_num_threads(1)
    load_general_plugins()
    assert "torchrl_ext" in WeightTransferTrainerFactory._registry
    from torchrl_ext.compat.vllm_api import TorchRLExtTrainerInitInfo

    where = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": datetime.timedelta(seconds=300)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **where)
    model = tiny_model(seeds[0])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    space = {"rank": rank, "model": model}

    def first():
        """Make the engine and send: for delta by the block of the page."""
        if transport == "delta":
            (block,) = [one for one in blocks(ROOT / "docs/migrate.md") if one.needs == "a trainer with vLLM"]
            exec(block.code.replace("/shared/updates", settings["root"]).replace("http://10.0.0.5:8000", url), space)
            return space["report"]
        told = TorchRLExtTrainerInitInfo(transport, settings, rank=rank)
        client = HTTPVLLMWeightSyncClient(url)
        space["engine"] = WeightTransferTrainerFactory.trainer_init(told, client=client, source=ModuleSource(model))
        return space["engine"].send_weights()

    for seed in seeds:
        with torch.no_grad():
            for (_, mine), (_, other) in zip(
                model.named_parameters(), tiny_model(seed).named_parameters(), strict=True
            ):
                mine.copy_(distribute_tensor(other.detach(), mine.device_mesh, mine.placements))
        if rank == 0:
            requests.post(f"{url}/pause?mode=keep", timeout=60).raise_for_status()
        dist.barrier()
        report = space["engine"].send_weights() if "engine" in space else first()
        assert isinstance(space["engine"], TrainerWeightTransferEngine)
        if rank == 0:
            everywhere = {"reset_running_requests": "true", "reset_external": "true"}
            requests.post(f"{url}/reset_prefix_cache", params=everywhere, timeout=60).raise_for_status()
            requests.post(f"{url}/resume", timeout=60).raise_for_status()
            print(json.dumps(report.to_json()), flush=True)
            sys.stdin.readline()
        dist.barrier()
    space["engine"].shutdown()
    assert not {"torchrl", "tensordict"} & {*sys.modules}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
