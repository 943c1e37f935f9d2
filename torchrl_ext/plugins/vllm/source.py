"""`VLLMSource` makes a weight source of vLLM's trainers a source of ours, without importing vLLM.

vLLM's `vllm.distributed.weight_transfer.base.WeightSource` comes in two forms, known by what an object has:

=========================  ======================================================  =====================================
\\                          0.31 and 0.32                                           0.33
=========================  ======================================================  =====================================
the parameters             ``metadata()``: name, dtype, full shape                 ``metadata``, with ``owners``,
                                                                                   ``mesh_shape`` and ``placements``
full tensors               iteration; None for a name that this rank lacks         ``iter_full()``: of names it owns
this rank's pieces         the parameters of vLLM's own `ModuleSource`             ``iter_local()``
names that a rank holds    ``held_names()``; None for all                          ``owners``; None for every rank
=========================  ======================================================  =====================================

Transports that gather take full tensors from rank 0, and the other ranks replay the pass over what they own. Transports
to which each rank gives its own blocks take pieces. Where a source makes no pieces, its owners give full tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.shards.dtensor import block_at
from torchrl_ext.weights.source import Row, WeightSource, full

__all__ = ["VLLMSource"]

_WHOLE = "its source makes it as a whole"
_JOINTLY = "its owners make it together"


class VLLMSource(WeightSource):
    """The weights that a source of vLLM's declares and yields.

    Its metadata is read once, as vLLM 0.33 does.

    Args:
        source: an object of either form.
        rank: this trainer process's rank, by which ``owners`` counts.

    Raises:
        ConfigError: the object is no such source.
    """

    def __init__(self, source: Any, *, rank: int = 0) -> None:
        if getattr(source, "metadata", None) is None:
            raise ConfigError(
                f"a {type(source).__name__} declares no weights", expected="a WeightSource of vLLM's, with metadata"
            )
        self._source, self._rank = source, rank
        metadata = source.metadata() if callable(source.metadata) else source.metadata
        self._declared = [(ParamMeta(meta.name, meta.dtype, tuple(meta.shape)), meta) for meta in metadata]
        self._held = getattr(source, "held_names", lambda: None)()
        self._full = _offers(source, "iter_full") or (None if _offers(source, "iter_local") else source.__iter__)
        self._local = _offers(source, "iter_local")

    def require(self, *, gathers: bool) -> None:
        """Refuse a source that cannot give what a transport takes.

        Args:
            gathers: whether rank 0 takes full tensors (`Transport.gathers`), or each rank gives its own blocks.

        Raises:
            ConfigError: the source yields no full tensors, or rank 0 owns only some; names the first that it lacks.
        """
        if not gathers:
            return
        hint = "choose a transport to which every rank gives its own part: sharded, or delta with by_shard=True"
        if self._full is None:
            raise ConfigError(
                f"a {type(self._source).__name__} yields only the pieces of its ranks, and this transport gathers",
                expected="a source with iter_full",
                state="nothing was sent",
                hint=hint,
            )
        lacking = [meta.name for meta, told in self._declared if not self._owned_by(0, told)]
        if lacking:
            raise ConfigError(
                f"trainer rank 0 does not own {lacking[0]!r} and {len(lacking) - 1} other(s), and this transport sends "
                "full tensors from rank 0",
                expected="a source of which rank 0 owns every name",
                state="nothing was sent",
                hint=hint,
            )

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta, _ in self._declared)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank owns; raises ManifestError where the source makes no full tensors."""
        if self._full is None:
            raise ManifestError(f"a {type(self._source).__name__} makes no full tensors", hint="use sharded")
        for name, tensor in self._full():
            if tensor is not None:
                yield name, tensor.detach()

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank owns.

        The pieces of one pass stay in memory as long as its shards; of modules they are views.
        """
        module = _module_of(self._source)
        if module is not None:
            named = dict(module.named_parameters())
            for meta, _ in self._declared:
                yield from Row(meta.name, named[meta.name], partial(full, named[meta.name])).shards()
            return
        taken = _Pass(iter(self) if self._local is None else self._local())
        for meta, told in self._declared:
            if self._owned_by(self._rank, told):
                block, why = (Block.whole(meta.shape), _WHOLE) if self._local is None else self._piece(told)
                if block.numel or why:
                    take = partial(taken.take, meta.name, block, once=bool(why))
                    yield Shard(meta, block, take, gathers=bool(why), why=why)

    def _owned_by(self, rank: int, told: Any) -> bool:
        """Return whether a rank owns a parameter; 0.32 says it only of this rank, so others count as owners there."""
        owners = getattr(told, "owners", None)
        if owners is not None:
            return rank in owners
        return self._held is None or rank != self._rank or told.name in self._held

    def _piece(self, told: Any) -> tuple[Block, str]:
        """Return this rank's block of a parameter, and why its owners may make it together; "" if they do not."""
        owners, placements = told.owners, told.placements
        if placements is None:
            return Block.whole(tuple(told.shape)), _JOINTLY if owners is not None and len(owners) > 1 else ""
        mesh, place, at = told.mesh_shape or (len(owners),), [], owners.index(self._rank)
        for axis in range(len(mesh)):
            place.append(at // math.prod(mesh[axis + 1 :]) % mesh[axis])
        return block_at(told.shape, mesh, [getattr(one, "dim", None) for one in placements], place), ""


def _offers(source: Any, mode: str) -> Callable[[], Iterator[tuple[str, Any]]] | None:
    """Return a source's way to iterate, if it implements that one."""
    says = getattr(source, f"implements_{mode}", None)
    found = getattr(source, mode, None)
    return found if says is None or says() else None


def _module_of(source: Any) -> Any:
    """Return the module of a `ModuleSource` of vLLM's that cannot yield its local pieces itself."""
    kind = type(source)
    known = kind.__name__ == "ModuleSource" and kind.__module__.startswith("vllm.")
    return source._module if known and _offers(source, "iter_local") is None else None


class _Pass:
    """One pass over a source, whose tensors are taken by name."""

    def __init__(self, stream: Iterator[tuple[str, Any]]) -> None:
        self._stream, self._seen = stream, dict[str, Any]()

    def take(self, name: str, block: Block, *, once: bool) -> Tensor:
        """Return the tensor of a name, after the pass has come so far.

        Raises:
            ManifestError: the pass ends before the name, or the tensor has another shape than the block.
        """
        while name not in self._seen:
            pair = next(self._stream, None)
            if pair is None:
                raise ManifestError(f"the source ended before {name!r}, which this rank owns", state="nothing was sent")
            self._seen[pair[0]] = pair[1]
        found: Tensor = (self._seen.pop(name) if once else self._seen[name]).detach()
        if tuple(found.shape) != block.shape:
            raise ManifestError(
                f"the source yields {list(found.shape)} as this rank's piece of {name!r}",
                expected=f"{list(block.shape)}, as its metadata places it",
                state="nothing was sent",
            )
        return found
