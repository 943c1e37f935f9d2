"""Transfers by NIXL: the receiver reads the sender's memory, over RDMA, TCP or within a machine, as UCX finds best.

Each rank registers a pair of arenas once, cut into slots, and leaves the address of the one for sending in the notes.
A sender copies the next piece of a message into a free slot and notifies the receiver; the receiver reads the slot into
one of its own, and the notification behind the read frees the sender's. Whoever waits for a transfer does all of this.
"""

from __future__ import annotations

import importlib
import logging
import uuid
import weakref
from collections import defaultdict, deque
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, TransportError, why
from torchrl_ext.transports.copies import copy_each
from torchrl_ext.transports.group.calls import made_in_time, run_beside, sever_at_exit, wait_for_at_exit
from torchrl_ext.transports.group.peers import Move, PeerGroup, Seat
from torchrl_ext.types import described

__all__ = ["NixlGroup", "load_nixl"]

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_SLOT_BYTES, _SLOTS = 2 << 20, 16
"""Of each of the two arenas, for sending and for reading."""
_SHORTEST_S, _LONGEST_S = 0.00005, 0.002
"""Pauses between two looks while nothing moves."""


def load_nixl() -> Any:
    """Return NIXL's Python interface.

    Raises:
        ConfigError: it is not installed.
    """
    raises = logging.raiseExceptions
    try:
        for name in _MODULES:
            with suppress(ImportError, RuntimeError, OSError):  # there, but made for another CUDA
                found = importlib.import_module(name)
                logger = logging.getLogger("nixl")
                if logger.level == logging.INFO:  # which it prints to standard output
                    logger.setLevel(logging.WARNING)
                return found
    finally:
        logging.raiseExceptions = raises  # NIXL sets it for the whole process
    raise ConfigError(
        "NIXL is not installed here",
        expected=f"one of the modules {', '.join(_MODULES)}",
        hint="pip install 'torchrl_ext[nixl]', or use the backend 'gloo' or 'nccl'",
    )


class _Address(msgspec.Struct, frozen=True):
    """How peers reach an agent: its name, its metadata, and the address and device of its arena for sending."""

    name: str
    metadata: bytes
    arena: int
    device: int


class _Notice(msgspec.Struct, frozen=True):
    """A slot of the sender's: it holds the next ``nbytes`` for the receiver, or was read and is free, with 0."""

    slot: int
    nbytes: int = 0


class _NixlMove(Move):
    """A transfer that goes on while somebody waits in its group."""

    def __init__(self, group: NixlGroup, flat: Tensor, peer: int, sends: bool) -> None:
        super().__init__(flat, peer, sends)
        self._group = group

    def land(self, nbytes: int) -> None:
        """Count bytes that are there, and end with the last."""
        self.landed += nbytes
        if self.landed == self.nbytes:
            self.end()

    def arrives(self, seconds: float) -> bool:
        within = Deadline(seconds)
        while not self.done.is_set() and not within.over:
            for _ in within.pauses(shortest_s=_SHORTEST_S, longest_s=_LONGEST_S):
                if self._group.advance() or self.done.is_set():
                    break
        return self.done.is_set()


_Piece = tuple[_NixlMove, Tensor]
"""A transfer, and the memory of it that one slot holds."""


class NixlGroup(PeerGroup):
    """A group whose ranks read each other's memory; arguments as for `PeerGroup`.

    Raises:
        ConfigError: NIXL is not installed.
        TransportError, DeadlineError: the ranks do not reach each other.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        notes, rank, peers, device, within = seat.notes, seat.rank, seat.peers, seat.device, seat.within
        api, key = load_nixl(), f"{seat.generation}/agents/"
        self._out, self._in = (torch.empty((_SLOTS, _SLOT_BYTES), dtype=torch.uint8, device=device) for _ in range(2))
        self._kind, self._index = ("VRAM", self._out.get_device()) if device.type == "cuda" else ("DRAM", 0)
        self._here = partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        self._free, self._idle = list(range(_SLOTS)), list(range(_SLOTS))  # of the two arenas
        self._unsent: deque[_Piece] = deque()
        self._unread: dict[tuple[int, int], _Piece] = {}  # by peer and slot
        self._expected: defaultdict[int, deque[_Piece]] = defaultdict(deque)
        self._offers: defaultdict[int, deque[_Notice]] = defaultdict(deque)
        self._reads: dict[int, tuple[Any, _Piece]] = {}  # by the slot that they fill, with NIXL's handle
        self._failure = ""
        name = f"{seat.generation}/{rank}/{uuid.uuid4().hex}"
        self._agent, self._end_agent = made_in_time(partial(self._start, api, name), within)
        sever_at_exit(self)
        own = _Address(name, self._agent.get_agent_metadata(), self._out.data_ptr(), self._index)
        try:
            notes.put(f"{key}{rank}", msgspec.to_builtins(own))
            found = notes.collect(key, peers, within)
            absent = [one for one in peers if one not in found]
            if absent:
                raise within.error(f"{self.call(absent)} did not answer")
            self._addresses = {one: msgspec.convert(note, described(_Address)) for one, note in found.items()}
            self._ranks = {address.name: one for one, address in self._addresses.items()}
            self._meet()
        except BaseException:
            self.sever()
            raise

    def _start(self, api: Any, name: str) -> tuple[Any, Any]:
        """Return an agent with both arenas, and the call that ends it."""
        try:
            # a progress thread would take a core
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
            rows = [(arena.data_ptr(), arena.nbytes, self._index, "") for arena in (self._out, self._in)]
            registered = agent.register_memory(rows, self._kind)
        except Exception as error:  # NIXL's errors have no root of their own
            raise RuntimeError(f"NIXL cannot start: {error}") from error
        end = weakref.finalize(self, _end, agent, registered, self._reads, (self._out, self._in))
        end.atexit = False  # then it is severed
        return agent, end

    def _meet(self) -> None:
        """Reach every peer, and pass a byte between rank 0 and each other rank, so that a formed group works."""
        for rank, address in self._addresses.items():
            if rank != self.rank:
                try:
                    self._agent.add_remote_agent(address.metadata)
                except Exception as error:  # NIXL's errors have no root of their own
                    raise TransportError(f"{self.call([rank])} cannot be reached: {error}") from error
        others = self.workers if self.rank == 0 else (0,)
        blank = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for work in [move(blank.clone(), one) for one in others for move in (self.receive, self.send)]:
            self.wait(work)
        self.sent.clear()
        self.received.clear()
        if self.rank == 0:
            for kind in ("agents", "ready"):
                self.notes.drop(f"{self.generation}/{kind}/")

    def send(self, flat: Tensor, to: int) -> Move:
        return self._begin(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Move:
        return self._begin(flat, source, sends=False)

    def _begin(self, flat: Tensor, peer: int, *, sends: bool) -> Move:
        move = _NixlMove(self, flat, peer, sends)
        with self._lock:
            if not self.alive:
                raise TransportError("the transfer was aborted")
            self._settle()
            pieces = [(move, memory) for memory in flat.split(_SLOT_BYTES)]
            (self._unsent if sends else self._expected[peer]).extend(pieces)
            self.advance()
        return move

    def _settle(self) -> None:
        """Wait until memory holds what was computed or copied, which NIXL does not see on CUDA."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def advance(self) -> bool:
        """Do what can be done at once for all transfers, and return whether anything was."""
        with self._lock, self._here():
            moved, peer = False, self.rank
            if not self.alive or self._failure:
                return False
            try:
                for name, messages in self._agent.get_new_notifs().items():
                    peer = self._ranks[name]
                    for message in messages:
                        self._take(peer, msgspec.msgpack.decode(message, type=described(_Notice)))
                        moved = True
                while self._unsent and self._free:
                    peer = self._unsent[0][0].peer
                    self._offer(peer, self._unsent.popleft())
                    moved = True
                for peer, offers in self._offers.items():
                    while offers and self._expected[peer] and self._idle:
                        self._read(peer, offers.popleft(), self._expected[peer].popleft())
                        moved = True
                for slot, (handle, piece) in list(self._reads.items()):
                    peer = piece[0].peer
                    moved |= self._landed(slot, handle, piece)
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no root of their own
                self._failure = f"NIXL failed with {self.call([peer])}: {why(error)}"
            return moved

    def _take(self, peer: int, notice: _Notice) -> None:
        if notice.nbytes:
            self._offers[peer].append(notice)
        else:
            move, memory = self._unread.pop((peer, notice.slot))
            move.land(memory.numel())
            self._free.append(notice.slot)

    def _offer(self, peer: int, piece: _Piece) -> None:
        slot, nbytes = self._free.pop(), piece[1].numel()
        copy_each([piece[1]], [self._out[slot, :nbytes]])
        self._settle()
        self._unread[peer, slot] = piece
        notice = _Notice(slot, nbytes)
        self._agent.send_notif(self._addresses[peer].name, msgspec.msgpack.encode(notice))

    def _read(self, peer: int, offer: _Notice, piece: _Piece) -> None:
        nbytes = piece[1].numel()
        if offer.nbytes != nbytes or not 0 <= offer.slot < _SLOTS:
            raise ValueError(f"it sends {offer.nbytes} bytes where {nbytes} are expected")
        slot, address = self._idle.pop(), self._addresses[peer]
        places = (self._in.data_ptr(), slot, self._index), (address.arena, offer.slot, address.device)
        own, other = (
            self._agent.get_xfer_descs([(arena + at * _SLOT_BYTES, nbytes, device)], self._kind)
            for arena, at, device in places
        )
        handle = self._agent.initialize_xfer("READ", own, other, address.name)
        self._reads[slot] = handle, piece
        self._agent.transfer(handle, msgspec.msgpack.encode(_Notice(offer.slot)))

    def _landed(self, slot: int, handle: Any, piece: _Piece) -> bool:
        """Bring a read piece where it belongs, and return whether it was there."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise ConnectionError("a read failed")
        if state == "DONE":
            move, memory = piece
            del self._reads[slot]
            self._agent.release_xfer_handle(handle)
            copy_each([self._in[slot, : memory.numel()]], [memory])
            self._settle()
            self._idle.append(slot)
            move.land(memory.numel())
        return bool(state == "DONE")

    def _lost(self) -> str:
        return self._failure or super()._lost()

    def _sever(self) -> None:
        with self._lock:
            self._agent = None
            for pieces in (self._unsent, self._unread, self._expected):
                pieces.clear()
        wait_for_at_exit(run_beside(self._end_agent), 0.0)  # at once


def _end(agent: Any, registered: Any, reads: dict[int, tuple[Any, _Piece]], arenas: Any) -> None:
    """End an agent; ``arenas`` live until then."""
    with suppress(Exception):
        for handle, _ in reads.values():
            agent.release_xfer_handle(handle)
        reads.clear()
        agent.deregister_memory(registered)
