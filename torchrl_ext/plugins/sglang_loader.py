"""How checkpoint tensors land in an SGLang model: by its own loader, or element by element where nothing packs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, distributed, nn

from torchrl_ext.errors import ConfigError
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
from torchrl_ext.plugins.sglang_model import can_unpack, is_plain, pack, stand_ins, unpack
from torchrl_ext.plugins.workers import combine
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digest import tensor_digest
from torchrl_ext.weights.landing import Coverage, Patcher, Piece, as_bits, compare
from torchrl_ext.weights.loader import Staging, WeightLoader
from torchrl_ext.weights.placement import Placement, record
from torchrl_ext.weights.position_digest import position_digest

__all__ = ["SGLangLoader"]


class SGLangLoader(WeightLoader):
    """Loads into one worker's model.

    `digests` reads the tensors back from the model where this worker alone holds them whole; else it vouches for the
    tensors as they were handed to the model's loader.

    Args:
        model: the worker's model.
        checkpoint: the directory that the model was loaded from.
        group: the tensor-parallel workers, on the CPU.
    """

    def __init__(self, model: nn.Module, checkpoint: str, group: distributed.ProcessGroup) -> None:
        self._model, self._checkpoint, self._group = model, checkpoint, group
        self._alone = distributed.get_world_size(group) == 1
        self._plain = is_plain(model)
        self._shapes = shapes_of(checkpoint)
        self._params: tuple[ParamMeta, ...] = ()
        self._patcher = Patcher({})
        self._coverage: dict[str, Coverage] = {}
        self._expected: Mapping[str, str] = {}
        self._handed: dict[str, str] = {}
        self._whole: list[tuple[str, Tensor]] = []
        self._open = False
        self.prepared = False  # somebody else unpacks layers before a load, and packs them after it
        self._loaded = False  # whether anything came after the checkpoint that the engine was started with

    def check(self, params: Iterable[ParamMeta]) -> None:
        """See `WeightLoader.check`. The model's loader runs over tensors without data; the live ones are not touched.

        Raises:
            ManifestError: names the first parameter that is unknown, missing, or of another shape or dtype.
            ConfigError: this release of SGLang cannot load into a model of this kind a second time.
        """
        params = tuple(params)
        if self._params == params:
            return
        if not self._plain and not can_unpack():
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
        pieces = self._pieces_of(params) if self._plain else {}
        self._params, self._patcher = params, Patcher(pieces)

    def start(self) -> None:
        """The parameters are in the form that the model's loader writes to."""
        self._handed, self._whole = {}, []
        self._patcher.forget()
        self._loaded = True
        if not self._plain and not self._open and not self.prepared:
            unpack(self._model)
        self._open = True

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in pairs:
                self._handed[name] = "" if self._readable() else tensor_digest(tensor)
                yield name, tensor

        self._model.load_weights(passing())

    def finish(self) -> None:
        """End the load.

        Raises:
            IntegrityError: parameters that were announced did not come.
        """
        if not self._open:
            return
        refuse_unfinished([meta.name for meta in self._params if meta.name not in self._handed])
        if not self._plain and not self.prepared:
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
        if self._readable():
            return {name: digest.hex() for name, (digest, _) in self._patcher.held().items()}
        if self._loaded:
            raise unreadable()
        return {name: position_digest(tensor).hex() for name, tensor in CheckpointSource(self._checkpoint)}

    def stage(self, changes: Staging) -> None:
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
        self._handed, self._loaded = {}, True
        self._patcher.commit()
        whole, self._whole = self._whole, []
        if whole:
            if not self.prepared:
                unpack(self._model)
            self._model.load_weights(iter(whole))
            if not self.prepared:
                pack(self._model)

    def digests(self) -> dict[str, str]:
        if not self._readable():
            return dict(self._handed)
        return {name: tensor_digest(tensor) for name, tensor in self.resident()}

    def resident(self) -> Iterator[tuple[str, Tensor]]:
        if self._readable():
            metas = {meta.name: meta for meta in self._params}
            for name, pieces in self._patcher.pieces.items():
                yield name, _read(metas[name], pieces)

    def reloaded(self) -> None:
        """SGLang itself has loaded the model, past this loader."""
        self._handed, self._whole, self._open, self._loaded = {}, [], False, True
        self._patcher.forget()

    def _readable(self) -> bool:
        """Whether this worker holds every tensor of the update whole, as it came."""
        return self._alone and bool(self._params) and all(self.patchable(meta.name) for meta in self._params)

    def _pieces_of(self, params: tuple[ParamMeta, ...]) -> dict[str, list[Piece]]:
        with stand_ins(self._model) as targets:
            placement = record(self._model.load_weights, params, targets)
        self._refuse(placement, targets)
        live: dict[str, Tensor] = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        found = {}
        for meta in params:
            landings = placement.landings[meta.name]
            exact = all(landing.exact and landing.dtype == meta.dtype for landing in landings)
            if landings and exact and not meta.dtype.is_complex:
                found[meta.name] = [Piece.of(live[landing.param], landing) for landing in landings]
        embeddings = [pieces for name, pieces in found.items() if name.endswith("embed_tokens.weight")]
        for name in placement.nowhere():  # a tied output embedding: it is where the input embedding is
            found.update({name: embeddings[0]} if embeddings else {})
        return found

    def _refuse(self, placement: Placement, targets: Mapping[str, Tensor]) -> None:
        for name in placement.nowhere():
            if not self._is_tied_head(name) and not name.endswith("rotary_emb.inv_freq"):  # SGLang skips any name
                raise unknown(name)
        for param, target in targets.items():
            if isinstance(target, nn.Parameter) and placement.written[param] < target.numel():
                raise incomplete(placement, param, target.numel())
        refuse_rounding(placement)

    def _is_tied_head(self, name: str) -> bool:
        """Whether ``name`` is the output embedding of a model in which that is the input embedding."""
        config = getattr(self._model, "config", None)
        return name.endswith("lm_head.weight") and bool(getattr(config, "tie_word_embeddings", False))


def _read(meta: ParamMeta, pieces: Iterable[Piece]) -> Tensor:
    """One checkpoint tensor, put together from where it lies."""
    found = torch.empty(meta.shape, dtype=meta.dtype)
    flat = as_bits(found).reshape(-1)
    for piece in pieces:
        part = as_bits(piece.destination)
        flat.as_strided(tuple(part.shape), piece.strides, piece.offset).copy_(part)
    return found
