"""Which rank writes what, where several hold the same elements: each element once, and each rank about as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torchrl_ext.errors import ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.view import Block, overlap, tiles, without

__all__ = ["disjoint", "shared_out"]

_Owner = TypeVar("_Owner")

_Holder = tuple[int, int]  # a rank, and the number of one of its shards


def shared_out(
    params: Sequence[ParamMeta], held: Sequence[Sequence[tuple[int, Block]]]
) -> list[dict[int, list[Block]]]:
    """Give every element of every parameter to one of the ranks that hold it.

    What one rank alone holds is its own; the rest goes piece by piece, the largest first, to whichever of its holders
    has the fewest bytes until then, or to the lowest of those.

    Args:
        params: every parameter.
        held: for each rank its shards in order, as the index of the parameter and the block.

    Returns:
        For each rank the blocks that it writes, by the number of the shard that they are parts of.

    Raises:
        ManifestError: a block lies outside of its parameter, or nobody holds some elements; names them.
    """
    holders: list[dict[Block, list[_Holder]]] = [{} for _ in params]
    for rank, shards in enumerate(held):
        for number, (index, block) in enumerate(shards):
            if not Block.whole(params[index].shape).contains(block):
                raise ManifestError(
                    f"trainer rank {rank} holds elements {block} of {params[index].name!r}",
                    expected=f"elements of {params[index]}",
                    state="nothing was sent",
                )
            if block.numel:
                holders[index].setdefault(block, []).append((rank, number))
    pieces: list[tuple[int, int, Block, list[_Holder]]] = []
    for index, (meta, own) in enumerate(zip(params, holders, strict=True)):
        for block, candidates in disjoint(meta, own).items():
            pieces.append((meta.dtype.itemsize * block.numel, index, block, candidates))
    kept: list[dict[int, list[Block]]] = [{} for _ in held]
    load = [0] * len(held)
    for nbytes, _, block, candidates in sorted(pieces, key=lambda row: (len(row[3]) > 1, -row[0], row[1], row[2])):
        rank, number = min(candidates, key=lambda one: (load[one[0]], one))
        load[rank] += nbytes
        kept[rank].setdefault(number, []).append(block)
    return kept


def disjoint(meta: ParamMeta, own: Mapping[Block, list[_Owner]]) -> dict[Block, list[_Owner]]:
    """Return blocks that do not meet and have every element of a parameter, each with all of its owners in ``own``.

    Raises:
        ManifestError: nobody holds some elements; names them.
    """
    found: list[Block] = []
    if overlap(own) is None:
        found = [*own]
    else:
        for block in sorted(own, key=lambda one: (one.numel, one)):  # the smallest first: most ranks hold these
            found += without([block], found)
    if sum(block.numel for block in found) < meta.numel:
        (hole,) = tiles(found, meta.shape)
        raise ManifestError(
            f"no trainer rank holds elements {hole} of {meta}",
            expected="every element of every parameter on at least one trainer rank",
            state="nothing was sent",
            hint="check the blocks that the source's shards() yields on each trainer rank",
        )
    return {
        piece: [holder for block, holders in own.items() if block.contains(piece) for holder in holders]
        for piece in found
    }
