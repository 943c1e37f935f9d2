"""`Shard`: a block of a full tensor that a trainer rank holds; and which blocks of a DTensor lie on this rank.

FSDP2, HSDP, tensor parallelism and their products place DTensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.view import Block, overlap

__all__ = ["Block", "Shard", "checked_shards", "require_whole", "shards_of_dtensor"]


@dataclass(frozen=True, eq=False)
class Shard:
    """A block of a parameter that this trainer rank holds.

    Attributes:
        meta: the parameter: its full shape, and the dtype in which it is sent.
        block: which of its elements these are.
        take: returns them as they are now, of the block's shape, on any device and with any strides; of a dtype that
            is cast where they are copied to one of ``meta.dtype``.
        gathers: `take` is a collective: every trainer rank has to call it, at the same point.
        why: where it gathers, the reason, in words for the report.
    """

    meta: ParamMeta
    block: Block
    take: Callable[[], Tensor]
    gathers: bool = False
    why: str = ""


def checked_shards(
    shards: Iterable[Shard], params: Iterable[ParamMeta]
) -> Iterator[tuple[ParamMeta, tuple[Shard, ...]]]:
    """Yield each parameter with the shards of it that one rank holds, once these are found to be sound.

    Args:
        shards: of one rank, in the order of ``params``.
        params: what the source declares.

    Yields:
        Each of ``params``, in order, with its shards; none where this rank holds nothing of it.

    Raises:
        ManifestError: a shard is of no declared parameter, or out of order; or its block reaches out of the tensor, has
            no elements, or shares some with another one of this rank.
    """
    declared = iter(params)
    for found, several in groupby(shards, attrgetter("meta")):
        for meta in declared:
            if meta == found:
                break
            yield meta, ()
        else:
            raise ManifestError(
                f"a shard of {found} follows those of all parameters, or is out of order",
                hint="`shards()` of a WeightSource yields in the order of `params()`, with the same names and dtypes",
            )
        held = tuple(several)
        _require_apart(meta, held)
        yield meta, held
    for meta in declared:
        yield meta, ()


def _require_apart(meta: ParamMeta, shards: Sequence[Shard]) -> None:
    whole = Block.whole(meta.shape)
    for shard in shards:
        block = shard.block
        if len(block.start) != len(whole.start) or len(block.stop) != len(whole.stop) or not whole.contains(block):
            raise ManifestError(f"a shard of {meta} is {block}", expected=f"a block within {whole}")
        if not shard.gathers and not all(map(int.__lt__, block.start, block.stop)):
            raise ManifestError(f"a shard of {meta} is {block}, which is empty", hint="do not yield it")
    pair = overlap(shard.block for shard in shards)
    if pair is not None:
        raise ManifestError(
            f"two shards of {meta} on this rank share elements: {pair[0]} and {pair[1]}",
            expected="blocks that are apart",
            state="nothing was sent",
            hint="yield each element once; other ranks hold the replicas",
        )


_Runs = tuple[tuple[int, int, int], ...]
"""Indices along one dimension: ``start <= index < stop``, and the position of the first in the local tensor."""


def shards_of_dtensor(meta: ParamMeta, tensor: Any) -> Iterator[Shard]:
    """Yield what this rank holds of a DTensor, as views of its local memory; nothing where that is empty.

    Replicas are yielded on every rank that holds one. A rank outside of the tensor's mesh holds nothing.

    Args:
        meta: describes the whole tensor.
        tensor: the DTensor. A block may lie in several pieces (``_StridedShard``), and is yielded as several then.

    Raises:
        ManifestError: the local tensor is of another size than its placements say.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return
    why = _unknown(tensor)
    if why:
        yield Shard(meta, Block.whole(meta.shape), partial(_full, tensor), gathers=True, why=why)
        return
    held = [_held(size, split, place) for size, (split, place) in zip(meta.shape, _splits(tensor), strict=True)]
    local, expected = _local(tensor).shape, tuple(sum(stop - start for start, stop, _ in runs) for runs in held)
    if tuple(local) != expected:
        raise ManifestError(
            f"this rank holds {list(local)} of {meta}, placed as {tensor.placements}",
            expected=f"{list(expected)}, as torch.chunk splits it",
            state="nothing was sent",
            hint="distribute it with distribute_tensor, parallelize_module or fully_shard",
        )
    for runs in itertools.product(*held):
        block = Block(tuple(start for start, _, _ in runs), tuple(stop for _, stop, _ in runs))
        if block.numel:
            there = tuple(slice(first, first + stop - start) for start, stop, first in runs)
            yield Shard(meta, block, partial(_local, tensor, there))


def _full(tensor: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = tensor.full_tensor()
    return found.detach()  # not before: torch 2.13 forgets an unusual order of splits then, and 2.14 gathers


def _local(tensor: Any, where: tuple[slice, ...] | None = None) -> Tensor:
    with torch.no_grad():  # otherwise it is a view that autograd follows
        found: Tensor = tensor.to_local().detach()
    return found if where is None else found[where]


_Split = tuple[int, int]
"""A dimension of the mesh that splits one of the tensor's: its size, and its split factor, 1 unless it is strided."""


def _unknown(tensor: Any) -> str:
    """Return why the blocks of a tensor are unknown, as a reason to gather it; all ranks find the same."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    for placement in tensor.placements:
        if placement.is_partial():
            return "ranks hold parts of a sum of it (a Partial placement)"
        if type(placement) not in (Replicate, Shard, _StridedShard):  # a class of them that is derived splits otherwise
            return f"its blocks under a {type(placement).__name__} placement are not known"
    order = getattr(tensor._spec, "shard_order", None) or ()  # since torch 2.10; None where strided ones tell it
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        return "dimensions of a mesh split it in an unusual order"
    for size, (split, _) in zip(tensor.shape, _splits(tensor), strict=True):
        if len(split) > 1 and _order(split) is None and size % math.prod(count * factor for count, factor in split):
            return "dimensions of a mesh split it unevenly, in an order that its placements do not tell"
    return ""


def _splits(tensor: Any) -> list[tuple[tuple[_Split, ...], tuple[int, ...]]]:
    """Return what splits each dimension of a tensor, in the order of the mesh, and this rank's place among those."""
    from torch.distributed.tensor.placement_types import Replicate, _StridedShard

    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    found: list[tuple[tuple[_Split, ...], tuple[int, ...]]] = [((), ())] * tensor.ndim
    for index, placement in enumerate(tensor.placements):
        if type(placement) is not Replicate:
            factor = int(placement.split_factor) if type(placement) is _StridedShard else 1
            split, place = found[placement.dim]
            found[placement.dim] = (*split, (mesh.size(index), factor)), (*place, coordinate[index])
    return found


@lru_cache(maxsize=4096)
def _order(split: tuple[_Split, ...]) -> tuple[int, ...] | None:
    """Return the order in which dimensions of a mesh split one of a tensor; None where their factors are of no order.

    ``fully_shard`` of a tensor that others of the mesh split already comes after them, and its split is noted as
    strided: by a factor that is the number of pieces which there were before.
    """
    order: list[int] = []
    for index in reversed(range(len(split))):
        before = [math.prod(split[other][0] for other in order[:end]) for end in range(len(order) + 1)]
        if split[index][1] not in before:
            return None
        order.insert(before.index(split[index][1]), index)
    return tuple(order)


@lru_cache(maxsize=4096)
def _held(size: int, split: tuple[_Split, ...], place: tuple[int, ...]) -> _Runs:
    """Return the indices along one dimension that lie at a place of the mesh's dimensions that split it.

    A split takes one of the chunks of `torch.chunk`: none of them is larger than the first, and the last may be empty.
    """
    order = _order(split)
    if order is not None:
        held = range(size)
        for index in order:
            chunk = -(-len(held) // split[index][0])
            held = held[place[index] * chunk : (place[index] + 1) * chunk]
        return ((held.start, held.stop, 0),)
    indices = torch.arange(size)
    for (count, factor), at in zip(split, place, strict=True):  # of each of `factor` parts every rank has a chunk
        chunks = [part.chunk(count)[at : at + 1] for part in indices.chunk(factor)]
        indices = torch.cat([indices[:0], *itertools.chain(*chunks)])
    firsts = ((indices.diff() != 1).nonzero().flatten() + 1).tolist()
    found = itertools.pairwise([0, *firsts, len(indices)])
    return tuple((int(indices[first]), int(indices[end - 1]) + 1, first) for first, end in found if first < end)


def require_whole(module: nn.Module) -> None:
    """Refuse a module that `FullyShardedDataParallel` (FSDP1) holds, wholly or in part.

    Its parameters are flat pieces of this rank, and nothing about such a tensor says which part of which parameter it
    is; a DTensor of FSDP2 does.

    Raises:
        ConfigError: some part of ``module`` is one.
    """
    for path, part in module.named_modules():
        if "FullyShardedDataParallel" in map(attrgetter("__name__"), type(part).__mro__):
            where = f"its part {path!r}" if path else "it"
            raise ConfigError(
                f"a {type(module).__name__} cannot be sent: {where} is sharded by FullyShardedDataParallel (FSDP1), so "
                "this rank holds a flat piece of its parameters",
                expected="a module whose parameters are whole, or sharded as DTensors",
                state="nothing was sent",
                hint="shard it with FSDP2 (torch.distributed.fsdp.fully_shard); or gather FSDP1's full state dict on "
                "every rank, and send that",
            )
