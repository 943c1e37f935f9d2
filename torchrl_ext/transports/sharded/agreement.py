"""What the members of a group tell each other of what they hold and need, so that all make the same plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from torchrl_ext.errors import ManifestError, TransportError
from torchrl_ext.transports.group.peers import Carrier
from torchrl_ext.transports.sharded.plans.plan import TransferPlan, make_plan
from torchrl_ext.transports.sharded.plans.shares import Share
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import WeightSource

__all__ = ["Description", "Needs", "described", "digest_of", "first_difference", "plan_of", "put_shares", "rows_of"]


class Description(NamedTuple):
    """What one trainer rank holds of a source."""

    params: tuple[ParamMeta, ...]
    shards: list[Shard]
    share: Share


class Needs(NamedTuple):
    """What one worker needs of the parameters that it joined for.

    Attributes:
        share: its share, or None for everything.
        whole: why some of it is whole.
        params: all of them; an update may bring some.
    """

    share: Share | None
    whole: Mapping[str, str]
    params: Sequence[ParamMeta] = ()

    def to_json(self) -> Info:
        """Return the note that says so."""
        return {"share": None if self.share is None else self.share.to_json(), "whole": dict(self.whole)}

    @classmethod
    def from_json(cls, told: Any, params: Sequence[ParamMeta]) -> Needs:
        """Return what a worker's note says.

        Raises:
            TransportError, ManifestError: it is malformed.
        """
        if type(told) is not dict or type(told.get("whole")) is not dict:
            raise TransportError(f"a worker says of its needs {str(told)[:200]!r}", expected="a share, and reasons")
        share = told.get("share")
        return cls(None if share is None else Share.from_json(share, params), told["whole"], params)

    def blocks(self, params: Sequence[ParamMeta]) -> Share:
        """Return the share of the parameters of an update, in full where it is everything."""
        if self.share is not None:
            if tuple(params) == tuple(self.params):
                return self.share
            places = {meta.name: place for place, meta in enumerate(self.params)}
            return self.share.some(places[meta.name] for meta in params)
        return Share.of_blocks((Block.whole(meta.shape),) for meta in params)


def described(source: WeightSource) -> Description:
    """Return what this rank holds of a source.

    Raises:
        ManifestError: a shard is of no parameter of the source, out of order, or overlaps with another one.
    """
    params, shards = source.params(), list(source.shards())
    index = {meta.name: number for number, meta in enumerate(params)}
    blocks: list[list[Block]] = [[] for _ in params]
    for shard in shards:
        number = index.get(shard.meta.name)
        if number is None or params[number] != shard.meta:
            raise ManifestError(
                f"a shard is of {shard.meta}",
                expected="one of the parameters that the source declares" if number is None else str(params[number]),
                state="nothing was sent",
                hint="`params()` and `shards()` of a WeightSource must agree",
            )
        blocks[number].append(shard.block)
    return Description(params, shards, Share.of_blocks(blocks))


def digest_of(params: Sequence[ParamMeta]) -> str:
    """Return 32 hex digits over parameters and their order, by which ranks find out whether they have the same."""
    rows = json.dumps([meta.to_json() for meta in params], separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(rows.encode())


def first_difference(rank: int, own: Sequence[ParamMeta], rows: Sequence[Any]) -> ManifestError:
    """Return the error that names the first parameter on which a trainer rank and rank 0 disagree."""
    theirs = [ParamMeta.from_json(row) for row in rows]
    for place, (mine, other) in enumerate(zip(own, theirs, strict=False)):
        if mine != other:
            what = f"trainer rank {rank} has {other} as parameter {place}, and rank 0 has {mine}"
            break
    else:
        what = f"trainer rank {rank} has {len(theirs)} parameters, and rank 0 has {len(own)}"
        if len(theirs) != len(own):
            longer = theirs if len(theirs) > len(own) else own
            what += f"; the first that only one of them has is {longer[min(len(own), len(theirs))]}"
    return ManifestError(
        what,
        expected="the same parameters, in the same order, on every trainer rank",
        state="nothing was sent; engines serve what they served",
        hint="give every rank the same model, and WeightSender the same mapper and dtype",
    )


def put_shares(group: Carrier, number: int, held: Sequence[Share], needed: Sequence[Share]) -> None:
    """Leave what every member holds or needs where all find it, equal shares once (trainer rank 0)."""
    distinct: list[Share] = []
    places: dict[int, int] = {}
    rows: list[list[int]] = []
    for shares in (held, needed):
        row = []
        for share in shares:
            if id(share) not in places:
                place = next((at for at, known in enumerate(distinct) if known == share), len(distinct))
                if place == len(distinct):
                    distinct.append(share)
                places[id(share)] = place
            row.append(places[id(share)])
        rows.append(row)
    told = {"shares": [share.to_json() for share in distinct], "held": rows[0], "needed": rows[1]}
    group.notes.put(_key(group, number), told)


def plan_of(
    group: Carrier, number: int, params: tuple[ParamMeta, ...], until: float, *, bucket_bytes: int, own: Share | None
) -> TransferPlan:
    """Make the plan from what rank 0 left under its number.

    Args:
        group: of trainer and workers.
        number: of the plan.
        params: every parameter, in order.
        until: monotonic moment by which it has to be there.
        bucket_bytes: of the transport.
        own: this member's share, which has to be among those that rank 0 names; None where it is everything.

    Raises:
        TransportError, ManifestError: it is not there, malformed, or not what this member said.
    """
    told = group.notes.wait(_key(group, number), until)
    try:
        shares = [Share.from_json(share, params) for share in told[0]["shares"]]
        held, needed = ([shares[place] for place in told[0][side]] for side in ("held", "needed"))
    except (LookupError, TypeError) as error:
        raise TransportError(
            f"rank 0 says of plan {number} what cannot be read: {error!r}",
            expected="the shares of all members",
            hint="use one release of torchrl_ext on both ends",
        ) from error
    if own is not None and own not in shares:
        raise ManifestError(
            f"the shares of plan {number} do not have that of rank {group.rank}",
            expected="what this rank holds or needs, as it said",
            state="nothing was moved",
            hint="use one release of torchrl_ext on both ends",
        )
    return make_plan(params, held, needed, bucket_bytes=bucket_bytes)


def rows_of(plan: TransferPlan) -> Info:
    """Return what a member says of a plan that differs from rank 0's."""
    return {"digest": plan.digest, "rows": plan.rows_digest().tolist()}


def _key(group: Carrier, number: int) -> str:
    return f"shares/{group.generation}/{number}"
