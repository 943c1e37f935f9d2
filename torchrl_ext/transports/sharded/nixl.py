"""Transfers by NIXL: the receiver reads the sender's memory, over RDMA, TCP or within a machine, as UCX finds best.

A sender registers its memory and offers it to the receiver in a notification. The receiver reads it in slices; with
each slice goes a notification that tells the sender how much has landed.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.transports.group.backends import made_in_time
from torchrl_ext.transports.group.notes import NoteStore
from torchrl_ext.transports.group.peers import Carrier, Move, must_return, sever_at_exit
from torchrl_ext.transports.group.sockets import run_beside
from torchrl_ext.transports.sharded.agents import Registered, load_nixl, make_agent

__all__ = ["NixlGroup"]

_SLICE_BYTES = 16 << 20
_FLYING = 4
"""Reads in flight from one peer."""

_SHORTEST_S, _LONGEST_S, _GROWTH = 0.00005, 0.002, 1.5
"""Pauses between two looks while something is under way."""
_PING_S = 0.5
"""A connection is tried this often, so that a peer that died is noticed also by who waits for its reads."""

_HEAD = struct.Struct("<cQQQQQQ")
_OFFER, _LANDED, _PING, _BYE = b"o", b"l", b"p", b"b"


class NixlGroup(Carrier):
    """A group whose ranks read each other's memory; arguments as for `Carrier`.

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
        api, until, key = load_nixl(), time.monotonic() + timeout_s, f"agents/{generation}/"
        self._begun: Counter[tuple[int, bool]] = Counter()
        name = f"{generation}/{rank}/{uuid.uuid4().hex}"
        agent = made_in_time(partial(make_agent, api, name), until, timeout_s, notes.stop)
        notes.put(f"{key}{rank}", [name, agent.get_agent_metadata().decode("latin-1")])
        said = notes.collect(key, peers, until)
        if notes.stop.is_set():
            raise TransportError("forming the group was aborted")
        if len(said) < len(peers):
            absent = self.call(one for one in peers if one not in said)
            raise DeadlineError(f"nothing was heard from {absent} within {timeout_s:g} s")
        self._thread = _Thread(agent, {one: _Peer(read) for one, read in said.items() if one != rank}, device)
        sever_at_exit(self)
        self._end_thread = weakref.finalize(self, self._thread.end)
        must_return(run_beside(self._thread.run), 0.0)  # at once, when it is severed
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
        works = [work for one in others for work in (self.receive(read[one], one), self.send(own, one))]
        for work in works:
            self.wait(work)
        for one in others:
            if read[one].item() != one % 251:
                raise TransportError(f"a first byte from {self.call([one])} is {read[one].item()}")
        self.sent.clear()
        self.received.clear()
        if self.rank == 0:
            self.notes.sweep(*(f"{kind}/{self.generation}/" for kind in ("agents", "ready")))

    def send(self, flat: Tensor, to: int) -> Any:
        return self._begin(_Transfer(flat, to, sends=True))

    def receive(self, flat: Tensor, source: int) -> Any:
        return self._begin(_Transfer(flat, source, sends=False))

    def _begin(self, move: _Transfer) -> Move:
        if not self.alive:
            raise TransportError("the transfer was aborted")
        with self._lock:
            move.number = self._begun[move.peer, move.sends]
            self._begun[move.peer, move.sends] += 1
            self._thread.begin(move)
        return move

    def _lost(self) -> str:
        return self.call(one for one, peer in list(self._thread.peers.items()) if peer.gone)

    def sever(self) -> None:
        self.alive = False
        self._end_thread()


class _Transfer(Move):
    """A `Move` with its place among those of the pair, and, on a device, the moment from which it may begin."""

    def __init__(self, flat: Tensor, peer: int, sends: bool) -> None:
        super().__init__(flat, peer, sends)
        self.number = self.asked = 0
        self.ready: Any = None
        if flat.device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(flat.device))


class _Peer:
    """What is under way with one peer.

    Args:
        said: the name of its agent, and how to reach it, as it left them in the notes.

    Attributes:
        linked: whether this agent was told how to reach it.
        gone: why it cannot be reached any more; "" while it can.
        told, known: which state of this rank's registered memory the peer knows, and which one of its own we know.
        sending: transfers to it that were not offered yet, in order.
        offered: those that were.
        expected: transfers from it that did not land yet.
        offers: what it offers to them: address, bytes, index of the device, state of its memory.
        reads: those in flight: handle, transfer, bytes.
    """

    def __init__(self, said: Any) -> None:
        if type(said) is not list or len(said) != 2 or not all(type(one) is str for one in said):
            raise TransportError(f"a rank says of its agent {str(said)[:200]!r}", expected="[name, metadata]")
        self.name, self.metadata = said[0], said[1].encode("latin-1", errors="replace")
        self.linked, self.gone = False, ""
        self.told: tuple[int, int] | None = None
        self.known: tuple[int, int] = (0, 0)
        self.sending: deque[_Transfer] = deque()
        self.offered: dict[int, _Transfer] = {}
        self.expected: dict[int, _Transfer] = {}
        self.offers: dict[int, tuple[int, int, int, tuple[int, int]]] = {}
        self.reads: list[tuple[Any, _Transfer, int]] = []

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self.sending or self.offered or self.expected)


class _Thread:
    """The thread of a group's agent, the only one that calls it.

    Args:
        agent: NIXL's.
        peers: by rank.
        device: where tensors are.
    """

    def __init__(self, agent: Any, peers: dict[int, _Peer], device: torch.device) -> None:
        self.peers, self._agent, self._device = peers, agent, device
        self._ranks = {peer.name: rank for rank, peer in peers.items()}
        self._memory = Registered(agent)
        self._new: deque[_Transfer] = deque()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._ping_at = 0.0

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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        pause_s = _SHORTEST_S
        why = "the group was ended"
        try:
            while not self._ended.is_set():
                if self._step():
                    pause_s = _SHORTEST_S
                    continue
                busy = any(peer.busy for peer in self.peers.values())
                pause_s = min(_LONGEST_S, _GROWTH * pause_s)
                if self._wake.wait(pause_s if busy else _PING_S):
                    self._wake.clear()
                elif not busy:
                    self._memory.sweep()
        except Exception as error:  # noqa: BLE001 - whatever the library raises is for those who wait
            why = f"NIXL failed: {error}"
        finally:
            self._finish(why)

    def _finish(self, why: str) -> None:
        for rank, peer in self.peers.items():
            if peer.linked and not peer.gone:
                with suppress(Exception):
                    self._agent.send_notif(peer.name, _HEAD.pack(_BYE, *(0,) * 6))
            self._lose(rank, why)
        while self._new:
            self._new.popleft().end(ConnectionError(why))
        with suppress(Exception):
            self._agent.get_new_notifs()  # lets the last words go
        self._memory.close()
        del self._agent

    def _step(self) -> bool:
        """Do what can be done at once, and return whether anything was."""
        moved = False
        while self._new:
            move, moved = self._new.popleft(), True
            peer = self.peers[move.peer]
            if peer.gone:
                move.end(ConnectionError(peer.gone))
            elif move.sends:
                peer.sending.append(move)
            else:
                peer.expected[move.number] = move
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages if name in self._ranks else ():
                self._guarded(self._ranks[name], self._take, message)
                moved = True
        for rank, peer in self.peers.items():
            if peer.busy:
                moved |= self._guarded(rank, self._offer) | self._guarded(rank, self._read)
        if time.monotonic() >= self._ping_at:
            for rank, peer in self.peers.items():
                if peer.linked and not peer.gone:
                    self._guarded(rank, self._tell, _PING)
            self._ping_at = time.monotonic() + _PING_S
        return moved

    def _guarded(self, rank: int, call: Any, *args: Any) -> bool:
        """Return what a call for this peer does; one that fails loses the peer."""
        peer = self.peers[rank]
        if peer.gone:
            return False
        try:
            return bool(call(peer, *args))
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no root of their own
            self._lose(rank, f"{error}")
            return True

    def _lose(self, rank: int, why: str) -> None:
        peer = self.peers[rank]
        peer.gone = why
        for handle, _, _ in peer.reads:
            with suppress(Exception):
                self._agent.release_xfer_handle(handle)
        for move in [*peer.sending, *peer.offered.values(), *peer.expected.values()]:
            self._memory.leave(move)
            move.end(ConnectionError(why))
        for held in (peer.reads, peer.sending, peer.offered, peer.expected, peer.offers):
            held.clear()

    def _tell(self, peer: _Peer, kind: bytes, *numbers: int, metadata: bytes = b"") -> None:
        if not peer.linked:
            self._agent.add_remote_agent(peer.metadata)
            peer.linked = True
        self._agent.send_notif(peer.name, _HEAD.pack(kind, *numbers, *(0,) * (6 - len(numbers))) + metadata)

    def _offer(self, peer: _Peer) -> bool:
        """Offer what is to be sent, with what the peer must know to read it."""
        moved = False
        while peer.sending and (peer.sending[0].ready is None or peer.sending[0].ready.query()):
            move = peer.sending[0]
            if move.flat is None:
                raise RuntimeError("a transfer was given up")
            self._memory.enter(move)
            state = self._memory.state
            if peer.told is not None and peer.told[0] != state[0] and peer.offered:
                break  # it must forget what it knew, which is in use
            numbers = (move.number, move.flat.data_ptr(), move.nbytes, max(0, move.flat.get_device()), *state)
            metadata = self._agent.get_agent_metadata() if peer.told != state else b""
            self._tell(peer, _OFFER, *numbers, metadata=metadata)
            peer.told, moved = state, True
            peer.offered[move.number] = peer.sending.popleft()
        return moved

    def _take(self, peer: _Peer, message: bytes) -> bool:
        """Take a notification of a peer."""
        kind, number, address, nbytes, index, *state = _HEAD.unpack_from(message)
        if kind == _OFFER:
            known = (state[0], state[1])
            if len(message) > _HEAD.size:
                if peer.linked and known[0] != peer.known[0]:
                    self._agent.remove_remote_agent(peer.name)  # else it keeps what it knew of the same addresses
                self._agent.add_remote_agent(message[_HEAD.size :])
                peer.linked, peer.known = True, known
            peer.offers[number] = (address, nbytes, index, known)
        elif kind == _LANDED:
            move = peer.offered[number]
            move.landed += nbytes
            if move.landed == move.nbytes:
                self._memory.leave(peer.offered.pop(number))
                move.end()
        elif kind == _BYE:
            raise ConnectionError("it ended the group")
        return True

    def _read(self, peer: _Peer) -> bool:
        """Read what was offered and is expected, and see what landed."""
        moved = False
        for number in [number for number in peer.expected if number in peer.offers]:
            move, (address, nbytes, index, state) = peer.expected[number], peer.offers[number]
            if state > peer.known or len(peer.reads) >= _FLYING:
                break
            if nbytes != move.nbytes or move.flat is None:
                raise ValueError(f"it sends {nbytes} bytes where {move.nbytes} are expected")
            if move.ready is not None and not move.ready.query():
                break
            self._memory.enter(move)
            kind, place = ("VRAM", move.flat.get_device()) if move.flat.is_cuda else ("DRAM", 0)
            while move.asked < nbytes and len(peer.reads) < _FLYING:
                size = min(_SLICE_BYTES, nbytes - move.asked)
                own = self._agent.get_xfer_descs([(move.flat.data_ptr() + move.asked, size, place)], kind)
                other = self._agent.get_xfer_descs([(address + move.asked, size, index)], kind)
                handle = self._agent.initialize_xfer("READ", own, other, peer.name)
                peer.reads.append((handle, move, size))
                self._agent.transfer(handle, _HEAD.pack(_LANDED, number, 0, size, 0, 0, 0))
                move.asked, moved = move.asked + size, True
        for read in list(peer.reads):
            handle, move, size = read
            state_of = self._agent.check_xfer_state(handle)
            if state_of == "ERR":
                raise ConnectionError("a read failed")
            if state_of == "DONE":
                peer.reads.remove(read)
                self._agent.release_xfer_handle(handle)
                move.landed, moved = move.landed + size, True
                if move.landed == move.nbytes:
                    del peer.expected[move.number], peer.offers[move.number]
                    self._memory.leave(move)
                    move.end()
        return moved
