"""How checkpoint tensors land in an SGLang model: by its own loader, or element by element where nothing packs them.

SGLang's loaders write into the parameters that it computes with. Where a layer's quantisation method rebuilds them
after loading (quantised models, weights packed for AMX), the model's loader alone can do the writing, between
`restore_weights_before_loading` and `postprocess_weights` (`sglang.srt.model_loader.loader`, 0.5.23).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor, distributed, nn

from torchrl_ext.errors import ConfigError
from torchrl_ext.landing.patcher import read
from torchrl_ext.landing.placement import Placement, record
from torchrl_ext.plugins.loader import PluginLoader
from torchrl_ext.plugins.refusals import UNCHANGED
from torchrl_ext.proof.runtime import Reading, reachable
from torchrl_ext.types import Info, ParamMeta

__all__ = ["SGLangLoader"]


class SGLangLoader(PluginLoader):
    """Loads weights into one worker's SGLang model; see `PluginLoader` for its arguments.

    Attributes:
        prepared: SGLang itself unpacks layers before a load, and packs them after it (``/begin_weight_update``).
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str,
        group: distributed.ProcessGroup,
        *,
        dummy: bool = False,
        unfit: ConfigError | None = None,
    ) -> None:
        super().__init__(
            model,
            checkpoint,
            group,
            alone=distributed.get_world_size(group) == 1,
            dtype=next(model.parameters()).dtype,
            tied=bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False)),
            dummy=dummy,
            unfit=unfit,
        )
        self._packs = _packs(model)
        self.prepared = False
        self._dummies: dict[str, Tensor] | None = None  # as a checkpoint would have them

    def invalidate(self) -> None:
        super().invalidate()
        self._loading = False

    # what a rehearsal asks

    def runtime(self) -> Iterator[Reading]:
        return reachable(self._model)

    def rehearse(self) -> Info:
        try:
            return super().rehearse()
        finally:
            self._dummies = None if self._rehearsed is not None else self._dummies

    # what `PluginLoader` asks

    def _placed(self, params: tuple[ParamMeta, ...]) -> Placement | None:
        if self._packs and getattr(DefaultModelLoader, "restore_weights_before_loading", None) is None:
            raise ConfigError(
                "layers of this model rebuild their weights after loading, and this SGLang cannot undo that",
                expected="SGLang 0.5.21 or later, or a model that is not quantised",
                state=UNCHANGED,
            )
        names = {meta.name for meta in params}
        self._refuse_absent(name for name in self._shapes if name not in names)
        if self._packs:
            return None
        with _stand_ins(self._model) as targets:
            placement = record(self._model.load_weights, params, targets)
        needed = {name: target.numel() for name, target in targets.items() if isinstance(target, nn.Parameter)}
        shared = any(getattr(module, "moe_ep_size", 1) > 1 for module in self._model.modules())  # expert parallelism
        self._refuse(placement, needed, shared=shared)  # SGLang skips a name that it does not know
        if self._dummy and not self.touched:
            self._dummies = self._read_dummies(placement)
        return placement

    def _made_up(self) -> Iterable[tuple[str, Tensor]] | None:
        return None if self._dummies is None else self._dummies.items()

    def _open(self, names: Collection[str] | None) -> Collection[nn.Module]:
        """Unpack the layers of the whole model, as SGLang does before its own updates."""
        if self._packs and not self._loading and not self.prepared:
            DefaultModelLoader.restore_weights_before_loading(self._model, next(self._model.parameters()).device)
        return ()

    def _close(self, layers: Collection[nn.Module]) -> None:
        if self._packs and not self.prepared:
            DefaultModelLoader.postprocess_weights(self._model, next(self._model.parameters()).device)

    def _loaded_with(self, touched: set[str]) -> Collection[str]:
        return [meta.name for meta in self._params if not self.patchable(meta.name)]

    def _read_dummies(self, placement: Placement) -> dict[str, Tensor]:
        """Return the random numbers that the model was filled with; its parameters have the form in which they load."""
        live, found = self._live(), {}
        for meta in placement.params:
            landings = placement.landings[meta.name]
            if landings and all(one.exact and one.dtype == meta.dtype for one in landings):
                found[meta.name] = read(meta, [one.piece(live[one.param]) for one in landings]).clone()
        return found


def _packs(model: nn.Module) -> bool:
    """Return whether layers rebuild their parameters after loading, so that the model's loader cannot write to them."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()} - {"NoneType"}
    packed = any(getattr(module, "use_intel_amx_backend", False) for module in model.modules())
    return packed or not all(method.startswith("Unquantized") for method in methods)


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Swap every parameter and buffer for a stand-in without data, and back; yields the stand-ins by name.

    What a loader derives from them meanwhile (`post_load_weights`) goes as well: parameters, buffers, modules and other
    attributes are those that were there, and no others.
    """
    live = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    kept_state: list[tuple[Any, Any]] = []
    for module, _, _ in live:
        registered = module._parameters, module._buffers, module._non_persistent_buffers_set, module._modules
        kept_state += [(own, own.copy()) for own in (*registered, vars(module))]
    found: dict[int, Any] = {}  # a tied tensor keeps its identity
    try:
        for module, parameters, buffers in live:
            for own, kept in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in kept.items():
                    if tensor is not None:
                        own[name] = found.setdefault(id(tensor), _stand_in(tensor))
        yield {**dict(model.named_parameters()), **dict(model.named_buffers())}
    finally:
        for own, kept in kept_state:
            own.clear()
            own.update(kept)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the meta device with the class and the loader's marks of ``tensor``, which loaders look at."""
    found = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(found, requires_grad=False)
    found.__class__ = tensor.__class__
    found.__dict__ = dict(tensor.__dict__)
    return found
