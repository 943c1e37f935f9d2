"""`Shard`: a block of a full tensor that a trainer rank holds; and which blocks of a DTensor lie on this rank.

FSDP2, HSDP, tensor parallelism and their products place DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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


def shards_of_dtensor(meta: ParamMeta, tensor: Any, gather: Callable[[], Tensor]) -> Iterator[Shard]:
    """Yield what this rank holds of a DTensor, as a view of its local memory; nothing where that is empty.

    Replicas are yielded on every rank that holds one. A rank outside of the tensor's mesh holds nothing.

    Args:
        meta: describes the whole tensor.
        tensor: the DTensor.
        gather: returns the whole tensor, on all ranks of the mesh; taken where placements do not tell the block.

    Raises:
        ManifestError: the local tensor is of another size than its placements say.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return
    held = _held(tensor)
    if isinstance(held, str):
        yield Shard(meta, Block.whole(meta.shape), gather, gathers=True, why=held)
        return
    block = Block(tuple(one.start for one in held), tuple(one.stop for one in held))
    local = tuple(_local(tensor).shape)
    if local != block.shape:
        raise ManifestError(
            f"this rank holds {list(local)} of {meta}, placed as {tensor.placements}",
            expected=f"{list(block.shape)}, as torch.chunk splits it",
            state="nothing was sent",
            hint="distribute it with distribute_tensor, parallelize_module or fully_shard",
        )
    if block.numel:
        yield Shard(meta, block, partial(_local, tensor))


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():  # otherwise it is a view that autograd follows
        found: Tensor = tensor.to_local().detach()
    return found


def _held(tensor: Any) -> list[range] | str:
    """Return the indices along each dimension that lie on this rank; or why they are unknown, the same on all ranks.

    A split takes one of the chunks of `torch.chunk`: none of them is larger than the first, and the last may be empty.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    shard_order = getattr(tensor._spec, "shard_order", None) or ()  # since torch 2.10; None where strided ones tell it
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in shard_order):
        return "dimensions of a mesh split it in an unusual order"
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    splits: list[list[int]] = [[] for _ in tensor.shape]  # dimensions of the mesh, in the order in which they split
    for index, placement in reversed([*enumerate(tensor.placements)]):
        if placement.is_partial():
            return "ranks hold parts of a sum of it (a Partial placement)"
        if type(placement) not in (Replicate, Shard, _StridedShard):  # a class of them that is derived splits otherwise
            return f"its blocks under a {type(placement).__name__} placement are not known"
        if type(placement) is not Replicate:
            # `fully_shard` splits what others of the mesh have split, and notes how many pieces there were
            factor = int(placement.split_factor) if type(placement) is _StridedShard else 1
            order = splits[placement.dim]
            pieces = [math.prod(map(mesh.size, order[:end])) for end in range(len(order) + 1)]
            if factor not in pieces:
                return "dimensions of a mesh split it in an order that its placements do not tell"
            order.insert(pieces.index(factor), index)
    held = [range(size) for size in tensor.shape]
    for dim, order in enumerate(splits):
        for index in order:
            chunk = -(-len(held[dim]) // mesh.size(index))
            held[dim] = held[dim][place[index] * chunk : (place[index] + 1) * chunk]
    return held


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
