"""The rounds of an update: trainer ranks pack and send, workers receive, pass on, land and check.

In a round every trainer rank sends each worker that it serves one message: blocks in C order, one after the other, each
at a multiple of its element size. What a member sends, or receives, in a round begins in one call; over NCCL such calls
run in order, and every member makes its own in the order of rounds. A message of one block that lies in one piece of
memory is sent from there, and received where it belongs. Behind the last round each rank sends each such worker the
position digests of its blocks, 16 bytes each; the worker compares their sums with what it reads from the memory in
which the blocks have landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.kernels.base import Piece, kernels_on
from torchrl_ext.landing.sliced import Sliced, memory_of, part_of
from torchrl_ext.transports.copies import BufferPool, as_bytes, copy_each, is_plain
from torchrl_ext.transports.group.peers import PeerGroup
from torchrl_ext.transports.sharded.plans.plan import MemberPlan, Transfer
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import PositionDigest
from torchrl_ext.weights.shards.blocks import Block, Shard

__all__ = ["RoundReceiver", "RoundSender", "words_of"]

_IN_FLIGHT = 2
_DIGEST_BYTES = 16
_MASK = (1 << 64) - 1


class _Placed(NamedTuple):
    """One transfer of a parameter, and where it lies in its message, in bytes."""

    transfer: Transfer
    meta: ParamMeta
    at: int
    nbytes: int

    def tensor_in(self, message: Tensor) -> Tensor:
        """Return the block as a view of the message that holds it."""
        return message[self.at : self.at + self.nbytes].view(self.meta.dtype).view(self.transfer.block.shape)


def _laid_out(params: Sequence[ParamMeta], transfers: Sequence[Transfer]) -> tuple[list[_Placed], int]:
    """Return where each block lies in the message that carries ``transfers``, and the message's size in bytes."""
    placed, cursor = [], 0
    for transfer in transfers:
        meta = params[transfer.param]
        itemsize = meta.dtype.itemsize
        at, nbytes = -(-cursor // itemsize) * itemsize, transfer.block.numel * itemsize
        placed.append(_Placed(transfer, meta, at, nbytes))
        cursor = at + nbytes
    return placed, cursor


class _Message(NamedTuple):
    """What a worker gets from one trainer rank in one round.

    Attributes:
        rank: the trainer rank's in the group.
        placed: its blocks.
        memory: that it fills.
        direct: whether ``memory`` is where its only block belongs.
    """

    rank: int
    placed: list[_Placed]
    memory: Tensor
    direct: bool


def _together(
    carrier: PeerGroup, move: Callable[[Tensor, int], Any], messages: Iterable[tuple[Tensor, int]]
) -> list[Any]:
    """Begin to send or receive messages, each with its peer, in one call; return the works to wait for."""
    with carrier.together():
        return [move(memory, peer) for memory, peer in messages]


def words_of(meta: ParamMeta, block: Block, data: Tensor) -> PositionDigest:
    """Return what a block adds to the position digest of its tensor.

    Args:
        meta: the tensor, with the dtype of ``data``.
        block: which elements these are.
        data: their values, of the block's shape.
    """
    strides = torch.empty(meta.shape, device="meta").stride()
    offset = sum(start * stride for start, stride in zip(block.start, strides, strict=True))
    if data.is_complex() and data.element_size() == 16:  # two units per element
        data, offset = torch.view_as_real(data), 2 * offset
        strides = (*(2 * stride for stride in strides), 1)
    return PositionDigest(*kernels_on(data.device).words(Piece(destination=data, offset=offset, strides=strides)))


class RoundSender:
    """Sends the rounds of one trainer rank in one update.

    Args:
        plan: of this rank.
        shards: of this rank, in the order of the plan's parameters.
        carrier: moves the messages.
        pool: of memory for messages.
    """

    def __init__(self, plan: MemberPlan, shards: Sequence[Shard], carrier: PeerGroup, pool: BufferPool) -> None:
        self._plan, self._carrier, self._pool = plan, carrier, pool
        index = {meta.name: number for number, meta in enumerate(plan.params)}
        self._held: dict[int, list[Shard]] = {}
        for shard in shards:
            self._held.setdefault(index[shard.meta.name], []).append(shard)
        self._gathers = deque(number for number, own in self._held.items() if any(one.gathers for one in own))
        self._taken: dict[int, list[tuple[Block, Tensor]]] = {}
        self._digests: dict[int, bytearray] = {}  # by worker

    @torch.no_grad()
    def send(self) -> None:
        """Send all rounds, and then their digests.

        Raises:
            TransportError, DeadlineError: as `PeerGroup.wait`.
            ManifestError: a shard is not what was declared.
        """
        flying: deque[list[Any]] = deque()
        for number in range(self._plan.rounds):
            while len(flying) >= _IN_FLIGHT:
                self._land(flying)
            first, stop = self._plan.span(number)
            self._take(first, stop)
            messages = [(self._packed(peer, transfers), peer) for peer, transfers in self._plan.links(number)]
            flying.append(_together(self._carrier, self._carrier.send, messages))
            del messages
        self._take(len(self._plan.params), len(self._plan.params))
        digests = [(torch.frombuffer(own, dtype=torch.uint8), peer) for peer, own in sorted(self._digests.items())]
        digests = [(flat.to(self._carrier.device), peer) for flat, peer in digests]
        flying.append(_together(self._carrier, self._carrier.send, digests))
        while flying:
            self._land(flying)

    def drain(self) -> None:
        """Take part in the gathers that are left, where other ranks wait for this one."""
        while self._gathers:
            for shard in self._held[self._gathers.popleft()]:
                shard.take()

    def _land(self, flying: deque[list[Any]]) -> None:
        for work in flying[0]:
            self._carrier.wait(work)
        flying.popleft()

    def _take(self, first: int, stop: int) -> None:
        """Gather every parameter before ``stop`` that has to be gathered; forget the parameters before ``first``."""
        for number in [number for number in self._taken if number < first]:
            del self._taken[number]
        while self._gathers and self._gathers[0] < stop:
            self._read(self._gathers.popleft())
        for number in [number for number in self._taken if number < first]:
            del self._taken[number]

    def _read(self, number: int) -> list[tuple[Block, Tensor]]:
        if number not in self._taken:
            found = []
            for shard in self._held.get(number, ()):
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
        digests = self._digests.setdefault(peer, bytearray())
        placed, nbytes = _laid_out(self._plan.params, transfers)
        if len(placed) == 1:
            source, meta = self._block(transfers[0]), placed[0].meta
            if source.dtype == meta.dtype and is_plain(source, self._carrier.device):
                digests += bytes.fromhex(words_of(meta, transfers[0].block, source).hex())
                return as_bytes(source)
        message = self._pool.take(nbytes)
        for one in placed:
            view, source = one.tensor_in(message), self._block(one.transfer)
            if source.dtype == view.dtype:
                copy_each([source], [view])
            else:
                view.copy_(source)
            digests += bytes.fromhex(words_of(one.meta, one.transfer.block, view).hex())
        return message

    def _block(self, transfer: Transfer) -> Tensor:
        found = memory_of(transfer.block, self._read(transfer.param))
        if found is None:
            raise ManifestError(
                f"this rank does not hold a block of {self._plan.params[transfer.param].name!r} that it has to send",
                expected=f"elements {transfer.block.start} to {transfer.block.stop}",
                hint="shards() must yield the same blocks in every update, or the plan is made again",
            )
        return found


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
        carrier: PeerGroup,
        pool: BufferPool,
    ) -> None:
        self._plan, self._needed, self._into = plan, needed, into
        self._carrier, self._pool = carrier, pool
        self._targets: dict[int, tuple[Tensor, list[tuple[Block, Tensor]]]] = {}
        self._flying: deque[tuple[list[_Message], list[Any]]] = deque()
        self._passed: deque[list[Any]] = deque()  # works by round
        self._done = 0
        self._landing = True
        self._transfers: dict[int, list[int]] = {}  # parameters of the blocks from each trainer rank, as they came
        self._found: dict[int, PositionDigest] = {}

    @torch.no_grad()
    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of which something is needed, once it is complete; then compare all with their digests.

        Raises:
            TransportError, DeadlineError: as `PeerGroup.wait`.
            IntegrityError: a tensor has landed otherwise than it was sent; names it.
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
                    self._found[number] = self._read_back(number, parts)
                    del parts
                    yield self._plan.params[number].name, tensor
                    del tensor
            yielded = reached
        self._compare(self._digests())

    def drain(self) -> None:
        """Receive the rest and drop it, so that the group stays in step.

        Raises:
            TransportError, DeadlineError: as `PeerGroup.wait`.
        """
        self._landing = False
        while self._done < self._plan.rounds:
            self._round()
        self._digests()

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
            self._flying.append((messages, self._receive((one.memory, one.rank) for one in messages)))
            del messages

    def _message(self, rank: int, transfers: Sequence[Transfer]) -> _Message:
        placed, nbytes = _laid_out(self._plan.params, transfers)
        if self._landing and len(placed) == 1:
            place = self._place(transfers[0])
            if is_plain(place, self._carrier.device):
                return _Message(rank, placed, as_bytes(place), direct=True)
        return _Message(rank, placed, self._pool.take(nbytes), direct=False)

    def _land(self, messages: list[_Message], works: list[Any]) -> None:
        """Wait for the messages of a round, pass them on, and bring their blocks where they belong."""
        for work in works:
            self._carrier.wait(work)
        self._await_passed(_IN_FLIGHT - 1)
        self._pass_on([one.memory for one in messages])
        for rank, placed, *_ in messages:  # before anything may fail here, for `drain`
            self._transfers.setdefault(rank, []).extend(one.transfer.param for one in placed)
        for _, placed, memory, direct in messages:
            if self._landing and not direct:
                copy_each([one.tensor_in(memory) for one in placed], [self._place(one.transfer) for one in placed])

    def _receive(self, messages: Iterable[tuple[Tensor, int]]) -> list[Any]:
        """Begin to receive messages of trainer ranks, from the worker that passes them on where there is one."""
        source = self._plan.source
        sources = ((memory, rank if source is None else source) for memory, rank in messages)
        return _together(self._carrier, self._carrier.receive, sources)

    def _pass_on(self, messages: Sequence[Tensor]) -> None:
        """Send messages to the next worker with the same needs; two rounds of them may be under way."""
        successor = self._plan.successor
        if successor is not None:
            pairs = ((memory, successor) for memory in messages)
            self._passed.append(_together(self._carrier, self._carrier.send, pairs))

    def _await_passed(self, rounds: int) -> None:
        """Wait until no more than the last ``rounds`` rounds are still being passed on."""
        while len(self._passed) > rounds:
            for work in self._passed.popleft():
                self._carrier.wait(work)

    def _target(self, number: int) -> tuple[Tensor, list[tuple[Block, Tensor]]]:
        """Return what is yielded for a parameter, and the memory of its blocks."""
        if number not in self._targets:
            meta, blocks = self._plan.params[number], self._needed[number]
            given = self._into.get(meta.name)
            if given is not None and ParamMeta.of(meta.name, given) == meta:
                parts = [(block, part_of(given, block)) for block in blocks]
                if all(part is not None for _, part in parts):
                    self._targets[number] = given, parts  # type: ignore[assignment]  # none of them is None
                    return self._targets[number]
            fresh = [
                (block, torch.empty(block.shape, dtype=meta.dtype, device=self._carrier.device)) for block in blocks
            ]
            whole = blocks == (Block.whole(meta.shape),)
            self._targets[number] = (fresh[0][1] if whole else Sliced.of(meta, fresh)), fresh
        return self._targets[number]

    def _place(self, transfer: Transfer) -> Tensor:
        """Return the memory in which a transferred block belongs."""
        found = memory_of(transfer.block, self._target(transfer.param)[1])
        if found is None:
            name = self._plan.params[transfer.param].name
            raise IntegrityError(
                f"trainer ranks send a block of {name!r} that this worker does not need",
                expected=f"parts of {self._needed[transfer.param]}",
                state="the engine holds a part of the version and stays paused",
            )
        return found

    def _read_back(self, number: int, parts: Sequence[tuple[Block, Tensor]]) -> PositionDigest:
        found = PositionDigest()
        for block, memory in parts:
            found += words_of(self._plan.params[number], block, memory)
        return found

    def _digests(self) -> dict[int, PositionDigest]:
        """Receive the digests of all blocks, and return their sum for each parameter."""
        expected: dict[int, PositionDigest] = {}
        sizes = [(rank, _DIGEST_BYTES * len(numbers)) for rank, numbers in sorted(self._transfers.items())]
        flats = [(torch.empty(size, dtype=torch.uint8, device=self._carrier.device), rank) for rank, size in sizes]
        for work in self._receive(flats):
            self._carrier.wait(work)
        self._pass_on([flat for flat, _ in flats])
        for flat, rank in flats:
            data = flat.cpu().numpy().tobytes()
            for place, number in enumerate(self._transfers[rank]):
                both = int.from_bytes(data[_DIGEST_BYTES * place : _DIGEST_BYTES * (place + 1)], "big")
                expected[number] = expected.get(number, PositionDigest()) + PositionDigest(both >> 64, both & _MASK)
        self._await_passed(0)
        return expected

    def _compare(self, expected: Mapping[int, PositionDigest]) -> None:
        for number, found in self._found.items():
            wanted = expected.get(number, PositionDigest())
            if found != wanted:
                raise IntegrityError(
                    f"parameter {self._plan.params[number].name!r} has landed otherwise than it was sent",
                    expected=f"digest {wanted.hex()} of this worker's blocks, found {found.hex()}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )
