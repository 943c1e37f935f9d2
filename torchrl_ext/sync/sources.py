"""What a sender wraps around a source: names, dtype, digests, and lockstep with the other trainer ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.errors import ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.conversion import converted
from torchrl_ext.weights.derived import CastSource, RenamedSource, as_mapper
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import MappingSource, WeightSource, as_source, checked, inner_model

__all__ = ["Outgoing", "require_data", "source_of"]


class Outgoing(WeightSource):
    """One update's pass over a source.

    Args:
        source: where the weights come from.
        mapper: trainer name -> checkpoint name.
        dtype: cast of floating-point tensors.

    Attributes:
        version: as what it is sent.
        digesting: take the digest of each tensor as it passes.
        count, bytes: what passed in the last iteration.

    Raises:
        ManifestError: a tensor has no data.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._origin = source
        source = source if mapper is None else RenamedSource(source, as_mapper(mapper))
        self._source = source if dtype is None else CastSource(source, dtype)
        self._params = self._source.params()
        held = require_data(source)
        self._gathers = any(meta.name not in held for meta in source.params())
        self.digesting = False
        self._digests: dict[str, str] = {}
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self.version = self.count = self.bytes = 0

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def own_names(self) -> list[str]:
        """Names as the trainer has them, before any mapper."""
        return [meta.name for meta in self._origin.params()]

    def held(self) -> Mapping[str, Tensor]:
        return self._source.held()

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._digests, self.count, self.bytes = {}, 0, 0
        self._stream = iter(self._source)
        for meta, tensor in checked(self._stream, self._params):
            if self.digesting:
                self._digests[meta.name] = tensor_digest(tensor)
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes
            yield meta.name, tensor

    def digests(self) -> dict[str, str]:
        """Digest of each tensor that passed in the last iteration."""
        return dict(self._digests)

    @property
    def alone(self) -> bool:
        """Whether this process can make another pass by itself: no other ranks could be part of a gather."""
        known = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not known or torch.distributed.get_world_size() == 1

    def replay(self) -> None:
        """Take part in every gather and drop what comes: the role of ranks that do not drive."""
        for _ in self._source if self._gathers else ():
            pass

    def drain(self) -> None:
        """Finish a pass that stopped half-way, or make one that never began, where other ranks wait in its gathers."""
        if self.alone or not self._gathers:
            return
        for _ in iter(self._source) if self._stream is None else self._stream:
            pass


def source_of(weights: Any, registered: Any) -> WeightSource:
    """The source for what an update sends; what is called as in a registered module goes as the module would.

    Args:
        weights: what `as_source` takes, or one of TorchRL's LLM wrappers.
        registered: the registered model; anything, or None.
    """
    source, registered = as_source(weights), inner_model(registered)
    if isinstance(source, MappingSource) and isinstance(registered, nn.Module):
        return converted(source, registered)
    return source


def require_data(source: WeightSource) -> Mapping[str, Tensor]:
    """What ``source`` holds as it is sent.

    Raises:
        ManifestError: a tensor is on the meta device: offloaded, or never loaded.
    """
    held = source.held()
    empty = [name for name, tensor in held.items() if tensor.device.type == "meta"]
    if empty:
        raise ManifestError(
            f"{len(empty)} tensor(s) are on the meta device, which holds no data: {', '.join(empty[:3])}",
            state="nothing was sent",
            hint="load the weights, or bring offloaded ones back, before sending them",
        )
    return held
