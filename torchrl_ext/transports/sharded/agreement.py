"""Shares on their way to trainer rank 0, which makes the plan, and the rows of the plan on their way back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import xxhash

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ManifestError, TransportError
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.sharded.plans.plan import MemberPlan, TransferPlan
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard, checked_shards
from torchrl_ext.weights.source import WeightSource

__all__ = ["Description", "Needs", "described", "digest_of", "first_difference", "hand_out", "read_plan"]


class Description(NamedTuple):
    """The parameters of a source, and the shards of one trainer rank."""

    params: tuple[ParamMeta, ...]
    shards: list[Shard]
    share: Share


class _NeedsNote(msgspec.Struct, frozen=True):
    share: Info | None
    whole: dict[str, str]


class Needs(NamedTuple):
    """The needs of one worker, of the parameters for which it joined.

    Attributes:
        share: its share, or None for everything.
        whole: the tensors that it needs whole -> the reason.
        params: all of them; an update may bring some.
    """

    share: Share | None
    whole: Mapping[str, str]
    params: Sequence[ParamMeta] = ()

    def to_json(self) -> Info:
        """Return the worker's note."""
        return {"share": None if self.share is None else self.share.to_json(), "whole": dict(self.whole)}

    @classmethod
    def from_json(cls, note: Any, params: Sequence[ParamMeta]) -> Needs:
        """Read a worker's note; the inverse of `to_json`.

        Raises:
            TransportError, ManifestError: it is malformed.
        """
        try:
            read = msgspec.convert(note, _NeedsNote)
        except msgspec.ValidationError as error:
            raise TransportError(f"a worker sent malformed needs: {error}", expected="a share, and reasons") from error
        return cls(None if read.share is None else Share.from_json(read.share, params), read.whole, params)

    def of(self, params: Sequence[ParamMeta]) -> Share:
        """Return the share of the parameters of an update.

        Raises:
            ManifestError: the worker did not join for one of them.
        """
        if self.share is None:
            return Share.of_blocks((Block.whole(meta.shape),) for meta in params)
        if tuple(params) == tuple(self.params):
            return self.share
        places = {meta: place for place, meta in enumerate(self.params)}
        for meta in params:
            if meta not in places:
                raise ManifestError(
                    f"a worker joined without {meta}, of which it needs slices",
                    expected="an update of parameters for which engines were connected",
                    state="nothing was sent",
                    hint="connect engines again for the new model",
                )
        return self.share.some(places[meta] for meta in params)


def described(source: WeightSource) -> Description:
    """Return what this rank holds of a source.

    Raises:
        ManifestError: as `checked_shards`.
    """
    params, shards = source.params(), list(source.shards())
    held = checked_shards(shards, params)
    return Description(params, shards, Share.of_blocks([shard.block for shard in own] for _, own in held))


def digest_of(params: Sequence[ParamMeta]) -> str:
    """Return 32 hex digits over parameters in their order, by which a rank sees that it has those of rank 0."""
    rows = json.dumps([meta.to_json() for meta in params], separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(rows.encode())


def first_difference(rank: int, own: Sequence[ParamMeta], rows: Sequence[Any]) -> ManifestError:
    """Return the error that names the first parameter on which a trainer rank and rank 0 disagree."""
    pairs = zip_longest(own, map(ParamMeta.from_json, rows))
    place, (mine, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return ManifestError(
        f"trainer rank {rank} has {other or 'nothing'} as parameter {place}, and rank 0 has {mine or 'nothing'}",
        expected="the same parameters, in the same order, on every trainer rank",
        state="nothing was sent; engines serve what they served",
        hint="give every rank the same model, and WeightSender the same mapper and dtype",
    )


def hand_out(group: PeerGroup, number: int, plan: TransferPlan) -> None:
    """Leave the rows of every member in the notes, in place of the rows of earlier plans (trainer rank 0)."""
    key = _key(group, number)
    group.notes.sweep(f"plan/{group.generation}/")
    group.notes.put(key, msgspec.to_builtins(plan.schedule))
    for member in range(1, group.world_size):
        group.notes.put(f"{key}/{member}", msgspec.to_builtins(plan.rows(member)))


def read_plan(group: PeerGroup, number: int, params: Sequence[ParamMeta], timeout_s: float) -> MemberPlan:
    """Return this member's part of the plan that rank 0 left under a number.

    Raises:
        TransportError: it is not there, or malformed.
    """
    key, until = _key(group, number), Deadline(timeout_s).until
    notes = [value for name in (key, f"{key}/{group.rank}") for value in group.notes.wait(name, until)]
    if len(notes) < 2:
        raise TransportError(
            f"{group.call([0])} left no rows of plan {number} for {group.call([group.rank])}", state="nothing was moved"
        )
    return MemberPlan(params, *notes)


def _key(group: PeerGroup, number: int) -> str:
    return f"plan/{group.generation}/{number}"
