"""What landing costs in a vLLM model: run by `tests.bench.landing` with the interpreter that has vLLM.

Reads one JSON object from standard input and prints one line of JSON last. The model is vLLM's own Qwen3 class with
random weights, in this process and without a server, so that nothing else is timed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.cli.bench.runner import seconds
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.vllm.model import VLLMModel
from torchrl_ext.engines.vllm.register import register


class _Step:
    """What `Patchable.stage` uses of a transport's changes."""

    def __init__(self, patches: list[StreamPatch]) -> None:
        self._patches = patches
        self.digests: Mapping[str, str] = {}  # nothing to compare with: digests are still computed

    def patches(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[StreamPatch]:
        return (patch for patch in self._patches if wanted(patch.meta.name))

    def whole(self, names: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def _nothing(*_: Any, **__: Any) -> None:
    pass


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
        torch.accelerator.synchronize = torch.accelerator.empty_cache = _nothing
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{asked['port']}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        source = CheckpointSource(asked["model"])
        tensors = {name: tensor.clone() for name, tensor in source}
        loader = EngineLoader(VLLMModel(model, config))
        loader.check([ParamMeta.of(name, tensor) for name, tensor in tensors.items()])
        found = _measure(model, loader, tensors, asked["repeats"])
        reloads = [seconds(partial(_reload, loader, source)) for _ in range(asked["repeats"] + 1)][1:]
    print(json.dumps({**found, "reload_s": statistics.median(reloads)}), flush=True)


def _measure(model: Any, loader: EngineLoader, tensors: dict[str, Tensor], repeats: int) -> dict[str, float]:
    """Seconds to stage and commit 1 % of the elements, and vLLM's own function with the same patches."""
    spent: dict[str, list[float]] = {"stage_s": [], "commit_s": [], "vllm_s": []}
    steps = _steps(tensors)
    theirs = [_theirs(step) for step in steps]
    for turn in range(repeats + 1):
        for step in steps:
            spent["stage_s"].append(seconds(partial(loader.stage, step)))
            spent["commit_s"].append(seconds(loader.commit))
        if turn <= 2:  # it takes long
            for patches in theirs:
                spent["vllm_s"].append(seconds(partial(load_checkpoint_weight_patches, model, patches)))
    return {name: statistics.median(taken[2:]) for name, taken in spent.items()}


def _steps(tensors: dict[str, Tensor]) -> tuple[_Step, _Step]:
    """The last bit of 1 % of the elements flipped, and flipped back."""
    generator = np.random.default_rng(0)
    forth: list[StreamPatch] = []
    back: list[StreamPatch] = []
    for name, tensor in tensors.items():
        old, table = units(tensor), ParamTable.of([ParamMeta.of(name, tensor)])
        where = np.flatnonzero(generator.random(old.size, np.float32) < 0.01).astype(np.int32)
        if where.size:
            forth.append(StreamPatch.of(table, name, where, old[where] ^ 1))
            back.append(StreamPatch.of(table, name, where, old[where]))
    return _Step(forth), _Step(back)


def _theirs(step: _Step) -> list[CheckpointWeightPatch]:
    found = []
    for patch in step.patches():
        values, where = (
            torch.from_numpy(patch.values.view(np.int16)).view(torch.bfloat16),
            torch.from_numpy(patch.positions),
        )
        found.append(CheckpointWeightPatch(patch.meta.name, patch.meta.shape, patch.meta.dtype, values, where))
    return found


def _reload(loader: EngineLoader, source: CheckpointSource) -> None:
    loader.start()
    loader.load(source)
    loader.finish()


if __name__ == "__main__":
    main()
