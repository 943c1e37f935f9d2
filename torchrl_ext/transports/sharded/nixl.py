"""Transfers by NIXL: the receiver reads the sender's memory, over RDMA, TCP or within a machine, as UCX finds best.

Each rank registers one arena of slots, and tells its peers the address once. A sender copies a message into free slots
and notifies the receiver of them; the receiver reads them with one list of reads into slots of its own, and the
notification behind the reads frees the sender's slots.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, TransportError
from torchrl_ext.transports.group.calls import made_in_time, run_beside, sever_at_exit, wait_for_at_exit
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.peers import Move, PeerGroup

__all__ = ["NixlGroup", "load_nixl"]

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_SLOT_BYTES, _SLOTS = 256 << 10, 128
"""Of each of the two arenas, for sending and for reading."""
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.00005, 0.002, 1.5
"""Pauses between two looks while something is under way."""
_PING_S = 0.5
"""A connection is tried this often, so that a rank that waits for a dead peer to read is told of its death."""


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
    """``offer``: slots hold the next bytes of transfer ``number``, of ``nbytes`` in all; ``read``: they were read."""

    kind: str
    number: int = 0
    nbytes: int = 0
    slots: list[int] = []


class _Transfer(Move):
    """A `Move` with its number among the moves of its pair and direction, and the bytes of it that have begun."""

    def __init__(self, flat: Tensor, peer: int, sends: bool, number: int) -> None:
        super().__init__(flat, peer, sends)
        self.number, self.begun = number, 0
        self.ready: Any = None
        if flat.device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(flat.device))

    def copy(self, arena: Tensor, slots: list[int], at: int) -> None:
        """Copy between the memory of the transfer, from byte ``at`` on, and slots."""
        assert self.flat is not None
        if self.ready is not None:
            self.ready.synchronize()
        for slot, part in zip(slots, self.flat[at:].split(_SLOT_BYTES), strict=False):
            place = arena[slot, : part.numel()]
            place.copy_(part) if self.sends else part.copy_(place)
        if self.ready is not None:
            torch.cuda.current_stream(arena.device).synchronize()


class _Peer:
    def __init__(self, address: _Address) -> None:
        self.address, self.gone = address, ""
        self.unread: dict[int, _Transfer] = {}  # offered, at least in part
        self.expected: dict[int, _Transfer] = {}
        self.offers: deque[_Notice] = deque()


class NixlGroup(PeerGroup):
    """A group whose ranks read each other's memory; arguments as for `PeerGroup`.

    Raises:
        ConfigError: NIXL is not installed.
        TransportError, DeadlineError: the ranks do not reach each other.
    """

    def __init__(
        self,
        notes: NoteStore,
        generation: str,
        rank: int,
        peers: dict[int, str],
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(notes, generation, rank, peers, device=device, timeout_s=timeout_s)
        api, key, within = load_nixl(), f"agents/{generation}/", Deadline(timeout_s, stop=notes.stop)
        self._begun: Counter[tuple[int, bool]] = Counter()
        agent = made_in_time(partial(_Agent, api, f"{generation}/{rank}/{uuid.uuid4().hex}", device), within)
        notes.put(f"{key}{rank}", msgspec.to_builtins(agent.address))
        found = notes.collect(key, peers, within.until)
        if notes.stop.is_set():
            raise TransportError("forming the group was aborted")
        if len(found) < len(peers):
            absent = self.call(one for one in peers if one not in found)
            raise DeadlineError(f"nothing was heard from {absent} within {timeout_s:g} s")
        try:
            agent.meet({one: msgspec.convert(note, _Address) for one, note in found.items() if one != rank})
        except Exception as error:  # NIXL's errors have no root of their own
            raise TransportError(f"a rank cannot be reached: {error}") from error
        self._agent = agent
        sever_at_exit(self)
        self._end_agent = weakref.finalize(self, agent.end)
        wait_for_at_exit(run_beside(agent.run), 0.0)  # at once, when it is severed
        try:
            self._exchange()
        except BaseException:
            self.sever()
            raise

    def _exchange(self) -> None:
        """Pass a byte between rank 0 and each other rank, so that a group that is formed is one that works."""
        others = self.workers if self.rank == 0 else (0,)
        own = torch.full((1,), self.rank % 251, dtype=torch.uint8, device=self.device)
        read = {one: torch.empty_like(own) for one in others}
        for work in [work for one in others for work in (self.receive(read[one], one), self.send(own, one))]:
            self.wait(work)
        for one in others:
            if read[one].item() != one % 251:
                raise TransportError(f"a first byte from {self.call([one])} is {read[one].item()}")
        self.sent.clear()
        self.received.clear()
        if self.rank == 0:
            self.notes.sweep(*(f"{kind}/{self.generation}/" for kind in ("agents", "ready")))

    def send(self, flat: Tensor, to: int) -> Any:
        return self._begin(flat, to, sends=True)

    def receive(self, flat: Tensor, source: int) -> Any:
        return self._begin(flat, source, sends=False)

    def _begin(self, flat: Tensor, peer: int, *, sends: bool) -> Move:
        if not self.alive:
            raise TransportError("the transfer was aborted")
        with self._lock:
            move = _Transfer(flat, peer, sends, self._begun[peer, sends])
            self._begun[peer, sends] += 1
            self._agent.begin(move)
        return move

    def _lost(self) -> str:
        gone = self.call(one for one, peer in list(self._agent.peers.items()) if peer.gone)
        return f"{gone} closed its connection" if gone else super()._lost()

    def _sever(self) -> None:
        self._end_agent()


class _Agent:
    """An agent of NIXL, its arenas, and the thread that calls it."""

    def __init__(self, api: Any, name: str, device: torch.device) -> None:
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)  # which would take a core
        try:
            self._agent = api.nixl_agent(name, config)
        except Exception as error:  # NIXL's errors have no root of their own
            raise RuntimeError(f"NIXL cannot start: {error}") from error
        self._device = device
        self._kind = "VRAM" if device.type == "cuda" else "DRAM"
        self._out, self._in = (torch.empty((_SLOTS, _SLOT_BYTES), dtype=torch.uint8, device=device) for _ in range(2))
        self._index = max(0, self._out.get_device())
        self._registered = [
            self._agent.register_memory([(one.data_ptr(), one.nbytes, self._index, "")], self._kind)
            for one in (self._out, self._in)
        ]
        self._free, self._free_in = list(range(_SLOTS)), list(range(_SLOTS))
        self.address = _Address(name, self._agent.get_agent_metadata(), self._out.data_ptr(), self._index)
        self.peers: dict[int, _Peer] = {}
        self._ranks: dict[str, int] = {}
        self._new: deque[_Transfer] = deque()
        self._sending: deque[_Transfer] = deque()
        self._reads: list[tuple[Any, _Transfer, list[int], int, int]] = []  # handle, slots, first byte, bytes
        self._wake, self._ended, self._ping_at = threading.Event(), threading.Event(), 0.0

    def meet(self, addresses: dict[int, _Address]) -> None:
        """Learn how to reach the peers."""
        for rank, address in addresses.items():
            self._agent.add_remote_agent(address.metadata)
            self.peers[rank], self._ranks[address.name] = _Peer(address), rank

    def begin(self, move: _Transfer) -> None:
        """Have the thread begin a transfer."""
        self._new.append(move)
        self._wake.set()
        if self._ended.is_set():  # the thread may not have seen this one
            move.end(ConnectionError("the group was ended"))

    def end(self) -> None:
        """Have the thread end, which tells the peers."""
        self._ended.set()
        self._wake.set()

    def run(self) -> None:
        """Move things until the end."""
        pause_s, why = _SHORTEST_S, "the group was ended"
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while not self._ended.is_set():
                if self._step():
                    pause_s = _SHORTEST_S
                    continue
                busy = self._sending or self._reads or any(one.unread or one.expected for one in self.peers.values())
                pause_s = min(_LONGEST_S, _GROWTH * pause_s)
                if self._wake.wait(pause_s if busy else _PING_S):
                    self._wake.clear()
        except Exception as error:  # noqa: BLE001 - whatever the library raises is for the ranks that wait
            why = f"NIXL failed: {error}"
        finally:
            for rank, peer in self.peers.items():
                if not peer.gone:
                    with suppress(Exception):
                        self._notify(peer, _Notice("bye"))
                self._lose(rank, why)
            for move in [*self._new, *self._sending]:
                move.end(ConnectionError(why))
            with suppress(Exception):
                self._agent.get_new_notifs()  # lets the last words go
                for one in self._registered:
                    self._agent.deregister_memory(one)
            del self._agent

    def _step(self) -> bool:
        """Do what can be done at once, and return whether anything was."""
        moved = bool(self._new)
        while self._new:
            move = self._new.popleft()
            if self.peers[move.peer].gone:
                move.end(ConnectionError(self.peers[move.peer].gone))
            elif move.sends:
                self._sending.append(move)
            else:
                self.peers[move.peer].expected[move.number] = move
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages if name in self._ranks else ():
                moved |= self._guarded(self._ranks[name], self._take, message)
        while self._sending and self._free:
            self._guarded(self._sending[0].peer, self._offer, self._sending[0])
            moved = True
        for rank, peer in self.peers.items():
            while (
                peer.offers
                and peer.offers[0].number in peer.expected
                and len(peer.offers[0].slots) <= len(self._free_in)
            ):
                moved |= self._guarded(rank, self._read, peer.offers.popleft())
        for read in list(self._reads):
            moved |= self._guarded(read[1].peer, self._finish, read)
        if time.monotonic() >= self._ping_at:
            for rank in self.peers:
                self._guarded(rank, self._notify, _Notice("ping"))
            self._ping_at = time.monotonic() + _PING_S
        return moved

    def _guarded(self, rank: int, call: Any, *args: Any) -> bool:
        """Return what a call for this peer does; one that fails loses the peer."""
        peer = self.peers[rank]
        try:
            return not peer.gone and bool(call(peer, *args))
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no root of their own
            self._lose(rank, f"{error}")
            return True

    def _lose(self, rank: int, why: str) -> None:
        peer = self.peers[rank]
        peer.gone = peer.gone or why
        for read in [read for read in self._reads if read[1].peer == rank]:
            self._reads.remove(read)  # what still comes may fill its slots, so nobody gets them
            with suppress(Exception):
                self._agent.release_xfer_handle(read[0])
        queued = [move for move in self._sending if move.peer == rank]
        self._sending = deque(move for move in self._sending if move.peer != rank)
        for move in [*queued, *peer.unread.values(), *peer.expected.values()]:
            move.end(ConnectionError(why))
        for held in (peer.unread, peer.expected, peer.offers):
            held.clear()

    def _notify(self, peer: _Peer, notice: _Notice) -> None:
        self._agent.send_notif(peer.address.name, msgspec.msgpack.encode(notice))

    def _offer(self, peer: _Peer, move: _Transfer) -> bool:
        """Copy the next bytes of a transfer into free slots, and offer them."""
        count = min(len(self._free), -(-(move.nbytes - move.begun) // _SLOT_BYTES))
        slots, self._free = self._free[:count], self._free[count:]
        move.copy(self._out, slots, move.begun)
        move.begun = min(move.nbytes, move.begun + count * _SLOT_BYTES)
        peer.unread[move.number] = move
        if move.begun == move.nbytes:
            self._sending.popleft()
        self._notify(peer, _Notice("offer", move.number, move.nbytes, slots))
        return True

    def _take(self, peer: _Peer, message: bytes) -> bool:
        """Take a notification of a peer."""
        notice = msgspec.msgpack.decode(message, type=_Notice)
        if notice.kind == "offer":
            peer.offers.append(notice)
        elif notice.kind == "read":
            move = peer.unread[notice.number]
            self._free += notice.slots
            move.landed = min(move.nbytes, move.landed + len(notice.slots) * _SLOT_BYTES)
            if move.landed == move.nbytes:
                del peer.unread[notice.number]
                move.end()
        elif notice.kind == "bye":
            raise ConnectionError("it ended the group")
        return notice.kind != "ping"

    def _read(self, peer: _Peer, offer: _Notice) -> bool:
        """Begin to read the slots of an offer."""
        move, at = peer.expected[offer.number], peer.expected[offer.number].begun
        size = min(move.nbytes - at, len(offer.slots) * _SLOT_BYTES)
        if offer.nbytes != move.nbytes or size <= 0 or not all(0 <= slot < _SLOTS for slot in offer.slots):
            raise ValueError(f"it sends {offer.nbytes} bytes where {move.nbytes} are expected")
        slots, self._free_in = self._free_in[: len(offer.slots)], self._free_in[len(offer.slots) :]
        parts = [min(_SLOT_BYTES, size - number * _SLOT_BYTES) for number in range(len(slots))]
        own, other = (
            self._agent.get_xfer_descs(
                [(base + slot * _SLOT_BYTES, part, index) for slot, part in zip(chosen, parts, strict=True)], self._kind
            )
            for base, index, chosen in (
                (self._in.data_ptr(), self._index, slots),
                (peer.address.arena, peer.address.device, offer.slots),
            )
        )
        handle = self._agent.initialize_xfer("READ", own, other, peer.address.name)
        move.begun += size
        self._reads.append((handle, move, slots, at, size))
        self._agent.transfer(handle, msgspec.msgpack.encode(_Notice("read", offer.number, slots=offer.slots)))
        return True

    def _finish(self, peer: _Peer, read: tuple[Any, _Transfer, list[int], int, int]) -> bool:
        """Bring what was read where it belongs, if it is there."""
        handle, move, slots, at, size = read
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise ConnectionError("a read failed")
        if state != "DONE":
            return False
        self._reads.remove(read)
        self._agent.release_xfer_handle(handle)
        move.copy(self._in, slots, at)
        self._free_in += slots
        move.landed += size
        if move.landed == move.nbytes:
            del peer.expected[move.number]
            move.end()
        return True
