"""How trainers and engines cut a decoder among their members: data, tensor, pipeline and expert parallelism, FSDP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.shapes import Part
from torchrl_ext.transports.sharded.plans.plan import Share
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["Layout"]

_WORDS = {"fsdp": "dp", "x": "copies"}


class _Role(NamedTuple):
    """What decides who has what of a tensor: its shape and cut, its stage, and the owner of its expert."""

    shape: tuple[int, ...]
    axis: int | None
    units: int
    stage: int
    owner: int | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A trainer, or an engine and equal ones beside it.

    Members are numbered stage by stage; within a stage tensor parallelism runs fastest, data parallelism next. Experts
    are dealt to ``ep`` members each, which follow each other; without ``ep`` they are cut as all else.

    Attributes:
        tp, pp, dp: parallel sizes; ``dp`` members hold the same, or a stretch each where they are ``sharded``.
        ep: among how many members of a stage its experts are dealt; 1 for none.
        sharded: FSDP: what ``dp`` members would all hold is cut among them along the first dimension.
        copies: how many of these there are, all equal: replicas of an engine.

    Raises:
        ConfigError: a size below 1, or experts that cannot be dealt among the members of a stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sharded: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ep, self.copies) < 1:
            raise ConfigError(f"{self} has a size below 1")
        if self.dp * self.tp % self.ep:
            raise ConfigError(f"ep{self.ep} does not divide the {self.dp * self.tp} members of a pipeline stage")

    @classmethod
    def of(cls, text: str) -> Layout:
        """Read a layout: ``"fsdp64"``, ``"tp4-pp2-dp2-ep8"``, or ``"dp8-ep8-x4"`` for four engines.

        Raises:
            ConfigError: it is none.
        """
        words = [re.fullmatch(r"(fsdp|tp|pp|dp|ep|x)([1-9]\d{0,5})", word) for word in text.lower().split("-")]
        given = [(_WORDS.get(word[1], word[1]), int(word[2])) for word in words if word]
        if len(given) < len(words) or len(dict(given)) < len(words):
            raise ConfigError(f"{text!r} is no layout", expected="such as fsdp64, tp4-pp2-dp2-ep8 or dp8-ep8-x4")
        return cls(**dict(given), sharded=text.lower().startswith("fsdp") or "-fsdp" in text.lower())

    @property
    def size(self) -> int:
        """The members of one."""
        return self.tp * self.pp * self.dp

    def shares(self, parts: Sequence[Part]) -> list[Share]:
        """Return what each member has of these tensors; of ``copies`` those of the first, then of the next.

        Args:
            parts: of one decoder, all of them.
        """
        layers = max(part.layer for part in parts)
        experts = 1 + max((part.expert for part in parts if part.expert is not None), default=0)
        roles: dict[_Role, int] = {}
        of = np.array(
            [roles.setdefault(self._role(part, layers, experts), len(roles)) for part in parts], dtype=np.int32
        )
        shares = [Share([self._blocks(role, member) for role in roles], of) for member in range(self.size)]
        return shares * self.copies

    def _role(self, part: Part, layers: int, experts: int) -> _Role:
        stage = min(max(part.layer, 0), layers - 1) * self.pp // layers
        owner = None if part.expert is None or self.ep == 1 else part.expert * self.ep // experts
        return _Role(part.meta.shape, part.axis, part.units, stage, owner)

    def _blocks(self, role: _Role, member: int) -> list[Block]:
        stage, within = divmod(member, self.dp * self.tp)
        if stage != role.stage or (role.owner is not None and role.owner != within % self.ep):
            return []
        whole = Block.whole(role.shape)
        if role.owner is not None:
            block, replica, replicas = whole, within // self.ep, self.dp * self.tp // self.ep
        else:
            replica, rank = divmod(within, self.tp)
            replicas, parts = self.dp, min(self.tp, role.units)
            block = whole if role.axis is None else _stretch(whole, role.axis, rank * parts // self.tp, parts)
        return [_stretch(block, 0, replica, replicas) if self.sharded else block]


def _stretch(block: Block, axis: int, part: int, parts: int) -> Block:
    """Return one of the parts of a block, as torch.chunk cuts it: the last ones may be smaller, or empty."""
    start, stop, step = block.start[axis], block.stop[axis], -(-block.shape[axis] // parts)
    low, high = min(start + part * step, stop), min(start + (part + 1) * step, stop)
    before, after = slice(None, axis), slice(axis + 1, None)
    return Block((*block.start[before], low, *block.start[after]), (*block.stop[before], high, *block.stop[after]))
