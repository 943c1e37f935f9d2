"""What landing costs in a vLLM model: run by `tests.bench.landing` with the interpreter that has vLLM.

Reads one JSON object from standard input and prints one line of JSON last. The model is vLLM's own Qwen3 class with
random weights, in this process and without a server, so that nothing else is timed.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
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

from torchrl_ext.bench.runner import seconds
from torchrl_ext.codecs.patch import SparsePatch
from torchrl_ext.codecs.units import units
from torchrl_ext.plugins.loader import EngineLoader
from torchrl_ext.plugins.vllm.model import VLLMModel
from torchrl_ext.plugins.vllm.register import register
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource

_DENSE = 1 / 3  # from here on a transport sends the tensor itself, which is smaller


class _Step:
    """What `Patchable.stage` uses of a transport's changes."""

    def __init__(self, patches: list[SparsePatch]) -> None:
        self._patches = patches
        self.digests: Mapping[str, str] = {}  # nothing to compare with: digests are still computed

    def patches(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[SparsePatch]:
        return (patch for patch in self._patches if wanted(patch.meta.name))

    def whole(self, names: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    @property
    def nbytes(self) -> int:
        """Decoded payload: indices and values."""
        return sum(p.values.nbytes + (0 if p.changed == p.meta.numel else p.indices.nbytes) for p in self._patches)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def main() -> None:
    """Build the model, then measure every density in turn."""
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
        metas = [ParamMeta.of(name, tensor) for name, tensor in tensors.items()]
        loader = EngineLoader(VLLMModel(model, config))
        loader.check(metas)
        found = [_measure(model, loader, tensors, elements, asked["repeats"]) for elements in asked["elements"]]
        reload_s = _median(lambda: _reload(loader, source), asked["repeats"])
        load_s = _median(lambda: model.load_weights(iter(tensors.items())), asked["repeats"])
    result = {
        "parameters": sum(meta.numel for meta in metas),
        "reload_s": reload_s,
        "load_in_memory_s": load_s,
        "rows": found,
    }
    print(json.dumps(result), flush=True)


def _measure(
    model: Any, loader: EngineLoader, tensors: dict[str, Tensor], elements: int, repeats: int
) -> dict[str, Any]:
    """Seconds to stage and commit ``elements`` changed elements, and vLLM's own function with the same patches."""
    forth, back = _steps(tensors, elements)
    spent: dict[str, list[float]] = {"stage": [], "commit": [], "vllm": []}
    extra = 0
    theirs = [_theirs(step) for step in (forth, back)]
    for turn in range(repeats + 1):
        for step in (forth, back):
            began = time.perf_counter()
            loader.stage(step)
            staged = time.perf_counter()
            extra = max(extra, loader.staged_bytes)
            loader.commit()
            spent["stage"].append(staged - began)
            spent["commit"].append(time.perf_counter() - staged)
        if turn <= 2:  # it takes long
            for patches in theirs:
                spent["vllm"].append(seconds(partial(load_checkpoint_weight_patches, model, patches)))
    del theirs
    gc.collect()
    total = sum(tensor.numel() for tensor in tensors.values())
    return {
        "density": elements / total,
        "changed": elements,
        **{f"{name}_s": statistics.median(taken[2:]) for name, taken in spent.items()},
        "commit_range_s": [min(spent["commit"][2:]), max(spent["commit"][2:])],
        "payload_bytes": forth.nbytes,
        "extra_bytes": extra,
    }


def _steps(tensors: dict[str, Tensor], elements: int) -> tuple[_Step, _Step]:
    """The last bit of ``elements`` scattered elements flipped, and flipped back."""
    generator = np.random.default_rng(elements)
    density = elements / sum(tensor.numel() for tensor in tensors.values())
    forth: list[SparsePatch] = []
    back: list[SparsePatch] = []
    for name, tensor in tensors.items():
        old, meta = units(tensor), ParamMeta.of(name, tensor)
        if density >= _DENSE:
            new = old ^ (generator.random(old.size, np.float32) < density).astype(old.dtype)
            every = np.arange(old.size, dtype=np.int32)
            forth.append(SparsePatch(meta, every, new))
            back.append(SparsePatch(meta, every, old.copy()))
            continue
        where = np.flatnonzero(generator.random(old.size, np.float32) < density).astype(np.int32)
        if where.size:
            forth.append(SparsePatch(meta, where, old[where] ^ 1))
            back.append(SparsePatch(meta, where, old[where]))
    return _Step(forth), _Step(back)


def _theirs(step: _Step) -> list[CheckpointWeightPatch]:
    found = []
    for patch in step.patches():
        values = torch.from_numpy(patch.values.view(np.int16)).view(torch.bfloat16)
        where = None if patch.changed == patch.meta.numel else torch.from_numpy(patch.indices)
        meta = patch.meta
        found.append(CheckpointWeightPatch(meta.name, meta.shape, meta.dtype, values, where))
    return found


def _reload(loader: EngineLoader, source: CheckpointSource) -> None:
    loader.start()
    loader.load(source)
    loader.finish()


def _median(call: Callable[[], Any], repeats: int) -> float:
    return statistics.median([seconds(call) for _ in range(repeats + 1)][1:])


if __name__ == "__main__":
    main()
