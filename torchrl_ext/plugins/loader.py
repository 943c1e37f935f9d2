"""What the loaders of vLLM and SGLang share: what can be written in place, and what is vouched for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.landing.patcher import Piece, holds, read
from torchrl_ext.landing.placement import Landing, Placement
from torchrl_ext.proof.engine_loader import EngineLoader
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import tensor_digest

__all__ = ["PluginLoader"]


class PluginLoader(EngineLoader):
    """Loads into one worker's model through the model's own loader, and knows which tensors lie there as they came.

    `digests` reads those tensors back from the live model that this worker alone holds whole, as they came. It vouches
    for the others as they were handed to the model's loader: a packed or quantised form cannot be read in checkpoint
    coordinates, so what becomes of them is the rehearsal's to show (`EngineLoader`).

    Args:
        model: the worker's model.
        alone: no other worker holds a part of it.
    """

    def __init__(self, model: nn.Module, *, alone: bool) -> None:
        super().__init__()
        self._model: Any = model  # every model of an engine has `load_weights`
        self._alone = alone
        self._pieces: dict[str, list[Piece]] = {}
        self._agreed: dict[str, tuple[Landing, ...]] = {}  # read at the start, and found to be the checkpoint's bytes
        self._handed: dict[str, str] = {}

    @abstractmethod
    def params(self) -> tuple[ParamMeta, ...]:
        """The parameters that were checked last."""

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in pairs:
                self._handed[name] = tensor_digest(tensor) if self.vouches and not self._readable(name) else ""
                yield name, tensor

        self._model.load_weights(passing())

    def digests(self) -> dict[str, str]:
        found = dict(self._handed)
        for meta in self.params():
            if meta.name in found and self._readable(meta.name):
                found[meta.name] = tensor_digest(read(meta, self._pieces[meta.name]))
        return found

    def _readable(self, name: str) -> bool:
        """Whether this worker holds the tensor whole, as it came."""
        return self._alone and bool(self._pieces.get(name))

    def _live(self) -> dict[str, Tensor]:
        """What the model computes with, by runtime name."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _in_place(
        self,
        placement: Placement,
        start: Callable[[], Iterable[tuple[str, Tensor]] | None],
        plain: Callable[[Tensor | None, Landing], bool] = lambda tensor, landing: True,
    ) -> dict[str, list[Piece]]:
        """The copies of each tensor that the live model holds as it was loaded, shown by its bytes.

        A parameter of the same shape may be shuffled, so shape says nothing. The bytes are compared with those of the
        start checkpoint, while the model still holds it; what was found then holds for later lists of parameters.

        Args:
            placement: where checkpoint tensors land on this worker.
            start: what the engine was started with.
            plain: whether a runtime tensor can be as it was loaded, for all that its engine says of it.
        """
        live, found = self._live(), {}
        for meta in placement.params:
            landings = placement.landings[meta.name]
            exact = all(one.exact and one.dtype == meta.dtype and plain(live.get(one.param), one) for one in landings)
            absorbed = any("kv_b_proj" in one.param for one in landings)  # MLA computes with a product of it
            if landings and exact and not absorbed and not meta.dtype.is_complex:
                found[meta.name] = [Piece.of(live[one.param], one) for one in landings]
        for name, tensor in () if self.touched else start() or ():
            if name in found and holds(found[name], tensor):
                self._agreed[name] = placement.landings[name]
        return {name: pieces for name, pieces in found.items() if self._agreed.get(name) == placement.landings[name]}
