"""`Gather` brings each parameter to the trainer rank that owns it, and to no other: one at a time, block by block.

`Ranks` is how rank 0 speaks to the others; `owners` shares the parameters out by size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from torchrl_ext.base.devices import current_device
from torchrl_ext.base.errors import ManifestError, TransportError, why
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.weights.blocks import Block, Shard, checked_shards
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.data.weights.view import overlap, without

__all__ = ["Gather", "Holding", "Ranks", "disjoint", "owners"]

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
    apart = overlap(own) is None
    found = [*own] if apart else []
    if not apart:
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
    if apart:
        return dict(own)
    return {
        piece: [holder for block, holders in own.items() if block.contains(piece) for holder in holders]
        for piece in found
    }


@final
class Holding:
    """What one rank holds of a model: its shards (`WeightSource.shards`), in order.

    Args:
        source: what is sent.
        before: what it held when the shards were found to be sound the last time.

    Attributes:
        params: of the model.
        rows: parameter, block and whether it gathers, of each shard.
        same: ``before`` holds the same elements of the same parameters.

    Raises:
        ManifestError: the shards are not sound (`checked_shards`).
    """

    def __init__(self, source: WeightSource, before: Holding | None) -> None:
        self.params, self._shards = source.params(), [*source.shards()]
        self.rows = [(shard.meta, shard.block, shard.gathers) for shard in self._shards]
        self.same = before is not None and (self.params, self.rows) == (before.params, before.rows)
        for _ in () if self.same else checked_shards(self._shards, self.params):
            pass

    def to_json(self) -> Info:
        """Return it for other ranks: ``params``, and of each shard ``[parameter, start, stop, whether it gathers]``."""
        numbers = {meta.name: number for number, meta in enumerate(self.params)}
        rows = [[numbers[meta.name], *block, int(gathers)] for meta, block, gathers in self.rows]
        return {"params": [meta.to_json() for meta in self.params], "shards": rows}

    def dropped(self) -> list[Shard]:
        """Return the shards, and keep none of them: they refer to the trainer's memory."""
        shards, self._shards = self._shards, []
        return shards


class _Piece(NamedTuple):
    """A block of a parameter, the rank that gives it to the owner, and the number of the shard there."""

    block: Block
    rank: int
    shard: int


@final
class Gather:
    """The way of every parameter to its owner.

    Ranks that hold replicas of what the owner lacks give different parameters, and what the owner has comes from
    nowhere else. A shard that gathers is taken on every rank; the owner alone keeps it.

    Args:
        params: of the model.
        held: what each rank holds, as `Holding.to_json` says it.
        rank: this one.
        count: how many ranks own parameters: ranks 0 to below ``count``.
        timeout_s: of each wait for another rank.

    Attributes:
        owners: the rank that owns each parameter.

    Raises:
        ManifestError: ranks do not send the same parameters, or nobody holds some elements; names the first.
    """

    def __init__(
        self, params: Sequence[ParamMeta], held: Sequence[Info], rank: int, count: int, timeout_s: float
    ) -> None:
        _compare(held)
        self._params, self._rank, self._timeout_s = params, rank, timeout_s
        self.owners = owners(params, count)
        holders: list[dict[Block, list[tuple[int, int]]]] = [{} for _ in params]
        self._gathers = dict[int, int]()  # number of this rank's shard, by parameter
        for one, shown in enumerate(held):
            for number, (param, start, stop, gathers) in enumerate(shown["shards"]):
                holders[param].setdefault(Block(tuple(start), tuple(stop)), []).append((one, number))
                if gathers and one == rank:
                    self._gathers[param] = number
        self._pieces: list[list[_Piece]] = []
        for param, (meta, own) in enumerate(zip(params, holders, strict=True)):
            owner, pieces = self.owners[param], list[_Piece]()
            for block, found in disjoint(meta, own).items() if param not in self._gathers else ():
                giver = next((one for one in found if one[0] == owner), found[param % len(found)])
                pieces.append(_Piece(block, *giver))
            self._pieces.append(pieces)

    def tensors(
        self, shards: Sequence[Shard], wanted: Callable[[int], bool] = lambda param: True
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Yield number and tensor of each parameter that this rank owns, in order; every rank iterates.

        This rank takes part to the end, also where it fails on the way or the caller stops: others wait for it.

        Args:
            shards: what this rank holds now.
            wanted: which parameters are gathered; the same ones on every rank.

        Raises:
            ManifestError: a shard is not of its block's shape.
            TransportError: another rank is gone, or takes no part within the timeout; names it.
        """
        taken = _Taken(shards)
        walk = self._walk(taken, wanted)
        try:
            for param, tensor in walk:
                if taken.failures:
                    break
                yield param, tensor
        finally:
            for _ in walk:
                pass
        if taken.failures:
            raise taken.failures[0]

    def _walk(self, taken: _Taken, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Tensor]]:
        for param, meta in enumerate(self._params):
            mine = self.owners[param] == self._rank
            if param in self._gathers:  # wanted or not: such shards are taken in order, each once
                tensor = taken.of(self._gathers[param])
                if mine and wanted(param):
                    yield param, tensor
            elif wanted(param):
                own = [piece for piece in self._pieces[param] if piece.rank == self._rank]
                parts = [taken.of(piece.shard, piece.block) for piece in own]
                if mine:
                    yield param, self._received(meta, [*zip(own, parts, strict=True)], self._pieces[param])
                else:
                    self._send(parts, self.owners[param])

    def _send(self, parts: Sequence[Tensor], owner: int) -> None:
        self._run([(torch.distributed.isend, byte_view(part.to(_device())), owner) for part in parts])

    def _received(self, meta: ParamMeta, own: Sequence[tuple[_Piece, Tensor]], pieces: Sequence[_Piece]) -> Tensor:
        """Return a parameter of this rank's own pieces and of those that others send."""
        whole = Block.whole(meta.shape)
        if [piece.block for piece, _ in own] == [whole]:
            return own[0][1]
        others = [piece for piece in pieces if piece.rank != self._rank]
        device = _device() if others else None if not own else own[0][1].device
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        waits, copies = [], []
        for piece in others:
            part = tensor[piece.block.within(whole)]
            room = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            waits.append((torch.distributed.irecv, byte_view(room), piece.rank))
            copies += [] if room is part else [(part, room)]
        self._run(waits)
        for part, room in copies + [(tensor[piece.block.within(whole)], part) for piece, part in own]:
            part.copy_(room)
        return tensor

    def _run(self, transfers: Sequence[tuple[Any, Tensor, int]]) -> None:
        if not transfers:
            return
        from torch.distributed import P2POp, batch_isend_irecv

        try:
            for work in batch_isend_irecv([P2POp(*one) for one in transfers]):
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            peers = ", ".join(str(rank) for *_, rank in transfers)
            raise TransportError(
                f"trainer rank {peers} took no part in a gather within {self._timeout_s:g} s, or is gone: {why(error)}",
                expected="every trainer rank, until the version is written",
                state="nothing was published",
                hint="check the trainer's ranks; torch's process group may be of no more use to them",
            ) from error


class _Taken:
    """Takes shards; where that fails, notes why in ``failures``, and gives others, for which another rank may wait."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards, self.failures = shards, list[Exception]()

    def of(self, number: int, part: Block | None = None) -> Tensor:
        """Return the elements of a shard, or a part of them, in the dtype in which they are sent."""
        shard = self._shards[number]
        try:
            tensor = shard.take().detach().resolve_conj().resolve_neg()
            if tuple(tensor.shape) != shard.block.shape:
                raise ManifestError(
                    f"a shard of {shard.meta.name!r} gives a tensor of shape {tuple(tensor.shape)}",
                    expected=f"{shard.block.shape}, as its block says",
                )
            tensor = tensor.to(shard.meta.dtype)
        except Exception as error:  # noqa: BLE001 - raised when every rank has what it waits for
            self.failures.append(error)
            tensor = torch.zeros(shard.block.shape, dtype=shard.meta.dtype)
        return tensor if part is None else tensor[part.within(shard.block)]


def _device() -> torch.device:
    """Return where the trainer's process group moves tensors: on the accelerator, if it can, else on the host."""
    from torch.distributed import get_backend_config, get_default_backend_for_device

    found = current_device()
    there = f"{found.type}:{get_default_backend_for_device(found)}" in get_backend_config()
    return found if there else torch.device("cpu")


def _compare(held: Sequence[Info]) -> None:
    """Compare what ranks say of the parameters, and of what gathers, with what rank 0 says.

    Raises:
        ManifestError: names the first that differs, and the rank.
    """

    def said(one: Info) -> list[tuple[str, list[Any]]]:
        params = one["params"]
        gathered = [params[param] for param, *_, gathers in one["shards"] if gathers]
        return [("parameter", params), ("shard that is gathered", gathered)]

    for rank, other in enumerate(held[1:], 1):
        for (what, ours), (_, theirs) in zip(said(held[0]), said(other), strict=True):
            for number, pair in enumerate(zip_longest(ours, theirs)):
                if pair[0] != pair[1]:
                    here, there = ("none" if one is None else ParamMeta.from_json(one) for one in pair)
                    raise ManifestError(
                        f"{what} {number} is {there} on trainer rank {rank}, and {here} on rank 0",
                        expected="the same on every rank",
                        state="nothing was sent",
                        hint="send the same model on every rank",
                    )
