"""Full tensors of what several ranks hold in blocks, over torch's default process group: every rank gets each."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchrl_ext.errors import ManifestError, WeightSyncError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.view import tiles

__all__ = ["gathered"]

Held = dict[Block, int]
"""Block -> the lowest rank that holds it."""


def gathered(params: Sequence[ParamMeta], shards: Callable[[], Iterable[Shard]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter as a full tensor; a collective that all ranks enter, and go through in lockstep.

    Each block is broadcast by the lowest rank that holds it. A single process needs no group, if it holds everything.

    Args:
        params: what is yielded; the same on every rank.
        shards: lists this rank's blocks, none of which gathers.

    Raises:
        ManifestError: a block is held by no rank, or blocks overlap (on every rank alike); or a rank has no shards.
    """
    import torch.distributed as dist

    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    mine: list[dict[Block, Shard]] = [{} for _ in params]
    failure: WeightSyncError | None = None
    place = {meta: index for index, meta in enumerate(params)}
    try:
        for shard in shards():
            mine[place[shard.meta]].setdefault(shard.block, shard)
    except WeightSyncError as error:
        failure = error
    table = _exchange(params, mine, failure) if grouped else [dict.fromkeys(blocks, 0) for blocks in mine]
    if failure is not None:
        raise failure
    for meta, held in zip(params, table, strict=True):
        _require_all(meta, held)
    device = _device() if grouped else None
    for meta, held, own in zip(params, table, mine, strict=True):
        whole = Block.whole(meta.shape)
        if not grouped and len(held) == 1:
            tensor = own[whole].take()
            yield meta.name, tensor if tensor.dtype == meta.dtype else tensor.to(meta.dtype)
            continue
        full = torch.empty(meta.shape, dtype=meta.dtype, device=device or next(iter(own.values())).take().device)
        for owner in sorted(set(held.values())):
            blocks = [block for block in sorted(held) if held[block] == owner]
            if not grouped:
                for block in blocks:
                    full[block.within(whole)] = own[block].take()
                continue
            flat = full.new_empty(sum(block.numel for block in blocks))
            parts = flat.split([block.numel for block in blocks])
            if owner == dist.get_rank():
                for block, part in zip(blocks, parts, strict=True):
                    part.view(block.shape).copy_(own[block].take())
            dist.broadcast(flat, owner)
            for block, part in zip(blocks, parts, strict=True):
                full[block.within(whole)] = part.view(block.shape)
        yield meta.name, full


def _exchange(
    params: Sequence[ParamMeta], mine: Sequence[Iterable[Block]], failure: WeightSyncError | None
) -> list[Held]:
    """Return who holds what, by parameter, on every rank alike.

    A rank that has no shards says so here, where the others wait for it, so that none of them goes on alone.
    """
    import torch.distributed as dist

    device, size = _device(), dist.get_world_size()
    width = max((len(meta.shape) for meta in params), default=0)
    pad = (0,) * width
    rows = [
        (index, *(*block.start, *pad)[:width], *(*block.stop, *pad)[:width])
        for index, blocks in enumerate(mine)
        for block in blocks
    ]
    listed = zlib.crc32("\n".join(map(str, params)).encode())
    head = torch.tensor([-1 if failure else len(rows), listed], device=device)
    heads = [torch.empty_like(head) for _ in range(size)]
    dist.all_gather(heads, head)
    counts, lists = zip(*(one.tolist() for one in heads), strict=True)
    if failure is not None:
        raise failure
    if min(counts) < 0:
        raise ManifestError(
            f"trainer rank {counts.index(-1)} cannot list its weights",
            hint="a list of its weights; that rank's own error has the reason",
        )
    if len(set(lists)) > 1:
        other = next(rank for rank, one in enumerate(lists) if one != lists[0])
        raise ManifestError(
            f"trainer ranks 0 and {other} list other parameters",
            expected="the same config and the same dtype on every rank",
        )
    table = torch.zeros((max(counts), 1 + 2 * width), dtype=torch.int64, device=device)
    if rows:
        table[: len(rows)] = torch.tensor(rows, device=device)
    tables = [torch.empty_like(table) for _ in range(size)]
    dist.all_gather(tables, table)
    found: list[Held] = [{} for _ in params]
    for rank, (count, one) in enumerate(zip(counts, tables, strict=True)):
        for index, *ends in one[:count].tolist():
            dim = len(params[index].shape)
            found[index].setdefault(Block(tuple(ends[:dim]), tuple(ends[width : width + dim])), rank)
    return found


def _require_all(meta: ParamMeta, held: Held) -> None:
    """Refuse a parameter whose blocks leave a hole, or overlap; those that do not meet hold what they add up to."""
    flaw = tiles([*held], meta.shape)
    if len(flaw) == 2:
        raise ManifestError(
            f"ranks {sorted(set(held.values()))} hold blocks of {meta.name!r} that overlap",
            expected="the same parallel sizes on every rank, and ranks as Megatron numbers them",
        )
    if flaw:
        got = sum(block.numel for block in held)
        raise ManifestError(
            f"{meta.numel - got} of {meta.numel} elements of {meta.name!r} are held by no rank",
            expected="ranks that hold all of it together; a process by itself has to hold everything",
            hint="build the source on every trainer rank, each with its own place in the parallel groups",
        )


def _device() -> torch.device:
    """Return where tensors have to be for the default group."""
    if "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
