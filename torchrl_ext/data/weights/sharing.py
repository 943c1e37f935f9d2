"""Trainer ranks that share a model: how rank 0 speaks to the others, which parameters each of them owns, and who holds
which elements of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.weights.view import Block, overlap, without

__all__ = ["Ranks", "disjoint", "owners"]

_Owner = TypeVar("_Owner")


class Ranks:
    """The other ranks of a trainer, as rank 0 speaks to them; here there are none."""

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return True

    def order(self, step: str, /, **args: Any) -> None:
        """Let every other rank run ``step``."""

    def answers(self) -> list[Info]:
        """Return what ranks 1, 2, ... answer to the last order."""
        return []

    def ask(self, step: str, /, **args: Any) -> list[Info]:
        """Give an order, and return the `answers` to it."""
        self.order(step, **args)
        return self.answers()


def owners(params: Sequence[ParamMeta], ranks: int) -> list[int]:
    """Return the rank that owns each of ``params``, so that each of ``ranks`` ranks owns about as many bytes.

    The largest parameter comes first, and goes to the rank with the fewest bytes until then, or to the lowest of those:
    so every rank finds the same.
    """
    found, load = [0] * len(params), [0] * ranks
    for number in sorted(range(len(params)), key=lambda number: -params[number].nbytes):
        found[number] = load.index(min(load))
        load[found[number]] += params[number].nbytes
    return found


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
        hole = min(without([Block.whole(meta.shape)], found))  # where the first missing element is, in C order
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
