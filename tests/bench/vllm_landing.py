"""What landing costs in a vLLM model: run by `tests.bench.landing` with the interpreter that has vLLM.

Reads one JSON object from standard input and prints one line of JSON last. The model is vLLM's own Qwen3 class with
random weights, in this process and without a server, so that nothing else is timed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from torchrl_ext.cli.bench import changes, seconds
from torchrl_ext.data.transports.delta import DeltaTransport
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.vllm.model import VLLMModel
from torchrl_ext.engines.vllm.register import register
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.sync.sender import WeightSender

VLLM_ROUNDS = 3  # its patches take long


def main() -> None:
    """Build the model, then measure."""
    asked = json.load(sys.stdin)
    sys.path.append(str(Path(__file__).with_name("plain")))
    importlib.import_module("plain_linears").register()
    register()
    config = EngineArgs(
        model=asked["model"], dtype="bfloat16", enforce_eager=True, max_model_len=256, tokenizer=asked["model"]
    ).create_engine_config()
    if not torch.accelerator.is_available():  # as vLLM's own CPU worker does (`CPUModelRunner`)
        torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None  # type: ignore[assignment]
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{asked['port']}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        source = CheckpointSource(asked["model"])
        weights = {name: tensor.clone() for name, tensor in source}
        loader = EngineLoader(VLLMModel(model, config))
        spent = _follow(model, loader, weights, asked["root"], asked["repeats"])
        assert all(map(loader.patchable, weights)), "the model holds tensors in another form: nothing was measured"
        reloads = [seconds(partial(_reload, loader, source)) for _ in range(asked["repeats"] + 1)][1:]
    print(json.dumps({**spent, "reload_s": statistics.median(reloads)}), flush=True)


def _follow(model: Any, loader: EngineLoader, weights: dict[str, Tensor], root: str, repeats: int) -> dict[str, float]:
    """Follow deltas of 1 %; time their commit, and a scatter of the same values and vLLM's own function after it."""
    spent: dict[str, list[float]] = {"commit_s": [], "scatter_s": [], "vllm_s": []}
    commit, target = loader.commit, {name: tensor.clone() for name, tensor in weights.items()}
    loader.commit = lambda: spent["commit_s"].append(seconds(commit))  # type: ignore[method-assign]
    sender = WeightSender(DeltaTransport(root, keyframe_every=0), InProcessEngine(WeightReceiver(loader)))
    sender.update_weights(weights)
    for turn in range(repeats + 2):
        writes = []
        for name, tensor in weights.items():
            generator = torch.Generator().manual_seed(turn)
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=generator) < 0.01] ^= 1
            where, bits = changes(name, target[name], tensor)
            writes.append((name, torch.from_numpy(where), torch.from_numpy(bits.view("int16"))))
        assert sender.update_weights(weights).verified
        flat = [(target[name].view(torch.int16).view(-1), where.long(), bits) for name, where, bits in writes]
        spent["scatter_s"].append(seconds(lambda flat=flat: [one.index_copy_(0, *new) for one, *new in flat]))
        if turn < VLLM_ROUNDS:
            patches = [
                CheckpointWeightPatch(name, weights[name].shape, torch.bfloat16, bits.view(torch.bfloat16), where)
                for name, where, bits in writes
            ]
            spent["vllm_s"].append(seconds(partial(load_checkpoint_weight_patches, model, patches)))
    return {name: statistics.median(taken[2:] or taken) for name, taken in spent.items()}


def _reload(loader: EngineLoader, source: CheckpointSource) -> None:
    loader.start()
    loader.load(source)
    loader.finish()


if __name__ == "__main__":
    main()
