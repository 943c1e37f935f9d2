"""`Shard` is a block of a full tensor that a trainer rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from torch import Tensor

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.view import Block, overlap

__all__ = ["Block", "Shard", "checked_shards"]


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
