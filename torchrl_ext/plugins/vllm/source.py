"""`VLLMSource` makes a weight source of vLLM's trainers (`vllm.distributed.weight_transfer.base`) a source of ours.

It does not import vLLM. An object's attributes tell which form of vLLM's ``WeightSource`` it has:

=========================  ========================================  ==================================================
\\                          0.31 and 0.32                             0.33
=========================  ========================================  ==================================================
parameters                 ``metadata()``: name, dtype, full shape   ``metadata``, also with owners and placements
full tensors               iteration; None for names not held here   ``iter_full()``, of names that this rank owns
pieces of this rank        parameters of vLLM's own `ModuleSource`   ``iter_local()``
names that a rank has      ``held_names()``; None for all            ``owners``; None for every rank
=========================  ========================================  ==================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.shards.dtensor import block_at
from torchrl_ext.weights.source import Row, WeightSource, checked, full, gathered_in_order

__all__ = ["VLLMSource"]


class VLLMSource(WeightSource):
    """The weights that a source of vLLM's declares and yields; its metadata is read once.

    Args:
        source: an object of either form.
        rank: this trainer process's rank, by which ``owners`` counts.

    Raises:
        ConfigError: the object is no such source.
    """

    def __init__(self, source: Any, *, rank: int = 0) -> None:
        metadata = getattr(source, "metadata", None)
        if metadata is None:
            raise ConfigError(f"a {type(source).__name__} declares no weights", expected="a WeightSource of vLLM's")
        self._source, self._rank, self._held = source, rank, getattr(source, "held_names", lambda: None)()
        declared = metadata() if callable(metadata) else metadata
        self._declared = [(ParamMeta(meta.name, meta.dtype, tuple(meta.shape)), meta) for meta in declared]
        self._local = _offers(source, "iter_local")
        self._full = _offers(source, "iter_full") or (source.__iter__ if self._local is None else None)

    def require(self, *, gathers: bool) -> None:
        """Refuse a source for a transport that ``gathers`` full tensors on rank 0, if rank 0 does not have them all.

        Raises:
            ConfigError: the source yields only pieces, or rank 0 does not own a parameter.
        """
        lacking = [meta.name for meta, told in self._declared if not self._owned_by(0, told)]
        why = f"a {type(self._source).__name__} yields only the pieces of its ranks" if self._full is None else ""
        if lacking:
            why = f"trainer rank 0 does not own {lacking[0]!r}"
        if gathers and why:
            raise ConfigError(
                why,
                expected="full tensors of every name on rank 0, from which this transport sends",
                state="nothing was sent",
                hint="choose a transport to which every rank gives its own part: sharded, or delta with by_shard=True",
            )

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta, _ in self._declared)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank owns."""
        for name, tensor in self._full() if self._full is not None else ():
            if tensor is not None:
                yield name, tensor.detach()

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank owns; the pieces of one pass stay in memory as long as its shards."""
        owned = [(meta, told) for meta, told in self._declared if self._owned_by(self._rank, told)]
        kind = type(self._source)
        if self._local is not None:
            stream, seen = self._local(), dict[str, Tensor]()
            for meta, told in owned:
                block, why = self._piece(told)
                if block.numel or why:
                    take = partial(_taken, stream, seen, meta.name, block)
                    yield Shard(meta, block, take, gathers=bool(why), why=why)
        elif kind.__name__ == "ModuleSource" and kind.__module__.startswith("vllm."):
            named = dict(self._source._module.named_parameters())
            for meta, _ in owned:
                yield from Row(meta.name, named[meta.name], partial(full, named[meta.name])).shards()
        else:
            metas = [meta for meta, _ in owned]
            tensors = (tensor for _, tensor in checked(iter(self), metas))
            yield from gathered_in_order(metas, tensors, "its source makes it as a whole")

    def _owned_by(self, rank: int, told: Any) -> bool:
        """Return whether a rank owns a parameter; 0.32 says it only of this rank, so others count as owners there."""
        owners = getattr(told, "owners", None)
        if owners is not None:
            return rank in owners
        return self._held is None or rank != self._rank or told.name in self._held

    def _piece(self, told: Any) -> tuple[Block, str]:
        """Return this rank's block of a parameter, and why its owners may make it together; "" if they do not."""
        if told.placements is None:
            return Block.whole(tuple(told.shape)), "its owners make it together" if len(told.owners or ()) > 1 else ""
        mesh, at = told.mesh_shape or (len(told.owners),), told.owners.index(self._rank)
        place = [at // math.prod(mesh[axis + 1 :]) % mesh[axis] for axis in range(len(mesh))]
        return block_at(told.shape, mesh, [getattr(one, "dim", None) for one in told.placements], place), ""


def _offers(source: Any, mode: str) -> Any:
    """Return a source's method, if it has it and says that it implements it."""
    says = getattr(source, f"implements_{mode}", None)
    return getattr(source, mode, None) if says is None or says() else None


def _taken(stream: Iterator[tuple[str, Any]], seen: dict[str, Tensor], name: str, block: Block) -> Tensor:
    """Return a piece by name, after a pass over all before it, which ``seen`` keeps."""
    while name not in seen:
        pair = next(stream, None)
        if pair is None:
            raise ManifestError(f"the source ended before {name!r}, which this rank owns", state="nothing was sent")
        seen[pair[0]] = pair[1].detach()
    if tuple(seen[name].shape) != block.shape:
        raise ManifestError(
            f"the source yields {list(seen[name].shape)} as this rank's piece of {name!r}",
            expected=f"{list(block.shape)}, as its metadata places it",
        )
    return seen[name]
