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

_BLOCK = 1 << 22  # units of a range, as transports cut streams


class _Step:
    """What `Patchable.stage` uses of a transport's changes, of tensors of one dtype."""

    def __init__(self, own: list[StreamPatch]) -> None:
        self.own = own
        self.digests: Mapping[str, str] = {}  # nothing to compare with: digests are still computed
        table = ParamTable.of(patch.meta for patch in own)
        (stream,) = table.streams
        firsts = zip(stream.first[:-1], stream.params.tolist(), strict=True)
        positions = np.concatenate([first + own[param].positions for first, param in firsts])
        values = np.concatenate([own[param].values for param in stream.params.tolist()])
        self._ranges: list[StreamPatch] = []
        for start in range(0, stream.size, _BLOCK):
            size = min(_BLOCK, stream.size - start)
            own_range = slice(*np.searchsorted(positions, (start, start + size)))
            where = (positions[own_range] - start).astype(np.int32)
            self._ranges.append(StreamPatch(table, 0, start, size, where, values[own_range], steps=False))

    def patches(self, wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        for patch in self.own:
            wanted(patch.meta.name)
        return iter(self._ranges)

    def whole(self, names: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def scatter(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a call that writes the same values into these tensors, and checks nothing."""
        writes = []
        for patch in self.own:
            values = torch.from_numpy(patch.values.view(np.int16))
            flat = tensors[patch.meta.name].view(torch.int16).view(-1)
            writes.append((flat, torch.from_numpy(patch.positions).long(), values))

        def put() -> None:
            for flat, where, values in writes:
                flat.index_copy_(0, where, values)

        return put


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
        loader.compare_start()
        assert all(map(loader.patchable, tensors)), "the model holds tensors in another form: nothing would be measured"
        found = _measure(model, loader, tensors, asked["repeats"])
        reloads = [seconds(partial(_reload, loader, source)) for _ in range(asked["repeats"] + 1)][1:]
    print(json.dumps({**found, "reload_s": statistics.median(reloads)}), flush=True)


def _measure(model: Any, loader: EngineLoader, tensors: dict[str, Tensor], repeats: int) -> dict[str, float]:
    """Seconds to stage and commit 1 % of the elements, beside a bare scatter, and vLLM's own function with them."""
    spent: dict[str, list[float]] = {"stage_s": [], "commit_s": [], "scatter_s": [], "vllm_s": []}
    steps = _steps(tensors)
    theirs = [_theirs(step) for step in steps]
    bare = [step.scatter({name: tensor.clone() for name, tensor in tensors.items()}) for step in steps]
    for turn in range(repeats + 1):
        for step, put in zip(steps, bare, strict=True):
            spent["stage_s"].append(seconds(partial(loader.stage, step)))
            spent["commit_s"].append(seconds(loader.commit))
            spent["scatter_s"].append(seconds(put))
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
            forth.append(StreamPatch.of(table, name, where, old[where] ^ 1, False))
            back.append(StreamPatch.of(table, name, where, old[where], False))
    return _Step(forth), _Step(back)


def _theirs(step: _Step) -> list[CheckpointWeightPatch]:
    found = []
    for patch in step.own:
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
