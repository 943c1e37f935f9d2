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
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _places(params: Sequence[ParamMeta], transfers: Sequence[Transfer]) -> list[int]:
    """Return at which byte of the message that carries ``transfers`` each block begins; at last, the message's size."""
    found, end = [], 0
    for param, block in transfers:
        itemsize = params[param].dtype.itemsize
        found.append(-(-end // itemsize) * itemsize)
        end = found[-1] + block.numel * itemsize
    return [*found, end]


def _views(params: Sequence[ParamMeta], transfers: Sequence[Transfer], message: Tensor) -> list[Tensor]:
    """Return the blocks of ``transfers`` as views of the message that carries them."""
    found = []
    for (param, block), at in zip(transfers, _places(params, transfers), strict=False):
        dtype = params[param].dtype
        found.append(message[at : at + block.numel * dtype.itemsize].view(dtype).view(block.shape))
    return found


def _together(move: Callable[[Tensor, int], Any], messages: Sequence[tuple[Tensor, int]], carrier: Group) -> list[Any]:
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
        shards: of this rank, in the order of the plan's parameters.
        carrier: moves the messages.
        pool: of memory for messages.
    """

    def __init__(self, plan: MemberPlan, shards: Sequence[Shard], carrier: Group, pool: BufferPool) -> None:
        self._plan, self._carrier, self._pool = plan, carrier, pool
        index = {meta.name: number for number, meta in enumerate(plan.params)}
        self._held: defaultdict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            self._held[index[shard.meta.name]].append(shard)
        self._gathers = deque(number for number, own in self._held.items() if any(one.gathers for one in own))
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
        before = self._carrier.sent.total()
        try:
            self._send()
        except BaseException as error:
            self._carrier.sever(why(error))
            while self._gathers:
                for shard in self._held[self._gathers.popleft()]:
                    shard.take()
            raise
        return self._carrier.sent.total() - before

    def _send(self) -> None:
        flying: deque[list[Any]] = deque()
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
        params, sources = self._plan.params, [self._block(*transfer) for transfer in transfers]
        plain = sources[0].dtype == params[transfers[0].param].dtype and is_plain(sources[0], self._carrier.device)
        if len(sources) == 1 and plain:
            views, message = sources, as_bytes(sources[0])
        else:
            message = self._pool.take(_places(params, transfers)[-1])
            views = _views(params, transfers, message)
            for source, view in zip(sources, views, strict=True):
                if source.dtype == view.dtype:
                    copy_each([source], [view])
                else:
                    view.copy_(source)
        for (param, block), view in zip(transfers, views, strict=True):
            self._digests[peer].append(block_words(params[param], block, view))
        return message

    def _block(self, param: int, block: Block) -> Tensor:
        found = memory_of(block, self._read(param))
        if found is None:
            raise ManifestError(
                f"this rank does not hold a block of {self._plan.params[param].name!r} that it must send",
                expected=f"elements {block.start} to {block.stop}",
                hint="make shards() yield the same blocks in every update, or connect again for a new plan",
            )
        return found


class _Message(NamedTuple):
    """What a worker gets from one trainer rank in one round.

    Attributes:
        rank: the trainer rank's in the group.
        transfers: its blocks.
        memory: that it fills.
        direct: whether ``memory`` is where its only block belongs.
    """

    rank: int
    transfers: list[Transfer]
    memory: Tensor
    direct: bool


class RoundReceiver:
    """Receives the rounds of one worker in one update.

    Args:
        plan: of this worker.
        needed: the blocks that it needs of each parameter.
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
        self._flying: deque[tuple[list[_Message], list[Any]]] = deque()
        self._passed: deque[list[Any]] = deque()  # works by round
        self._done = 0
        self._came: defaultdict[int, list[int]] = defaultdict(list)  # parameters of the blocks of each trainer rank
        self._found: dict[int, Tensor] = {}  # words of this worker's blocks

    @torch.no_grad()
    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of which something is needed, once it is complete; then compare all with their digests.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
            IntegrityError: a tensor differs from what was sent; names it.
        """
        yielded, count = 0, len(self._plan.params)
        while yielded < count:
            if self._done < self._plan.rounds:
                self._round()
            # the last tensor of a round may go on in the next one
            reached = self._plan.span(self._done)[0] if self._done < self._plan.rounds else count
            for number in range(yielded, reached):
                if self._needed[number]:
                    tensor, parts = self._target(number)
                    del self._targets[number]
                    words = [block_words(self._plan.params[number], *part) for part in parts]
                    self._found[number] = torch.cat(words).sum(0, keepdim=True)
                    del parts
                    yield self._plan.params[number].name, tensor
                    del tensor
            yielded = reached
        self._compare(self._digests())

    def _round(self) -> None:
        """Receive one round; the next ones are under way when it has landed, so that they come while it is loaded."""
        self._begin()
        self._done += 1
        self._land(*self._flying.popleft())
        self._begin()  # no name is left for a message, whose memory this may use

    def _begin(self) -> None:
        """Begin to receive as many rounds as may be under way."""
        while (number := self._done + len(self._flying)) < self._plan.rounds and len(self._flying) < _IN_FLIGHT:
            messages = [self._message(*link) for link in self._plan.links(number)]
            self._flying.append((messages, self._receive(messages)))
            del messages

    def _message(self, rank: int, transfers: list[Transfer]) -> _Message:
        if len(transfers) == 1:
            place = self._place(*transfers[0])
            if is_plain(place, self._carrier.device):
                return _Message(rank, transfers, as_bytes(place), direct=True)
        nbytes = _places(self._plan.params, transfers)[-1]
        return _Message(rank, transfers, self._pool.take(nbytes), direct=False)

    def _land(self, messages: list[_Message], works: list[Any]) -> None:
        """Wait for the messages of a round, pass them on, and bring their blocks where they belong."""
        for work in works:
            self._carrier.wait(work)
        _await(self._passed, _IN_FLIGHT - 1, self._carrier)
        if self._plan.successor is not None:
            pairs = [(one.memory, self._plan.successor) for one in messages]
            self._passed.append(_together(self._carrier.send, pairs, self._carrier))
        for rank, transfers, memory, direct in messages:
            self._came[rank] += [one.param for one in transfers]
            if not direct:
                views = _views(self._plan.params, transfers, memory)
                copy_each(views, [self._place(*transfer) for transfer in transfers])

    def _receive(self, messages: Sequence[_Message]) -> list[Any]:
        """Begin to receive messages of trainer ranks, from the worker that passes them on where there is one."""
        source = self._plan.source
        sources = [(one.memory, one.rank if source is None else source) for one in messages]
        return _together(self._carrier.receive, sources, self._carrier)

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
        found = memory_of(block, self._target(param)[1])
        if found is None:
            raise IntegrityError(
                f"trainer ranks send a block of {self._plan.params[param].name!r} that this worker does not need",
                expected=f"parts of {self._needed[param]}",
                state="the engine holds a part of the version and stays paused",
            )
        return found

    def _digests(self) -> np.ndarray:
        """Receive the digests of all blocks, and return their sums: uint64 of shape (parameters, 2)."""
        own = [(rank, self._pool.take(16 * len(params))) for rank, params in sorted(self._came.items())]
        messages = [_Message(rank, [], memory, direct=True) for rank, memory in own]
        self._land(messages, self._receive(messages))
        found = np.zeros((len(self._plan.params), 2), dtype=np.uint64)
        for rank, memory in own:
            np.add.at(found, self._came[rank], memory.cpu().numpy().view(np.uint64).reshape(-1, 2))
        _await(self._passed, 0, self._carrier)
        return found

    def _compare(self, expected: np.ndarray) -> None:
        for number, found in zip(self._found, as_digests([*self._found.values()]), strict=True):
            wanted = PositionDigest(*expected[number].tolist())
            if found != wanted:
                raise IntegrityError(
                    f"parameter {self._plan.params[number].name!r} differs from what was sent",
                    expected=f"digest {wanted.hex()} of this worker's blocks, found {found.hex()}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )
