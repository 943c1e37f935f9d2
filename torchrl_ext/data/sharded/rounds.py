"""The rounds of an update: trainer ranks pack and send, workers receive, pass on, land and check.

In a round every trainer rank sends each worker that it serves one message: blocks in C order, one after the other, each
at a multiple of its element size. What a member sends, or receives, in a round begins in one call; over NCCL such calls
run in order, and every member makes its own in the order of rounds. A message of one block that lies in one piece of
memory is sent from there, and received where it belongs. Behind the last round each rank sends each such worker the
digests of its blocks, 16 bytes each; the worker compares their sums with what it reads from the memory in
which the blocks have landed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import IntegrityError, ManifestError, why
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group.buckets import BufferPool, as_bytes, copy_each, is_plain
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.landing.sliced import Sliced, memory_of, part_of
from torchrl_ext.data.sharded.plan import MemberPlan, Transfer
from torchrl_ext.data.weights.blocks import Block, Shard
from torchrl_ext.data.weights.digests import PositionDigest, as_digests, block_words

__all__ = ["RoundReceiver", "RoundSender"]

_IN_FLIGHT = 2


def _message(
    params: Sequence[ParamMeta], transfers: Sequence[Transfer], pool: BufferPool
) -> tuple[Tensor, list[Tensor]]:
    """Return memory for the message that carries ``transfers``, and views of it, one of each block."""
    places, end = list[int](), 0
    for param, block in transfers:
        itemsize = params[param].dtype.itemsize
        places.append(-(-end // itemsize) * itemsize)
        end = places[-1] + block.numel * itemsize
    memory, views = pool.take(end), list[Tensor]()
    for (param, block), at in zip(transfers, places, strict=True):
        dtype = params[param].dtype
        views.append(memory[at : at + block.numel * dtype.itemsize].view(dtype).view(block.shape))
    return memory, views


def _together(move: Callable[[Tensor, int], Any], messages: Iterable[tuple[Tensor, int]], carrier: Group) -> list[Any]:
    """Begin to send or receive messages, each with its peer, in one call; return the works to wait for."""
    with carrier.together():
        return [move(memory, peer) for memory, peer in messages]


def _await(flying: deque[list[Any]], rounds: int, carrier: Group) -> None:
    """Wait until no more than the works of the last ``rounds`` rounds are under way."""
    while len(flying) > rounds:
        for work in flying.popleft():
            carrier.wait(work)


class RoundSender:
    """Sends the rounds of one trainer rank in one update.

    Args:
        plan: of this rank.
        held: this rank's shards of each parameter, which the plan was made of.
        carrier: moves the messages.
        pool: of memory for messages.
    """

    def __init__(self, plan: MemberPlan, held: Sequence[Sequence[Shard]], carrier: Group, pool: BufferPool) -> None:
        self._plan, self._held, self._carrier, self._pool = plan, held, carrier, pool
        self._gathers = deque(number for number, own in enumerate(held) if any(one.gathers for one in own))
        self._taken: dict[int, list[tuple[Block, Tensor]]] = {}
        self._digests: defaultdict[int, list[Tensor]] = defaultdict(list)  # words of blocks, by worker

    @torch.no_grad()
    def send(self) -> int:
        """Send all rounds, and then their digests; return how many bytes that were.

        Where it fails, the group is severed, and this rank has taken part in every gather: other ranks wait there.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
            ManifestError: a shard is not what was declared.
        """
        before, flying = self._carrier.sent.total(), deque[list[Any]]()
        try:
            for number in range(self._plan.rounds):
                _await(flying, _IN_FLIGHT - 1, self._carrier)
                self._take(*self._plan.span(number))
                messages = [(self._packed(peer, transfers), peer) for peer, transfers in self._plan.links(number)]
                flying.append(_together(self._carrier.send, messages, self._carrier))
                del messages
            self._take(len(self._plan.params), len(self._plan.params))
            digests = [(as_bytes(torch.cat(own)), peer) for peer, own in sorted(self._digests.items())]
            flying.append(_together(self._carrier.send, digests, self._carrier))
            _await(flying, 0, self._carrier)
        except BaseException as error:
            self._carrier.sever(why(error))
            for number in self._gathers:
                for shard in self._held[number]:
                    shard.take()
            raise
        return self._carrier.sent.total() - before

    def _take(self, first: int, stop: int) -> None:
        """Gather every parameter before ``stop`` that has to be gathered; forget the parameters before ``first``."""
        self._taken = {number: found for number, found in self._taken.items() if number >= first}
        while self._gathers and self._gathers[0] < stop:
            number = self._gathers.popleft()
            self._read(number)
            if number < first:  # nobody needs it
                del self._taken[number]

    def _read(self, number: int) -> list[tuple[Block, Tensor]]:
        if number not in self._taken:
            found = []
            for shard in self._held[number]:
                tensor = shard.take().detach()
                if tuple(tensor.shape) != shard.block.shape:
                    raise ManifestError(
                        f"a shard of {shard.meta.name!r} has shape {list(tensor.shape)}",
                        expected=f"{list(shard.block.shape)}, as it was declared",
                        state="nothing more is sent; engines hold a part of the version",
                    )
                found.append((shard.block, tensor))
            self._taken[number] = found
        return self._taken[number]

    def _packed(self, peer: int, transfers: Sequence[Transfer]) -> Tensor:
        """Return the message with ``transfers``, and note their digests."""
        params = self._plan.params
        sources = [_memory(block, self._read(param)) for param, block in transfers]
        cast = sources[0].dtype != params[transfers[0].param].dtype
        if len(sources) == 1 and not cast and is_plain(sources[0], self._carrier.device):
            message, views = as_bytes(sources[0]), sources
        else:
            message, views = _message(params, transfers, self._pool)
            for source, view in zip(sources, views, strict=True):
                if source.dtype == view.dtype:
                    copy_each([source], [view])
                else:
                    view.copy_(source)
        for (param, block), view in zip(transfers, views, strict=True):
            self._digests[peer].append(block_words(params[param], block, view))
        return message


def _memory(block: Block, parts: Sequence[tuple[Block, Tensor]]) -> Tensor:
    found = memory_of(block, parts)
    assert found is not None  # the plan is of the blocks that this member named
    return found


class _Message(NamedTuple):
    """What a worker gets from one trainer rank in one round: blocks, and ``memory`` with views of each.

    There are no views where the memory is that in which the only block belongs.
    """

    rank: int
    transfers: Sequence[Transfer]
    memory: Tensor
    views: Sequence[Tensor]


class RoundReceiver:
    """Receives the rounds of one worker in one update.

    Args:
        plan: of this worker.
        needed: the blocks that it needs of each parameter, which the plan was made of.
        into: tensors that may be filled directly, by name.
        carrier: moves the messages.
        pool: of memory for messages.
    """

    def __init__(
        self,
        plan: MemberPlan,
        needed: Sequence[tuple[Block, ...]],
        into: Mapping[str, Tensor],
        carrier: Group,
        pool: BufferPool,
    ) -> None:
        self._plan, self._needed, self._into = plan, needed, into
        self._carrier, self._pool = carrier, pool
        self._targets: dict[int, tuple[Tensor, list[tuple[Block, Tensor]]]] = {}
        self._begun = 0  # rounds
        self._flying: deque[tuple[list[_Message], list[Any]]] = deque()
        self._passed: deque[list[Any]] = deque()  # works by round
        self._came: defaultdict[int, list[int]] = defaultdict(list)  # parameters of the blocks of each trainer rank
        self._found: dict[int, Tensor] = {}  # words of this worker's blocks

    @torch.no_grad()
    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of which something is needed, once it is complete; then compare all with their digests.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
            IntegrityError: a tensor differs from what was sent; names it.
        """
        plan, yielded = self._plan, 0
        self._begin()
        for done in range(plan.rounds + 1):
            # the last tensor of a round may go on in the next one
            reached = plan.span(done)[0] if done < plan.rounds else len(plan.params)
            for number in filter(self._needed.__getitem__, range(yielded, reached)):
                tensor, parts = self._target(number)
                del self._targets[number]
                words = [block_words(plan.params[number], *part) for part in parts]
                self._found[number] = torch.cat(words).sum(0, keepdim=True)
                del parts
                yield plan.params[number].name, tensor
                del tensor
            yielded = reached
            if done < plan.rounds:
                self._land(*self._flying.popleft())
                self._begin()  # the next rounds come while this one is loaded, and may use its memory
        self._compare()

    def _begin(self) -> None:
        """Begin to receive as many rounds as may be under way."""
        while self._begun < self._plan.rounds and len(self._flying) < _IN_FLIGHT:
            messages = [self._message(*link) for link in self._plan.links(self._begun)]
            self._flying.append((messages, self._receive(messages)))
            self._begun += 1
            del messages

    def _message(self, rank: int, transfers: Sequence[Transfer]) -> _Message:
        if len(transfers) == 1 and is_plain(place := self._place(*transfers[0]), self._carrier.device):
            return _Message(rank, transfers, as_bytes(place), ())
        return _Message(rank, transfers, *_message(self._plan.params, transfers, self._pool))

    def _receive(self, messages: Sequence[_Message]) -> list[Any]:
        """Begin to receive messages of trainer ranks, from the worker that passes them on where there is one."""
        source = self._plan.source
        sources = [(one.memory, one.rank if source is None else source) for one in messages]
        return _together(self._carrier.receive, sources, self._carrier)

    def _land(self, messages: Sequence[_Message], works: Sequence[Any]) -> None:
        """Wait for the messages of a round, pass them on, and bring their blocks where they belong."""
        for work in works:
            self._carrier.wait(work)
        _await(self._passed, _IN_FLIGHT - 1, self._carrier)
        if (successor := self._plan.successor) is not None:
            passed = [(one.memory, successor) for one in messages]
            self._passed.append(_together(self._carrier.send, passed, self._carrier))
        for rank, transfers, _, views in messages:
            self._came[rank] += [one.param for one in transfers]
            if views:
                copy_each(views, [self._place(*transfer) for transfer in transfers])

    def _target(self, number: int) -> tuple[Tensor, list[tuple[Block, Tensor]]]:
        """Return what is yielded for a parameter, and the memory of its blocks."""
        if number not in self._targets:
            meta, blocks, device = self._plan.params[number], self._needed[number], self._carrier.device
            given, parts = self._into.get(meta.name), list[tuple[Block, Tensor]]()
            if given is not None and ParamMeta.of(meta.name, given) == meta:
                parts = [(block, part) for block in blocks if (part := part_of(given, block)) is not None]
            if given is None or len(parts) < len(blocks):
                parts = [(block, torch.empty(block.shape, dtype=meta.dtype, device=device)) for block in blocks]
                given = parts[0][1] if blocks == (Block.whole(meta.shape),) else Sliced.of(meta, parts)
            self._targets[number] = given, parts
        return self._targets[number]

    def _place(self, param: int, block: Block) -> Tensor:
        """Return the memory in which a transferred block belongs."""
        return _memory(block, self._target(param)[1])

    def _compare(self) -> None:
        """Receive the digests of all blocks, and compare their sums with those of the memory."""
        own = [_Message(rank, (), self._pool.take(16 * len(came)), ()) for rank, came in sorted(self._came.items())]
        self._land(own, self._receive(own))
        sums = np.zeros((len(self._plan.params), 2), dtype=np.uint64)
        for rank, _, memory, _ in own:
            np.add.at(sums, self._came[rank], memory.cpu().numpy().view(np.uint64).reshape(-1, 2))
        _await(self._passed, 0, self._carrier)
        for number, found in zip(self._found, as_digests([*self._found.values()]), strict=True):
            wanted = PositionDigest(*sums[number].tolist())
            if found != wanted:
                raise IntegrityError(
                    f"parameter {self._plan.params[number].name!r} differs from what was sent",
                    expected=f"digest {wanted.hex()} of this worker's blocks, found {found.hex()}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )
