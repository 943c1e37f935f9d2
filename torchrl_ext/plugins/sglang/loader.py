"""How checkpoint tensors land in an SGLang model: by its own loader, or element by element where nothing packs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, distributed, nn

from torchrl_ext.errors import ConfigError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.landing.patcher import Coverage, Patcher, Piece, compare, read
from torchrl_ext.landing.placement import Landing, Placement, record
from torchrl_ext.landing.runtime import Reading, reachable
from torchrl_ext.plugins.loader import PluginLoader
from torchrl_ext.plugins.refusals import (
    UNCHANGED,
    incomplete,
    missing,
    refuse_other_shapes,
    refuse_rounding,
    refuse_unfinished,
    shapes_of,
    unknown,
    unreadable,
)
from torchrl_ext.plugins.sglang.model import can_unpack, pack, packs, stand_ins, unpack
from torchrl_ext.plugins.workers import combine
from torchrl_ext.proof.known_weights import announced
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import position_digest

__all__ = ["SGLangLoader"]


class SGLangLoader(PluginLoader):
    """Loads into one worker's model.

    Args:
        model: the worker's model.
        checkpoint: the directory that the model was loaded from.
        group: the tensor-parallel workers, on the CPU.
        dummy: the model was filled with random numbers instead.
        unfit: why no update can be taken by an engine of these settings.
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
        super().__init__(model, alone=distributed.get_world_size(group) == 1)
        self._unfit = unfit
        self._checkpoint, self._group, self._dummy = checkpoint, group, dummy
        self._packs = packs(model)
        self._shapes = shapes_of(checkpoint)
        self._params: tuple[ParamMeta, ...] = ()
        self._placement: Placement | None = None
        self._patcher = Patcher({})
        self._coverage: dict[str, Coverage] = {}
        self._expected: Mapping[str, str] = {}
        self._whole: list[tuple[str, Tensor]] = []
        self._made_up: dict[str, Tensor] | None = None  # the dummy weights, as a checkpoint would have them
        self._open = self._whole_model = False
        self.prepared = False  # somebody else unpacks layers before a load, and packs them after it

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def check(self, params: Iterable[ParamMeta]) -> None:
        """See `WeightLoader.check`. The model's loader runs over tensors without data; the live ones are not touched.

        Raises:
            ManifestError: names the first parameter that is unknown, missing, or of another shape or dtype.
            ConfigError: this release of SGLang cannot load into a model of this kind a second time, or the engine is
                unfit.
        """
        params = tuple(params)
        if self._unfit is not None:
            raise self._unfit
        if self._params == params:
            return
        if self._packs and not can_unpack():
            raise ConfigError(
                "layers of this model rebuild their weights after loading, and this SGLang cannot undo that",
                expected="SGLang 0.5.21 or later, or a model that is not quantised",
                state=UNCHANGED,
            )
        refuse_other_shapes(params, self._shapes)
        names = {meta.name for meta in params}
        for name in self._shapes:
            if name not in names and not self._is_tied_head(name):
                raise missing(name)
        self._placement = None if self._packs else self._placed(params)
        if self._dummy and not self.touched and self._placement is not None:
            self._made_up = self._read_dummies(self._placement)
        self._pieces = {} if self._placement is None else self._writable(self._placement)
        self._params, self._patcher = params, Patcher({} if self._whole_model else self._pieces)

    def start(self) -> None:
        """The parameters are in the form that the model's loader writes to."""
        self._handed, self._whole = {}, []
        self._patcher.forget()
        self.touched = self.touched or not self._rehearsing
        if self._packs and not self._open and not self.prepared:
            unpack(self._model)
        self._open = True

    def finish(self) -> None:
        """End the load.

        Raises:
            IntegrityError: parameters that were announced did not come.
        """
        if not self._open:
            return
        if not self._rehearsing:
            refuse_unfinished([meta.name for meta in self._params if meta.name not in self._handed])
        if self._packs and not self.prepared:
            pack(self._model)
        self._open = False

    def patchable(self, name: str) -> bool:
        return name in self._patcher.pieces

    def position_digests(self) -> dict[str, str]:
        """What this worker reads back of its model; else the checkpoint that the engine was started with, while nothing
        else was loaded.

        Raises:
            ConfigError: it can tell neither.
        """
        if self._alone and self._params and all(self.patchable(meta.name) for meta in self._params):
            return {name: digest.hex() for name, (digest, _) in self._patcher.held().items()}
        if self.touched:
            raise unreadable()
        start = self.start_weights()
        if start is None:
            raise unreadable()
        return {name: position_digest(tensor).hex() for name, tensor in start}

    def stage(self, changes: Changes) -> None:
        self._whole = []
        self._coverage, self._expected = self._patcher.stage(changes), changes.digests
        if any(not self.patchable(meta.name) for meta in self._params):
            every = [meta.name for meta in self._params if not self.patchable(meta.name)]
            self._whole = list(changes.whole(every))
            compare({name: position_digest(tensor) for name, tensor in self._whole}, self._expected)

    def confirm(self) -> None:
        """Hold what all workers of the engine staged against the trainer's digests."""
        compare(combine(self._coverage, self._patcher.pieces, self._params, self._group), self._expected)

    @torch.no_grad()
    def commit(self) -> None:
        self._handed, self.touched = {}, self.touched or not self._rehearsing
        self._patcher.commit()
        whole, self._whole = self._whole, []
        if whole:
            unpacks = self._packs and not self.prepared
            if unpacks:
                unpack(self._model)
            self._model.load_weights(iter(whole))
            if unpacks:
                pack(self._model)

    def invalidate(self) -> None:
        self._handed, self._whole, self._open, self.touched = {}, [], False, True
        self._patcher.forget()

    # what a rehearsal asks

    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        return self._started_with(self._params)

    def ready(self) -> None:
        if not self._params and self._shapes:
            self.check(CheckpointSource(self._checkpoint).params())

    def runtime(self) -> Iterator[Reading]:
        return reachable(self._model)

    def landings(self, name: str) -> Iterable[Landing]:
        return self._placement.landings.get(name, ()) if self._placement is not None else ()

    def kernel(self, layer: str) -> str:
        module = self._model.get_submodule(layer)
        method = getattr(module, "quant_method", None)
        return type(module).__name__ + ("" if method is None else f", {type(method).__name__}")

    def land_whole(self) -> None:
        self._whole_model, self._patcher = True, Patcher({})

    def rehearse(self) -> Info:
        try:
            return super().rehearse()
        finally:
            self._made_up = None if self._rehearsed is not None else self._made_up

    def _started_with(self, params: Iterable[ParamMeta]) -> Iterable[tuple[str, Tensor]] | None:
        """What the engine was started with, as an update of ``params`` would name it."""
        if self._dummy:
            return None if self._made_up is None else self._made_up.items()
        own = next(self._model.parameters()).dtype
        return announced(CheckpointSource(self._checkpoint), params, own) if self._shapes else None

    def _read_dummies(self, placement: Placement) -> dict[str, Tensor]:
        """The numbers that an engine without a checkpoint was filled with; its parameters lie as they are loaded."""
        live = self._live()
        return {
            meta.name: read(meta, [Piece.of(live[one.param], one) for one in placement.landings[meta.name]]).clone()
            for meta in placement.params
            if placement.landings[meta.name]
            and all(one.exact and one.dtype == meta.dtype for one in placement.landings[meta.name])
        }

    def _placed(self, params: tuple[ParamMeta, ...]) -> Placement:
        with stand_ins(self._model) as targets:
            placement = record(self._model.load_weights, params, targets)
        self._refuse(placement, targets)
        return placement

    def _writable(self, placement: Placement) -> dict[str, list[Piece]]:
        """See `_in_place`; a tied output embedding is where the input embedding is."""
        kept = self._in_place(placement, lambda: self._started_with(placement.params))
        embeddings = [pieces for name, pieces in kept.items() if name.endswith("embed_tokens.weight")]
        for name in placement.nowhere():
            kept[name] = embeddings[0] if embeddings and self._is_tied_head(name) else []
        return kept

    def _refuse(self, placement: Placement, targets: Mapping[str, Tensor]) -> None:
        for name in placement.nowhere():  # SGLang skips any name
            elsewhere = self._shares_experts() and (name in self._shapes or not self._shapes)
            if not (elsewhere or self._is_tied_head(name) or name.endswith("rotary_emb.inv_freq")):
                raise unknown(name)
        for param, target in targets.items():
            if isinstance(target, nn.Parameter) and placement.written[param] < target.numel():
                raise incomplete(placement, param, target.numel())
        refuse_rounding(placement)

    def _shares_experts(self) -> bool:
        """Whether workers hold different experts (expert parallelism): what lands nowhere here lands on another one."""
        return any(getattr(module, "moe_ep_size", 1) > 1 for module in self._model.modules())

    def _is_tied_head(self, name: str) -> bool:
        """Whether ``name`` is the output embedding of a model in which that is the input embedding."""
        config = getattr(self._model, "config", None)
        return name.endswith("lm_head.weight") and bool(getattr(config, "tie_word_embeddings", False))
