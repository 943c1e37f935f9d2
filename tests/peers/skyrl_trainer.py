"""SkyRL's trainer-side weight sync, with the backend's name swapped; it runs where vLLM is, beside files of SkyRL's.

`build_trainer_engine` of SkyRL's development branch ends in the call below. Prints one line per update.
"""

import importlib.util
import json
import sys
from pathlib import Path

import requests
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.models import tiny_model
from torchrl_ext.compat.vllm_api import TorchRLExtTrainerInitInfo


def loaded(folder, name):
    spec = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder, root, urls, seeds):
    torch.set_num_threads(1)
    model = tiny_model(seeds[0])
    client = loaded(folder, "control_plane").SkyrlWeightSyncClient(urls, 1)
    source = loaded(folder, "sources").FsdpWeightSource(model, torch.float32)
    told = TorchRLExtTrainerInitInfo("delta", {"root": root}, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(told, client=client, source=source)
    assert not engine.skyrl_handles_prefix_cache_reset and not engine.skyrl_force_disable_expandable_segments
    assert engine.skyrl_empty_cache_after_send and engine.client is client
    for seed in seeds:
        model.load_state_dict(tiny_model(seed).state_dict())
        for url in urls:
            requests.post(f"{url}/pause?mode=keep&clear_cache=false", timeout=60).raise_for_status()
        report = engine.send_weights()
        for url in urls:
            requests.post(
                f"{url}/reset_prefix_cache?reset_running_requests=true&reset_external=true", timeout=60
            ).raise_for_status()
            requests.post(f"{url}/resume", timeout=60).raise_for_status()
        print(json.dumps({"version": report.version, "proof": report.proof}), flush=True)
        sys.stdin.readline()
    engine.shutdown()
    client.close()


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
