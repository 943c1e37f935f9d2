"""The model of an SGLang worker: its own loader writes into the parameters that it computes with.

Where a layer's quantisation method rebuilds them after loading (quantised models, weights packed for AMX), the model's
loader alone can do the writing, between `restore_weights_before_loading` and `postprocess_weights`
(`sglang.srt.model_loader.loader`, 0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group
from sglang.srt.model_loader import weight_utils
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor, distributed, nn

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.engines.loader import UNCHANGED, StandIns, rebalanced, swapped
from torchrl_ext.engines.plugin import started_with
from torchrl_ext.engines.runtime import Reading, reachable

__all__ = ["SGLangModel"]


class SGLangModel:
    """An `EngineModel` of one SGLang worker.

    Args:
        runner: SGLang's `ModelRunner`.

    Attributes:
        prepared: SGLang itself unpacks layers before a load, and packs them after it (``/begin_weight_update``).
    """

    by_layer = asleep = False
    kept = ()
    repairs: dict[str, Any] = {}  # noqa: RUF012 - none

    def __init__(self, runner: Any) -> None:
        self.module: nn.Module = runner.model
        self.checkpoint = started_with(self.module, runner.model_config)
        self.group = get_tp_group().cpu_group
        self.alone = distributed.get_world_size(self.group) == 1
        self.shared = any(getattr(layer, "moe_ep_size", 1) > 1 for layer in self.module.modules())  # expert parallelism
        self.dtype = next(self.module.parameters()).dtype
        self.tied = bool(getattr(getattr(self.module, "config", None), "tie_word_embeddings", False))
        dummy = str(runner.server_args.load_format) == "dummy"
        self.dummy: Callable[[Tensor], Any] | None = _fill if dummy else None
        self.prepared = False
        self._packs = _packs(self.module)
        self.rejection: ConfigError | None = None
        if get_pp_group().world_size > 1:
            self.rejection = ConfigError(
                "the plugin does not know engines with pipeline stages", expected="--pp-size 1", state=UNCHANGED
            )
        elif getattr(runner, "eplb_manager", None) is not None:
            self.rejection = rebalanced()

    def readings(self) -> Iterator[Reading]:
        return reachable(self.module)

    @contextmanager
    def stand_ins(self) -> Iterator[StandIns | None]:
        if self._packs:
            yield None
            return
        found: dict[int, Any] = {}  # a tied tensor keeps its identity

        def on_meta(tensors: dict[str, Any]) -> dict[str, Any]:
            return {
                name: None if tensor is None else found.setdefault(id(tensor), _stand_in(tensor))
                for name, tensor in tensors.items()
            }

        with swapped(self.module, lambda layer: (on_meta(layer._parameters), on_meta(layer._buffers))) as tensors:
            yield StandIns(tensors, {name: parameter.numel() for name, parameter in self.module.named_parameters()})

    def open(self, layers: Collection[str] | None) -> Collection[nn.Module]:
        """Unpack the layers of the whole model, as SGLang does before its own updates; unpacked ones stay so."""
        if self._packs and not self.prepared:
            DefaultModelLoader.restore_weights_before_loading(self.module, next(self.module.parameters()).device)
        return ()

    def close(self, layers: Collection[nn.Module]) -> None:
        if self._packs and not self.prepared:
            DefaultModelLoader.postprocess_weights(self.module, next(self.module.parameters()).device)


def _packs(module: nn.Module) -> bool:
    """Return whether layers rebuild their parameters after loading, so that the model's loader cannot write to them."""
    methods = {type(getattr(layer, "quant_method", None)).__name__ for layer in module.modules()} - {"NoneType"}
    packed = any(getattr(layer, "use_intel_amx_backend", False) for layer in module.modules())
    return packed or not all(method.startswith("Unquantized") for method in methods)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the meta device with the class and the loader's marks of ``tensor``, which loaders look at."""
    found = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(found, requires_grad=False)
    found.__class__ = tensor.__class__
    found.__dict__ = dict(tensor.__dict__)
    return found


def _fill(tensor: Tensor) -> None:
    """Fill a tensor as `DummyModelLoader` fills a parameter; SGLang takes those of a whole model."""
    weight_utils.initialize_dummy_weights(SimpleNamespace(state_dict=lambda: {"": tensor}))
