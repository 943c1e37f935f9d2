"""`UpdateSource` is one update's pass over a source; `bump` tells collectors of its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.errors import ManifestError
from torchrl_ext.transports.ranks import torch_group
from torchrl_ext.types import ParamMeta, Part
from torchrl_ext.weights.derived import CastSource, RenamedSource, as_mapper
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.finite import FiniteCheck
from torchrl_ext.weights.shards.blocks import Shard, checked_shards
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["UpdateSource", "bump"]

log = logging.getLogger("torchrl_ext")


class UpdateSource(WeightSource):
    """One update's pass over a source, which renames and casts tensors and takes their digests as they pass.

    Args:
        source: what is sent.
        mapper: trainer name -> checkpoint name.
        dtype: cast of floating-point tensors.
        finite: looks for NaN and infinity in tensors as they pass, or lets the transport look; None for nobody.
        narrow: a limited pass yields some tensors only; else all, and `part` says which may differ from its base.

    Attributes:
        only: the names of the tensors that may differ from what was sent last; None for all.
        version: the version as which it is sent.
        digesting: whether to take the digest of each tensor as it passes.
        digests: digest of each tensor that passed in the last iteration, by name; empty unless `digesting`.
        count, bytes: number and bytes of the tensors that passed in the last iteration, of it or of its `shards`, where
            a tensor passes on every rank and counts as a whole.
        model_bytes: bytes of all tensors, whether they are sent or not.
        whole: the source of all tensors, also while only some are sent.

    Raises:
        ManifestError: a tensor is on the meta device: offloaded, or never loaded. A pass, of a NaN or an infinity that
            is refused.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        finite: FiniteCheck | None = None,
        narrow: bool = True,
    ) -> None:
        self.finite = FiniteCheck() if finite is None else finite
        self.look = self.finite.look if self.finite.left else None
        source = source if mapper is None else RenamedSource(source, as_mapper(mapper))
        self.whole = source if dtype is None else CastSource(source, dtype)
        self.only: frozenset[str] | None = None
        self._narrow = narrow
        self._names: frozenset[str] | None = None  # of the tensors that a pass yields; None for all
        self._params = self.whole.params()
        self.digesting = False
        self.version, self.digests = 0, dict[str, str]()
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self.count = self.bytes = 0
        self.model_bytes = sum(meta.nbytes for meta in self._params)
        held = source.held()
        self._gathers = any(meta.name not in held for meta in self._params)
        found = (meta.name for meta in self._params if meta.name in held)
        empty = [name for name in found if held[name].device.type == "meta"]
        if empty:
            raise ManifestError(
                f"{len(empty)} tensor(s) are on the meta device, which holds no data: {', '.join(empty[:3])}",
                state="nothing was sent",
                hint="load the weights, or bring offloaded ones back, before sending them",
            )

    def limit(self, base: int | None) -> None:
        """Send what `only` names from the next pass on, as changes of version ``base``; with None, all tensors."""
        self.part = None if base is None or self.only is None else Part(base=base, names=self.only)
        self._stream, self._names = None, self.only if self.part is not None and self._narrow else None
        self._params = tuple(meta for meta in self.whole.params() if self._sends(meta.name))

    def _sends(self, name: str) -> bool:
        return self._names is None or name in self._names

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def held(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self.whole.held().items() if self._sends(name)}

    def files(self) -> Mapping[str, bytes]:
        return self.whole.files()

    def tied(self) -> Mapping[str, str]:
        return self.whole.tied()

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield as `WeightSource.pairs`, and count; all tensors without ``names``."""
        names = self._names if names is None else names
        stream = self._stream = iter(self.whole) if names is None else self.whole.pairs(names)
        self.digests, self.count, self.bytes = {}, 0, 0
        for meta, tensor in checked(stream, (meta for meta in self._params if names is None or meta.name in names)):
            if self.look is None:
                self.finite.look(meta.name, tensor)
            if self.digesting:
                self.digests[meta.name] = tensor_digest(tensor)
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes
            yield meta.name, tensor

    __iter__ = pairs

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, once they are found to be sound, and count their parameters.

        Raises:
            ManifestError: as `checked_shards`.
        """
        self.digests, self.count, self.bytes = {}, 0, 0
        for meta, held in checked_shards(self._sent(), self._params):
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes  # other ranks have the rest of it
            yield from held

    def _sent(self) -> Iterator[Shard]:
        """Yield the shards of the tensors that are sent.

        Ranks gather in order, so a shard that gathers first takes and drops the ones before it that are left out.
        """
        left_out: list[Shard] = []
        for shard in self.whole.shards():
            if self._sends(shard.meta.name):
                yield replace(shard, take=partial(self._take, shard, left_out if shard.gathers else []))
                left_out = [] if shard.gathers else left_out
            elif shard.gathers:
                left_out.append(shard)

    def _take(self, shard: Shard, before: Sequence[Shard]) -> Tensor:
        for one in before:
            one.take()
        tensor = shard.take()
        if self.look is None:
            self.finite.look(shard.meta.name, tensor, shard.block)
        return tensor

    def _begin(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.whole) if self.part is None else self.whole.pairs(self.part.names)

    def replay(self) -> None:
        for _ in self._begin() if self._gathers else ():
            pass

    def drain(self) -> None:
        """Finish a pass, or make one that never began, where other ranks wait in its gathers.

        One that cannot be finished is logged, not raised: the caller has an error of its own to raise.
        """
        if not self._gathers or torch_group().size == 1:
            return
        try:
            for _ in self._begin() if self._stream is None else self._stream:
                pass
        except Exception:
            log.warning("other trainer ranks may wait for this one, which cannot finish its pass", exc_info=True)


def bump(collectors: Iterable[Callable[[], Any]]) -> None:
    """Increment the policy version of each collector once.

    Args:
        collectors: references that return a collector, or None where it is gone.

    The engines have the weights by then, so a collector that raises is logged, and the others are bumped all the same.
    """
    seen: set[int] = set()
    for known in collectors:
        collector = known()
        if collector is None or id(collector) in seen:  # not its truth: endless ones have no length
            continue
        seen.add(id(collector))
        try:
            collector.increment_version()
        except Exception:
            log.error("a collector did not take note of new weights, which are in service", exc_info=True)
